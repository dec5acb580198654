"""Ways to be wrong in session/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "what receivers can take does not matter",
        "session/store/receivers.py",
        "return FOR_PARTS if self._have_parts and name not in PROFILES else name",
        "return name",
        Tests("integrations/test_ranks.py", "cannot_be_read"),
    ),
    Mutant(
        "patches are cut along parts of other tensors",
        "session/store/run_writer.py",
        "return known if known is not None and (known.table is table or known.table.specs == table.specs) else None",
        "return known",
        Tests("integrations/test_ranks.py", "other_tensors"),
    ),
    Mutant(
        "receivers wait for an anchor that is due some day",
        "session/store/receivers.py",
        "self.need_anchor = any(row.need_anchor for row in heard)",
        "self.need_anchor = False",
        Tests("integrations/test_ranks.py", "cannot_be_taken"),
    ),
    Mutant(
        "the baseline advances before the head moved",
        "session/store/publisher.py",
        "return changes.encode(link=encoding.link, to=upload.bucket_list(), threads=encoding.threads)",
        (
            "early = changes.encode(link=encoding.link, to=upload.bucket_list(), threads=encoding.threads)\n"
            "committed.baseline.advance(early, changes)\n"
            "return early"
        ),
        Tests("session/test_session_publisher.py", "failed_publish"),
    ),
    Mutant(
        "the head is moved without a condition",
        "session/store/head.py",
        "self._tag = self._store.swap(HEAD, data, self._tag)",
        "self._store.put(HEAD, data)",
        Tests("session/test_session_publisher.py", "two_publishers or racing"),
    ),
    Mutant(
        "a lost reply is taken for a failure",
        "session/store/head.py",
        "(stored.nonce == head.nonce or _same_version(stored, last_head))",
        "_same_version(stored, last_head)",
        Tests("session/test_session_publisher.py", "reply_that_was_lost"),
    ),
    Mutant(
        "a restarted publisher does not fetch the patches since its anchor",
        "session/store/resume.py",
        "return stored.build(steps, newest, threads, start)",
        "return restored(anchor, threads)",
        Tests("session/test_refusals.py", "state_saves"),
    ),
    Mutant(
        "parts that failed half way are patched again",
        "session/arrival.py",
        "anchor.is_spoiled = True",
        "anchor.is_spoiled = False",
        Tests("session/test_parts.py", "half_way"),
    ),
    Mutant(
        "what the ranks have rebuilt is not added up",
        "session/store/resume.py",
        "if sum(map(Digest.from_bytes, rows), table_digest(local.table)) == head.digest:",
        "if rows:",
        Tests("session/test_writers_restart.py", "other_bits"),
    ),
    Mutant(
        "ranks decode what depends on bits that they do not have",
        "session/parts.py",
        "has_grown |= _include(boxes.setdefault(tensor, []), region)",
        "has_grown |= False",
        Tests("session/test_writers_restart.py", "more_or_fewer"),
    ),
    Mutant(
        "captured weights are the trainer's own",
        "session/anchors.py",
        "Bits(memory.copied(), memory.dtype)",
        "Bits(memory.view(), memory.dtype)",
        Tests("session/test_session_versions.py", "training_goes_on or bit_for_bit"),
    ),
    Mutant(
        "targets that committed before one failed stay as they are",
        "session/receiver.py",
        ("for undo in reversed(undos):\n    undo()"),
        "",
        Tests("session/test_session_commits.py", "all_targets"),
    ),
    Mutant(
        "an older head is believed",
        "session/store/subscriber.py",
        "if head.run == run and head.version < version:",
        "if head.version < 0:",
        Tests("session/test_signing.py", "rolled_back"),
    ),
    Mutant(
        "an older run is believed",
        "session/store/subscriber.py",
        "head.run != run and head.created <= created:",
        "head.run == run and head.created < created:",
        Tests("session/test_signing.py", "older_run"),
    ),
    Mutant(
        "a head without a signature is believed",
        "session/store/signing.py",
        'raise Untrusted(f"{label} is not signed, and only what a trusted key has signed is accepted")',
        "return body.encode()",
        Tests("session/test_signing.py", "unsigned or belongs"),
    ),
    Mutant(
        "any key will do",
        "session/store/signing.py",
        "if key not in trusted:",
        "if not trusted:",
        Tests("session/test_signing.py", "foreign"),
    ),
    Mutant(
        "objects need not be what their names promise",
        "session/store/records.py",
        "if sha256(data) != hash:",
        "if not hash:",
        Tests("session/test_signing.py", "bound_by_hash"),
    ),
    Mutant(
        "a run that cannot be continued is replaced without a word",
        "session/store/head.py",
        'if self.obstacle is not None:\n    raise SessionError(f"{self._store.url} {self.obstacle}. {HOW_TO_REPLACE}")',
        "",
        Tests("session/test_silence.py", "unsigned_run"),
    ),
    Mutant(
        "bits alone tell which files are held",
        "session/store/subscriber.py",
        "return min(held, default=max(versions))",
        "return max(versions)",
        Tests("session/test_side_files.py", "files_alone"),
    ),
    Mutant(
        "files that come back are the old objects",
        "session/store/run_writer.py",
        "place = secrets.token_hex(8)",
        'place = "0" * 16',
        Tests("session/test_side_files.py", "comes_back"),
    ),
    Mutant(
        "time that is up without a version is no error",
        "session/store/subscriber.py",
        "if deadline.over and not self._has_held_a_version():",
        "if deadline.over and self._has_held_a_version() is None:",
        Tests("session/test_silence.py", "without_a_run"),
    ),
    Mutant(
        "retention forgets live subscribers",
        "session/store/routes.py",
        "*(version for version in needed if version > too_old)",
        "",
        Tests("session/test_session_following.py", "retention"),
    ),
    Mutant(
        "routes do not care about digests",
        "session/store/routes.py",
        "if way.base_digest == node[1]:",
        "if True:",
        Tests("session/test_session_versions.py", "cheapest"),
    ),
    Mutant(
        "a rank that fails fails alone",
        "session/store/writers.py",
        "if data[:1] != _DONE:",
        'if data[:1] == b"?":',
        Tests("session/test_writers.py", "fail_together"),
    ),
    Mutant(
        "a baseline trusts marks",
        "session/baseline.py",
        "weights = weights.map(lambda part: part.data)",
        "pass",
        Tests("session/test_tracked.py", "loses_no_marks"),
    ),
    Mutant(
        "an anchor leaves out a region with a single bit",
        "patch/snapshot.py",
        "if count := int(np.count_nonzero(bits)):",
        "if (count := int(np.count_nonzero(bits))) > 1:",
        Tests("patch/test_snapshot.py", "patch_of_zeros and bfloat16"),
    ),
    Mutant(
        "an anchor is believed",
        "patch/snapshot.py",
        "require_result(self._patch, digest(self.weights, threads=threads))",
        "pass",
        Tests("patch/test_snapshot.py", "another_result"),
    ),
    Mutant(
        "what was fetched before an outage is fetched again",
        "session/store/subscriber.py",
        "begun=self._unfinished",
        "begun=None",
        Tests("session/test_streaming.py", "goes_on_where_it_was"),
    ),
    Mutant(
        "weights that were patched are taken for those of their anchor",
        "session/store/transfer.py",
        "[] if is_ahead or is_spoiled else same",
        "same",
        Tests("session/test_streaming.py", "its_own_way_alone"),
    ),
    Mutant(
        "changes are found while the trainer writes",
        "session/store/publisher.py",
        "None if at_once else functools.partial",
        "functools.partial",
        Tests("session/test_streaming.py", "captured_first"),
    ),
    Mutant(
        "weights that cannot be used are kept for the next attempt",
        "session/store/subscriber.py",
        "if arrival.failure is not None and not isinstance(arrival.failure, StoreError):",
        "if False:",
        Tests("session/test_streaming.py", "not_kept"),
    ),
    Mutant(
        "two targets exchange bits with the same fresh weights",
        "session/receiver.py",
        "owns_fresh=is_sole",
        "owns_fresh=True",
        Tests("session/test_session_commits.py", "all_targets or fresh"),
    ),
    Mutant(
        "a patch may lead to other tensors",
        "session/store/records.py",
        "if step.base is not None and self.layout_of(step.base) != self.layout_of(step.version):",
        "if False:",
        Tests("session/test_layouts.py", "patch_to_other_tensors"),
    ),
    Mutant(
        "the table of later tensors is collected as garbage",
        "session/store/retention.py",
        "names |= {layout.table.name(head.run) for layout in index.layouts}",
        "",
        Tests("session/test_layouts.py", "nothing_else"),
    ),
    Mutant(
        "ranks commit although one could not stage",
        "session/group/rounds.py",
        ('if failed:\n    round.write("verdict", {"off": failed})'),
        ('if failed and own_failure:\n    round.write("verdict", {"off": failed})'),
        Tests("session/test_group_syncs.py", "random_syncs"),
    ),
    Mutant(
        "the baseline moves on although a rank has not committed",
        "session/group/publisher.py",
        (
            "if failed:\n"
            "    raise SessionError(\n"
            '        f"version {plan.version} was not committed everywhere: {failed}. "'
        ),
        (
            "if failed and captured.changes is None:\n"
            "    raise SessionError(\n"
            '        f"version {plan.version} was not committed everywhere: {failed}. "'
        ),
        Tests("session/test_group_syncs.py", "random_syncs"),
    ),
    Mutant(
        "a rank that joined is sent patches it has no base for",
        "session/group/publisher.py",
        'needs_anchor = any(hello["digest"] not in digests for hello in receiver_hellos)',
        'needs_anchor = all(hello["digest"] not in digests for hello in receiver_hellos)',
        Tests("session/test_group_syncs.py", "joins"),
    ),
    Mutant(
        "buckets need not fit the weights they are for",
        "session/store/transfer.py",
        "if count > elements or size > most:",
        "if count > elements:",
        Tests("hostile/test_budgets.py", "larger_than_any_patch and in_memory"),
    ),
    Mutant(
        "weights are made for which there is no memory",
        "session/anchors.py",
        "require_memory(anchor.table.dense_bytes)",
        "pass",
        Tests("hostile/test_budgets.py", "do_not_fit"),
    ),
    Mutant(
        "a commit can be interrupted between two targets",
        "session/receiver.py",
        "uninterrupted(lambda: self._commit_targets(staged))",
        "self._commit_targets(staged)",
        Tests("hostile/test_sessions.py", "interrupt_at_any_line"),
    ),
    Mutant(
        "an anchor in the state folder goes before the head has moved",
        "session/store/resume.py",
        ("self.run = run\nself._name = name"),
        ("self.run = run\nself._name = name\nself.settle()"),
        Tests("hostile/test_sessions.py", "throws_nothing_away"),
    ),
    Mutant(
        "every publish for a subscriber far behind writes an anchor",
        "session/store/maintenance.py",
        "or len(patches) >= _STEPS - 1",
        "or len(steps) >= _STEPS - 1",
        Tests("hostile/test_sessions.py", "far_behind"),
    ),
)
