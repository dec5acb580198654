"""FSDP1 and ZeRO-3 in real processes: ranges of flattened parameters are published without gathering, or refused."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

import sparserl
from sparserl.errors import UnsupportedTensor
from tests.session.ranks import port, ranks, results
from tests.sources import zero3_engine
from tests.sources.test_fsdp import Policy

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without Gloo", allow_module_level=True)

VERSIONS = 2


def bits(weights):
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in weights.items()}


def publish(rank, group, source, url, step, gathered):
    """Publish some versions from every rank. A subscriber of rank 0 must have the gathered weights after each."""
    with sparserl.Publisher(url, source, writers=group) as publisher:
        rollout = {name: torch.zeros_like(tensor) for name, tensor in gathered().items()}
        for version in range(VERSIONS):
            if version:
                step()
            report = publisher.publish()
            assert (report.kind, report.changed > 0) == ("patch" if version else "anchor", True)
            weights = gathered()
            if rank == 0:
                with sparserl.Subscriber(url, rollout) as subscriber:
                    subscriber.sync()
                assert bits(rollout) == bits(weights)
    return len(source.weights().parts)


def fsdp1(rank, group, pipe, folder, strategy, tracked):
    """Tied weights, buffers, parameters that are cut within a row; by the flat parameters and by the original ones."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    warnings.simplefilter("ignore")
    counts = []
    for use_orig_params in (False, True):
        torch.manual_seed(0)
        model = Policy()
        options = {
            "use_orig_params": use_orig_params,
            "device_id": torch.device("cpu"),
            "sharding_strategy": ShardingStrategy[strategy],
        }
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullyShardedDataParallel(block, **options)
        model = FullyShardedDataParallel(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(model=model, optimizer=optimizer):
            model(torch.arange(13)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.arange(3))  # leaves the outermost parameters unsharded

        def gathered(model=model):
            cast = {name for name, _ in Policy().named_parameters()}  # the tied head once
            tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
            return {n: t.to(torch.bfloat16) if n in cast else t.clone() for n, t in tensors.items()}

        source = sparserl.sources.fsdp(model, cast=torch.bfloat16)
        if tracked:
            source = sparserl.sources.track(optimizer, sparserl.sources.fsdp(model), cast=torch.bfloat16)
        counts.append(publish(rank, group, source, f"{folder}/{use_orig_params}", step, gathered))
        refused(model)
    return counts


def refused(model):
    """What would pass for whole weights, or leave some out, is refused by name."""
    with pytest.raises(UnsupportedTensor, match=r"sharded by FSDP1.*sources\.fsdp"):
        sparserl.sources.module(model).weights()
    with pytest.raises(UnsupportedTensor, match="sharded by FSDP1"):
        sparserl.targets.module(model).weights()
    with pytest.raises(UnsupportedTensor, match="sharded by FSDP1"):
        sparserl.sources.module(model.module.blocks[0].module).weights()
    with pytest.raises(UnsupportedTensor, match=r"'(_flat_param|norm\.weight)' is a flat shard of FSDP1; pass the out"):
        sparserl.sources.fsdp(model.module.blocks[0].module).weights()
    with pytest.raises(UnsupportedTensor, match=r"'(_flat_param|scale)' is a flat shard of FSDP1"):
        sparserl.sources.fsdp(model.module).weights()
    with (
        type(model).summon_full_params(model),
        pytest.raises(UnsupportedTensor, match="outside of summon_full_params"),
    ):
        sparserl.sources.fsdp(model).weights()


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "tracked"),
    [("FULL_SHARD", False), ("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("NO_SHARD", False)],
)
def test_fsdp1(tmp_path, strategy, tracked):
    """Every version arrives bit for bit, each rank publishes its own elements, and of whole copies one is published."""
    with ranks(2, fsdp1, str(tmp_path), strategy, tracked) as started:
        first, second = results(started)
    assert all(first)
    assert all(second) == (strategy != "NO_SHARD")


def zero3(rank, group, pipe, folder, at):
    """A real engine of DeepSpeed, whose parameters are empty between steps."""
    zero3_engine.join(rank, at)
    torch.manual_seed(0)
    model = Policy()
    engine = zero3_engine.engine_of(model, 1e-2)

    def step():
        engine.backward(engine(torch.arange(13)).square().mean())
        engine.step()

    with pytest.raises(UnsupportedTensor, match=r"sharded by DeepSpeed ZeRO-3.*sources\.fsdp"):
        sparserl.sources.module(model).weights()
    source = sparserl.sources.fsdp(model)

    def gathered():
        return {n: tensor for n, tensor in zero3_engine.whole_weights(model).items() if n != "head.weight"}

    return publish(rank, group, source, f"{folder}/run", step, gathered)


@pytest.mark.slow
def test_zero3(tmp_path):
    """Every version of a DeepSpeed engine arrives bit for bit, where DeepSpeed is installed."""
    pytest.importorskip("deepspeed")
    with ranks(2, zero3, str(tmp_path), port()) as started:
        assert all(results(started))


def zero3_attributes(rank, group, pipe, folder):
    """Parameters with the attributes that DeepSpeed's ZeRO-3 gives them: partitions with padding, and no data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        size = -(-parameter.numel() // 2)
        padded = torch.nn.functional.pad(full[name].flatten(), (0, 2 * size - parameter.numel()), value=9.0)
        parameter.ds_id = number
        parameter.ds_shape = parameter.shape
        parameter.ds_numel = parameter.numel()
        parameter.ds_process_group = group
        parameter.ds_tensor = padded[rank * size : (rank + 1) * size].clone()
        parameter.ds_tensor.ds_numel = size
        parameter.ds_tensor.status = SimpleNamespace(name="AVAILABLE")
        parameter.data = torch.empty(0)

    def step():
        for name, parameter in model.named_parameters():
            parameter.ds_tensor += 0.5
            full[name] += 0.5

    with pytest.raises(UnsupportedTensor, match=r"sharded by DeepSpeed ZeRO-3.*sources\.fsdp"):
        sparserl.sources.module(model).weights()
    source = sparserl.sources.fsdp(model)
    count = publish(rank, group, source, f"{folder}/run", step, lambda: {n: t.clone() for n, t in full.items()})
    model[0].bias.ds_tensor.status.name = "NOT_AVAILABLE"
    with pytest.raises(UnsupportedTensor, match=r"'0\.bias': its ZeRO-3 partition is not in memory"):
        source.weights()
    return count


@pytest.mark.long
def test_partitions_of_zero3(tmp_path):
    """Partitions are put where they belong, padding is left out, and what is not in memory is refused."""
    with ranks(2, zero3_attributes, str(tmp_path)) as started:
        assert results(started) == [7, 6]
