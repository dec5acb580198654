"""A server that speaks SGLang's endpoints for weights, over real ranks with a tensor-parallel model on the CPU.

What is SGLang's own here comes from its wheel: the endpoints and fields that requests may have, and the unpickler of
tensors. Releases differ: 0.5.15 has no update sessions, and ends if it is to flush its cache while it has requests. The
model is written for the tests; it fuses and shards as SGLang's models do, and its ranks run the loader as theirs do.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib
import io
import json
import pickle
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import load_file

from sparserl.integrations.ranks import EngineSubscriber
from sparserl.integrations.sglang_plugin import LOADER
from tests.integrations.sglang_plugins import RESOLUTION_HOOKS, weight_loaders
from tests.integrations.wheels import Wheel, definition, fields
from tests.session.ranks import ranks

HIDDEN, HEADS, HEAD, INNER, VOCAB, PADDED, LAYERS = 64, 4, 16, 96, 30, 32, 2
NORMS = ("input_layernorm", "post_attention_layernorm")
STACKED = (
    ("qkv_proj", "q_proj"),
    ("qkv_proj", "k_proj"),
    ("qkv_proj", "v_proj"),
    ("gate_up_proj", "gate_proj"),
    ("gate_up_proj", "up_proj"),
)
REQUESTS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "weights_checker": "CheckWeightsReqInput",
}


def checkpoint(version: int = 0) -> dict[str, torch.Tensor]:
    """What the trainer has: whole tensors under the names of a Hugging Face checkpoint."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.{kind}": (HEADS * HEAD, HIDDEN)[: 1 + (kind == "weight")]
            for kind in ("weight", "bias")
        }
        shapes |= {f"{at}self_attn.{name}.weight": (HEAD, HIDDEN) for name in ("k_proj", "v_proj")}
        shapes |= {f"{at}self_attn.{name}.bias": (HEAD,) for name in ("k_proj", "v_proj")}
        shapes |= {f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD), f"{at}mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{at}mlp.{name}.weight": (INNER, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{at}{name}.weight": (HIDDEN,) for name in NORMS}
    random = torch.Generator().manual_seed(3)
    out = {name: torch.randn(shape, generator=random).to(torch.bfloat16) for name, shape in shapes.items()}
    for at in range(version):
        for tensor in out.values():
            tensor.view(-1)[at :: 11 + at] *= 1.5
    return out


def changed_element(name: str, version: int) -> tuple[int, ...]:
    """An element that a version changes, by its place on the second of two ranks, which has the last columns."""
    changes = checkpoint(version)[name] != checkpoint(version - 1)[name]
    return tuple(changes.chunk(2, dim=1)[1].nonzero()[0].tolist())


class Model(torch.nn.Module):
    """One rank of a model: query heads, inner and vocabulary rows are split, the one key-value head is on all ranks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self._rows = {
            "q_proj": HEADS * HEAD // size,
            "k_proj": HEAD,
            "v_proj": HEAD,
            "gate_proj": INNER // size,
            "up_proj": INNER // size,
        }
        shapes = {"model.embed_tokens.weight": (PADDED // size, HIDDEN), "lm_head.weight": (PADDED // size, HIDDEN)}
        shapes["model.norm.weight"] = (HIDDEN,)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            for fused, at_fused in (("qkv_proj", f"{at}self_attn."), ("gate_up_proj", f"{at}mlp.")):
                rows = sum(self._rows[name] for into, name in STACKED if into == fused)
                shapes[f"{at_fused}{fused}.weight"] = (rows, HIDDEN)
                if fused == "qkv_proj":
                    shapes[f"{at_fused}{fused}.bias"] = (rows,)
            shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD // size)
            shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, INNER // size)
            shapes |= {f"{at}{name}.weight": (HIDDEN,) for name in NORMS}
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, torch.nn.Module())
                module = getattr(module, step)
            module.register_parameter(
                last, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
            )
        self.register_buffer("model_inv_freq", torch.arange(4.0), persistent=False)

    def load_weights(self, weights) -> None:
        """Whole checkpoint tensors, each to its place in this rank's parameters."""
        params = dict(self.named_parameters())
        for name, loaded in weights:
            for fused, part in STACKED:
                if f".{part}." in name:
                    before = [p for f, p in STACKED if f == fused]
                    start = sum(self._rows[p] for p in before[: before.index(part)])
                    into = params[name.replace(part, fused)].data[start : start + self._rows[part]]
                    split = part not in ("k_proj", "v_proj")
                    into.copy_(loaded.chunk(self.size)[self.rank] if split else loaded)
                    break
            else:
                into = params[name].data
                if "o_proj" in name or "down_proj" in name:
                    into.copy_(loaded.chunk(self.size, dim=1)[self.rank])
                elif "embed_tokens" in name or "lm_head" in name:
                    mine = loaded[self.rank * PADDED // self.size :][: PADDED // self.size]
                    into[: len(mine)].copy_(mine)
                else:
                    into.copy_(loaded)


class Folded(Model):
    """A model that computes something of its weights when they are loaded, and only then."""

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        self.fold()

    def fold(self) -> None:
        self.made = self.lm_head.weight.float().sum(dim=1)


class Refreshed(Folded):
    """The same, as SGLang has it: what was made can be made again."""

    breaks = False

    def post_load_weights(self) -> None:
        if self.breaks:
            raise RuntimeError("broken")
        self.fold()


class Tied(Model):
    """A model whose head is its embeddings."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.lm_head = self.model.embed_tokens

    def load_weights(self, weights) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if not name.startswith("lm_head"))


class Scaled(Refreshed):
    """One that also computes something which it cannot make again, and keeps it with what works on its weights."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.quant_method = SimpleNamespace(kernels=[SimpleNamespace(scales=torch.zeros(HIDDEN))])

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        self.quant_method.kernels[0].scales = self.model.norm.weight.float() * 2


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    """Every bit of the parameters."""
    return {name: p.data.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for name, p in model.named_parameters()}


def expected(version: int, rank: int, size: int) -> dict[str, bytes]:
    """What a rank holds that loads a version in the ordinary way."""
    model = Model(rank, size)
    model.load_weights(checkpoint(version).items())
    return bits(model)


def control(url, **said):
    """The tensor that a client sends."""
    said = {"url": url, "trusted_keys": None, "run": None, "token": None, "version": None, "ahead": False} | said
    return [("sparserl", torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8))]


def marks(model):
    """What the loader says of a model."""
    return [name for name, _ in model.named_buffers() if name.startswith("sparserl")]


def in_group(rank: int, size: int, group) -> None:
    """Put the one thing of SGLang in place that the loader asks for: its tensor-parallel group."""
    tp = SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=group)
    distributed = ModuleType("sglang.srt.distributed")
    distributed.get_tp_group = lambda: tp
    sys.modules |= {"sglang": ModuleType("sglang"), "sglang.srt": ModuleType("sglang.srt")}
    sys.modules["sglang.srt.distributed"] = distributed


