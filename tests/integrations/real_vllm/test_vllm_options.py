"""What cannot be an option of the backend of vLLM is refused where it is given, by its name."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from sparserl.errors import SessionError

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"version": "3"}, "version is '3'; it must be an integer, 0 or more"),
        ({"version": -1}, "version is -1"),
        ({"step": True}, "step is True"),
        ({"step": 2, "timeout": float("nan")}, "timeout is nan; it must be a positive number of seconds"),
        ({"audit": "false"}, "audit is 'false'; it must be True or False"),
        ({"version": 1, "step": 1}, "not both"),
    ],
)
def test_updates(options, text):
    """A version, a step, or neither."""
    from sparserl.integrations.vllm_options import SparserlUpdateInfo

    SparserlUpdateInfo()
    SparserlUpdateInfo(version=0, audit=True)
    SparserlUpdateInfo(step=3, timeout=0.5)
    with pytest.raises(SessionError, match=text):
        SparserlUpdateInfo(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ahead": "false"}, "ahead is 'false'; it must be True or False"),
        ({"audit_every": 0}, "audit_every is 0; it must be an integer, 1 or more"),
    ],
)
def test_workers(options, text):
    """Workers refuse it, and trainers before they publish."""
    from sparserl.integrations.vllm_options import SparserlInitInfo
    from sparserl.integrations.vllm_trainer import SparserlTrainerInitInfo

    with pytest.raises(SessionError, match=text):
        SparserlInitInfo(url="runs/7", **options)
    with pytest.raises(SessionError, match=text):
        SparserlTrainerInitInfo(rank=0, url="runs/7", worker=options)


def test_unknown_options_of_workers():
    """Trainers name the one that there is not, and those that there are."""
    from sparserl.integrations.vllm_trainer import SparserlTrainerInitInfo

    info = SparserlTrainerInitInfo(rank=0, url="runs/7", worker={"ahead": False, "token": "secret"})
    assert info.worker_info() == {"url": "runs/7", "ahead": False, "token": "secret"}
    with pytest.raises(SessionError, match=r"worker has 'ahaed'; its options are 'url', .*'ahead'"):
        SparserlTrainerInitInfo(rank=0, url="runs/7", worker={"ahaed": False})


@pytest.mark.parametrize("name", ["profile", "ladr"])
def test_options_of_publishers(name, tmp_path):
    """Those that there are not, or that trainers have themselves, are refused before anything is published."""
    from sparserl.integrations.vllm_trainer import AdapterTrainer, SparserlTrainerInitInfo

    SparserlTrainerInitInfo(rank=0, url="runs/7", publisher={"ladder": None})
    with pytest.raises(SessionError, match=f"publisher has '{name}'; it may have also, .*ladder"):
        SparserlTrainerInitInfo(rank=0, url="runs/7", publisher={name: None})
    with pytest.raises(SessionError, match=r"publisher has 'ladr'; it may have .*profile"):
        AdapterTrainer(str(tmp_path / "run"), {}, None, publisher={"ladr": None})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lora_id", [0, -1, "policy", None])
def test_ids_of_adapters(lora_id, tmp_path):
    """They are counted from one; nothing is published for another."""
    from sparserl.integrations.vllm_trainer import AdapterTrainer

    with pytest.raises(SessionError, match=f"lora_id is {lora_id!r}; it must be an integer, 1 or more"):
        AdapterTrainer(str(tmp_path / "run"), {}, None, lora_id=lora_id)
    assert not (tmp_path / "run").exists()
