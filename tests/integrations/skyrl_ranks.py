"""A rank of SkyRL's trainer, on a CPU: SkyRL's own worker, source, sender and client. It does what the test orders.

It does not import the integration: that comes with the config.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.backends.skyrl_train.weight_sync.weight_senders import teardown_engine
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


class Policy(PolicyWorkerBase):
    """SkyRL's policy worker; its class for FSDP imports flash-attn, and adds what builds the source."""

    def __init__(self, cfg, model):
        self.cfg = cfg.trainer
        self.model = model

    def _build_weight_source(self, dtype, backend):
        return FsdpWeightSource(self.model, dtype)


class Rank:
    """What the test can order."""

    def __init__(self, rank, runner):
        self.rank = rank
        self.runner = runner
        self.warnings = []
        handler = logging.Handler()
        handler.emit = lambda record: self.warnings.append(record.getMessage())
        logging.getLogger("sparserl.skyrl").addHandler(handler)

    def begin(self, cfg, model, urls):
        """Load a checkpoint in fp32, shard it, and let the servers follow."""
        self.cfg = cfg
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in policy.model.layers:
            fully_shard(layer, mesh=mesh)
        self.worker = Policy(cfg, fully_shard(policy, mesh=mesh))
        self.client = RemoteInferenceClient(proxy_url=urls[0], server_urls=urls, data_parallel_size=1)
        engine = cfg.generator.inference_engine
        self.runner.run(self.worker.init_weight_sync_state(self.client, engine))
        return type(self.worker._weight_sync_engine).__name__

    def step(self, seed):
        """Change some elements by a little, and some by a lot."""
        generator = torch.Generator().manual_seed(seed + 100 * self.rank)
        with torch.no_grad():
            for parameter in self.worker.model.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                chosen = torch.rand(local.shape, generator=generator) < 0.01
                local[chosen] += torch.randn(local.shape, generator=generator)[chosen] * 0.05

    def sync(self):
        """As SkyRL's dispatcher syncs trainers and engines that are not colocated."""
        engine = self.cfg.generator.inference_engine
        if self.rank == 0:
            self.runner.run(self.client.pause_generation())
        dist.barrier()
        try:
            self.runner.run(self.worker._sync_weights_to_inference_engines(self.client, engine))
        finally:
            if self.rank == 0:
                self.runner.run(self.client.resume_generation())
        return self.warnings

    def save(self, folder):
        """Save the weights as they are sent."""
        dtype = getattr(torch, self.cfg.generator.inference_engine.model_dtype)
        tensors = {name: tensor.clone() for name, tensor in FsdpWeightSource(self.worker.model, dtype)}
        if self.rank == 0:
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    def draft(self, prefix):
        """Have a drafter with the policy's tensors, under names with a prefix."""
        engine = self.worker._weight_sync_engine
        engine.skyrl_draft_source = FsdpWeightSource(self.worker.model, torch.float32, prefix)
        engine.skyrl_draft_source = None

    def end(self):
        teardown_engine(self.worker._weight_sync_engine)


def rank(number, _group, pipe):
    """Do what comes through the pipe."""
    with asyncio.Runner() as runner:
        ordered = Rank(number, runner)
        for method, arguments in iter(pipe.recv, None):
            try:
                pipe.send((True, getattr(ordered, method)(*arguments)))
            except Exception as error:  # noqa: BLE001  # the test raises it
                pipe.send((False, f"{type(error).__name__}: {error}"))
