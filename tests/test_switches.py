"""Environment variables that take a word refuse those that they do not know, where they are read."""

from __future__ import annotations

import pytest

from sparserl.errors import SparserlError
from sparserl.humanize import switch
from sparserl.kernels.gpu import support
from sparserl.transport.stores.opening import open_store


class Device:
    """A device on which there is nothing to look for."""

    type = "cpu"


@pytest.mark.parametrize(
    ("value", "word"), [(None, None), ("", None), ("off", "off"), ("OFF", "off"), ("on", "on"), ("On", "on")]
)
def test_known_words(monkeypatch: pytest.MonkeyPatch, value: str | None, word: str | None) -> None:
    """Case does not matter; what is not set, or empty, is no word."""
    monkeypatch.delenv("SPARSERL_TRIAL", raising=False)
    if value is not None:
        monkeypatch.setenv("SPARSERL_TRIAL", value)
    assert switch("SPARSERL_TRIAL", "on", "off") == word


@pytest.mark.parametrize("value", ["0", "false", "of", " off"])
def test_unknown_words_for_gpus(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The error says which variable it is, what it is set to, and which words are known."""
    monkeypatch.setenv("SPARSERL_GPU", value)
    with pytest.raises(SparserlError, match=f"^SPARSERL_GPU is '{value}'; set it to on or off, or do not set it$"):
        support.obstacle(Device())


def test_unknown_words_for_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is not opened with another setting than was meant."""
    pytest.importorskip("obstore")
    options = {"region": "us-east-1", "endpoint": "http://127.0.0.1:9"}
    monkeypatch.setenv("AWS_ALLOW_HTTP", "ture")
    with pytest.raises(SparserlError, match="AWS_ALLOW_HTTP is 'ture'; set it to true or "):
        open_store("s3://bucket/run", **options)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "no")
    open_store("s3://bucket/run", **options).close()
