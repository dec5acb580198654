"""SkyRL's own sender and client, from its wheel, over vLLM's trainer classes: what they say to servers."""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparserl
from sparserl.errors import SessionError
from tests.integrations.test_skyrl import ENGINE, TRAIN, UTILS, _skyrl, generator, run  # noqa: F401

FOLDER = "skyrl/backends/skyrl_train/weight_sync"
HAS_LOGURU = find_spec("loguru") is not None
COMMIT = ["start_weight_update", "update_weights", "finish_weight_update"]

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of vLLM, which has many
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`"),
]


class Server:
    """A vLLM server, as far as senders see it: it refuses versions before it was told of a run."""

    def __init__(self) -> None:
        server = self
        self.seen: list[tuple[str, Any]] = []
        self.follows = False
        self.resets = True

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.strip("/")
                server.seen.append((path, json.loads(body) if body else None))
                server.follows |= path == "init_weight_transfer_engine"
                refused = path == "update_weights" and not server.follows
                answer = {"error": {"message": "call init first"}} if refused else {"success": server.resets}
                self.send_response(500 if refused else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def paths(self) -> list[str]:
        """What was called since the last time."""
        paths = [path for path, _ in self.seen]
        self.seen = []
        return paths


def sources() -> Any:
    """What makes SkyRL's sources. Those of SkyRL 0.4 are for vLLM until 0.32, which refuses them from 0.33 on."""
    from vllm.distributed.weight_transfer import base

    arguments = f"{TRAIN}.weight_sync.sources", f"{FOLDER}/sources.py"
    if not hasattr(base.WeightSource, "iter_full"):
        return run(*arguments).FsdpWeightSource
    with pytest.raises(TypeError, match="cached_property"):
        run(*arguments)

    class Source(base.WeightSource):
        def __init__(self, model: torch.nn.Module, dtype: torch.dtype, prefix: str) -> None:
            self._tensors = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
            self._dtype = dtype

        @functools.cached_property
        def metadata(self) -> Any:
            return [base.ParamMeta(name, self._dtype, tensor.shape) for name, tensor in self._tensors.items()]

        def iter_full(self) -> Any:
            return ((name, tensor.to(self._dtype)) for name, tensor in self._tensors.items())

    return Source


@pytest.fixture(name="server")
def _server() -> Any:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(name="sending")
def _sending(skyrl: Any, server: Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model, and a function that builds the sender of a rank."""
    utils = run("skyrl.train.utils.utils", UTILS, {"str_to_torch_dtype"}, torch=torch)
    assert utils.str_to_torch_dtype("bfloat16") == torch.bfloat16
    if not HAS_LOGURU:
        monkeypatch.setitem(sys.modules, "loguru", SimpleNamespace(logger=logging.getLogger(__name__)))
    for name in ("control_plane", "weight_senders"):
        setattr(skyrl.sync, name, run(f"{TRAIN}.weight_sync.{name}", f"{FOLDER}/{name}.py"))
    make_source = sources()
    model = torch.nn.Linear(40, 30)
    url = f"file://{tmp_path}/run"

    def source(dtype: torch.dtype, prefix: str = "") -> Any:
        return make_source(model, dtype, prefix)

    def build(rank: int = 0, **engine: Any) -> Any:
        options = ENGINE | {"sparserl": {"url": url, "worker": {"ahead": False}}} | engine
        return skyrl.sync.weight_senders.build_trainer_engine(
            ie_cfg=generator(skyrl, **options).inference_engine,
            colocate_all=False,
            rank=rank,
            inference_world_size=1,
            source_factory=lambda dtype, backend: source(dtype),
            draft_source_factory=lambda dtype: source(dtype, "mtp."),
            server_urls=[server.url],
            data_parallel_size=1,
        )

    yield SimpleNamespace(build=build, model=model, url=url, source=source, senders=skyrl.sync.weight_senders)
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if "sparserl.integrations.skyrl_trainer" in sys.modules:
        WeightTransferTrainerFactory._registry.pop("skyrl_sparserl")


def test_a_round(sending: Any, server: Server) -> None:
    """The server is told of the run, then of each version; the store has the bits in the dtype of the engine."""
    sender = sending.build()
    assert server.seen == [("init_weight_transfer_engine", {"init_info": {"url": sending.url, "ahead": False}})]
    server.paths()
    held = {name: torch.zeros(t.shape, dtype=torch.bfloat16) for name, t in sending.model.state_dict().items()}
    with sparserl.Subscriber(sending.url, held) as subscriber:
        for version in (1, 2):
            with torch.no_grad():
                sending.model.weight[version] *= 1.5
            sender.skyrl_set_reset_prefix_cache(version == 2)
            assert sender.send_weights().version == version
            calls = list(server.seen)
            assert server.paths()[:3] == COMMIT
            assert calls[1][1]["update_info"]["version"] == version
            assert calls[2][1]["weight_version"].endswith(f":{version}")
            resets = ["reset_prefix_cache?reset_running_requests=true&reset_external=true", "reset_encoder_cache"]
            assert [path for path, _ in calls[3:]] == (resets if version == 2 else [])
            subscriber.sync()
            for name, tensor in sending.model.state_dict().items():
                assert torch.equal(held[name], tensor.to(torch.bfloat16))
    sending.senders.teardown_engine(sender)


def test_a_server_that_was_restarted(sending: Any, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """It is told of the run again, and the version is committed; a warning says so."""
    sender = sending.build()
    server.paths()
    server.follows = False
    with caplog.at_level(logging.WARNING, "sparserl.skyrl"):
        sender.send_weights()
    assert "follow the run again" in caplog.text
    paths = server.paths()
    assert paths.count("init_weight_transfer_engine") == 1
    assert paths[-3:] == COMMIT
    sending.senders.teardown_engine(sender)


def test_a_cache_that_is_not_reset(sending: Any, server: Server) -> None:
    """The sync fails: the server would go on with what it computed from old weights."""
    sender = sending.build()
    server.resets = False
    sender.skyrl_set_reset_prefix_cache(True)
    with pytest.raises(SessionError, match="prefix cache"):
        sender.send_weights()
    sending.senders.teardown_engine(sender)


def test_ranks_that_do_not_send(sending: Any, server: Server) -> None:
    """They gather, and say nothing to servers or the store."""
    sender = sending.build(rank=1)
    assert sender.send_weights() is None
    assert server.seen == []
    sending.senders.teardown_engine(sender)


def test_what_would_stay_as_it_is(sending: Any) -> None:
    """FP8 wires, and drafters whose tensors the policy lacks, are refused by name."""
    with pytest.raises(ValueError, match="FP8"):
        sending.build(fp8_weight_sync_mode="blockwise")
    with pytest.raises(SessionError, match=r"'mtp\.bias'"):
        sending.build(speculative_config={"method": "mtp"})
    sender = sending.build(sparserl={"url": f"{sending.url}-2"})
    sender.skyrl_draft_source = sending.source(torch.bfloat16)
    sending.senders.teardown_engine(sender)
