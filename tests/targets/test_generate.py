"""A model that is generated from while a version is staged, and a commit that waits for the caller's lock."""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path

import pytest

import sparserl
from sparserl import sources, targets
from sparserl.errors import UnsupportedTensor
from tests.sources.test_lora import CASES, peft_merged, state
from tests.sources.test_lora import adapted as peft_model

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

PROMPT = torch.arange(1, 9).reshape(1, 8)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama(seed: int = 0):
    """A tiny language model with random weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def adapted(seed: int = 0):
    model = llama()
    torch.manual_seed(seed)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    ).eval()


def step(model, seed: int) -> None:
    """Move what is trained a little."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)


def generated(model, each=None):
    """Greedy tokens, and every bit of their logits; `each` is called before every token."""

    def call(_tokens, scores):
        if each is not None:
            each()
        return scores

    out = model.generate(
        input_ids=PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=transformers.LogitsProcessorList([call]),
    )
    return out.sequences.tolist(), torch.stack(out.logits).float().view(torch.int32)


def same(one, other) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


@pytest.mark.parametrize("kind", ["module", "adapter", "merged adapter"])
def test_staging_does_not_wait_and_a_commit_does(kind: str, tmp_path: Path) -> None:
    """While tokens are generated under a lock a version is staged, and its commit waits: all are of one version."""
    lock = threading.Lock()
    if kind == "module":
        trainer, rollout = llama(), llama(9)
        source, target = sources.module(trainer), targets.module(rollout, lock=lock)
    else:
        trainer, rollout = adapted(1), adapted(9)
        source = sources.lora(trainer)
        target = targets.lora(rollout, merged=kind == "merged adapter", lock=lock)
    store = f"file://{tmp_path}"
    with sparserl.Publisher(store, source) as publisher, sparserl.Subscriber(store, target) as subscriber:
        publisher.publish()
        subscriber.sync()
        step(trainer, 1)
        publisher.publish()
        before = generated(rollout)
        events: list[str] = []

        def sync() -> None:
            subscriber.stage()
            events.append("staged")
            subscriber.commit()
            events.append("committed")

        other = threading.Thread(target=sync)
        tokens = 0

        def each() -> None:
            nonlocal tokens
            tokens += 1
            if tokens == 3:
                other.start()
            if tokens == 6:
                while "staged" not in events and other.is_alive():
                    other.join(0.01)
            events.append("token")

        with lock:
            found = generated(rollout, each)
        other.join(120)
        assert 2 <= events.index("staged") <= 5
        assert events[-8:] == ["token"] * 7 + ["committed"]
        assert same(found, before)
        after = generated(rollout)
        assert not same(after, before)
        wanted = copy.deepcopy(trainer).merge_and_unload() if kind == "merged adapter" else trainer
        assert same(after, generated(wanted))


def test_the_lock_is_held_for_every_writing() -> None:
    """For the commit, and for taking it back; for both at once where what is made of the weights fails."""
    seen: list[float] = []

    class Noting:
        """A lock that notes the weights when it is taken and when it is given back."""

        def __enter__(self) -> None:
            seen.append(float(mine["w"][0]))

        def __exit__(self, *_: object) -> None:
            self.__enter__()

    mine, new = {"w": torch.zeros(10)}, {"w": torch.ones(10)}
    target = targets.module(mine, lock=Noting())
    target.attach(sparserl.tensor_table(mine))
    change = targets.Change("run", 0.0, 1, sparserl.digest(new), [sparserl.diff(mine, new)])
    prepared = target.prepare(change)
    assert seen == []
    undo = prepared.commit()
    assert seen == [0, 1]
    undo()
    assert seen == [0, 1, 1, 0]

    class Fails(targets.ModuleTarget):
        """One that cannot make anything of ones."""

        def written(self) -> None:
            if mine["w"][0]:
                raise UnsupportedTensor("on purpose")

    with pytest.raises(UnsupportedTensor, match="on purpose"):
        Fails(mine, lock=Noting()).prepare(change).commit()
    assert seen == [0, 1, 1, 0, 0, 0]


def test_merged_layers_are_refused() -> None:
    """What peft has merged already cannot be taken out exactly: neither kind of target takes it."""
    rollout = adapted(2)
    target = targets.lora(rollout)
    rollout.merge_adapter()
    for work in (lambda: target.prepare(None), lambda: targets.lora(rollout, merged=True)):
        with pytest.raises(UnsupportedTensor, match=r"q_proj.*merged into it already"):
            work()
    with pytest.raises(UnsupportedTensor, match="expected a peft model"):
        targets.lora(llama())


def test_what_peft_cannot_merge_is_refused_at_once() -> None:
    """Before anything is written."""
    model = peft.get_peft_model(
        llama(),
        peft.LoraConfig(target_modules=["v_proj"], alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"),
    )
    with pytest.raises(UnsupportedTensor, match="peft cannot merge"):
        targets.lora(model, merged=True)
    targets.lora(model)


SINGLE = [case for case, (_, configs) in CASES.items() if len(configs) == 1]


@pytest.mark.parametrize("case", SINGLE)
def test_every_kind_of_layer_is_merged_like_in_peft(case: str, tmp_path: Path) -> None:
    """Whatever peft can merge: after each version the base weights are peft's, where they always were."""
    make, configs = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice about tied embeddings and the like
        trainer, rollout = (peft_model(make(), *configs) for _ in range(2))
        step(rollout, 7)
        addresses = {name: p.data_ptr() for name, p in rollout.named_parameters()}
        store, source = f"file://{tmp_path}", sources.lora(trainer)
        if case == "attention":  # its parameters are made anew at every step
            with pytest.raises(UnsupportedTensor, match=r"0\.in_proj_weight: merging in place"):
                targets.lora(rollout, merged=True)
            return
        target = targets.lora(rollout, merged=True)
        with sparserl.Publisher(store, source) as publisher, sparserl.Subscriber(store, target) as subscriber:
            for version in range(2):
                step(trainer, version)
                publisher.publish()
                subscriber.sync()
                assert state(copy.deepcopy(rollout).unload().state_dict()) == state(peft_merged(trainer))
        assert {name: p.data_ptr() for name, p in rollout.named_parameters()} == addresses
