"""Megatron-core's own optimizers are tracked, with data parallelism on processes with Gloo."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from sparserl.errors import UnsupportedTensor
from sparserl.sources import megatron
from sparserl.sources.layout import Local, Slice
from sparserl.sources.master_sample import MasterSampler
from sparserl.sources.megatron_core import interleaved, transposed
from sparserl.sources.megatron_optimizer import OptimizerSteps, owned_ranges, within
from sparserl.weights.region import Region, whole
from tests.sources.megatron_models import megatron_model, megatron_ranks, offloaded, two_ranks
from tests.sources.test_track_sharded import sharded_steps
from tests.sources.transformers_models import VOCAB, transformers_model

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


class Trainer:
    """A model of Megatron-core in bf16 with one of its optimizers."""

    def __init__(self, kind, *, distributed=True, overlap=False, offload=False, backward=False):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        _, self.config, _ = transformers_model(kind, "bfloat16")
        self.backward = backward
        model = megatron_model(kind, self.config).bfloat16()
        parallel = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_param_gather=overlap)
        self.model = DistributedDataParallel(model.config, parallel, model)
        self.model.broadcast_params()
        options = OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            bf16=True,
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap,
            optimizer_cpu_offload=offload,
            optimizer_offload_fraction=1.0 if offload else 0.0,
            overlap_cpu_optimizer_d2h_h2d=offload,
            pin_cpu_grads=False,
        )
        make = partial(get_megatron_optimizer, options, [self.model])
        self.optimizer = offloaded(make) if offload else make()

    def source(self):
        return megatron(self.model, self.config, optimizer=self.optimizer)

    def train(self, seed):
        """A step with gradients that differ from rank to rank."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
        if self.backward:
            ids = torch.randint(0, VOCAB, (1, VOCAB), generator=generator)
            mask = torch.ones(1, 1, VOCAB, VOCAB).triu(1).bool()
            self.model(ids, torch.arange(VOCAB).view(1, -1), mask).float().square().mean().backward()
        else:
            for parameter in self.model.parameters():
                parameter.main_grad.normal_(generator=generator)
        self.model.finish_grad_sync()
        assert self.optimizer.step()[0]

    def checkpoint(self):
        """All weights, after what others wrote was gathered, by the map alone."""
        if self.model.ddp_config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)
        shards = megatron(self.model, self.config).weights()
        parts = [None, None]
        dist.all_gather_object(parts, [(part.tensor, part.region, part.data.clone()) for part in shards.parts])
        tensors = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in shards.table.specs}
        for tensor, region, data in parts[0] + parts[1]:
            tensors[tensor][region.slices] = data
        return tensors


def run_steps(kind, **options):
    """Steps and publishes, each held against a comparison of all weights. Every rank has its share."""
    trainer = Trainer(kind, **options)
    sharded_steps(trainer.source, trainer.checkpoint, trainer.train, dist.get_rank())
    shares = [None, None]
    parts = trainer.source().weights().parts
    dist.all_gather_object(shares, sum(part.region.numel for part in parts))
    numel = sum(tensor.numel() for tensor in trainer.checkpoint().values())
    assert sum(shares) == numel
    return min(shares) / numel


def sample_masters(**options):
    """Masters and gradients are found for every published element, wherever the optimizer keeps them."""
    trainer = Trainer("qwen2", **options)
    source = trainer.source()
    sampler = MasterSampler(None, 0)
    sampler.watch(source)
    gradients = []
    source.before_steps(lambda _: gradients.extend(p.main_grad.clone() for p in trainer.model.parameters()))
    trainer.train(0)  # clips gradients in place
    trainer.model.zero_grad_buffer()
    weights = source.weights()
    sample = sampler.take(source, weights)
    assert [*sample] == [(part.tensor, part.region) for part in weights.parts]
    for part in weights.parts:
        taken = sample[part.tensor, part.region]
        masters = torch.from_numpy(taken.masters)
        assert torch.equal(masters.bfloat16(), part.data.reshape(-1))
        assert torch.equal(taken.published, part.data.reshape(-1))
        assert masters.numel() < 9 or not torch.equal(masters, masters.bfloat16().float())
    with torch.no_grad():
        for parameter, gradient in zip(trainer.model.parameters(), gradients, strict=True):
            parameter.copy_(gradient)
    for part in source.weights().parts:  # now the parts of the gradients
        taken = torch.from_numpy(sample[part.tensor, part.region].gradients)
        assert torch.equal(taken.bfloat16(), part.data.reshape(-1))
        assert taken.any()
    return len(sample)


def run_short(rank):
    with megatron_ranks():
        assert run_steps("qwen2", backward=True) > 0.3
        assert sample_masters()


