"""The HTTP server of a run: objects, ranges, heads that are waited for, and nothing else."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sparserl
from sparserl.cli.app import app
from sparserl.errors import NotFound, StoreError
from sparserl.transport import open_store
from tests.transport.serve_program import ENV, ask, same, serving, step, weights
from tests.transport.served_run import BUCKET, DATA, HASH, begun, fill

pytest.importorskip("uvicorn")
pytest.importorskip("obstore")


def test_objects_are_there_for_ever(site: tuple[str, Path]) -> None:
    """Whole and in chunks, with a strong tag, to be cached by anyone."""
    url, _ = site
    got = ask(url, BUCKET)
    assert (got.status, got.body) == (200, DATA)
    assert got.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert got.headers["etag"] == f'"{HASH}"'
    assert got.headers["content-length"] == str(len(DATA))
    head = ask(url, BUCKET, "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["etag"] == got.headers["etag"]
    assert head.headers["content-length"] == str(len(DATA))
    for known in (f'"{HASH}"', f'W/"{HASH}"', f'"other", "{HASH}"', "*"):
        again = ask(url, BUCKET, if_none_match=known)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", got.headers["etag"])
    assert ask(url, BUCKET, if_none_match='"other"').status == 200
    run = ask(url, "/runs/0123456789abcdef/run.json")
    assert (run.body, "immutable" in run.headers["cache-control"]) == (b"{}", True)
    assert ask(url, "/empty").body == b""


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-99999", 10, 100_000),
        ("bytes=999990-", 999_990, 1_000_000),
        ("bytes=999990-5000000", 999_990, 1_000_000),
        ("bytes=-7", 999_993, 1_000_000),
        ("bytes=1-999999", 1, 1_000_000),
    ],
)
def test_ranges(site: tuple[str, Path], asked: str, start: int, end: int) -> None:
    """A part is that part, and says so."""
    got = ask(site[0], BUCKET, range=asked)
    assert (got.status, got.body) == (206, DATA[start:end])
    assert got.headers["content-range"] == f"bytes {start}-{end - 1}/1000000"
    assert got.headers["content-length"] == str(end - start)


def test_ranges_that_are_none(site: tuple[str, Path]) -> None:
    """Beyond the end is 416; what is no single range of bytes, or of another object, gets everything."""
    url, _ = site
    for asked in ("bytes=1000000-", "bytes=5000000-6000000", "bytes=-0"):
        got = ask(url, BUCKET, range=asked)
        assert (got.status, got.headers["content-range"]) == (416, "bytes */1000000")
    for asked in ("bytes=5-3", "bytes=-", "bytes=0-1,5-6", "lines=1-2", "bytes=a-b", "bytes=1-" + "9" * 30):
        assert ask(url, BUCKET, range=asked).status == 200
    assert ask(url, BUCKET, range="bytes=0-1", if_range='"other"').status == 200
    assert ask(url, BUCKET, range="bytes=0-1", if_range=f'"{HASH}"').status == 206
    assert ask(url, "/empty", range="bytes=0-0").status == 416
    head = ask(url, "/head.json", range="bytes=1-2")
    assert (head.status, head.body) == (206, b"ir")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "/nothing",
        "/runs",
        "/runs/",
        "/runs/0123456789abcdef/leases/someone",
        "/pins/best",
        "/.hidden",
        "/.tmp",
        "/.lock",
        "/link",
        "/way/secret",
        "/way/store/head.json",
        "/pipe",
        "/../secret",
        "/runs/../../secret",
        "/%2e%2e/secret",
        "/..%2fsecret",
        "/runs%2f0123456789abcdef%2frun.json",
        "/%68ead.json",
        "//head.json",
        "/./head.json",
        "/head.json/",
        "/head.json/x",
        "/head.json?x",
        "/head.json%00",
        "/head.json;x",
        "/" + "a" * 300,
        "/" + "a/" * 150 + "a",
        "/" + "a" * 1000,
        "http://127.0.0.1/head.json",
    ],
)
def test_nothing_else_is_there(site: tuple[str, Path], path: str) -> None:
    """Ways up, hidden names, folders, links, pipes, leases, pins and other spellings: all the same 404."""
    got = ask(site[0], path)
    assert (got.status, got.body, got.headers["cache-control"]) == (404, b"", "no-store")


def test_it_is_read_only(site: tuple[str, Path]) -> None:
    """Nothing but GET and HEAD."""
    url, folder = site
    for method in ("PUT", "POST", "DELETE", "PATCH", "OPTIONS", "PROPFIND"):
        got = ask(url, "/head.json", method)
        assert (got.status, got.headers["allow"]) == (405, "GET, HEAD")
    assert (folder / "head.json").read_bytes() == b"first"
    store = open_store(url)
    assert not store.writable
    with pytest.raises(StoreError, match="can only be read"):
        store.put("x", b"")


def test_a_request_for_the_head_is_held(tmp_path: Path) -> None:
    """Until there is another one, or until time is up; the newest is always asked for anew."""
    store, tag = begun(tmp_path)
    with serving(tmp_path) as (url, _):
        got = ask(url, "/head.json")
        assert (got.body, got.headers["cache-control"]) == (b"0", "no-cache")
        assert got.headers["etag"] == f'"{hashlib.sha256(b"0").hexdigest()}"'
        for prefer, least, most in (("wait=1", 0.9, 15.0), ("respond-async, wait=1", 0.9, 15.0), ("wait=0", 0.0, 15.0)):
            began = time.monotonic()
            same_ = ask(url, "/head.json", if_none_match=got.headers["etag"], prefer=prefer)
            assert (same_.status, same_.headers["etag"]) == (304, got.headers["etag"])
            assert least <= time.monotonic() - began < most
        began = time.monotonic()
        assert ask(url, "/head.json", if_none_match='"other"', prefer="wait=20").body == b"0"
        assert ask(url, "/head.json", prefer="wait=20").body == b"0"
        assert time.monotonic() - began < 15
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, url, "/head.json", if_none_match=got.headers["etag"], prefer="wait=9999")
            time.sleep(0.5)
            assert not waiting.done()
            store.swap("head.json", b"1", tag)
            began = time.monotonic()
            news = waiting.result()
            assert (news.status, news.body) == (200, b"1")
            assert time.monotonic() - began < 15
    store.close()


def test_what_is_announced_is_held_too(tmp_path: Path) -> None:
    """Where nothing was ever announced, there is something to wait with; no cache keeps it."""
    store, _ = begun(tmp_path)
    with serving(tmp_path) as (url, _):
        nothing = ask(url, "/coming.json")
        assert (nothing.status, nothing.body, nothing.headers["cache-control"]) == (200, b"{}", "no-cache")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, url, "/coming.json", if_none_match=nothing.headers["etag"], prefer="wait=9999")
            time.sleep(0.2)
            assert not waiting.done()
            store.put("coming.json", b"something")
            assert waiting.result().body == b"something"
    store.close()


def test_requests_are_written_down(tmp_path: Path) -> None:
    """One line for each: method, path, status, bytes."""
    folder = tmp_path / "store"
    folder.mkdir()
    fill(folder).close()
    log = tmp_path / "access"
    with serving(folder, "--access-log", log) as (url, _):
        ask(url, BUCKET, range="bytes=0-9")
        ask(url, BUCKET, "HEAD")
        ask(url, "/nothing?really", "GET")
    assert log.read_text() == f"GET {BUCKET} 206 10\nHEAD {BUCKET} 200 0\nGET /nothing?really 404 0\n"


def test_what_cannot_be_served_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what is wrong and where; a missing package with how to get it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").write_text("\n# nothing\n")
    (tmp_path / "bad").write_text("good\ntwo words\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for args, says in (
            (("none",), "none is not a folder"),
            ((".", "--listen", "here"), "'here' is not an address to listen on; write HOST:PORT"),
            ((".", "--listen", "127.0.0.1:99999"), "is not an address"),
            ((".", "--listen", f"127.0.0.1:{port}"), f"cannot listen on 127.0.0.1:{port}: "),
            ((".", "--token-file", "none"), "none has no token in it"),
            ((".", "--token-file", "bad"), "bad: line 2 is not a token"),
            ((".", "--token-file", "missing"), "missing: No such file"),
            ((".", "--tls-cert", "bad", "--tls-key", "bad"), "the certificate or its key cannot be used"),
        ):
            done = CliRunner().invoke(app, ["serve", *args])
            assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
            assert done.stderr.startswith("sparserl: error: ")
            assert says in done.stderr
        there = _serve(tmp_path, ".", "--listen", f"127.0.0.1:{port}")
        assert (there.returncode, there.stdout, there.stderr.count("\n")) == (1, "", 1), there.stderr
    assert CliRunner().invoke(app, ["serve", ".", "--tls-cert", "bad"]).exit_code == 2
    code = "import sys\nsys.modules['uvicorn'] = None\nfrom sparserl.cli.app import app\napp(['serve', '.'])"
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert (done.returncode, "pip install 'sparserl[serve]'" in done.stderr) == (1, True)


def _serve(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparserl.cli", "serve", *args]
    return subprocess.run(command, env=ENV, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_other_addresses(tmp_path: Path) -> None:
    """IPv6 in brackets; where others can reach it and no token is asked for, a note says so."""
    begun(tmp_path)[0].close()
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(tmp_path, listen="[::1]:0") as (url, _):
        assert url.startswith("http://[::1]:")
        assert ask(url, "/head.json").body == b"0"
    command = [sys.executable, "-m", "sparserl.cli", "serve", str(tmp_path), "--listen", "0.0.0.0:0"]
    with subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        said = running.stderr.readline(), running.stderr.readline()
        running.terminate()
    assert "anyone who can reach this address can read the weights" in said[1]


def test_help_teaches() -> None:
    done = _serve(Path(), "--help")
    assert "sparserl serve /data/run --listen" in done.stdout.split("Example", 1)[1]


def test_a_subscriber_follows(tmp_path: Path) -> None:
    """Publish to the folder, follow over HTTP: bit for bit, each version well under a second after it was published."""
    ours, theirs = weights(), {name: array * 0 for name, array in weights().items()}
    (tmp_path / "store").mkdir()
    (tmp_path / "tokens").write_text("t0ken\n")
    log = tmp_path / "access"
    publisher = sparserl.Publisher(f"file://{tmp_path / 'store'}", ours)
    publisher.publish()
    with serving(tmp_path / "store", "--token-file", tmp_path / "tokens", "--access-log", log) as (url, _):
        with pytest.raises(NotFound):
            open_store(url, token="t0ken").get("nothing", 10)
        subscriber = sparserl.Subscriber(url, theirs, token="t0ken")
        report = subscriber.sync()
        assert report is not None
        assert (report.kind, same(ours, theirs)) == ("anchor", True)
        committed: dict[int, float] = {}
        arrived = threading.Condition()

        def note(report: sparserl.SyncReport) -> None:
            with arrived:
                committed[report.version] = time.monotonic()
                arrived.notify()

        ended = threading.Event()
        options = {"stop": ended.is_set, "on_commit": note}
        following = threading.Thread(target=subscriber.follow, kwargs=options, daemon=True)
        following.start()
        late = []
        for version in range(1, 6):
            time.sleep(0.3)
            step(ours, version)
            publisher.publish()
            published = time.monotonic()
            with arrived:
                assert arrived.wait_for(lambda v=version: v in committed, 60)
            late.append(committed[version] - published)
            assert same(ours, theirs)
        asked = log.read_text().count("GET /head.json")
        time.sleep(3)
        idle = log.read_text().count("GET /head.json") - asked
        ended.set()
        following.join(120)
        assert not following.is_alive()
    print(f"from published to committed: {[round(1000 * s) for s in late]} ms; {idle} requests in 3 s of silence")
    assert min(late) < 1, "none was told at once"
    assert idle <= 8


def test_waiting_where_nothing_is_held(tmp_path: Path) -> None:
    """Before the first version, and at a server that knows no waiting, a client asks a few times a second, not more."""
    log = tmp_path / "access"
    (tmp_path / "store").mkdir()
    with serving(tmp_path / "store", "--access-log", log) as (url, _):
        store = open_store(url)
        assert store.changed("head.json", None, 2.5) is None
        assert log.read_text().count("\n") < 20
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.changed, "head.json", None, 20)
            writer, _ = begun(tmp_path / "store")
            found = waiting.result()
        assert found is not None
        assert found.data == b"0"
        began = time.monotonic()
        assert store.changed("head.json", found.tag, 1.5) is None
        assert 1.4 < time.monotonic() - began < 15
        writer.close()


def test_answers_do_not_wait_to_be_confirmed() -> None:
    """Nagle's algorithm would hold a body back until its headers are acknowledged, 40 ms later."""
    from sparserl.transport.server import listen

    with listen("127.0.0.1:0") as server, socket.create_connection(server.getsockname()), server.accept()[0] as there:
        assert there.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
