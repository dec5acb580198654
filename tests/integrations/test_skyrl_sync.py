"""SkyRL's own sender against real vLLM servers, both on the CPU; servers and trainers are killed and started again.

Two environments, which share a folder and talk over HTTP: this one has SkyRL, which needs Python 3.12, that of
`VLLM_PYTHON` has vLLM. See `make test-skyrl`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("skyrl") is None:
    pytest.skip("SkyRL is not installed: see `make test-skyrl`", allow_module_level=True)

import requests
from safetensors.torch import load_file
from skyrl.train.config.config import SkyRLTrainConfig

import sparserl.integrations.skyrl  # noqa: F401
from sparserl.errors import SessionError
from sparserl.integrations.verify import verify_engine
from sparserl.session.store.retention import read_head, read_index
from sparserl.transport.stores.folder import FolderStore
from tests.session import ranks as real_ranks

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
VLLM_ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "NUMBA_CACHE_DIR": str(VLLM_PYTHON.parents[1] / "numba"),
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    "SPARSERL_VLLM_CPU": "plain",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
MAKE_MODEL = """
import pathlib, sys
from tests.integrations.real_vllm import models

models.make(pathlib.Path(sys.argv[1]), "qwen2")  # with tied embeddings
"""
PROMPT = [*range(3, 70)]  # whole blocks of it are cached

pytestmark = [
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM is not installed: see `make test-skyrl`"),
    pytest.mark.filterwarnings("ignore"),  # those of SkyRL, vLLM and Ray, of which they have many
    pytest.mark.timeout(1800),
]


class Server:
    """A vLLM server, in a session of its own so that all its processes can be killed at once."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.model = str(model)
        self.log = log
        small = ["--max-model-len", "96", "--block-size", "32", "--kv-cache-memory-bytes", str(16 << 20)]
        self.command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
        self.command += [*small, "--enforce-eager", "--weight-transfer-config", '{"backend": "sparserl"}']

    def start(self) -> None:
        """Start it; `wait` until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=VLLM_ENVIRONMENT, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        while self.process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=30).ok:
                    return
            except requests.RequestException:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-6000:]}")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def complete(self, tokens: int) -> list[int]:
        asked = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        fields = asked | {"model": self.model, "return_token_ids": True}
        answer = requests.post(f"{self.url}/v1/completions", json=fields, timeout=300)
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]


class Asking:
    """A client that always has a request at a server, also during syncs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self.lengths: list[int] = []
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        while not self._ended.is_set():
            self.lengths.append(len(self._server.complete(24)))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Trainer:
    """The ranks of a trainer."""

    def __init__(self, started) -> None:
        self._started = started

    def __call__(self, method: str, *arguments):
        """What the first rank answers; raises where one fails."""
        for _, pipe in self._started:
            pipe.send((method, arguments))
        answers = []
        for _, pipe in self._started:
            assert pipe.poll(900), f"{method} takes too long"
            answers.append(pipe.recv())
        for succeeded, answer in answers:
            if not succeeded:
                raise RuntimeError(answer)
        return answers[0][1]


def trainer_ranks(size: int):
    real_ranks.CONTEXT.set_forkserver_preload(["tests.integrations.skyrl_ranks", "sparserl.session.store.publisher"])
    from tests.integrations.skyrl_ranks import rank

    return real_ranks.ranks(size, rank)


