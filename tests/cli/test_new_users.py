"""What stops a new user at the command line: formats, numbers as people write them, older versions, buckets."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.cli.session_commands import W, failed, invoke, said, same, usage, values
from tests.servers import BUCKET, NoServer, running

URL = "file://store"


def test_an_older_version(here: Path) -> None:
    """`--version` fetches it and ends; one that is not there is said."""
    for version in (1, 0, 2):
        said("follow", URL, "-o", "out", "--version", version)
        assert same(here / "out", W[version])
    assert "version 7 is not in the store; it has versions 0 to 2" in failed("follow", URL, "-o", "out", "--version", 7)
    assert same(here / "out", W[2])


def test_numbers_as_people_write_them() -> None:
    """7B is seven billion, and 0.6% is 0.006."""
    common = ("plan", "--link", "25Gbit", "--threads", "2")
    people = values(*common, "--params", "7B", "--density", "0.6%")
    assert (people["elements"], people["density"]) == (7e9, pytest.approx(0.006))
    assert values(*common, "--params", "135M", "--density", ".01")["elements"] == 135e6
    for wrong in (("--params", "7X"), ("--params", "0.5"), ("--density", "some"), ("--density", "-1")):
        assert wrong[0] in usage(*common, "--params", "7B", "--density", "1%", *wrong)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.gguf"])
def test_other_formats_are_named(here: Path, name: str) -> None:
    """As a file and in a folder, with what to do."""
    (here / "other").mkdir()
    (here / "other" / name).write_bytes(b"something else")
    for path in ("other", f"other/{name}"):
        line = failed("digest", path)
        assert f"{name!r} is a " in line
        assert "save the weights as safetensors first" in line


def test_a_followed_folder_is_not_a_checkpoint(here: Path) -> None:
    """The link in it is."""
    said("follow", URL, "-o", "out", "--once")
    assert "current may be one" in failed("digest", "out")
    assert said("digest", "out/current")


def test_squash_explains_the_base() -> None:
    """In its example and its text: patches that `diff` makes by default need it."""
    text = " ".join(said("squash", "--help").split())
    assert "101-103.patch --base step-100/" in text
    assert "cannot be joined without it" in text


def test_shells_complete_commands() -> None:
    """`--install-completion` and `--show-completion` are there."""
    assert "--install-completion" in said("--help")


def test_a_bucket_that_does_not_exist(here: Path) -> None:
    """It is not taken for a store in which nothing is published yet, nor waited for."""
    env = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running("moto", here / "server"))
        except NoServer as error:
            pytest.skip(str(error))
        where = ("--endpoint", server.endpoint, "--region", "us-east-1")
        for args in (("log", "s3://missing/run"), ("follow", "s3://missing/run", "-o", "none", "--timeout", "5s")):
            result = invoke(*args, *where, **env)
            assert result.exit_code == 1
            assert "s3://missing/run: the bucket does not exist" in result.stderr
        assert "nothing is published here yet" in failed("log", f"s3://{BUCKET}/run", *where, **env)
