"""A rank of SGLang's own: its groups, its model, its updater and its checker, on the CPU. Nothing is computed."""

from __future__ import annotations

from pathlib import Path

import torch


def declare_image_kernels() -> None:
    """Let a torchvision that was built for another torch be imported, whose kernels no text model calls."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def saved(folder: Path, architecture: str) -> None:
    """A small checkpoint of an architecture, as transformers saves it."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 200}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if "Moe" in architecture else {}
    config = getattr(transformers, f"{architecture}Config")(**sizes, **heads, **experts, tie_word_embeddings=False)
    torch.manual_seed(0)
    getattr(transformers, f"{architecture}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)


def trained(folder: Path, version: int) -> dict[str, torch.Tensor]:
    """The checkpoint after some steps."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    for at in range(version):
        for tensor in weights.values():
            tensor.view(-1)[at :: 31 + at] *= 1.25
    return weights


def model_of(folder: Path, rank: int, size: int):
    """SGLang's model of a checkpoint, on one rank of several, loaded by SGLang."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    def without(self, *_, **__) -> None:
        self.available, self.disabled = False, True

    PyNcclCommunicator.__init__ = without  # it would look for a GPU
    options = {"device": "cpu", "dtype": "bfloat16", "attention_backend": "torch_native", "skip_tokenizer_init": True}
    args = ServerArgs(model_path=str(folder), tp_size=size, **options)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    init_distributed_environment(backend="gloo", world_size=size, rank=rank, local_rank=rank)
    initialize_model_parallel(backend="gloo")
    config = ModelConfig.from_server_args(args)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")), config


def follow(rank, group, _pipe, size, folder, url, versions):
    """Be brought to versions by SGLang's updater: what its checker says, and whether all is as if it were loaded."""
    import sparserl

    declare_image_kernels()

    model, config = model_of(folder, rank, size)
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.weight_checker import WeightChecker

    from sparserl.integrations import sglang as ours

    nothing = dict.fromkeys(("update_model_fields", "recapture_cuda_graph", "get_model_runner"), lambda *_, **__: None)
    places = {"tp_rank": rank, "device": "cpu", "gpu_id": 0, "model_config": config}
    updater = WeightUpdater(custom_weight_loaders=[ours.LOADER], get_model=lambda: model, **places, **nothing)
    checker = WeightChecker(get_model=lambda: model)
    weights = trained(folder, 0)
    publisher = sparserl.Publisher(url, weights, profile="ulp") if rank == 0 else None
    seen = []
    for version in versions:
        for name, tensor in trained(folder, version).items():
            weights[name].copy_(tensor)
        if publisher is not None:
            publisher.publish()
        torch.distributed.barrier(group)
        said = ours.request(url, ranks=size, ahead=False)
        named = MultiprocessingSerializer.deserialize(said["serialized_named_tensors"][rank])
        updater.update_weights_from_tensor(named, load_format=said["load_format"])
        (mark,) = checker.handle("checksum", skip_tensor_list=["."], role="target")["checksums"]
        held = {name: tensor.clone() for name, tensor in model.named_parameters()}
        model.load_weights(weights.items())
        seen.append((mark, all(torch.equal(tensor, held[name]) for name, tensor in model.named_parameters())))
        torch.distributed.barrier(group)
    return seen