def config(model: Path, store: Path, *options: str) -> SkyRLTrainConfig:
    dtype = next(iter(load_file(model / "model.safetensors").values())).dtype
    return SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.policy.model.path={model}",
            "trainer.placement.colocate_all=false",
            f"generator.inference_engine.model_dtype={str(dtype).removeprefix('torch.')}",
            "generator.inference_engine.weight_sync_backend=sparserl",
            f"generator.inference_engine.sparserl.url=file://{store}",
            *options,
        ]
    )


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory):
    """Two lives of a trainer, the first with two ranks, two of a server, and a second server that joins late."""
    folder = tmp_path_factory.mktemp("skyrl")
    model = folder / "model"
    subprocess.run([VLLM_PYTHON, "-c", MAKE_MODEL, model], env=VLLM_ENVIRONMENT, cwd=ROOT, check=True, timeout=600)
    store = folder / "run"
    saved = shutil.copytree(model, folder / "saved")
    seen: dict[str, object] = {"store": store}
    first, late = Server(model, folder / "first.log"), Server(model, folder / "late.log")

    def verified(server: Server) -> tuple[str, str]:
        """Against the store, and against what the trainer has."""
        against = (f"file://{store}", load_file(saved / "model.safetensors"))
        return tuple(verify_engine(server.url, weights).answer for weights in against)

    try:
        first.start()
        with trainer_ranks(2) as started:
            trainer = Trainer(started)
            first.wait()
            seen["engine"] = trainer("begin", config(model, store), model, [first.url])
            seen["rounds"] = []
            meanwhile = Asking(first)
            for seed in range(3):
                trainer("step", seed)
                seen["warnings"] = list(trainer("sync"))
                trainer("save", saved)
                seen["rounds"].append(verified(first))
            meanwhile.end()
            seen["meanwhile"] = meanwhile.lengths
            first.kill()
            first.start()
            late.start()
            first.wait()
            trainer("step", 3)
            seen["follows again"] = list(trainer("sync"))
            trainer("save", saved)
            seen["restarted server"] = verified(first)
            trainer("step", 4)
            trainer("sync")  # the last thing that this trainer does: nothing ends it in order
            trainer("save", saved)
        late.wait()
        with trainer_ranks(1) as started:
            trainer = Trainer(started)
            refused = config(model, store, "generator.inference_engine.sparserl.worker.trusted_key=x")
            with pytest.raises(RuntimeError) as refusal:
                trainer("begin", refused, saved, [first.url])
            seen["refused"] = str(refusal.value)
        with trainer_ranks(1) as started:
            trainer = Trainer(started)
            trainer("begin", config(model, store), saved, [first.url, late.url])
            trainer("step", 5)
            trainer("sync")
            trainer("save", saved)
            seen["both"] = [verified(first), verified(late)]
            trainer("draft", "")
            with pytest.raises(RuntimeError) as refusal:
                trainer("draft", "mtp.")
            seen["drafter"] = str(refusal.value)
            seen["completions"] = [server.complete(24) for server in (first, late)]
            trainer("end")
        yield seen
    finally:
        first.kill()
        if hasattr(late, "process"):
            late.kill()


def test_servers_have_the_trainers_bits(synced) -> None:
    """After every round all bits of the server are those that the trainer sends, and those of the version."""
    assert synced["engine"] == "SkyrlTrainer"
    assert synced["rounds"] == [("equal", "equal")] * 3
    assert synced["warnings"] == []


def test_requests_go_on(synced) -> None:
    """Requests that run during a sync are kept, and computed again with the new weights."""
    assert synced["meanwhile"]
    assert set(synced["meanwhile"]) == {24}


def test_a_restarted_server_follows_again(synced) -> None:
    """It has the weights of its checkpoint, is told of the run again, and then has the trainer's."""
    assert "follow the run again" in "".join(synced["follows again"])
    assert synced["restarted server"] == ("equal", "equal")


def test_a_restarted_trainer_and_a_late_server(synced) -> None:
    """A trainer of fewer ranks goes on with the run, with a server that has missed all of it."""
    assert synced["both"] == [("equal", "equal")] * 2
    first, late = synced["completions"]
    assert first == late  # nothing of old weights is in the prefix cache


def test_a_worker_option_that_is_none(synced) -> None:
    """Servers refuse it by its name, and the trainer does not begin."""
    assert "trusted_key" in synced["refused"]


def test_a_drafter_that_would_stay_as_it_is(synced) -> None:
    """A drafter is written with the policy; if the policy lacks tensors of it, the sender is refused."""
    assert "'mtp." in synced["drafter"]