def kept_reports():
    """A list that gets the report of every commit of this process from now on."""
    reports = []
    commit = EngineSubscriber.commit_version

    def commit_version(self, version=None):
        reports.append(commit(self, version))
        return reports[-1]

    EngineSubscriber.commit_version = commit_version
    return reports


def unpickler(source: str):
    """SGLang's own, which refuses nearly everything."""
    tree = ast.parse(source)
    tree.body = [n for n in tree.body if getattr(n, "name", "") in ("_safe_load_torch_storage", "SafeUnpickler")]
    out = {"pickle": pickle, "io": io, "torch": torch}
    exec(compile(tree, "sglang/srt/utils/common.py", "exec"), out)
    return out["SafeUnpickler"]


def serve(rank, group, pipe, size, source, name, loaders):
    """A rank of the engine: does what the scheduler of SGLang would do."""
    in_group(rank, size, group)
    reports = kept_reports()
    model = globals()[name](rank, size)
    model.load_weights(checkpoint(0).items())
    load_tensors = unpickler(source)
    for order, said in iter(pipe.recv, None):
        answer = None
        if order == "update":
            assert said["load_format"] in loaders
            module, _, function = said["load_format"].rpartition(".")
            named = load_tensors(
                io.BytesIO(base64.b64decode(said["serialized_named_tensors"][rank], validate=True))
            ).load()
            getattr(importlib.import_module(module), function)(model, [(n, t.to("cpu")) for n, t in named])
        elif order == "disk":
            model.load_weights(t for file in sorted(Path(said).glob("*.safetensors")) for t in load_file(file).items())
        elif order == "checksum":
            state = {
                n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not any(s in n for s in said)
            }
            sums = {
                n: hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy()).hexdigest()[:16] for n, t in state.items()
            }
            whole = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
            answer = {"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": [{"tp_rank": rank}]}
        elif order == "spoil":
            name, at = said
            dict(model.named_parameters())[name].data[at] = 7
        elif order == "move":
            model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
        elif order == "break":
            model.breaks = said
        elif order == "report":
            answer = reports[-1].kind, reports[-1].bytes
        elif order == "bits":
            answer = bits(model), getattr(model, "made", None)
        pipe.send(answer)


