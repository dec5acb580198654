"""Ways to be wrong in integrations/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "a step counts that was published before the trainer went back",
        "session/store/routes.py",
        "if labels[version] < training_step:",
        "if labels[version] < 0:",
        Tests("integrations/test_prime_rl.py", "version_of_a_training_step"),
    ),
    Mutant(
        "a broadcast is published before it is whole",
        "integrations/prime_rl.py",
        'for marker in self._broadcasts.glob(f"step_*/{_MARKER}"):',
        'for marker in self._broadcasts.glob("step_*/model.safetensors"):',
        Tests("integrations/test_prime_rl.py", "become_versions"),
    ),
    Mutant(
        "a step that is broadcast again is not published again",
        "integrations/prime_rl.py",
        "if self._published.get(step) != when]",
        "if step not in self._published]",
        Tests("integrations/test_prime_rl.py", "resumes_from_an_older_step"),
    ),
    Mutant(
        "ranks do not compare what they share",
        "integrations/ranks.py",
        "if first is None or any(other is None or other.after != first.after for other in sums):",
        "if first is None:",
        Tests("integrations/test_ranks.py", "another_has_too"),
    ),
    Mutant(
        "a version of any run will do",
        "integrations/vllm_versions.py",
        "elif demanded_run is not None and actual[1] != demanded_run:",
        "elif demanded_run == actual[2]:",
        Tests("integrations/test_vllm_versions.py", "not_there"),
    ),
    Mutant(
        "an answer ends with the version that it began with",
        "integrations/vllm_versions.py",
        "headers.append(_header(END_VERSION, await _version(self._engine)))",
        "headers.append(_header(END_VERSION, self._start))",
        Tests("integrations/test_vllm_versions.py", "both_versions"),
    ),
    Mutant(
        "an answer of any version will do",
        "integrations/vllm_server.py",
        "if not start == end == demanded:",
        "if start is None:",
        Tests("integrations/test_vllm_server.py", "restarted or somebody_else"),
    ),
    Mutant(
        "a server that was restarted is thought to follow the run",
        "integrations/vllm_server.py",
        "self._is_following = self._has_version = False",
        "self._has_version = False",
        Tests("integrations/test_vllm_server.py", "restarted"),
    ),
    Mutant(
        "the plugin drops the loaders of the user",
        "integrations/sglang_plugin.py",
        "custom_weight_loader=[*loaders, LOADER]",
        "custom_weight_loader=[LOADER]",
        Tests("integrations/test_sglang.py", "the_plugin"),
    ),
    Mutant(
        "a version of an earlier sync passes for that of this one",
        "integrations/checkpoint_engine.py",
        "return version == head_version(self._store, self._trusted_keys) != self._before",
        "return version == head_version(self._store, self._trusted_keys)",
        Tests("integrations/test_nemo_rl.py", "earlier_sync"),
    ),
    Mutant(
        "any head is the one that a worker waits for",
        "integrations/checkpoint_engine.py",
        "if (head.run, head.version) != self._before:",
        "if head.run:",
        Tests("integrations/test_nemo_rl.py", "waited_for"),
    ),
    Mutant(
        "a policy publishes in a sync of which rollouts were not told",
        "integrations/nemo_rl.py",
        "if self._sender is None or not self._is_ready:",
        "if self._sender is None:",
        Tests("integrations/test_nemo_rl.py", "not_announced"),
    ),
    Mutant(
        "only rank 0 of the trainer hears that an engine has failed",
        "integrations/slime_megatron.py",
        "dist.broadcast_object_list(failures, src=0, group=group)",
        "dist.barrier(group)",
        Tests("integrations/test_slime_megatron.py", "follow_a_trainer"),
    ),
    Mutant(
        "a server without sessions flushes its cache in the update",
        "integrations/sglang_server.py",
        'body = body | {"flush_cache": False, "disable_draft_model": True}',
        'body = body | {"disable_draft_model": True}',
        Tests("integrations/test_sglang.py", "without_update_sessions"),
    ),
    Mutant(
        "a server is labelled with a version that it has not got",
        "integrations/sglang.py",
        "if label is None or failure is not None else label",
        "if label is None else label",
        Tests("integrations/test_sglang.py", "without_update_sessions"),
    ),
    Mutant(
        "modules of SkyRL that have imported its function keep it",
        "integrations/skyrl.py",
        'if module_name.startswith("skyrl.") and vars(module).get(original.__name__) is original:',
        "if module_name == original.__module__:",
        Tests("integrations/test_skyrl.py", "in_the_tables"),
    ),
    Mutant(
        "engines of SkyRL that sleep are synced",
        "integrations/skyrl.py",
        "if colocate_all:",
        "if colocate_all is None:",
        Tests("integrations/test_skyrl.py", "would_not_be_synced"),
    ),
    Mutant(
        "SkyRL's config has options of a backend that it does not use",
        "integrations/skyrl.py",
        "if self.weight_sync_backend != BACKEND and self.sparserl is not None:",
        "if self.weight_sync_backend is None:",
        Tests("integrations/test_skyrl.py", "that_are_none"),
    ),
)
