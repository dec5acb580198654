"""Versions that requests demand, without vLLM: what is refused, what passes, and what answers say.

tests/integrations/real_vllm has the same with a real server.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from sparserl.errors import SessionError, WrongVersion
from sparserl.integrations.vllm_client import WeightUpdates
from sparserl.integrations.vllm_versions import MIN_VERSION, VersionMiddleware, require_version

RUN = "12e9e740decf9cd4"
STREAM = b"text/event-stream; charset=utf-8"


@pytest.mark.parametrize("demand", [0, 7, "7", f"{RUN}:7", f"{RUN}:0"])
def test_a_version_that_is_there(demand):
    """The version itself and later ones are enough, of the run if one is named."""
    require_version(f"{RUN}:7", demand)


@pytest.mark.parametrize(
    ("engine", "demand", "reason"),
    [
        (f"{RUN}:7", 8, ""),
        (f"{RUN}:9", f"{RUN}:10", ""),  # by number, not by letter
        (f"{RUN}:7", "other:1", ": it follows another run"),
        ("default", 0, ": its weights are no version of a run"),
        ("7", 0, ": its weights are no version of a run"),
        (f"{RUN}:seven", f"{RUN}:0", ": its weights are no version of a run"),
    ],
)
def test_a_version_that_is_not_there(engine, demand, reason):
    """The error names both versions, and says why they cannot be compared."""
    with pytest.raises(WrongVersion) as error:
        require_version(engine, demand)
    assert str(error.value) == f"the engine has {engine}, but {demand} or later is demanded{reason}"


@pytest.mark.parametrize("demand", ["", "newest", "-1", -1, ":7", f"{RUN}:", f"{RUN}:7 ", "1, 2", "٧", "9" * 5000])
def test_what_is_no_version(demand):
    """An option is checked before anything is compared with it."""
    with pytest.raises(SessionError, match="is no version: write RUN:VERSION") as error:
        require_version(f"{RUN}:7", demand)
    assert not isinstance(error.value, WrongVersion)


class Engine:
    """An engine that says one version after the other."""

    def __init__(self, *versions):
        self.versions = list(versions)

    async def get_weight_version(self):
        version = self.versions.pop(0)
        if version is None:
            raise RuntimeError("Engines returned different get_weight_version results")
        return version


def post(
    engine,
    *demands,
    path="/v1/completions",
    chunks=(b"{}",),
    kind=b"application/json",
    raw=(),
    headers_as=dict,
    **scope,
):
    """The status of an answer, its headers and its body; None where the app behind was not reached unchanged."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *raw]})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})

    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"accept", b"*/*"), *((MIN_VERSION.lower().encode(), demand.encode()) for demand in demands)]
    request = {"type": "http", "method": "POST", "path": path, "headers": headers, **scope}
    request["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    asyncio.run(VersionMiddleware(app)(request, None, send))
    start, *bodies = sent
    return start["status"], headers_as(start["headers"]), b"".join(message.get("body", b"") for message in bodies)


def said(headers):
    """The versions in headers."""
    return {name.decode(): value.decode() for name, value in headers.items() if name.startswith(b"x-sparserl")}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/invocations", "/pooling", "/score", "/rerank", "/classify", "/generative_scoring"]
)
def test_an_answer_has_both_versions(path):
    """The one before the generation, and the one after it, wherever vLLM generates, scores or embeds."""
    status, headers, body = post(Engine(f"{RUN}:7", f"{RUN}:8"), path=path)
    assert (status, body) == (200, b"{}")
    assert said(headers) == {"x-sparserl-start-version": f"{RUN}:7", "x-sparserl-end-version": f"{RUN}:8"}


