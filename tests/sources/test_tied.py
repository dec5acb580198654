"""A tied tensor is published once, by every source; whatever receivers call it, and however a run began."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import sparserl
from sparserl import Publisher, Subscriber, sources, targets
from sparserl.errors import CommitFailed, TensorMismatch, TiedConflict
from sparserl.sources.tying import shared_names
from sparserl.targets.engine import EngineTarget
from sparserl.targets.pieces import Piece
from sparserl.weights.region import Region
from tests.session.ranks import ranks, results

torch = pytest.importorskip("torch")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS, COLUMNS = 60, 8
ONCE = ROWS * COLUMNS + COLUMNS  # elements, and those of a norm


class Policy(torch.nn.Module):
    """A language model whose head is its embedding; what its config says of that may be given."""

    def __init__(self, *, tied=True, says=None, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(ROWS, COLUMNS)})
        self.model["norm"] = torch.nn.LayerNorm(COLUMNS, bias=False)
        self.lm_head = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        if tied:
            self.lm_head.weight = self.model["embed_tokens"].weight
        if says is not None:
            self.config = SimpleNamespace(tie_word_embeddings=says)

    def forward(self, tokens):
        return self.lm_head(self.model["norm"](self.model["embed_tokens"](tokens)))


class Trainer:
    """A policy, its optimizer and a source of one kind, made anew as often as it is restarted."""

    def __init__(self, kind, policy=None):
        self.policy = Policy() if policy is None else policy
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.5)
        self.kind = kind

    def source(self):
        if self.kind == "fsdp":
            return sources.fsdp(self.policy)
        if self.kind == "renamed":
            return sources.renamed(self.policy, {"lm_head.": "lm_head.", "model.norm.": "model.norm."})
        if self.kind == "quantized":
            return sources.quantized(self.policy, "int8")
        if self.kind == "tracked":
            return sources.track(self.optimizer, self.policy)
        if self.kind == "tracked shards":
            return sources.track(self.optimizer, sources.fsdp(self.policy))
        return self.policy

    def step(self):
        self.policy(torch.arange(5)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


KINDS = ["module", "fsdp", "renamed", "quantized", "tracked", "tracked shards"]


def both_names(policy):
    """All weights, as a mapping that says both names."""
    return lambda: dict(policy.state_dict())


def zeros(names, policy):
    state = policy.state_dict()
    return {name: torch.zeros_like(state[name]) for name in names}


def bits(weights):
    return {name: tensor.detach().contiguous().view(torch.uint8).tolist() for name, tensor in weights.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_published_once(tmp_path, kind):
    """Elements and bytes of anchors and patches are those of one tensor; a mapping that says two names has two."""
    trainer = Trainer(kind)
    twice = tmp_path / "twice"
    options = {"profile": "raw", "ladder": None}
    with (
        Publisher(tmp_path / "once", trainer.source(), **options) as publisher,
        Publisher(twice, both_names(trainer.policy), **options) as other,
    ):
        for version in range(2):
            report, both = publisher.publish(), other.publish()
            assert (report.elements, both.elements) == (ONCE, ONCE + ROWS * COLUMNS)
            assert report.bytes < both.bytes
            if version == 0:
                assert both.bytes - report.bytes > 0.8 * 4 * ROWS * COLUMNS
            trainer.step()
    rollout = zeros([EMBEDDING, "model.norm.weight"], trainer.policy)
    with Publisher(tmp_path / "once", trainer.source(), **options) as publisher:
        assert publisher.publish().kind == "patch"
    Subscriber(tmp_path / "once", rollout).sync()
    assert bits(rollout) == {name: bits(trainer.policy.state_dict())[name] for name in rollout}


@pytest.mark.parametrize("kind", ["module", "fsdp", "tracked"])
@pytest.mark.parametrize("tied_trainer", [True, False])
def test_trainers_and_rollouts_may_be_tied_or_not(tmp_path, kind, tied_trainer):
    """Every version arrives in every rollout that can hold it; the others refuse it by name."""
    policy = Policy(tied=tied_trainer)
    trainer = Trainer(kind, policy)
    tied, untied = Policy(seed=1), Policy(tied=False, says=True, seed=1)
    unknown = Policy(tied=False, seed=1)
    before = bits(unknown.state_dict()), bits(tied.state_dict())
    with Publisher(tmp_path, trainer.source()) as publisher:
        publisher.publish()
        followers = [
            Subscriber(tmp_path, rollout) for rollout in ([untied, tied] if tied_trainer else [untied, unknown])
        ]
        refusing = Subscriber(tmp_path, unknown if tied_trainer else tied)
        for version in range(3):
            for follower in followers:
                follower.sync()
                follower.audit()
            for rollout in [untied, tied] if tied_trainer else [untied, unknown]:
                assert bits(rollout.state_dict()) == bits(policy.state_dict()), version
            with pytest.raises(TensorMismatch if tied_trainer else TiedConflict, match=r"lm_head\.weight"):
                refusing.sync()
            trainer.step()
            publisher.publish()
    assert (bits(unknown.state_dict()) if tied_trainer else bits(tied.state_dict())) == before[not tied_trainer]


def test_an_untied_head_is_part_of_what_a_rollout_holds(tmp_path):
    """Where it differs from the embedding, no version is held; it is taken back with a failed commit, and audited."""
    policy = Policy()
    rollout = Policy(tied=False, says=True, seed=1)
    with Publisher(tmp_path, policy) as publisher:
        publisher.publish()
        with torch.no_grad():
            rollout.load_state_dict(policy.state_dict())
            rollout.lm_head.weight[3] += 1
        subscriber = Subscriber(tmp_path, rollout)
        assert subscriber.sync().kind == "anchor"  # not held, though the embedding is that of the version
        assert bits(rollout.state_dict()) == bits(policy.state_dict())
        assert Subscriber(tmp_path, rollout).sync() is None  # held now
        old = bits(rollout.state_dict())
        with torch.no_grad():
            policy.lm_head.weight[7] += 1
        publisher.publish()
        failing = sparserl.Subscriber(tmp_path, [rollout, Failing(Policy(seed=1))])
        with pytest.raises(CommitFailed):
            failing.sync()
        assert bits(rollout.state_dict()) == old
        subscriber.sync()
        assert bits(rollout.state_dict()) == bits(policy.state_dict())
        with torch.no_grad():
            rollout.lm_head.weight[3] += 1
        with pytest.raises(sparserl.errors.ChecksumMismatch, match="something else wrote to it"):
            subscriber.audit()
        subscriber.sync()
        assert bits(rollout.state_dict()) == bits(policy.state_dict())


class Failing(targets.ModuleTarget):
    """A target that cannot be committed."""

    def __init__(self, policy):
        super().__init__(lambda: dict(policy.state_dict()))

    def written(self):
        raise OSError("broken on purpose")


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_both_names_keeps_both(tmp_path, kind, with_state):
    """It goes on, by patches, with the tensors that it has; its followers, tied or not, notice nothing."""
    url, state = tmp_path / "store", tmp_path / "state" if with_state else None
    trainer = Trainer(kind)
    with Publisher(url, both_names(trainer.policy), state=state) as publisher:
        publisher.publish()
        run = publisher.run
    rollouts = [zeros([EMBEDDING, HEAD, "model.norm.weight"], trainer.policy), Policy(seed=1)]
    followers = [Subscriber(url, rollout) for rollout in rollouts]
    for _ in range(2):
        with Publisher(url, trainer.source(), state=state) as publisher:
            for _ in range(2):
                trainer.step()
                report = publisher.publish()
                assert (report.kind, publisher.run) == ("patch", run)
                assert report.elements == ONCE + ROWS * COLUMNS
                for follower in followers:
                    follower.sync()
                expected = bits(trainer.policy.state_dict())
                assert bits(rollouts[0]) == expected == bits(rollouts[1].state_dict())
    with Publisher(url, trainer.source(), state=state, new_run=True) as publisher:
        assert publisher.publish().elements == ONCE


def test_a_run_may_have_another_of_the_names(tmp_path):
    """The name that the run has is the one that is published."""
    trainer = Trainer("fsdp")
    with Publisher(tmp_path, lambda: {n: t for n, t in trainer.policy.state_dict().items() if n != EMBEDDING}) as first:
        first.publish()
    for source in (trainer.policy, trainer.source()):
        with Publisher(tmp_path, source) as publisher:
            trainer.step()
            assert publisher.publish().kind == "patch"
    rollout = zeros([HEAD, "model.norm.weight"], trainer.policy)
    Subscriber(tmp_path, rollout).sync()
    assert bits(rollout)[HEAD] == bits(trainer.policy.state_dict())[HEAD]


def test_the_source_of_a_validation_has_the_names_of_the_run(tmp_path):
    """A module is compared with a run that has both names."""
    policy = Policy()
    with Publisher(tmp_path, both_names(policy)) as publisher:
        publisher.publish()
    Subscriber(tmp_path, Policy(seed=1), validate=policy).sync()


def test_a_table_says_which_names_a_rank_publishes():
    """Of one stage of a pipeline, it is the table of the whole checkpoint."""
    policy = Policy()
    state = policy.state_dict()
    for names in ([EMBEDDING], [HEAD], [EMBEDDING, HEAD]):
        table = sparserl.tensor_table({name: state[name] for name in (*names, "model.norm.weight")})
        shards = sources.fsdp(policy, table=table).weights()
        assert sorted(part.tensor for part in shards.parts) == sorted([*names, "model.norm.weight"])


def test_tensors_of_one_memory_are_tied_whatever_object_they_are():
    """Two parameters over the same storage are one tensor; views of a part of it are others, and so are buffers."""
    policy = Policy(tied=False)
    policy.lm_head.weight = torch.nn.Parameter(policy.model["embed_tokens"].weight.data)
    policy.upper = torch.nn.Parameter(policy.lm_head.weight.data[: ROWS // 2])
    policy.first, policy.again = (torch.nn.Buffer(torch.ones(3)) for _ in range(2))
    policy.again = policy.first
    assert shared_names(policy, policy.state_dict(keep_vars=True)) == {HEAD: EMBEDDING}
    policy._tied_weights_keys = {EMBEDDING: HEAD}
    assert shared_names(policy, policy.state_dict(keep_vars=True)) == {EMBEDDING: HEAD}
    empty = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(0, 4)) for _ in range(2)])
    assert shared_names(empty, empty.state_dict(keep_vars=True)) == {}


def test_a_config_that_says_untied_is_believed(tmp_path):
    """Whoever loads such a checkpoint gives the head memory of its own: both names are published."""
    policy = Policy(says=False)
    with Publisher(tmp_path, policy) as publisher:
        assert publisher.publish().elements == ONCE + ROWS * COLUMNS
    rollout = Policy(tied=False, says=False, seed=1)
    Subscriber(tmp_path, rollout).sync()
    assert bits(rollout.state_dict()) == bits(policy.state_dict())


def test_names_are_those_that_transformers_saves(tmp_path):
    """Of models whose heads, biases, encoders and decoders share tensors."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors")
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    models = [
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, intermediate_size=16, tie_word_embeddings=True)
        ),
        transformers.BertForMaskedLM(transformers.BertConfig(**small, intermediate_size=16)),
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
    ]
    for model in models:
        model.save_pretrained(tmp_path / type(model).__name__)
        with safetensors.safe_open(tmp_path / type(model).__name__ / "model.safetensors", "pt") as file:
            source = sources.module(model)
            assert {*file.keys()} == source.weights().keys()
            assert source.tied


