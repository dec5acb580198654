"""A server that follows a run, without vLLM: an app that answers as vLLM does, behind the real middleware.

tests/integrations/test_trl_server.py has the same with a real server, which is killed.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest

requests = pytest.importorskip("requests")
starlette = pytest.importorskip("starlette.applications", reason="pip install 'sparserl[serve]'")
uvicorn = pytest.importorskip("uvicorn")
from starlette.responses import JSONResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

import sparserl  # noqa: E402
from sparserl.errors import SessionError, WrongVersion  # noqa: E402
from sparserl.integrations.vllm_client import HTTPClient  # noqa: E402
from sparserl.integrations.vllm_server import FollowingServer  # noqa: E402
from sparserl.integrations.vllm_versions import VersionMiddleware  # noqa: E402

RUN = "12e9e740decf9cd4"
STORE = {"url": "file:///store"}


class App:
    """What vLLM answers to a trainer. It can be restarted, and then has the weights of the checkpoint."""

    def __init__(self, backend="sparserl", middleware=True, dev_mode=True):
        self.backend = backend
        self.calls = []
        self.commits = True
        self.restart()
        paths = ["pause", "resume", "start_weight_update", "reset_prefix_cache"]
        routes = [Route(f"/{path}", self.answer, methods=["POST"]) for path in paths]
        routes += [
            Route("/health", self.answer),
            Route("/init_weight_transfer_engine", self.follow, methods=["POST"]),
            Route("/update_weights", self.update, methods=["POST"]),
            Route("/finish_weight_update", self.finish, methods=["POST"]),
            Route("/v1/completions", self.generate, methods=["POST"]),
        ]
        if dev_mode:
            routes.append(Route("/server_info", self.info))
        self.app = starlette.Starlette(routes=routes)
        self.app.state.engine_client = self
        if middleware:
            self.app.add_middleware(VersionMiddleware)

    def restart(self):
        self.version = "default"
        self.store = None

    async def get_weight_version(self):
        return self.version

    async def answer(self, _request):
        return JSONResponse({})

    async def info(self, _request):
        config = {"weight_transfer_config": {"backend": self.backend}, "model_config": {"dtype": "torch.bfloat16"}}
        return JSONResponse({"vllm_config": config})

    async def follow(self, request):
        self.store = (await request.json())["init_info"]["url"]
        self.calls.append("follow")
        return JSONResponse({})

    async def update(self, request):
        version = (await request.json())["update_info"]["version"]
        if self.store is None or not self.commits:
            return JSONResponse({"error": "call init_weight_transfer_engine first"}, 500)
        self.calls.append(version)
        return JSONResponse({})

    async def finish(self, request):
        self.version = (await request.json())["weight_version"] or self.version
        return JSONResponse({})

    async def generate(self, _request):
        self.calls.append("generate")
        return JSONResponse({"made with": self.version})


@pytest.fixture
def serve():
    """Serve an app on a port of this machine."""
    servers = []

    def start(app):
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app.app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def generate(server):
    answer = server.ask(lambda: server.session.post(f"{server.url}/v1/completions", json={}))
    return answer.json()["made with"]


def test_versions_are_committed_and_demanded(serve):
    """A server is told of the run once, and of each version once."""
    app = App()
    server = FollowingServer(serve(app))
    for version in (0, 1):
        server.commit(STORE, RUN, version)
        assert generate(server) == f"{RUN}:{version}"
    assert app.calls == ["follow", 0, "generate", 1, "generate"]
    assert app.store == STORE["url"]


def test_another_store(serve):
    """A server that is to follow another store, or otherwise, is told so: it would commit versions of the old one."""
    app = App()
    server = FollowingServer(serve(app))
    server.commit(STORE, RUN, 3)
    server.commit({"url": "file:///other"}, RUN[::-1], 3)
    assert app.store == "file:///other"
    assert app.calls == ["follow", 3, "follow", 3]


@pytest.mark.parametrize("before_commit", [False, True])
def test_a_server_that_was_restarted(serve, before_commit):
    """It generates nothing with the weights of its checkpoint, but follows the run again."""
    app = App()
    server = FollowingServer(serve(app))
    server.commit(STORE, RUN, 3)
    app.restart()
    app.calls.clear()
    if before_commit:
        server.commit(STORE, RUN, 4)
    assert generate(server) == f"{RUN}:{4 if before_commit else 3}"
    assert app.calls == ["follow", 4 if before_commit else 3, "generate"]


def test_a_version_that_somebody_else_commits(serve):
    """An answer that was made with a later version is refused, and the server gets the right one."""
    app = App()
    server = FollowingServer(serve(app))
    server.commit(STORE, RUN, 3)
    app.version = f"{RUN}:4"
    assert generate(server) == f"{RUN}:3"


def test_a_server_that_cannot_commit(serve):
    """What goes wrong again and again is raised, and nothing is generated."""
    app = App()
    server = FollowingServer(serve(app))
    server.commit(STORE, RUN, 3)
    app.commits = False
    app.calls.clear()
    with pytest.raises(SessionError, match="500 to update_weights"):
        server.commit(STORE, RUN, 4)
    with pytest.raises(SessionError, match="500 to update_weights"):
        generate(server)
    assert "generate" not in app.calls


def test_a_request_of_ones_own(serve):
    """A request outside `ask` is refused too, if the server has another version."""
    app = App()
    server = FollowingServer(serve(app))
    server.commit(STORE, RUN, 3)
    app.restart()
    with pytest.raises(WrongVersion, match=f"had default and then default, but {RUN}:3 is demanded"):
        server.session.post(f"{server.url}/v1/completions", json={})
    assert server.session.get(f"{server.url}/health").ok


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": "nccl"}, "backend nccl: start vLLM with --weight-transfer-config"),
        ({"middleware": False}, "start vLLM with --middleware sparserl.integrations.vllm_versions.VersionMiddleware"),
        ({"dev_mode": False}, "start vLLM with VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_servers_that_cannot_follow(serve, options, reason):
    """The error names the option that is missing."""
    with pytest.raises(SessionError, match=reason):
        FollowingServer(serve(App(**options)))


@pytest.mark.parametrize("made", [FollowingServer, HTTPClient])
def test_options_that_cannot_be_used(made):
    """An address without a scheme, or a time that never ends, is refused by name before anything is asked."""
    with pytest.raises(SessionError, match="url is 'localhost:8000'; it must be the address of a server"):
        made("localhost:8000")
    for timeout in (0, float("inf"), "60"):
        with pytest.raises(SessionError, match=f"timeout is {timeout!r}; it must be a positive number of seconds"):
            made("http://localhost:8000", timeout=timeout)


def test_a_server_that_never_comes():
    """It is waited for as long as the caller says."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(SessionError, match=r"does not answer within 0\.1 s"):
        FollowingServer(f"http://127.0.0.1:{port}", timeout=0.1)
    assert time.monotonic() - begun >= 0.1


def test_weights_of_an_asynchronous_trainer(serve, tmp_path):
    """Each sync publishes what the trainer streams, cast to the server's dtype, and the server commits it."""
    torch = pytest.importorskip("torch")
    from sparserl.integrations.trl_async import WeightTransfer

    app = App()
    store = f"file://{tmp_path / 'run'}"
    transfer = WeightTransfer(serve(app), store)
    with pytest.raises(SessionError, match="call init_weight_transfer first"):
        transfer.send_weights(iter(()))
    transfer.init_weight_transfer()
    weights = {"w": torch.linspace(-1, 1, 100), "count": torch.arange(3)}
    for _ in range(2):
        weights["w"][:7] += 1
        transfer.pause()
        transfer.send_weights(iter(weights.items()))
        transfer.resume()
    transfer.destroy()
    assert (transfer.report.version, transfer.report.kind) == (1, "patch")
    assert app.calls == ["follow", 0, 1]
    assert app.store == store
    received = {"w": torch.zeros(100, dtype=torch.bfloat16), "count": torch.zeros(3, dtype=torch.int64)}
    sparserl.Subscriber(store, received).sync()
    assert torch.equal(received["w"], weights["w"].to(torch.bfloat16))
    assert torch.equal(received["count"], weights["count"])
