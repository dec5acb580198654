"""Files that travel with the weights: with the first version, and again whenever they change."""

import logging

import numpy as np
import pytest

from sparserl import Publisher, Subscriber, targets, tensor_table
from sparserl.errors import InvalidField, SessionError
from sparserl.session.store import side_files
from sparserl.session.store.records import Blob, FileChanges, RunRecord
from sparserl.session.store.retention import faults, read_head, read_index, read_run
from sparserl.session.store.squashing import squash_versions
from sparserl.transport import open_store
from tests.session.policy import Policy, bits


class Trainer:
    """A policy, and a publisher of it with a folder of files."""

    def __init__(self, url, folder, **options):
        self.policy = Policy()
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"version": 0}')
        (folder / "tokenizer.json").write_text("a tokenizer")
        self.publisher = Publisher(url, self.policy.weights, files=folder, **options)

    def publish(self, **files):
        for name, text in files.items():
            path = self.folder / f"{name}.json"
            if text is None:
                path.unlink()
            else:
                path.write_text(text)
        self.policy.step()
        return self.publisher.publish()


def read(folder):
    """The files beside the weights of a checkpoint."""
    names = [path for path in folder.iterdir() if ".safetensors" not in path.name]
    return {path.name.removesuffix(".json"): path.read_text() for path in names}


def test_files_that_change_travel(url, tmp_path):
    """Changed, added and removed files are those of the version, for who follows, comes late or goes back."""
    trainer = Trainer(url, tmp_path / "files")
    follower = Subscriber(url, targets.folder(tmp_path / "out"))
    expected = []
    for files in ({}, {"config": "other"}, {}, {"chat_template": "new"}, {"tokenizer": None}, {"config": "last"}):
        trainer.publish(**files)
        follower.sync()
        expected.append(read(trainer.folder))
        assert read(tmp_path / "out" / "current") == expected[-1]
    late = Subscriber(url, targets.folder(tmp_path / "late"))
    for version in (5, 2, 0, 3, 1, 4):
        for subscriber, folder in ((follower, "out"), (late, "late")):
            subscriber.sync(version)
            assert read(tmp_path / folder / "current") == expected[version]
    assert list(faults(open_store(url))) == []


def test_files_that_stay_are_not_sent_again(url, tmp_path):
    """Of a change, only what is new is uploaded, and versions between changes name no files."""
    trainer = Trainer(url, tmp_path / "files")
    trainer.publish()
    trainer.publish()
    store = open_store(url)
    head, _ = read_head(store)
    assert read_index(store, head).files == ()
    trainer.publish(config="other")
    trainer.publish()
    head, _ = read_head(store)
    [changed] = read_index(store, head).files
    assert changed.version == 2
    assert changed.files.keys() == {"config.json"}
    assert len([item for item in store.list("runs/") if "/files/" in item.name]) == 2


def test_a_publisher_without_files_keeps_those_of_the_run(url, tmp_path):
    """Going on with a run without `files=` removes nothing."""
    trainer = Trainer(url, tmp_path / "files")
    trainer.publish()
    trainer.publish(config="other")
    trainer.publisher.close()
    trainer.policy.step()
    with Publisher(url, trainer.policy.weights) as again:
        again.publish()
    Subscriber(url, targets.folder(tmp_path / "out")).sync()
    assert read(tmp_path / "out" / "current") == read(trainer.folder)


def test_retention_keeps_the_files_that_versions_need(url, tmp_path):
    """Old changes go with old versions, but for the last one before the oldest version."""
    trainer = Trainer(url, tmp_path / "files", anchor_after=0.0, keep_anchors=2, ladder=None, grace=0.0, lease=0.0)
    for n in range(6):
        trainer.publish(config=f"version {n}")
    store = open_store(url)
    head, _ = read_head(store)
    index = read_index(store, head)
    oldest = min(step.version for step in index.steps if step.base is None)
    assert [changed.version for changed in index.files] == list(range(oldest, 6))
    assert list(faults(store)) == []
    late = Subscriber(url, targets.folder(tmp_path / "late"))
    for version in (oldest, 5):
        late.sync(version)
        assert read(tmp_path / "late" / "current")["config"] == f"version {version}"