def run_long(rank):
    with megatron_ranks():
        assert run_steps("qwen3_moe", overlap=True) > 0.3
        assert run_steps("qwen2", distributed=False) == 0
        assert bool(sample_masters(distributed=False)) == (rank == 0)
        publish_interleaved()
    with megatron_ranks(tp=2):
        run_steps("qwen2")
    with megatron_ranks(pp=2):
        run_steps("qwen3")
    with megatron_ranks(ep=2):
        run_steps("mixtral")
    run_offload()  # the last, since torch has streams of a GPU then


def run_offload():
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    with megatron_ranks():
        (optimizer,) = Trainer("qwen2", offload=True).optimizer.chained_optimizers
        assert isinstance(optimizer.optimizer, HybridDeviceOptimizer)
        assert optimizer.optimizer.cpu_optimizers
        assert run_steps("qwen2", offload=True) > 0.3


def publish_interleaved():
    """Rows that the checkpoint has in another order are published by one rank, unless no rank has them all."""
    trainer = Trainer("gpt_oss")
    source = trainer.source()
    parts = [None, None]
    for step in range(2):
        trainer.train(step)
        weights = source.weights()
        dist.all_gather_object(parts, [(part.tensor, part.region, part.data.clone()) for part in weights.parts])
        for name, tensor in trainer.checkpoint().items():
            published = torch.zeros_like(tensor)
            for _, region, data in (part for part in parts[0] + parts[1] if part[0] == name):
                published[region.slices] = data
            assert torch.equal(published, tensor), name
    with pytest.raises(UnsupportedTensor, match=r"linear_fc1.*overlap_param_gather"):
        Trainer("gpt_oss", overlap=True).source()


@pytest.mark.long
def test_distributed_optimizer(tmp_path):
    """Each of two data-parallel ranks publishes what its optimizer writes: every step, exactly."""
    two_ranks(tmp_path, run_short)


@pytest.mark.long
def test_optimizers_and_ranks(tmp_path):
    """Parameters gathered late, experts, stages, cut layers; not distributed, and with masters in host memory."""
    two_ranks(tmp_path, run_long)


def test_a_range_of_a_parameter():
    """Elements of a parameter are boxes of the tensors it consists of, also of a tensor with columns as rows."""
    tensor = torch.arange(24.0).view(2, 4, 3)
    rows = Local((3, 4), (Slice("w", Region((1, 0, 0), (1, 4, 3)), whole((3, 4))),), transposed)
    fused = Local((4, 3), (Slice("w", Region((1, 2, 0), (1, 2, 3)), Region((2, 0), (2, 3))),))
    parameters = {rows: tensor[1].T.contiguous(), fused: torch.cat([torch.zeros(2, 3), tensor[1, 2:]])}
    for local, parameter in parameters.items():
        for low in range(12):
            for high in range(low, 13):
                published = torch.full_like(tensor, -1)
                for slice_ in within(local, range(low, high)).slices:
                    data = parameter[slice_.local.slices]
                    data = data if local.convert is None else local.convert(data)
                    published[slice_.region.slices] = data.view(slice_.region.size)
                flat = parameter.flatten()[low:high]
                expected = flat[flat > 0] if local is fused else flat
                assert sorted(published[published >= 0].tolist()) == sorted(expected.tolist())
                assert ((published == tensor) | (published == -1)).all()
    assert within(Local((4, 3), rows.slices, interleaved), range(3)) is None


def test_what_cannot_be_tracked():
    """Other objects, Megatron-FSDP and MXFP8 are refused; so are shards that leave holes or overlap."""
    with pytest.raises(UnsupportedTensor, match="SimpleNamespace is no optimizer of Megatron-core, nor one of torch"):
        owned_ranges(SimpleNamespace())

    def distributed(**options):
        fields = {"use_megatron_fsdp": False, "reuse_grad_buf_for_mxfp8_param_ag": False} | options
        config = SimpleNamespace(**fields)
        return SimpleNamespace(step_with_ready_grads=print, ddp_config=config, config=config, is_stub_optimizer=False)

    with pytest.raises(UnsupportedTensor, match=r"Megatron-FSDP has DTensors.*sources.fsdp"):
        owned_ranges(distributed(use_megatron_fsdp=True))
    with pytest.raises(UnsupportedTensor, match="MXFP8"):
        owned_ranges(SimpleNamespace(chained_optimizers=[distributed(reuse_grad_buf_for_mxfp8_param_ag=True)]))


def test_hooks_of_an_optimizer():
    """Hooks are called around each step, in order, until they are removed."""
    calls = []
    optimizer = SimpleNamespace(step=lambda: calls.append("step") or "result")
    steps = OptimizerSteps(optimizer, [], {})
    hooks = [
        steps.register_step_pre_hook(lambda *_: calls.append("before")),
        steps.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    assert optimizer.step() == "result"
    assert calls == ["before", "step", "after"]
    for hook in hooks:
        hook.remove()
    assert optimizer.step() == "result"
    assert calls[3:] == ["step"]
