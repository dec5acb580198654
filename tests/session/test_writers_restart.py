"""Several ranks that publish one run are killed or end, and others go on with it. Real processes over Gloo."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Subscriber
from sparserl.errors import SessionError
from sparserl.session.store.resume import SavedAnchor
from sparserl.session.store.retention import faults, read_head
from sparserl.transport.stores.folder import FolderStore
from tests.session.killed_processes import driver
from tests.session.ranks import finish, launch
from tests.session.test_writers import Trainer, shards, whole


def publisher_of(rank: int, size: int, folder: str, attempt: int, **options) -> tuple[Trainer, sparserl.Publisher]:
    import torch.distributed as dist

    limit = dt.timedelta(seconds=60)
    init = f"file://{folder}/init-{attempt}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=limit)
    trainer = Trainer(rank, size)
    return trainer, sparserl.Publisher(f"{folder}/store", trainer, writers=dist.group.WORLD, timeout=60, **options)


def publish_some(rank: int, size: int, folder: str, attempt: int, first: int, last: int, options: dict) -> None:
    """Publish some versions, after another attempt has published those before; the first must be found again."""
    trainer, publisher = publisher_of(rank, size, folder, attempt, **options)
    assert publisher.version == (first - 1 if first else None)
    run = publisher.run
    for version in range(first, last):
        trainer.version = version
        report = publisher.publish()
        assert (report.version, report.kind) == (version, "patch" if version else "anchor")
        assert report.digest == sparserl.digest(whole(version)).hex
        assert run in (None, report.run), "a new run has begun"
    publisher.close()


def attempts(tmp_path: Path, sizes: list[int], **options) -> None:
    """One attempt after another, each with another number of ranks, publishes three versions; a subscriber follows."""
    mine = {name: np.zeros_like(bits) for name, bits in whole(0).items()}
    subscriber = Subscriber(f"{tmp_path}/store", mine)
    for attempt, size in enumerate(sizes):
        args = (attempt, 3 * attempt, 3 * attempt + 3, options)
        finish(launch(publish_some, size, tmp_path, *args), tmp_path)
        report = subscriber.sync()
        assert (report.version, report.kind) == (3 * attempt + 2, "patch" if attempt else "anchor")
        assert all((mine[name] == bits).all() for name, bits in whole(report.version).items())
    assert list(faults(FolderStore(f"{tmp_path}/store"))) == []


@pytest.mark.parametrize("profile", ["ctx", pytest.param("gap", marks=pytest.mark.long)])
def test_more_or_fewer_ranks_go_on_with_a_run_from_the_store(tmp_path, profile):
    attempts(tmp_path, [2, 3, 1, 2], profile=profile, anchor_after=100.0)


def test_ranks_go_on_from_what_each_has_saved(tmp_path, monkeypatch):
    """Only patches are fetched: the anchor is gone from the store, and the ranks go on all the same."""
    state = str(tmp_path / "state")
    options = {"profile": "ctx", "state": state, "anchor_after": 100.0}
    finish(launch(publish_some, 2, tmp_path, 0, 0, 3, options), tmp_path)
    store = FolderStore(f"{tmp_path}/store")
    mine = {name: np.zeros_like(bits) for name, bits in whole(0).items()}
    subscriber = Subscriber(store, mine)
    subscriber.sync()
    head = read_head(store)[0]
    saved = sorted(path.name for path in Path(state).glob("rank-*/*.srl"))
    assert len(saved) == 2
    assert all(head.run in name for name in saved)
    anchor = next(step for step in subscriber._snapshot.index.steps if step.base is None)
    (tmp_path / "store" / "runs" / head.run / "manifests" / anchor.manifest).unlink()
    finish(launch(publish_some, 2, tmp_path, 1, 3, 5, options), tmp_path)
    assert subscriber.sync().kind == "patch"
    assert all((mine[name] == bits).all() for name, bits in whole(4).items())


def test_saved_shards_of_other_ranks_are_not_used(tmp_path):
    attempts(tmp_path, [2, 3, 2], profile="ctx", state=str(tmp_path / "state"), anchor_after=100.0)


def test_a_saved_anchor_with_other_bits_is_noticed_by_all(tmp_path):
    """One rank has saved other bits under the name of this run: the ranks begin from the store together."""
    state = str(tmp_path / "state")
    options = {"profile": "gap", "state": state, "anchor_after": 100.0}
    finish(launch(publish_some, 2, tmp_path, 0, 0, 2, options), tmp_path)
    head = read_head(FolderStore(f"{tmp_path}/store"))[0]
    table = sparserl.tensor_table(whole(0))
    wrong = shards(5, 1, 2)
    zeros = wrong.map(lambda part: np.zeros_like(part.data))
    saved = SavedAnchor(Path(state) / "rank-1", f"{tmp_path}/store")
    (path,) = Path(state).glob("rank-1/*.srl")
    sparserl.diff(zeros, wrong).save(path)
    saved.close()
    assert len(table) == len(wrong.table)
    assert head.run in path.name
    finish(launch(publish_some, 2, tmp_path, 1, 2, 4, options), tmp_path)
    mine = {name: np.zeros_like(bits) for name, bits in whole(0).items()}
    Subscriber(f"{tmp_path}/store", mine).sync()
    assert all((mine[name] == bits).all() for name, bits in whole(3).items())


@pytest.mark.long
def test_writers_are_killed_over_and_over():
    seen = driver("-m", "tests.session.soak_writers", "--kills", 12, "--seed", 7)
    assert seen["kills"] >= 12
    assert seen["faults"] == 0
    assert seen["published"] > 12


def refused(rank: int, size: int, folder: str, attempt: int, words: str) -> None:
    with pytest.raises(SessionError, match=words):
        publisher_of(rank, size, folder, attempt)
    if rank == 0:
        print("refused", flush=True)


def test_a_run_that_cannot_be_rebuilt_is_refused_on_all_ranks(tmp_path):
    finish(launch(publish_some, 2, tmp_path, 0, 0, 2, {}), tmp_path)
    store = FolderStore(f"{tmp_path}/store")
    head = read_head(store)[0]
    for path in (tmp_path / "store" / "runs" / head.run / "manifests").iterdir():
        path.unlink()
    said = finish(launch(refused, 2, tmp_path, 1, "cannot be rebuilt.*new_run=True"), tmp_path)
    assert "refused" in said[0]
    assert read_head(store)[0] == head