@pytest.mark.parametrize("end", [[b"data: [DONE]\n\n"], []])
def test_a_stream_ends_with_its_version(end):
    """It comes once, as a comment, after all tokens: before the mark at which clients stop reading, if there is one."""
    chunks = [b"data: {1}\n\n", b'data: {"text": "data: [DONE]"}\n\n', *end]
    _, headers, body = post(Engine(f"{RUN}:7", f"{RUN}:8"), chunks=chunks, kind=STREAM)
    assert said(headers) == {"x-sparserl-start-version": f"{RUN}:7"}
    comment = f": X-Sparserl-End-Version: {RUN}:8\n\n".encode()
    assert body == b"".join([*chunks[:2], comment, *end])


def test_refusals():
    """The app behind is not reached: 412 where the engine has not the version, 400 where it is none."""
    status, headers, body = post(Engine(f"{RUN}:7"), f"{RUN}:8", path="/anything")
    assert status == 412
    assert said(headers) == {"x-sparserl-start-version": f"{RUN}:7"}
    assert int(headers[b"content-length"]) == len(body)
    assert json.loads(body)["error"] == {
        "message": f"the engine has {RUN}:7, but {RUN}:8 or later is demanded",
        "type": "WrongVersion",
        "param": "X-Sparserl-Min-Version",
        "code": 412,
    }
    assert post(Engine(f"{RUN}:7"), "newest")[0] == 400
    for demands in (("7", "8"), ("7", "7"), ("7, 8",)):  # a request has one, however a proxy writes several
        assert post(Engine(f"{RUN}:7"), *demands)[0] == 400


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "POST"])
def test_a_demand_counts_for_every_method(method):
    """Whatever is asked, it is refused, or answered by the version that was demanded, which the answer names."""
    for path in ("/v1/models", "/tokenize", "//v1/completions"):
        assert post(Engine(f"{RUN}:7"), "8", path=path, method=method)[0] == 412
        status, headers, _ = post(Engine(f"{RUN}:7", f"{RUN}:7"), "7", path=path, method=method)
        assert status == 200
        assert said(headers)["x-sparserl-start-version"] == f"{RUN}:7"


