"""Commands on stores that are reached over HTTP and S3."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.session_commands import URL, W, failed, said, same, usage, values
from tests.servers import BUCKET, NoServer, running


class Guarded(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP, for those who know the word, from a server that knows no tags."""

    asked = 0

    def do_GET(self) -> None:
        Guarded.asked += 1
        if self.headers["Authorization"] == "Bearer open sesame":
            super().do_GET()
        else:
            self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def served(here: Path) -> Iterator[str]:
    """The URL of the store over HTTP; the token is in a file."""
    (here / "token").write_text("open sesame\n")
    handler = functools.partial(Guarded, directory=str(here / "store"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_over_http(here: Path, served: str) -> None:
    """A store can be followed and looked at with the token, and neither published to nor collected."""
    said("follow", served, "-o", "out", "--once", "--token-file", "token", "--trusted-key", "key.pub")
    assert same(here / "out", W[2])
    assert values("log", served, "--token-file", "token")["version"] == 2
    found = values("fsck", served, "--token-file", "token")
    assert (found["faults"], found["unreferenced"]) == ([], None)
    assert served in failed("log", served)
    assert "nowhere: No such file" in failed("log", served, "--token-file", "nowhere")
    assert "can only be read" in failed("gc", served)
    assert "can only be read" in failed("publish", "0", served)


def test_a_server_without_tags_is_not_hammered(here: Path, served: str) -> None:
    """Waiting for the next version takes a few looks a second."""
    said("follow", served, "-o", "out", "--once", "--token-file", "token")
    before = Guarded.asked
    said("follow", served, "-o", "out", "--timeout", "1s", "--token-file", "token")
    assert Guarded.asked - before < 50


def test_options_that_do_not_fit_the_url(here: Path) -> None:
    """Are not passed over in silence."""
    assert "is for object storage, not for file://" in usage("log", URL, "--endpoint", "http://localhost:1")
    assert "is for object storage, not for http://" in usage("log", "http://localhost:1", "--region", "x")
    (here / "token").write_text("x")
    assert "is for http(s) stores, not for file://" in usage("log", URL, "--token-file", "token")


@pytest.mark.long
def test_over_s3(here: Path) -> None:
    """Every command works on a bucket of an S3-compatible service, with credentials from the environment."""
    env = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running("moto", here / "server"))
        except NoServer as error:
            pytest.skip(str(error))
        where = (f"s3://{BUCKET}/run", "--endpoint", server.endpoint, "--region", "us-east-1")
        said("publish", "0", *where, "--state", "mystate", **env)
        said("publish", "1", *where, "--state", "mystate", **env)
        said("follow", *where, "-o", "out", "--once", **env)
        assert same(here / "out", W[1])
        assert "newest 1: " in said("log", *where, **env)
        assert ": no fault(s); nothing refers to 1 object(s)" in said("fsck", *where, **env)
        assert said("gc", *where, "--grace", "0s", **env).startswith("1 object(s), ")
        assert "nothing refers to 0 object(s)" in said("fsck", *where, **env)
        assert "nothing is published here yet" in failed("log", f"s3://{BUCKET}/other", *where[1:], **env)
