"""sparserl in a real vLLM on a GPU, beside vLLM's own ways to get new weights.

    python -m benchmarks.engine --models 0.14B 6.7B --modes eager graphs --folder /dev/shm/engine

For every model and mode, in processes of their own: vLLM alone, vLLM that follows a run, and vLLM's backend `ipc`. The
checkpoints are random. After the last sync all weights of the engine are compared with those that vLLM itself loads.
Writes research/results/engine.json, and tables beside it. It needs vLLM and a GPU with room for three copies, and takes
twenty minutes; with --add, the file keeps its other cases, so that it may be run in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.engine_tables import case_of, report

RESULTS = Path(__file__).parent.parent / "research" / "results"
CHANGED = (0.002, 0.002, 0.004, 0.006, 0.008, 0.012, 0.003, 0.001)  # of all elements, sync by sync
PROMPTS = [[1, 5, 9, 30], [1, 44, 7], [1, *range(5, 75)]]
WAYS = ("alone", "follow", "ipc")
_PATIENCE = 60.0  # seconds for a version to be staged
# the integers, and the largest finite number as one of them, of float8_e4m3fn, bfloat16 and float32
_LARGEST = {1: ("int8", 0x7E), 2: ("int16", 0x7F7F), 4: ("int32", 0x7F7FFFFF)}


def _llama(vocab: int, hidden: int, layers: int, heads: int, keys: int, inner: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": hidden // heads,
        "intermediate_size": inner,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


MODELS = {
    "tiny": _llama(192, 128, 2, 4, 2, 96),
    "0.14B": _llama(49152, 768, 12, 12, 4, 2048),
    "1B": _llama(32000, 2048, 20, 32, 8, 5632),
    "6.7B": _llama(32000, 4096, 32, 32, 32, 11008),
    "moe": _llama(32000, 1024, 8, 16, 4, 2048)
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
_CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
MODELS["1B-fp8-blocks"] = MODELS["1B"] | {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
MODELS["1B-fp8-channels"] = MODELS["1B"] | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": _CHANNELS, "input_activations": _TOKENS},
        },
        "ignore": ["lm_head"],
    }
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


# -- checkpoints -------------------------------------------------------------------------------------------------------


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a checkpoint."""
    hidden = config["hidden_size"]
    width = config["head_dim"]
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    experts = config.get("num_experts")
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        if experts:
            yield f"{layer}.self_attn.q_norm.weight", (width,)
            yield f"{layer}.self_attn.k_norm.weight", (width,)
            yield f"{layer}.mlp.gate.weight", (experts, hidden)
        for prefix in [f"{layer}.mlp.experts.{e}" for e in range(experts)] if experts else [f"{layer}.mlp"]:
            yield f"{prefix}.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.up_proj.weight", (inner, hidden)
            yield f"{prefix}.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def make(model: str, folder: Path, device: str) -> None:
    """A checkpoint of random weights, unless it is there."""
    import torch

    if (folder / "config.json").exists():
        return
    generator = torch.Generator(device).manual_seed(7)
    weights = {}
    for name, shape in shapes(MODELS[model]):
        scale = 0.0 if name.endswith("norm.weight") else 0.6 if "embed" in name else 1.6 * shape[-1] ** -0.5
        values = torch.randn(shape, generator=generator, device=device).mul_(scale)
        values = (values + 1 if scale == 0.0 else values).to(torch.bfloat16)
        weights |= quantized(name, values, MODELS[model]) if name.endswith("_proj.weight") else {name: values}
    save(weights, folder, MODELS[model])