@pytest.mark.parametrize("learnt", [True, False], ids=["it is loaded", "it is not"])
def test_an_engine_with_a_head_of_its_own_is_refused_by_name(tmp_path, learnt):
    """It would keep its old bits: the run has the embedding alone. A tied one follows."""
    policy = Policy()
    with Publisher(tmp_path, policy) as publisher:
        publisher.publish()

    def target(rollout, names):
        state = {name: tensor.detach() for name, tensor in rollout.state_dict().items()}
        whole = {name: Region((0,) * state[name].ndim, tuple(state[name].shape)) for name in names}
        pieces = [Piece(name, box, name, 0, state[name].stride()) for name, box in whole.items()]
        return EngineTarget(pieces, lambda: state)

    names = [EMBEDDING, "model.norm.weight", *([HEAD] if learnt else [])]
    with pytest.raises(TensorMismatch, match=r"memory of its own for 'lm_head\.weight', of which the run has only"):
        Subscriber(tmp_path, target(Policy(tied=False), names)).sync()
    rollout = Policy(seed=1)
    Subscriber(tmp_path, target(rollout, names)).sync()
    assert bits(rollout.state_dict()) == bits(policy.state_dict())


def sharded(rank, group, pipe, folder):
    """Two ranks go on with a run that has both names, then begin one."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from sparserl.sources.dtensors import shards_of

    policy = Policy()
    fully_shard(policy)
    trainer = Trainer("fsdp", policy)
    reports = []
    both = lambda: shards_of(policy.state_dict(keep_vars=True))  # noqa: E731
    for source, options in (
        (both, {}),
        (trainer.source(), {}),
        (trainer.source(), {"state": f"{folder}/state"}),
        (sources.track(trainer.optimizer, trainer.source()), {"state": f"{folder}/state"}),
        (trainer.source(), {"new_run": True}),
    ):
        with Publisher(f"{folder}/store", source, writers=group, **options) as publisher:
            reports.append(publisher.publish())
            trainer.step()
            reports.append(publisher.publish())
    whole = {name: tensor.full_tensor() for name, tensor in policy.state_dict().items()}
    if rank == 0:
        rollout = Policy(seed=1)
        Subscriber(f"{folder}/store", rollout).sync()
        assert bits(rollout.state_dict()) == bits(whole)
    dist.barrier(group)
    return [(report.kind, report.elements) for report in reports]


@pytest.mark.long
def test_ranks_go_on_with_a_run_that_has_both_names(tmp_path):
    """Each publishes its shards under both; a new run has one."""
    with ranks(2, sharded, str(tmp_path)) as started:
        first, second = results(started)
    twice = ONCE + ROWS * COLUMNS
    assert first == second
    assert first == [("anchor", twice), *[("patch", twice)] * 7, ("anchor", ONCE), ("patch", ONCE)]


def test_what_has_a_state_dict_and_is_no_module():
    """It has no list of modules, and its parameters are still published once."""
    policy = Policy()
    source = sources.module(SimpleNamespace(state_dict=policy.state_dict))
    assert source.weights().keys() == {EMBEDDING, "model.norm.weight"}