def websocket(engine, *demands, extensions=None):
    """What a websocket that makes demands gets to hear, from an app that takes every one."""

    async def app(scope, receive, send):
        await send({"type": "websocket.accept", "headers": [(b"X-Sparserl-Start-Version", b"forged:1"), (b"a", b"b")]})

    sent = []

    async def send(message):
        sent.append(message)

    headers = [(MIN_VERSION.lower().encode(), demand.encode()) for demand in demands]
    request = {"type": "websocket", "path": "/v1/realtime", "headers": headers, "extensions": extensions}
    request["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    asyncio.run(VersionMiddleware(app)(request, None, send))
    return sent


def test_a_demand_counts_when_a_websocket_is_opened():
    """It is refused before the app hears of it, by a status where the server can send one."""
    start = (b"x-sparserl-start-version", f"{RUN}:7".encode())
    taken = {"type": "websocket.accept", "headers": [(b"a", b"b")]}
    assert websocket(Engine()) == [taken]
    assert websocket(Engine(f"{RUN}:7"), "7") == [{**taken, "headers": [(b"a", b"b"), start]}]
    assert websocket(Engine(f"{RUN}:7"), "8") == [{"type": "websocket.close", "code": 1008}]
    for demand, status in (("8", 412), ("newest", 400)):
        opened, body = websocket(Engine(f"{RUN}:7"), demand, extensions={"websocket.http.response": {}})
        assert (opened["type"], opened["status"]) == ("websocket.http.response.start", status)
        assert start in opened["headers"]
        assert json.loads(body["body"])["error"]["code"] == status


def test_nobody_else_tells_versions():
    """Headers of the app, or of what stands behind it, do not pass for ours; others stay, though there are two."""
    forged = [(b"X-Sparserl-Start-Version", b"forged:1"), (b"x-sparserl-end-version", b"forged:2")]
    others = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
    for path, versions in (("/v1/completions", [f"{RUN}:7".encode(), f"{RUN}:8".encode()]), ("/version", [])):
        headers = post(Engine(f"{RUN}:7", f"{RUN}:8"), path=path, raw=[*forged, *others], headers_as=list)[1]
        assert [value for name, value in headers if name.lower().startswith(b"x-sparserl")] == versions
        assert [header for header in headers if header[0] == b"set-cookie"] == others


def test_a_stream_that_grows_has_no_length():
    """A comment is added to it, so that a length that the app has counted would cut it off."""
    headers = post(Engine(f"{RUN}:7", f"{RUN}:8"), kind=STREAM, raw=[(b"Content-Length", b"2")])[1]
    assert b"Content-Length" not in headers


@pytest.mark.parametrize("version", [None, 7, "", " ", "1\r\nset-cookie: a", "é"])
def test_an_engine_that_has_no_version_to_tell(version):
    """Replicas may differ in the middle of a commit, and anyone can name weights: answers say `unknown`."""
    status, headers, _ = post(Engine(version, f"{RUN}:8"))
    assert status == 200
    assert said(headers) == {"x-sparserl-start-version": "unknown", "x-sparserl-end-version": f"{RUN}:8"}
    status, _, body = post(Engine(version), "0")
    assert status == 412
    assert b"the engine has unknown, but 0 or later is demanded" in body


@pytest.mark.parametrize(
    "scope", [{"path": "/update_weights"}, {"path": "/root/pause", "root_path": "/root"}, {"method": "GET"}]
)
def test_what_generates_nothing_is_left_alone(scope):
    """The engine is not even asked; it could not answer in the middle of a commit."""
    _, headers, _ = post(Engine(), **scope)
    assert said(headers) == {}


class Client:
    """A client whose workers answer something, or raise it, when they are asked for their version."""

    def __init__(self, answer):
        self.answer = answer
        self.followed = []
        self.version = None

    def init_weight_transfer_engine(self, info):
        self.followed.append(info)

    def collective_rpc(self, method):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def update_weight_version(self, version):
        self.version = version


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ([{"version": f"{RUN}:7"}] * 2, f"{RUN}:7"),
        ([{"version": f"{RUN}:7"}, {"version": f"{RUN}:8"}], "default"),
        ([{"version": None}], "default"),
        ([], "default"),
        (None, "default"),
        ([[{"version": f"{RUN}:7"}]], "default"),
        (AttributeError("no such method"), "default"),
    ],
)
def test_an_engine_that_attaches_has_the_version_of_its_workers(answer, version):
    """All of them must say the same; whatever they say, the engine follows the run."""
    client = Client(answer)
    WeightUpdates(client).follow({"url": "file:///run"})
    assert client.followed == [{"url": "file:///run"}]
    assert client.version == version


class Trouble(Client):
    """A client whose updates fail when they have written a version; it has caches."""

    def __init__(self):
        super().__init__([{"version": f"{RUN}:7"}])
        self.calls = []
        self.error = None

    def collective_rpc(self, method):
        self.calls.append(method)
        return super().collective_rpc(method)

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, update):
        self.calls.append(update)
        if self.error is not None:
            raise self.error

    def finish_weight_update(self, version):
        self.version = version

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def reset_caches(self):
        self.calls.append("reset")


def test_an_engine_whose_update_failed_has_the_version_of_its_workers():
    """They may have written it before an audit failed, or an answer was lost: caches are dropped, then it goes on."""
    client = Trouble()
    updates = WeightUpdates(client)
    client.error = TimeoutError("the answer is lost")
    with pytest.raises(TimeoutError):
        updates.commit(7, RUN, audit=True)
    update = {"version": 7, "run": RUN, "audit": True}
    assert client.version == f"{RUN}:7"
    assert client.calls == ["pause", "start", update, "sparserl_version", "reset", "resume"]
    client.calls.clear()
    client.error = None
    updates.commit(8, RUN)
    update = {"version": 8, "run": RUN, "audit": False}
    assert client.version == f"{RUN}:8"
    assert client.calls == ["pause", "sparserl_end_update", "start", update, "reset", "resume"]
    client.calls.clear()
    updates.commit(9, RUN)
    assert client.calls[:2] == ["pause", "start"]