def test_squashing_keeps_files(url, tmp_path):
    """A tool that adds a step to the index leaves the files alone, and so does the publisher after it."""
    trainer = Trainer(url, tmp_path / "files", ladder=None)
    for n in range(3):
        trainer.publish(config=f"version {n}")
    squash_versions(open_store(url), 0, 2)
    trainer.publish()
    Subscriber(url, targets.folder(tmp_path / "out")).sync()
    assert read(tmp_path / "out" / "current")["config"] == "version 2"
    assert bits(targets.folder(tmp_path / "out").attach(read_table(url))) == bits(trainer.policy.weights)


def read_table(url):
    store = open_store(url)
    return read_run(store, read_head(store)[0]).table


def test_a_lost_file_is_a_fault(url, tmp_path):
    """`fsck` looks at files that changed as well as at the first ones."""
    trainer = Trainer(url, tmp_path / "files")
    trainer.publish()
    trainer.publish(config="other")
    store = open_store(url)
    head, _ = read_head(store)
    [changed] = read_index(store, head).files
    store.delete([changed.files["config.json"].name(head.run)])
    [fault] = faults(store)
    assert "config.json" in fault


def test_what_does_not_travel_is_named(url, tmp_path, caplog):
    """Hidden files, and weights in another format."""
    (tmp_path / "files").mkdir()
    for name in (".hidden", "optimizer.pt", "model.safetensors"):
        (tmp_path / "files" / name).write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="sparserl.session"):
        Trainer(url, tmp_path / "files")
    [record] = caplog.records
    assert record.getMessage() == f"{tmp_path / 'files'}: not sent with the weights: '.hidden', 'optimizer.pt'"


def test_steps_and_notes_are_kept(url):
    """What a publisher says of a version is in the index; what cannot be kept is refused."""
    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish(step=100, note="after the first epoch")
        policy.step()
        publisher.publish()
        policy.step()
        publisher.publish_in_background(step=102).result()
        for wrong in ({"step": -1}, {"step": 1.5}, {"note": ""}, {"note": "two\nlines"}, {"note": "x" * 201}):
            with pytest.raises(SessionError, match=next(iter(wrong))):
                publisher.publish(**wrong)
    store = open_store(url)
    steps = read_index(store, read_head(store)[0]).steps
    assert [(step.step, step.note) for step in steps] == [(100, "after the first epoch"), (None, None), (102, None)]


def test_a_folder_that_is_removed(url, tmp_path, caplog):
    """The files of the last version stay, and that is said once."""
    import shutil

    trainer = Trainer(url, tmp_path / "files")
    trainer.publish()
    expected = read(trainer.folder)
    shutil.rmtree(trainer.folder)
    for _ in range(2):
        trainer.publish()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{trainer.folder} is gone: the files of the last version stay those of the next ones"
    ]
    Subscriber(url, targets.folder(tmp_path / "out")).sync()
    assert read(tmp_path / "out" / "current") == expected


def test_files_alone_may_change(url, tmp_path):
    """A version whose weights are those of the one before brings its files, also to who has restarted."""
    trainer = Trainer(url, tmp_path / "files")
    trainer.publish()
    with Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
        subscriber.sync()
    (trainer.folder / "config.json").write_text("other")
    trainer.publisher.publish()
    with Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
        assert subscriber.sync().version == 1
    assert read(tmp_path / "out" / "current")["config"] == "other"
    with Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
        assert subscriber.sync() is None