def test_patches_travel(synced) -> None:
    """One run with a version for every round; each is a patch of the one before, or an anchor is written."""
    store = FolderStore(synced["store"])
    head, _ = read_head(store)
    assert head.version >= 6
    assert any(step.base == step.version - 1 for step in read_index(store, head).steps)


def options_of_the_page() -> list[str]:
    """The switch, and three that SkyRL's config has with it."""
    page = (ROOT / "docs/how-to/integrations/skyrl.md").read_text()
    command = page.partition("main_base")[2].partition("```")[0].replace("\\", "")
    shown = [word for word in command.split() if "=" in word]
    assert len(shown) == 4
    assert shown[0].startswith("trainer.override_entrypoint=")
    return shown


def plain_config(*options: str) -> SkyRLTrainConfig:
    """A config as a user's command has it, with the options that the page shows."""
    return SkyRLTrainConfig.from_cli_overrides([*options_of_the_page()[1:], *options])


def failure_of_the_command(*options: str) -> str:
    """What SkyRL's own command says, in processes that have imported nothing of ours."""
    command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base", *options, "trainer.logger=console"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 1
    return ended.stderr


def test_the_command_of_the_page(tmp_path: Path) -> None:
    """The driver accepts the config and starts Ray, whose worker accepts it too, and looks for the model."""
    model = tmp_path / "missing"
    failure = failure_of_the_command(*options_of_the_page(), f"trainer.policy.model.path={model}")
    in_worker = failure.rpartition("ray::skyrl_entrypoint()")[2]
    assert "in get_tokenizer" in in_worker
    assert str(model) in in_worker


def test_the_command_of_the_page_has_the_backend() -> None:
    """The checks of the backend are among those of SkyRL."""
    conflicting = "generator.inference_engine.offload_kv_for_weight_sync=true"
    failure = failure_of_the_command(*options_of_the_page(), conflicting)
    assert "SessionError: weight_sync_backend=sparserl needs offload_kv_for_weight_sync=false" in failure


def test_the_command_without_the_switch() -> None:
    """SkyRL refuses the options, and does not take the backend for `nccl`."""
    assert "ValueError: Invalid fields {'sparserl'}" in failure_of_the_command(*options_of_the_page()[1:])


def test_skyrl_accepts_the_options_of_the_page() -> None:
    """They pass SkyRL's validation, and SkyRL starts its servers with the backend."""
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
    from skyrl.train.utils.utils import validate_generator_cfg

    cfg = plain_config("trainer.logger=console")
    validate_generator_cfg(cfg)
    assert build_vllm_cli_args(cfg).weight_transfer_config.backend == "sparserl"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("trainer.placement.colocate_all=true", "colocate_all"),
        ("trainer.policy.model.lora.rank=8", "LoRA"),
        ("generator.inference_engine.offload_kv_for_weight_sync=true", "offload_kv_for_weight_sync"),
    ],
)
def test_skyrl_refuses_what_would_not_be_synced(option: str, message: str) -> None:
    """SkyRL's own validation names the option."""
    from skyrl.train.utils.utils import validate_generator_cfg

    with pytest.raises(SessionError, match=message):
        validate_generator_cfg(plain_config("trainer.logger=console", option))


def test_an_option_that_is_none() -> None:
    """SkyRL refuses it by its name."""
    with pytest.raises(ValueError, match="urls"):
        plain_config("generator.inference_engine.sparserl.urls=x")


def test_workers_of_ray_get_the_backend_with_the_config(monkeypatch) -> None:
    """A process that has nothing but SkyRL knows the backend as soon as it has been sent the config."""
    ray = pytest.importorskip("ray")

    def strategy(engine: object) -> str:
        from skyrl.backends.skyrl_train.weight_sync import get_transfer_strategy

        return get_transfer_strategy("sparserl", False)

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), str(ROOT))))
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        ask = ray.remote(strategy)
        assert ray.get(ask.remote(None)) == "nccl"
        assert ray.get(ask.remote(plain_config().generator.inference_engine)) == "sparserl"
    finally:
        ray.shutdown()
