"""`sparserl serve`, as clients of every kind find it: real processes, real sockets."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

import sparserl
from sparserl.cli import app
from sparserl.errors import NotFound, StoreError
from sparserl.transport import open_store
from sparserl.transport.stores.base import Retry
from sparserl.transport.stores.folder import FolderStore
from tests.transport.served import ENV, ask, same, serving, step, weights

pytest.importorskip("uvicorn")
pytest.importorskip("obstore")

DATA = os.urandom(1_000_000)
HASH = hashlib.sha256(DATA).hexdigest()
BUCKET = f"/runs/0123456789abcdef/buckets/0123456789abcdef/{HASH}"


def fill(folder: Path) -> FolderStore:
    """A store with a head, a bucket, a lease, and things that nobody shall see."""
    store = FolderStore(folder)
    store.put(BUCKET[1:], DATA)
    store.put("runs/0123456789abcdef/run.json", b"{}")
    store.put("runs/0123456789abcdef/leases/someone", b"{}")
    store.put("empty", b"")
    store.swap("head.json", b"first", None)
    secret = folder.parent / "secret"
    secret.write_text("secret")
    (folder / "link").symlink_to(secret)
    (folder / "way").symlink_to(folder.parent)
    (folder / ".hidden").write_text("secret")
    os.mkfifo(folder / "pipe")
    return store


def begun(folder: Path) -> tuple[FolderStore, str]:
    """A store with an object and a first head, and the head's tag."""
    store = FolderStore(folder)
    store.put("object", b"")
    return store, store.swap("head.json", b"0", None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server that is open to everyone, and its folder."""
    folder = tmp_path_factory.mktemp("site") / "store"
    folder.mkdir()
    store = fill(folder)
    with serving(folder) as (url, _):
        yield url, folder
    store.close()


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
    """Ways up, hidden names, folders, links, pipes, leases and other spellings: all the same 404."""
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
        for prefer, least, most in (("wait=1", 0.9, 3.0), ("respond-async, wait=1", 0.9, 3.0), ("wait=0", 0.0, 0.5)):
            began = time.monotonic()
            same_ = ask(url, "/head.json", if_none_match=got.headers["etag"], prefer=prefer)
            assert (same_.status, same_.headers["etag"]) == (304, got.headers["etag"])
            assert least <= time.monotonic() - began < most
        began = time.monotonic()
        assert ask(url, "/head.json", if_none_match='"other"', prefer="wait=20").body == b"0"
        assert ask(url, "/head.json", prefer="wait=20").body == b"0"
        assert time.monotonic() - began < 1
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, url, "/head.json", if_none_match=got.headers["etag"], prefer="wait=9999")
            time.sleep(0.5)
            assert not waiting.done()
            store.swap("head.json", b"1", tag)
            began = time.monotonic()
            news = waiting.result()
            assert (news.status, news.body) == (200, b"1")
            assert time.monotonic() - began < 1
    store.close()


def _open(url: str) -> socket.socket:
    place = urlsplit(url)
    assert place.port is not None
    return socket.create_connection((place.hostname, place.port), timeout=30)


def test_hundreds_wait_and_none_is_in_the_way(tmp_path: Path) -> None:
    """Three hundred held requests are all answered when the head moves; meanwhile others are served."""
    store, tag = begun(tmp_path)
    with serving(tmp_path) as (url, _):
        known = ask(url, "/head.json").headers["etag"]
        held = [_open(url) for _ in range(300)]
        for one in held:
            one.sendall(
                f"GET /head.json HTTP/1.1\r\nHost: x\r\nIf-None-Match: {known}\r\nPrefer: wait=30\r\n\r\n".encode()
            )
        time.sleep(0.5)
        began = time.monotonic()
        assert ask(url, "/head.json").body == b"0"
        assert time.monotonic() - began < 1
        store.swap("head.json", b"1", tag)
        began = time.monotonic()
        for one in held:
            assert one.recv(4096).startswith(b"HTTP/1.1 200 ")
            one.close()
        assert time.monotonic() - began < 3
    store.close()


def test_tokens(tmp_path: Path) -> None:
    """Who has one of them may read; who has none learns nothing, not even what is there."""
    folder = tmp_path / "store"
    folder.mkdir()
    fill(folder).close()
    tokens = tmp_path / "tokens"
    tokens.write_text("# two of them\nopen-sesame\n\nsecond.token~\n")
    with serving(folder, "--token-file", tokens) as (url, _):
        for path in ("/head.json", BUCKET, "/nothing", "/auth", "/../x", "/.hidden"):
            for method in ("GET", "HEAD", "POST"):
                for given in ({}, {"authorization": "Bearer open-sesam"}, {"authorization": "Bearer open-sesame x"}):
                    got = ask(url, path, method, **given)
                    assert (got.status, got.body) == (401, b"")
                    assert got.headers["www-authenticate"] == 'Bearer realm="sparserl"'
                    assert "etag" not in got.headers
        for given in ("Basic open-sesame", "Bearer", "Bearer ", "open-sesame", "Bearer \xfc", "Bearer # two of them"):
            assert ask(url, "/head.json", authorization=given).status == 401
        for given in ("Bearer open-sesame", "bearer second.token~"):
            assert ask(url, "/head.json", authorization=given).body == b"first"
            assert ask(url, "/nothing", authorization=given).status == 404
            for method in ("GET", "HEAD", "POST", "PUT"):
                assert ask(url, "/auth", method, authorization=given).status == 204
        assert open_store(url, token="open-sesame").get("head.json", 100).data == b"first"
        with pytest.raises(StoreError, match=r"head\.json.*401") as refused:
            open_store(url, token="wrong").get("head.json", 100)
        assert "wrong" not in str(refused.value)
        with pytest.raises(StoreError, match="401"):
            sparserl.Subscriber(url, weights(), token=None).sync()


def test_too_much_is_refused(site: tuple[str, Path]) -> None:
    """Headers and URLs that are too long, and what is not HTTP: an answer in the four hundreds, or none, and on."""
    url, _ = site
    assert ask(url, "/" + "a" * 3000).status == 414
    assert ask(url, "/head.json", x_long="a" * 17_000).status in (400, 431)
    for sent in (b"GET /" + b"a" * 300_000, b"\x16\x03\x01" + bytes(200), b"GET / HTTP/1.1\r\nX: " + b"b" * 200_000):
        with _open(url) as raw:
            try:
                raw.sendall(sent + b"\r\n\r\n")
                answer = raw.recv(4096)
            except OSError:  # cut off while we were still sending
                answer = b""
            assert answer == b"" or answer.split()[1].startswith(b"4")
    assert ask(url, "/head.json").body == b"first"


def test_slow_clients_are_cut_off(site: tuple[str, Path]) -> None:
    """Fifty that send a byte at a time, or nothing, do not keep others waiting, and are gone after ten seconds."""
    url, _ = site
    slow = [_open(url) for _ in range(50)]
    for i, one in enumerate(slow[10:]):
        rest = b"Content-Length: 100000\r\n\r\n" if i < 10 else b"X-Slow: "
        one.sendall(b"GET /head.json HTTP/1.1\r\nHost: x\r\n" + rest)
    began = time.monotonic()
    worst = 0.0
    while time.monotonic() - began < 13:
        for one in slow[10:]:
            with contextlib.suppress(OSError):  # cut off
                one.send(b"a")
        asked = time.monotonic()
        assert ask(url, "/head.json").body == b"first"
        worst = max(worst, time.monotonic() - asked)
        time.sleep(0.5)
    assert worst < 2
    for one in slow:
        one.settimeout(1)
        with contextlib.suppress(ConnectionError), one:
            while one.recv(4096):
                pass


def _open_files(pid: int) -> list[str]:
    """What each descriptor of a process points to."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(fd.readlink()))
    return found


@pytest.mark.slow
def test_who_takes_nothing_is_cut_off(tmp_path: Path) -> None:
    """An answer that stands still for long (three seconds here) ends there, and the server has the connection back."""
    size = 64 << 20
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    sooner = "from sparserl.transport.stores import guard\nguard._STALL_SECONDS = 3.0"
    with serving(tmp_path, first=sooner) as (url, running), _open(url) as one:
        one.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert one.recv(10) == b"HTTP/1.1 2"
        large = str(tmp_path / "large")
        while large not in (held := _open_files(running.pid)):
            time.sleep(0.01)
        ends = time.monotonic() + 30
        while large in (now := _open_files(running.pid)) or len(now) > len(held) - 2:
            assert time.monotonic() < ends  # the connection or the file is still open
            time.sleep(0.1)
        got = 0
        with contextlib.suppress(ConnectionError):
            while part := one.recv(1 << 20):
                got += len(part)
        assert got < size


def test_who_leaves_or_does_not_read_is_no_harm(tmp_path: Path) -> None:
    """Clients that go in the middle of an answer, or take none of it: memory stays bounded and others are served."""
    size = 64 << 20
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    with serving(tmp_path) as (url, running):
        assert len(ask(url, "/large").body) == size
        before = _memory(running.pid)
        held = [_open(url) for _ in range(30)]
        for one in held:
            one.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(10) == b"HTTP/1.1 2"
        for one in held[:15]:
            one.close()
        time.sleep(0.5)
        assert ask(url, "/large", range="bytes=5-6").body == bytes(2)
        assert _memory(running.pid) - before < size
        for one in held:
            one.close()


def _memory(pid: int) -> int:
    """Bytes of its own that a process has in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_signals_end_it_at_once(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM: requests that are held are answered, and the exit code is 0."""
    begun(tmp_path)[0].close()
    for number in (signal.SIGINT, signal.SIGTERM):
        with serving(tmp_path) as (url, running), ThreadPoolExecutor(1) as pool:
            known = ask(url, "/head.json").headers["etag"]
            waiting = pool.submit(ask, url, "/head.json", if_none_match=known, prefer="wait=30")
            time.sleep(0.3)
            began = time.monotonic()
            running.send_signal(number)
            assert waiting.result().status == 304
            assert running.wait(10) == 0
            assert time.monotonic() - began < 5


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


def test_tls(tmp_path: Path) -> None:
    """With a certificate the same over https; a client that trusts it needs nothing else."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    folder = tmp_path / "store"
    folder.mkdir()
    fill(folder).close()
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, *name, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with serving(folder, "--tls-cert", cert, "--tls-key", key) as (url, _):
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(cert))
        assert ask(url, "/head.json", tls=context).body == b"first"
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(url, "/head.json", tls=ssl.create_default_context())
        open_ = open_store(url, client_options={"allow_invalid_certificates": True})
        assert open_.get(BUCKET[1:], len(DATA)).data == DATA
        once = Retry(attempts=1)
        with pytest.raises(StoreError):
            open_store(url, retry=once).get("head.json", 100)
        with _open(url) as plain:  # http to an https port
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.recv(100)
        assert ask(url, "/head.json", tls=context).status == 200


def test_what_cannot_be_served_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what is wrong and where; a missing package with how to get it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").write_text("\n# nothing\n")
    (tmp_path / "bad").write_text("good\ntwo words\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for args, says in (
            (("nowhere",), "nowhere is not a folder"),
            ((".", "--listen", "here"), "'here' is not an address to listen on; write HOST:PORT"),
            ((".", "--listen", "127.0.0.1:99999"), "is not an address"),
            ((".", "--listen", f"127.0.0.1:{port}"), f"cannot listen on 127.0.0.1:{port}: "),
            ((".", "--token-file", "none"), "none: there is no token in it"),
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
    code = "import sys\nsys.modules['uvicorn'] = None\nfrom sparserl.cli import app\napp(['serve', '.'])"
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
    assert "whoever reaches this address can read the weights" in said[1]


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
                assert arrived.wait_for(lambda v=version: v in committed, 10)
            late.append(committed[version] - published)
            assert same(ours, theirs)
        asked = log.read_text().count("GET /head.json")
        time.sleep(3)
        idle = log.read_text().count("GET /head.json") - asked
        ended.set()
        following.join(10)
        assert not following.is_alive()
    print(f"from published to committed: {[round(1000 * s) for s in late]} ms; {idle} requests in 3 s of silence")
    assert sorted(late)[2] < 0.5
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
        assert 1.4 < time.monotonic() - began < 3
        writer.close()


def test_answers_do_not_wait_to_be_confirmed() -> None:
    """Nagle's algorithm would hold a body back until its headers are acknowledged, 40 ms later."""
    from sparserl.transport.stores.server import listen

    with listen("127.0.0.1:0") as server, socket.create_connection(server.getsockname()), server.accept()[0] as there:
        assert there.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
