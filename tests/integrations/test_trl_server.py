"""Real GRPO training with TRL that generates through a real vLLM server, both on the CPU, which is killed meanwhile.

Two environments, which share a folder and talk over HTTP: this one has TRL, that of `VLLM_PYTHON` has vLLM. See
`make test-trl`.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparserl.session.store.retention import read_head, read_index
from sparserl.transport.stores.folder import FolderStore

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
STEPS = 20  # of the example
KILLED_AT = 6
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
}
VLLM_ENVIRONMENT = ENVIRONMENT | {
    "NUMBA_CACHE_DIR": str(VLLM_PYTHON.parents[1] / "numba"),
    "SPARSERL_VLLM_CPU": "plain",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
MAKE_MODEL = """
import pathlib, sys
from tests.integrations.real_vllm import models

models.make(pathlib.Path(sys.argv[1]), "llama")
"""

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: see `make test-trl`"),
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM is not installed: see `make test-trl`"),
    pytest.mark.timeout(1800),
]


class Server:
    """A vLLM server, in a session of its own so that all its processes can be killed at once."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        small = ["--max-model-len", "96", "--block-size", "32", "--kv-cache-memory-bytes", str(16 << 20)]
        self.command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "model"]
        self.command += ["--port", str(port), *small, "--enforce-eager", *self.options()]

    def options(self) -> list[str]:
        """What the page says about `vllm serve`."""
        page = (ROOT / "docs/how-to/integrations/trl.md").read_text()
        command = re.search(r"vllm serve MODEL (.*?)\n```", page, re.DOTALL)
        assert command is not None
        return [word.strip("'") for word in re.findall(r"'.*?'|[^\s\\]+", command[1])]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=VLLM_ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        while self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=30).close()
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
            else:
                return
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-6000:]}")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def published(store: Path) -> int:
    """The newest version in a store; -1 if there is none."""
    if not (store / "head.json").exists():
        return -1
    return read_head(FolderStore(store))[0].version


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """The example of the page has run, and its server was killed and started again meanwhile."""
    folder = tmp_path_factory.mktemp("trl")
    store = folder / "run"
    subprocess.run(
        [VLLM_PYTHON, "-c", MAKE_MODEL, folder / "model"],
        env=VLLM_ENVIRONMENT,
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    page = (ROOT / "docs/how-to/integrations/trl.md").read_text()
    program = max(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL), key=len)
    (folder / "example.py").write_text(program)
    output = folder / "example.log"
    server = Server(folder)
    server.start()
    trainer = None
    try:
        with output.open("wb") as log:  # it waits for the server
            trainer = subprocess.Popen(
                [sys.executable, "example.py", folder / "model", server.url, f"file://{store}"],
                cwd=folder,
                env=ENVIRONMENT,
                stdout=log,
                stderr=log,
            )
        while published(store) < KILLED_AT:
            assert trainer.poll() is None, output.read_text()[-6000:]
            time.sleep(0.05)
        server.kill()
        killed_at = published(store)
        server.start()
        server.wait()
        assert trainer.wait(1200) == 0, output.read_text()[-6000:] + server.log.read_text()[-3000:]
        yield {"folder": folder, "server": server, "output": output.read_text(), "killed at": killed_at}
    finally:
        server.kill()
        if trainer is not None and trainer.poll() is None:
            trainer.kill()
            trainer.wait()


def test_the_reward_rises(trained) -> None:
    """The trainer learns from what the server generates."""
    found = re.search(r"^rewards: (\[.*\])$", trained["output"], re.MULTILINE)
    assert found is not None, trained["output"][-3000:]
    rewards = ast.literal_eval(found[1])
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_a_killed_server_follows_again(trained) -> None:
    """It is started with the first checkpoint, and generates nothing before it has the trainer's version."""
    assert KILLED_AT <= trained["killed at"] < STEPS
    assert "is to follow the run again" in trained["output"]


@pytest.mark.parametrize("weights", ["file://{}/run", "{}/trained"])
def test_the_server_has_the_trainers_bits(trained, weights: str) -> None:
    """What the server has in the end is the last version, and what the trainer has saved."""
    command = ["verify-engine", trained["server"].url, weights.format(trained["folder"])]
    done = subprocess.run(
        [sys.executable, "-m", "sparserl.cli", *command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to" in done.stdout
    assert "trained" in weights or f"version {STEPS} of run" in done.stdout


def test_patches_travel(trained) -> None:
    """Each step is one version, and each version a patch of the one before."""
    store = FolderStore(trained["folder"] / "run")
    head, _ = read_head(store)
    steps = read_index(store, head).steps
    assert head.version == STEPS
    patched = {step.version for step in steps if step.base == step.version - 1}
    last_anchor = max(step.version for step in steps if step.base is None)
    assert patched >= {*range(last_anchor + 1, STEPS + 1)}
