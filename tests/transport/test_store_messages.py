"""What a store says where a user can do something about it: certificates, tokens, credentials, endpoints, heads."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparserl.errors import FormatError, NotFound, StoreError, Unavailable
from sparserl.session.store.retention import read_head
from sparserl.transport import open_store
from sparserl.transport.stores.base import Retry
from tests.transport.serve_program import serving

S3 = {"region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}


class Certificates:
    """An authority, and a server's certificate that it has signed."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.pem"
        self.cert = folder / "cert.pem"
        self.key = folder / "key.pem"
        ca_key = folder / "ca.key"
        request = folder / "request.pem"
        extensions = folder / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        self._openssl("req", "-x509", *curve, "-keyout", ca_key, "-out", self.ca, "-days", "2", "-subj", "/CN=our own")
        self._openssl("req", *curve, "-keyout", self.key, "-out", request, "-subj", "/CN=server")
        authority = ["-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", extensions]
        self._openssl("x509", "-req", "-in", request, *authority, "-days", "2", "-out", self.cert)

    @staticmethod
    def _openssl(*args: object) -> None:
        subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def server(tmp_path: Path, certificates: Certificates) -> Iterator[str]:
    """The URL of an empty store over https."""
    folder = tmp_path / "store"
    folder.mkdir()
    with serving(folder, "--tls-cert", certificates.cert, "--tls-key", certificates.key) as (url, _):
        yield url


def stores(server: str, **options: Any) -> Iterator[Any]:
    """The same server as an http store, and as the endpoint of object storage."""
    yield open_store(server, **options)
    yield open_store("s3://bucket/run", endpoint=server, **S3, **options)


def test_an_untrusted_certificate_is_named_and_not_tried_again(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for store in stores(server):
        with pytest.raises(
            StoreError, match=r"the certificate of .* is not trusted: .*--ca FILE.*SSL_CERT_FILE"
        ) as told:
            store.get("head.json", 100)
        assert not isinstance(told.value, Unavailable)


def test_an_authority_of_our_own(server: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as a file, or by the environment: the server is believed, and says that there is nothing."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for store in stores(server, ca=certificates.ca):
        with pytest.raises(NotFound):
            store.get("head.json", 100)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    for store in stores(server):
        with pytest.raises(NotFound):
            store.get("head.json", 100)


def test_a_file_of_certificates_that_has_none(tmp_path: Path, certificates: Certificates) -> None:
    for path, reason in ((tmp_path / "nowhere", "cannot be read"), (certificates.key, "has no certificates")):
        with pytest.raises(StoreError, match=reason):
            open_store("https://localhost", ca=path)


@pytest.mark.long
def test_the_command_line_takes_certificates(server: str, certificates: Certificates) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    for options, told in (([], "is not trusted"), (["--ca", certificates.ca], "nothing is published here yet")):
        command = [sys.executable, "-m", "sparserl.cli", "log", server, *map(str, options)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 1
        assert told in done.stderr


def test_a_missing_or_wrong_token(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("right\n")
    with serving(tmp_path, "--token-file", tokens) as (url, _):
        for token, told in ((None, "wants an access token: --token-file"), ("wrong", "does not accept this token")):
            with pytest.raises(StoreError, match=f"401.*{told}"):
                open_store(url, token=token).get("head.json", 100)


def test_a_plain_endpoint_is_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whoever writes http:// in an argument, here as on the command line; not of the environment alone."""
    once = {"retry": Retry(attempts=1), **S3}
    for url in ("s3://bucket/run", "S3://bucket/run"):
        for endpoint in ("http://127.0.0.1:9", "HTTP://127.0.0.1:9"):
            store = open_store(url, endpoint=endpoint, **once)
            assert store.url == "s3://bucket/run"
            with pytest.raises(Unavailable):  # it was asked, and nobody is there
                store.get("head.json", 100)
    refused = {"endpoint": "http://127.0.0.1:9", "client_options": {"allow_http": False}}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for options in ({}, refused):
        with pytest.raises(StoreError, match=r"plain http.*AWS_ALLOW_HTTP=true") as told:
            open_store("s3://bucket/run", **once, **options).get("head.json", 100)
        assert not isinstance(told.value, Unavailable)


def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment, and no metadata service: not a failure that goes away."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    store = open_store("s3://bucket/run", region="us-east-1")
    with pytest.raises(StoreError, match="no credentials: set AWS_ACCESS_KEY_ID") as told:
        store.get("head.json", 100)
    assert not isinstance(told.value, Unavailable)


def test_a_damaged_head_says_how_to_replace_it(tmp_path: Path) -> None:
    (tmp_path / "head.json").write_bytes(b'{"half": ')
    with pytest.raises(FormatError, match=r"the head is damaged: .*new_run=True.*--new-run"):
        read_head(open_store(tmp_path))


def test_one_error_is_printed_and_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the attempts before it nor what obstore dumps: a rank that fails prints one traceback."""
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    for store in (
        open_store("s3://bucket/run", endpoint="http://127.0.0.1:1", retry=Retry(attempts=2, first=0.0), **S3),
        open_store("http://127.0.0.1:1/run", retry=Retry(attempts=2, first=0.0)),
    ):
        with pytest.raises(Unavailable, match=r"(?i)gave up after 2 attempts.*refused") as raised:
            read_head(store)
        printed = "".join(traceback.format_exception(raised.value))
        assert printed.count("Traceback") == 1
        assert "Debug source" not in printed
    with pytest.raises(StoreError) as raised_at_once:
        open_store("s3://bucket/run", no_such_option=1, **S3)
    assert "".join(traceback.format_exception(raised_at_once.value)).count("Traceback") == 1