class Server(ThreadingHTTPServer):
    """The HTTP side. Requests with fields that SGLang does not know, or without those that it needs, are refused."""

    def __init__(self, sglang: Wheel, started) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        structs = sglang.tree("sglang/srt/managers/io_struct.py")
        there = {node.name for node in structs.body if isinstance(node, ast.ClassDef)}
        self.known = {path: definition(structs, name) for path, name in REQUESTS.items() if name in there}
        self.has_sessions = "begin_weight_update" in self.known
        self.requests = 0  # that a server without sessions still has: one ends whenever it is to flush its cache
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.started, self.calls = started, []
        self.version, self.paused, self.session = "default", False, not self.has_sessions
        self.pp_size = 1

    def ask(self, order: str, said=None, only: int | None = None) -> list:
        """Say the same to all ranks, all at a time, or only to one."""
        asked = self.started if only is None else [self.started[only]]
        for _, pipe in asked:
            pipe.send((order, said))
        answers = []
        for _, pipe in asked:
            assert pipe.poll(600), "a rank does not answer"
            answers.append(pipe.recv())
        return answers

    def answer(self, path: str, said: dict) -> tuple[int, dict]:
        self.calls.append(path)
        if path == "server_info":
            host, port = self.server_address
            return 200, {"tp_size": len(self.started), "pp_size": self.pp_size, "host": host, "port": port}
        if path == "flush_cache" and not self.has_sessions:
            self.requests -= 1
            return (200, "Cache flushed.") if self.requests < 0 else (400, "Flush cache failed.")
        if path not in self.known:
            return 404, {"detail": "Not Found"}
        struct = self.known[path]
        if path == "weights_checker" and not self.has_sessions:  # fields of later releases, which are ignored
            said = {name: value for name, value in said.items() if name in fields(struct)}
        needed = {n.target.id for n in struct.body if isinstance(n, ast.AnnAssign) and n.value is None}
        if said.keys() - fields(struct) or needed - said.keys():
            return 422, {"success": False, "message": f"{path} does not take {sorted(said)}"}
        return getattr(self, path)(**said)

    def pause_generation(self, mode="abort"):
        self.paused = True
        return 200, {"status": "ok"}

    def continue_generation(self):
        self.paused = False
        return 200, {"status": "ok"}

    def begin_weight_update(self, selector="all"):
        return self._in_session(False, True)

    def end_weight_update(self):
        return self._in_session(True, False)

    def _in_session(self, before, after):
        if self.session != before or not self.paused:
            return 400, {"success": False, "message": "not now"}
        self.session = after
        return 200, {"success": True, "message": "Success"}

    def update_weights_from_tensor(self, **said):
        if not self.session:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        if not self.has_sessions and (said["flush_cache"] or not said["disable_draft_model"] or not self.paused):
            return 500, {"detail": "the scheduler has ended, or the draft model has got the weights"}
        self.ask("update", said)
        return 200, {"success": True, "message": "Success"}

    def update_weights_from_disk(self, model_path, weight_version=None, flush_cache=True):
        if not Path(model_path).is_dir():
            return 400, {"success": False, "message": f"no {model_path}", "num_paused_requests": 0}
        self.ask("disk", model_path)
        self.version = weight_version or self.version
        return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}

    def update_weight_version(self, new_version, abort_all_requests=True):
        self.version = new_version
        return 200, {"success": True, "new_version": new_version}

    def weights_checker(self, action="checksum", skip_tensor_list=None, selector="all"):
        found = self.ask("checksum", skip_tensor_list or [])
        whole = hashlib.sha256("".join(rank["per_gpu_checksum"] for rank in found).encode()).hexdigest()
        return 200, {"success": True, "message": "Success.", "ranks": found, "per_engine_checksum": whole}


class _Handler(BaseHTTPRequestHandler):
    def _serve(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.server.answer(self.path.lstrip("/"), json.loads(data or b"{}"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode() if isinstance(body, str) else json.dumps(body).encode())

    do_GET = do_POST = _serve  # noqa: N815  # as the base class has it

    def log_message(self, *_) -> None:
        """Not on stderr."""


@contextmanager
def running(sglang: Wheel, size: int = 2, model: str = "Model"):
    """A server with so many ranks, started without an option for the loader where the plugin adds it."""
    source = sglang.text("sglang/srt/utils/common.py")
    loaders = weight_loaders(sglang, {})[1][0] if RESOLUTION_HOOKS in sglang.names() else [LOADER]
    with ranks(size, serve, size, source, model, loaders) as started, Server(sglang, started) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