def test_a_file_that_comes_back_is_another_object(url, tmp_path):
    """What nothing refers to any more is never referred to again, so that it can be deleted at any moment."""
    trainer = Trainer(url, tmp_path / "files", anchor_after=0.0, keep_anchors=1, ladder=None, lease=0.0)
    store = open_store(url)
    names = []
    for text in ("a", "b", "a", "b"):
        trainer.publish(config=text)
        head, _ = read_head(store)
        names.append(read_index(store, head).files_of(head.version, read_run(store, head))["config.json"].name)
    assert len(set(names)) == 4


def test_many_files_of_which_one_changes(url, tmp_path):
    """The index names what changed, not all files of every version."""
    trainer = Trainer(url, tmp_path / "files", ladder=None)
    for n in range(300):
        (trainer.folder / f"{n}.txt").write_text(str(n))
    for n in range(10):
        trainer.publish(config=f"version {n}")
    store = open_store(url)
    files = read_index(store, read_head(store)[0]).files
    assert [len(changes.files) for changes in files] == [1] * 9


def test_files_are_captured_with_the_weights(url, tmp_path):
    """What is written to a file while a publish runs in the background belongs to the next version."""
    trainer = Trainer(url, tmp_path / "files")
    trainer.publish()
    (trainer.folder / "config.json").write_text("captured")
    background = trainer.publisher.publish_in_background()
    (trainer.folder / "config.json").write_text("later")
    background.result()
    subscriber = Subscriber(url, targets.folder(tmp_path / "out"))
    subscriber.sync()
    assert read(tmp_path / "out" / "current")["config"] == "captured"
    trainer.publish()
    subscriber.sync()
    assert read(tmp_path / "out" / "current")["config"] == "later"


def test_weights_below_a_folder_are_files(url, tmp_path):
    """Only those at the top are the weights that are patched."""
    files = {"config.json": b"a", "sub/x.safetensors": b"not ours"}
    policy = Policy()
    subscriber = Subscriber(url, targets.folder(tmp_path / "out"))
    with Publisher(url, policy.weights, files=files) as publisher:
        for text in (b"a", b"b", b"c"):
            files["config.json"] = text
            policy.step()
            publisher.publish()
            subscriber.sync()
        assert (tmp_path / "out" / "current" / "sub" / "x.safetensors").read_bytes() == b"not ours"
        del files["sub/x.safetensors"]
        policy.step()
        publisher.publish()
        subscriber.sync()
    assert not (tmp_path / "out" / "current" / "sub").exists()


def test_few_bytes_of_files_are_kept_in_memory(tmp_path, monkeypatch):
    """What does not fit is read again when it is sent, whatever there is of it."""
    monkeypatch.setattr(side_files, "FLIGHT_BYTES", 10)
    for name, size in (("a", 6), ("b", 6), ("c", 4), ("d", 100)):
        (tmp_path / name).write_bytes(bytes(size))
    captured = side_files.SideFiles(tmp_path, {"w": None}).capture()
    assert {name for name, file in captured.items() if isinstance(file.content, bytes)} == {"a", "c"}
    assert [file.blob.size for file in captured.values()] == [6, 6, 4, 100]


def test_files_lie_in_few_folders(url, tmp_path):
    """In 32, one in the other: a publisher refuses more when it is given them, a reader when a record has one."""
    weights = {"w": np.zeros(4, np.float32)}
    for depth in (1, 32):
        with Publisher(url, weights, files={"d/" * depth + "x": b"1"}) as publisher:
            publisher.publish()
        with Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
            subscriber.sync()
        assert (tmp_path / "out" / "current" / ("d/" * depth + "x")).read_bytes() == b"1"
    with pytest.raises(InvalidField, match="in at most 32 folders"):
        Publisher(url, weights, files={"d/" * 33 + "x": b"1"})
    run = RunRecord("0" * 16, 1.0, tensor_table(weights), {"d/" * 33 + "x": Blob("0" * 64, 1)})
    with pytest.raises(InvalidField, match="files is"):
        RunRecord.parse(run.to_bytes(), "it")
    changes = FileChanges(1, {"d/" * 33 + "x": None})
    with pytest.raises(InvalidField, match="files is"):
        FileChanges.read(changes.record())
