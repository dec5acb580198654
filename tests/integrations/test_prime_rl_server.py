"""prime-rl's own inference server with vLLM, on a CPU: workers commit steps, or load the folder that is followed.

`make test-prime-rl` runs it; SPARSERL_PRIME_RL names a checkout (see test_prime_rl.py). vLLM is 0.28.0: prime-rl does
not start with later ones, nor the backend with earlier ones.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.wheels import ROOT

CHECKOUT = os.environ.get("SPARSERL_PRIME_RL")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="SPARSERL_PRIME_RL names no checkout of prime-rl"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; see `make test-prime-rl`"),
    pytest.mark.timeout(900),
]
PROMPTS = [[1, 5, 9, 30], [1, 44, 7], [1, *range(5, 45)]]


class Server:
    """prime-rl's entry point `inference`, started as the page says."""

    def __init__(self, model: Path, folder: Path, config: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "server.log"
        folder.mkdir()
        sizes = "max_model_len = 64\nblock_size = 32\nkv_cache_memory_bytes = 16777216\nenforce_eager = true\n"
        bare = 'router = "None"\nenable_fp32_lm_head = false\n'  # neither is to be had on a CPU
        at = f'[server]\nhost = "127.0.0.1"\nport = {port}\n'
        (folder / "inference.toml").write_text(f'{bare}{at}[vllm]\nmodel = "{model}"\n{sizes}{config}')
        paths = (f"{CHECKOUT}/src", f"{CHECKOUT}/packages/prime-rl-configs/src", str(ROOT / "src"), str(ROOT))
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "SPARSERL_VLLM_CPU": "plain",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-m", "prime_rl.entrypoints.inference", "@", str(folder / "inference.toml")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self):
        import requests

        end = time.monotonic() + 400
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return self
            except requests.ConnectionError:
                time.sleep(1)
        self.__exit__()
        raise AssertionError(self._log.read_text()[-8000:])

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def post(self, path: str, body: object = None):
        import requests

        answer = requests.post(f"{self.url}/{path}", json=body, timeout=300)
        assert answer.ok, f"{answer.text}\n{self._log.read_text()[-8000:]}"
        return answer.json()

    def update(self, weight_dir: str) -> None:
        """The calls of prime-rl's orchestrator."""
        self.post("pause?mode=keep&clear_cache=false")
        self.post("update_weights", {"weight_dir": weight_dir})
        self.post("resume")

    def generate(self) -> list[list[object]]:
        """Tokens, and how likely they are; each with a salt of its own, since prime-rl keeps the prefix cache."""
        found = []
        for prompt in PROMPTS:
            body = {"model": self.model(), "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0}
            choice = self.post("v1/completions", body | {"ignore_eos": True, "cache_salt": str(time.monotonic_ns())})
            logprobs = choice["choices"][0]["logprobs"]
            found.append([logprobs["tokens"], logprobs["token_logprobs"]])
        return found

    def model(self) -> str:
        import requests

        return requests.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["id"]


def page_config() -> str:
    """What the page writes into the config of the server."""
    page = (ROOT / "docs/how-to/integrations/prime-rl.md").read_text()
    (toml,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return toml.split("[inference.vllm]\n")[1].split("\n\n")[0] + "\n"


def test_a_server_of_prime_rl(tmp_path):
    """Workers that commit steps compute what those compute that load prime-rl's folders, or a followed one."""
    import sparserl
    from sparserl.integrations.prime_rl import BroadcastPublisher
    from tests.integrations.real_vllm import models

    model = tmp_path / "model"
    models.make(model, "llama")
    weights = models.load(model)
    url = f"file://{tmp_path}/store"
    publisher = BroadcastPublisher(tmp_path / "trainer", url, files=model)
    found = {}
    with Server(model, tmp_path / "patches", page_config(), SPARSERL_URL=url) as server:
        found["before"] = server.generate()
        for step in (1, 2, 3):
            models.step(weights, step)
            folder = tmp_path / f"trainer/broadcasts/step_{step}"
            folder.mkdir(parents=True)
            models.save_file(weights, folder / "model.safetensors")
            (folder / "STABLE").touch()
            publisher.publish_new()
            server.update(f"/on/another/machine/broadcasts/step_{step}")
            found[step] = server.generate()
    sparserl.Subscriber(url, sparserl.targets.folder(tmp_path / "followed")).sync(1)  # step 2
    with Server(model, tmp_path / "files", "") as server:
        assert server.generate() == found["before"]
        server.update(str(tmp_path / "trainer/broadcasts/step_1"))
        assert server.generate() == found[1]
        server.update(os.path.realpath(tmp_path / "followed/current"))
        assert server.generate() == found[2]
        server.update(str(tmp_path / "trainer/broadcasts/step_3"))
        assert server.generate() == found[3]
    assert len({json.dumps(generations) for generations in found.values()}) == 4
