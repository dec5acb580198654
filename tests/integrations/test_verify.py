"""The caller's side of verifying an engine: what is compared, and what is never left out without a word."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sparserl import Publisher, Region, tensor_table
from sparserl.cli.app import app
from sparserl.errors import SessionError, SparserlError
from sparserl.integrations.verify import verify_engine
from sparserl.session.store.records import parse_layout
from sparserl.targets.pieces import Piece
from sparserl.targets.rank_sums import rank_sums
from sparserl.weights.engine_sums import EngineSums
from sparserl.weights.region import whole


def pieces_of(table, regions):
    """Every tensor in one of the same name, or the region of it that is named."""
    for spec in table.specs:
        region = regions.get(spec.name, whole(spec.shape))
        strides = np.zeros(region.size, np.uint8).strides
        yield Piece(spec.name, region, f"live.{spec.name}", 0, strides)


class Engine:
    """The workers of an engine, by their tensors and regions: what `LLM.collective_rpc` would reach."""

    def __init__(self, *ranks, has_plugin=True, parameters=()):
        self.ranks, self.has_plugin, self.parameters, self.calls = ranks, has_plugin, parameters, []

    def collective_rpc(self, method, args=()):
        self.calls.append(method)
        if method == "__dir__":
            return [["load_model", *["sparserl_sums"] * self.has_plugin] for _ in self.ranks]
        (layout,) = args
        return json.loads(json.dumps([self.sums(parse_layout(layout.encode(), "it"), *rank) for rank in self.ranks]))

    def sums(self, table, tensors, regions=None):
        live = {f"live.{name}": tensor for name, tensor in tensors.items()}
        pieces = [piece for piece in pieces_of(table, regions or {}) if piece.live in live]
        return rank_sums(table, pieces, live, [*live, *self.parameters], {}, {}).record()


WEIGHTS = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5)}
UPPER, LOWER = Region((0, 0), (2, 3)), Region((2, 0), (2, 3))


def test_ranks_with_parts_and_copies():
    """Parts of ranks add up; where copies on two ranks differ, or one part does, the tensor is named."""
    first, second = ({"a": part.clone(), "b": torch.ones(5)} for part in WEIGHTS["a"].split(2))
    engine = Engine((first, {"a": UPPER}), (second, {"a": LOWER}))
    comparison = verify_engine(engine, WEIGHTS)
    assert (comparison.answer, comparison.tensors, comparison.bytes) == ("equal", 2, 68)
    second["b"][4] = 2
    assert verify_engine(engine, WEIGHTS).different == ("b",)
    second["a"][0, 0] = -0.0
    assert verify_engine(engine, WEIGHTS).different == ("a", "b")


def test_nothing_is_left_out():
    """Tensors of which a part is nowhere, and parameters that come from no tensor, are named; the rest is compared."""
    engine = Engine(({"a": WEIGHTS["a"][:2], "b": WEIGHTS["b"]}, {"a": UPPER}), parameters=["extra"])
    comparison = verify_engine(engine, WEIGHTS)
    assert (comparison.answer, comparison.tensors, comparison.different) == ("incomplete", 1, ())
    assert comparison.uncompared.keys() == {"a", "extra"}
    assert "no plain copy of 6 of its 12 elements" in comparison.uncompared["a"]
    overlapping = Engine((WEIGHTS,), ({"a": WEIGHTS["a"][:2]}, {"a": UPPER}))
    assert "overlap" in verify_engine(overlapping, WEIGHTS).uncompared["a"]


def test_an_engine_that_casts():
    """What the engine keeps in another dtype is compared with the checkpoint in that dtype, and said."""
    wide = {"a": torch.arange(12.0).view(4, 3) + 1e-3, "b": torch.ones(5)}
    narrow = {"a": wide["a"].bfloat16(), "b": torch.ones(5)}
    engine = Engine((narrow,))
    assert not torch.equal(narrow["a"].float(), wide["a"])
    comparison = verify_engine(engine, wide)
    assert (comparison.answer, comparison.cast, comparison.bytes) == ("equal", {"a": "bfloat16"}, 44)
    narrow["a"][1, 1] += 1
    assert verify_engine(engine, wide).different == ("a",)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout": float("nan")}, "timeout is nan; it must be a positive number of seconds"),
        ({"threads": 0}, "threads is 0; it must be an integer, 1 or more"),
    ],
)
def test_options_that_cannot_be_used(options, text):
    """They are refused by name, and no engine is asked, be it a server or an `LLM`."""
    engine = Engine((WEIGHTS,))
    for each in (engine, "http://localhost:1"):
        with pytest.raises(SparserlError, match=text):
            verify_engine(each, WEIGHTS, **options)
    assert engine.calls == []


def test_runs(tmp_path):
    """A folder with a run is told from a checkpoint; versions are compared as they are asked for."""
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    with Publisher(tmp_path / "run", weights) as publisher:
        publisher.publish()
        weights["b"][2] = 7
        publisher.publish()
    engine = Engine((weights,))
    newest = verify_engine(engine, tmp_path / "run")
    assert (newest.answer, newest.version) == ("equal", 1)
    older = verify_engine(engine, f"{tmp_path}/run@0")
    assert (older.different, older.version) == (("b",), 0)


def test_the_record_of_an_engine():
    """It comes back as it was."""
    table = tensor_table(WEIGHTS)
    engine = Engine((WEIGHTS,), parameters=["extra"])
    sums = EngineSums.combine(table, [rank_sums(table, pieces_of(table, {}), live(), ["extra"], {}, {})])
    assert engine.sums(table, WEIGHTS)["uncompared"] == sums.uncompared
    assert EngineSums.of(table, json.loads(json.dumps(sums.record(table)))) == sums


def live():
    return {f"live.{name}": tensor for name, tensor in WEIGHTS.items()}


def test_an_engine_without_sparserl_is_not_called():
    """After a call of a method that workers do not have, vLLM would mix up later answers."""
    engine = Engine((WEIGHTS,), (WEIGHTS,), has_plugin=False)
    with pytest.raises(SessionError, match="sparserl is not installed where vLLM runs"):
        verify_engine(engine, WEIGHTS)
    assert engine.calls == ["__dir__"]


@contextmanager
def answering(paths):
    """A server with these paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.lstrip("/")
            self.send_response(200 if path in paths else 404)
            self.end_headers()
            self.wfile.write(json.dumps(paths.get(path, {})).encode())

        do_POST = do_GET  # noqa: N815  # as the base class has it

        def log_message(self, *_):
            """Not on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_servers_that_cannot_be_asked(tmp_path):
    """The one line says what to do: for vLLM without its development mode, and where nothing answers."""
    with Publisher(tmp_path / "run", WEIGHTS) as publisher:
        publisher.publish()
    with answering({"version": {"version": "0.32"}}) as url:
        done = CliRunner().invoke(app, ["verify-engine", url, str(tmp_path / "run")])
        assert done.exit_code == 1
        assert "start vLLM with VLLM_SERVER_DEV_MODE=1" in done.stderr
    done = CliRunner().invoke(app, ["verify-engine", url, str(tmp_path / "run")])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "Connection refused" in done.stderr
    done = CliRunner().invoke(app, ["verify-engine", "localhost:8000", str(tmp_path / "run")])
    assert "it must be the address of a server" in done.stderr