def quantized(name: str, values: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A weight as a checkpoint of a model has it: in fp8 with scales, if the model is quantized."""
    import torch

    how = config.get("quantization_config")
    if how is None:
        return {name: values}
    rows, columns = values.shape
    height, width = how.get("weight_block_size", (1, columns))
    padded = torch.zeros(-(-rows // height) * height, -(-columns // width) * width, device=values.device)
    padded[:rows, :columns] = values
    blocks = padded.view(padded.shape[0] // height, height, -1, width)
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scales).view_as(padded)[:rows, :columns].contiguous().to(torch.float8_e4m3fn)
    suffix = "_scale_inv" if "weight_block_size" in how else "_scale"
    return {name: codes, name + suffix: scales.view(blocks.shape[0], -1)}


def save(weights: dict[str, Any], folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint, in one file."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def step(weights: dict[str, Any], share: float, seed: int) -> None:
    """Move a share of all elements to a neighbouring number."""
    import torch

    for tensor in weights.values():
        generator = torch.Generator(tensor.device).manual_seed(seed)
        integers, largest = _LARGEST[tensor.element_size()]
        integer = getattr(torch, integers)
        for bits in tensor.view(-1).view(integer).split(1 << 26):
            chosen = torch.rand(bits.shape, generator=generator, device=tensor.device) < share
            bits += chosen * torch.where((bits & torch.iinfo(integer).max) == largest, -1, 1).to(integer)


# -- one engine --------------------------------------------------------------------------------------------------------


class Engine:
    """vLLM on a checkpoint, in this process or in one of its own."""

    def __init__(self, folder: Path, mode: str, backend: str | None) -> None:
        import torch
        from vllm import LLM

        self.folder = folder
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        options: dict[str, Any] = {"kv_cache_memory_bytes": (4 << 30) if self.device == "cuda" else (16 << 20)}
        if backend is not None:
            options["weight_transfer_config"] = {"backend": backend}
        begun = time.perf_counter()
        self.llm = LLM(
            str(folder),
            seed=0,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512 if self.device == "cuda" else 96,
            gpu_memory_utilization=0.5,
            **options,
            **MODES[mode],
        )
        self.start_seconds = time.perf_counter() - begun
        self.peak_bytes = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0

    def weights(self) -> dict[str, Any]:
        """The checkpoint, as a trainer on the same device has it."""
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors", device=self.device)

    def generations(self) -> list[Any]:
        """Tokens that follow on some prompts, and how likely they are."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
        return [
            [[*one.outputs[0].token_ids], [next(iter(p.values())).logprob for p in one.outputs[0].logprobs]]
            for one in outputs
        ]

    def wait_for_stage(self, version: int) -> None:
        """Wait until a version is staged by the engine's own thread."""
        deadline = time.monotonic() + _PATIENCE
        while self.llm.collective_rpc(_staged_version)[0] != version:
            if time.monotonic() > deadline:
                raise TimeoutError(f"version {version} was not staged within {_PATIENCE:g} s")
            time.sleep(0.001)

    def digest(self) -> str:
        """Of all weights."""
        digest: str = self.llm.collective_rpc(_digest)[0]
        return digest


def _staged_version(worker: Any) -> int | None:
    staged = worker.weight_transfer_engine.subscriber._staged  # noqa: SLF001
    return None if staged is None else staged.run_version.version


def _digest(worker: Any) -> str:
    import sparserl

    return sparserl.digest({name: p.data for name, p in worker.get_model().named_parameters()}).hex


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds, with all that the GPU has to do for it."""
    import torch

    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


class Compiled:
    """Counts the kernels that Triton compiles."""

    def __init__(self) -> None:
        self.names: list[str] = []
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, **facts: Any) -> None:
        self.names.append(str(getattr(facts.get("fn"), "name", facts.get("repr"))))

    def take(self) -> list[str]:
        """Those since the last call."""
        names = self.names
        self.names = []
        return names


def alone(mode: str, folder: Path) -> dict[str, Any]:
    """VLLM without a backend: its start, and its own reload."""
    engine = Engine(folder, mode, None)
    all_weights = [*engine.weights().items()]
    reload = engine.llm.collective_rpc
    memory = [timed(lambda: reload("reload_weights", kwargs={"weights_iterator": iter(all_weights)})) for _ in range(2)]
    disk = timed(lambda: reload("reload_weights", kwargs={"weights_path": str(folder)}))
    return {"start_s": engine.start_seconds, "peak_bytes": engine.peak_bytes, "memory_ms": min(memory), "disk_ms": disk}


def follow(mode: str, folder: Path) -> dict[str, Any]:
    """VLLM that follows a run: every sync, then two at once, then a comparison with what vLLM loads itself."""
    from sparserl.integrations.vllm_trainer import OfflineClient, SparserlTrainer, SparserlTrainerInitInfo

    compiled = Compiled()
    engine = Engine(folder, mode, "sparserl")
    weights = engine.weights()
    baseline = "device" if engine.device == "cuda" else "host"
    store = folder.with_name(f"{folder.name}-store-{os.getpid()}")
    publisher = {"ladder": None, "anchor_after": 1e9, "baseline": baseline}
    info = SparserlTrainerInitInfo(rank=0, url=str(store), publisher=publisher)
    trainers: list[Any] = []
    client = OfflineClient(engine.llm)
    attach = timed(lambda: trainers.append(SparserlTrainer.trainer_init(info, client=client, source=weights)))
    (trainer,) = trainers
    syncs = []
    compiled.take()
    for number, share in enumerate(CHANGED, 1):
        step(weights, share, number)
        syncs.append(_sync(engine, trainer) | {"share": share, "compiled": compiled.take()})
    for seed in (101, 102):
        step(weights, 0.002, seed)
        version = trainer.publish().version
    late = timed(lambda: trainer.commit(version))
    before = engine.digest(), engine.generations()
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter([*weights.items()])})
    engine.llm.reset_prefix_cache()
    after = engine.digest(), engine.generations()
    trainer.shutdown()
    return {
        "start_s": engine.start_seconds,
        "peak_bytes": engine.peak_bytes,
        "attach_ms": attach,
        "syncs": syncs,
        "late_ms": late,
        "same_bits": before[0] == after[0],
        "same_generations": before[1] == after[1],
    }


def _sync(engine: Engine, trainer: Any) -> dict[str, Any]:
    reports: list[Any] = []
    publish = timed(lambda: reports.append(trainer.publish()))
    report = reports[0]
    staged = timed(lambda: engine.wait_for_stage(report.version))
    pause = timed(lambda: trainer.commit(report.version))
    audit = timed(lambda: trainer.commit(report.version, audit=True))
    return {
        "changed": report.changed,
        "bytes": report.bytes,
        "publish_ms": publish,
        "staged_after_ms": staged,
        "pause_ms": pause,
        "audit_ms": audit,
    }


def ipc(mode: str, folder: Path) -> dict[str, Any]:
    """VLLM's own backend for one host: all weights, from this process to the engine's."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    from sparserl.integrations.vllm_trainer import OfflineClient

    engine = Engine(folder, mode, "ipc")
    weights = engine.weights()
    source = ModuleSource(SimpleNamespace(named_parameters=weights.items))
    info = IPCTrainerInitInfo(rank=0, packed=True)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=OfflineClient(engine.llm), source=source)
    return {"start_s": engine.start_seconds, "send_ms": min(timed(trainer.send_weights) for _ in range(4))}


