"""Real GRPO training with TRL on a CPU, of a tiny model, while a rollout in a process of its own follows."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import sparserl
from sparserl.errors import SessionError, Unavailable, UnsupportedTensor
from sparserl.session import Callback
from sparserl.sources import open_checkpoint
from sparserl.transport.stores.base import exists
from sparserl.transport.stores.folder import FolderStore

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'sparserl[trl]'")
    import datasets
    import peft
    import tokenizers
    import torch
    import transformers

    from sparserl.integrations.trl import PublishCallback, default_source
    from sparserl.integrations.trl_server import use_server

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL and what it stands on
WORDS = ["<pad>", "<eos>", *"abcdefgh"]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokenizer():
    """Letters, one token each, made here."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(WORDS),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def train(folder: Path, model, callback, steps: int = 3, **options) -> trl.GRPOTrainer:
    """GRPO on the share of the letter a."""
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [text.count("a") / max(1, len(text)) for text in completions],
        args=trl.GRPOConfig(
            output_dir=str(folder / "trainer"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
            max_steps=steps,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a b c", "d e f", "g h a", "b d f"] * 4}),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    return trainer


class Notes(Callback):
    """Digests of the versions, as they were published."""

    def __init__(self) -> None:
        self.reports: list[sparserl.SyncReport] = []

    def published(self, report) -> None:
        self.reports.append(report)


# Follows until a version comes; at each says what it holds, and what it generates with it.
ROLLOUT = """
import json, sys, torch, transformers, sparserl

folder, url, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
keeper = sparserl.Subscriber(url, sparserl.targets.folder(folder))
keeper.follow(stop=lambda: keeper.version is not None, timeout=900)
model = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.from_pretrained(folder + "/current"), dtype=getattr(torch, sys.argv[4])
).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder + "/current")
prompt = tokenizer("a b c", return_tensors="pt")
subscriber = sparserl.Subscriber(url, model)


def say(report):
    tokens = model.generate(input_ids=prompt["input_ids"], max_new_tokens=6, do_sample=False)
    held = sparserl.digest(sparserl.sources.module(model).weights()).hex
    print(json.dumps([report.version, held, tokens.tolist()]), flush=True)


subscriber.follow(stop=lambda: subscriber.version == last, timeout=900, on_commit=say)
"""


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_a_rollout_follows_training(dtype: str, tmp_path: Path) -> None:
    """Each optimizer step is a version; what the rollout holds and generates with is one of them, to the bit."""
    url = f"file://{tmp_path / 'store'}"
    command = [sys.executable, "-c", ROLLOUT, str(tmp_path / "model"), url, "4", dtype]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as rollout:
        assert rollout.stdout is not None
        assert rollout.stdout.readline() == "ready\n"
        notes, model = Notes(), llama()
        cast = None if dtype == "float32" else torch.bfloat16
        callback = PublishCallback(url, cast=cast, callbacks=[notes])
        try:
            train(tmp_path, model, callback, steps=4)
        except BaseException:
            rollout.kill()
            raise
        lines = [json.loads(line) for line in rollout.stdout]
    assert rollout.returncode == 0
    assert [report.version for report in notes.reports] == [0, 1, 2, 3, 4]
    assert len({report.digest for report in notes.reports}) == 5, "every step has changed something"
    assert [report.kind for report in notes.reports] == ["anchor"] + ["patch"] * 4
    assert callback.report == notes.reports[-1]
    published = {report.version: report.digest for report in notes.reports}
    assert all(published[version] == held for version, held, _ in lines)
    version, _, tokens = lines[-1]
    assert version == 4
    prompt = tokenizer()("a b c", return_tensors="pt")["input_ids"]
    wanted = model.eval().to(getattr(torch, dtype)).generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
    assert tokens == wanted.tolist()


# One of several processes that train together; says what it has published.
RANK = """
import json, os, sys
from pathlib import Path

sys.path.insert(0, {tests!r})
import sparserl, test_trl

folder = Path(sys.argv[1])
notes, model = test_trl.Notes(), test_trl.llama()
callback = test_trl.PublishCallback(f"file://{{folder / 'store'}}", callbacks=[notes])
test_trl.train(folder, model, callback, steps=2, ddp_backend="gloo")
held = sparserl.digest(sparserl.sources.module(model).weights()).hex
(folder / os.environ["RANK"]).write_text(json.dumps([[report.version for report in notes.reports], held]))
"""


@pytest.mark.long
def test_the_first_of_two_processes_publishes(tmp_path: Path) -> None:
    """What both have after the same steps."""
    (tmp_path / "rank.py").write_text(RANK.format(tests=str(Path(__file__).parent)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, str(tmp_path / "rank.py"), str(tmp_path)], check=True, capture_output=True, timeout=900)
    held = llama()
    sparserl.Subscriber(f"file://{tmp_path / 'store'}", held).sync()
    digest = sparserl.digest(held.state_dict()).hex
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert (first, second) == ([[0, 1, 2], digest], [[], digest])


def test_every_second_step_in_flight(tmp_path: Path) -> None:
    """Versions of every second step and of the last one, sent while training goes on."""
    notes, model = Notes(), llama()
    callback = PublishCallback(f"file://{tmp_path / 'store'}", every=2, in_background=True, callbacks=[notes])
    train(tmp_path, model, callback, steps=3)
    assert [report.version for report in notes.reports] == [0, 1, 2]
    assert callback.settle() == notes.reports[-1]
    assert notes.reports[-1].digest == sparserl.digest(sparserl.sources.module(model).weights()).hex


def test_an_adapter_is_published_merged(tmp_path: Path) -> None:
    """Rollouts that know nothing of adapters hold what peft merges, with a config that loads."""
    model = peft.get_peft_model(llama(torch.bfloat16), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    url, folder = f"file://{tmp_path / 'store'}", sparserl.targets.folder(tmp_path / "model")
    train(tmp_path, model, PublishCallback(url), steps=2)
    with sparserl.Subscriber(url, folder) as subscriber:
        subscriber.sync()
    merged = model.merge_and_unload()
    assert sparserl.digest(open_checkpoint(folder.current)) == sparserl.digest(merged.state_dict())
    assert type(transformers.AutoModelForCausalLM.from_pretrained(folder.current)) is type(merged)


class Away(FolderStore):
    """A folder that is away while the second version is written."""

    failed = False

    def put(self, name: str, data: bytes | memoryview) -> None:
        if exists(self, "head.json") and not self.failed:
            self.failed = True
            raise Unavailable("on purpose")
        super().put(name, data)


@pytest.mark.parametrize(("wait", "steps"), [(True, 3), (False, 3), (False, 1)])
def test_a_store_that_is_away_costs_no_training(
    wait: bool, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the next version has what was not published; the last one is made up for at the end."""
    notes, model, store = Notes(), llama(), Away(tmp_path / "store")
    with caplog.at_level(logging.WARNING, logger="sparserl.trl"):
        train(tmp_path, model, PublishCallback(store, in_background=not wait, callbacks=[notes]), steps=steps)
    assert store.failed
    assert caplog.text.count("not published; the next version will include these changes: on purpose") == 1
    assert [report.version for report in notes.reports] == list(range(max(2, steps)))
    assert notes.reports[-1].digest == sparserl.digest(sparserl.sources.module(model).weights()).hex


def test_what_it_refuses() -> None:
    """Two ways to say what is published, a cast of an adapter, and parameters of which a process has only a part."""
    with pytest.raises(SessionError, match="give one of them"):
        PublishCallback("file:///nowhere", cast=torch.bfloat16, source=lambda model, _optimizer: model)
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(SessionError, match="dtype of the base model"):
        default_source(model, None, cast=torch.bfloat16)
    model = llama()
    model.lm_head.weight.ds_id = 1
    with pytest.raises(UnsupportedTensor, match="is sharded: give `source` and `writers`"):
        default_source(model, None)


def test_trainers_that_cannot_use_a_server() -> None:
    """One that has opened an NCCL group with it already, one that does not generate, and parts without their source."""
    with pytest.raises(SessionError, match="make the trainer with use_vllm=False"):
        use_server(SimpleNamespace(use_vllm=True), "file:///nowhere")
    with pytest.raises(SessionError, match="SimpleNamespace has no server mode"):
        use_server(SimpleNamespace(), "file:///nowhere")
    with pytest.raises(SessionError, match="writers publish their own parts"):
        use_server(SimpleNamespace(use_vllm=False), "file:///nowhere", writers=object())