# -- all of them -------------------------------------------------------------------------------------------------------


def run(way: str, model: str, mode: str, folder: Path) -> dict[str, Any]:
    """One case in a process of its own."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    settings = SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if way == "ipc" else "0"}
    command = [sys.executable, "-m", "benchmarks.engine", "--case", way, "--models", model, "--modes", mode]
    log = folder / f"{way}-{mode}.log"
    with log.open("wb") as output:
        code = subprocess.call(
            [*command, "--folder", str(folder.parent)], env=os.environ | settings, stdout=output, stderr=output
        )
    facts = {"model": model, "mode": mode, "way": way}
    if code or not result.exists():
        return facts | {"failed": log.read_text(errors="replace")[-3000:]}
    warnings = [line for line in log.read_text(errors="replace").splitlines() if "Failed to load" in line]
    return facts | {"warnings": len(warnings)} | json.loads(result.read_text())


def main() -> None:
    """Run the cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.14B", "1B", "6.7B", "moe"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/sparserl-engine"))
    parser.add_argument("--out", type=Path, default=RESULTS / "engine.json")
    parser.add_argument("--add", action="store_true", help="keep what --out has of other cases")
    parser.add_argument("--case", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        (model,) = options.models
        case = {"alone": alone, "follow": follow, "ipc": ipc}[options.case]
        result = case(options.modes[0], options.folder / model)
        (options.folder / model / "result.json").write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # an engine's threads do not always end
    results = {case_of(result): result for result in _results(options.out)} if options.add else {}
    for model in options.models:
        make_it = f"from benchmarks.engine import make_checkpoint; make_checkpoint({model!r}, {str(options.folder)!r})"
        subprocess.check_call([sys.executable, "-c", make_it])
        for mode in options.modes:
            for way in options.ways:
                if way == "alone":
                    run(way, model, mode, options.folder / model)  # once before: vLLM compiles kernels of its own
                result = run(way, model, mode, options.folder / model) | {"day": time.strftime("%Y-%m-%d")}
                results[case_of(result)] = result
                print(json.dumps(result), flush=True)
                options.out.write_text(json.dumps([*results.values()], indent=1) + "\n")
                options.out.with_suffix(".md").write_text(report([*results.values()]))
    print("python -m benchmarks.engine_tables writes them to vLLM's page")


def _results(path: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return results


def make_checkpoint(model: str, folder: str) -> None:
    """In a process of its own, so that the engine has the GPU to itself."""
    import torch

    make(model, Path(folder) / model, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
