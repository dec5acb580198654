"""Mistakes of users and accidents of stores that sessions refuse, or say."""

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import SessionError, WeightsError
from sparserl.transport.stores.folder import FolderStore
from tests.session.policy import Policy


def test_a_publisher_without_a_key_does_not_continue_a_signed_run(url):
    """Its heads would be unsigned, and refused by all who trust the key."""
    from sparserl.session.store.signing import keygen

    secret, public = keygen()
    policy = Policy()
    with Publisher(url, policy.weights, signing_key=secret) as publisher:
        publisher.publish()
    with pytest.raises(SessionError, match=r"is signed, and this publisher has no signing_key.*new_run=True"):
        Publisher(url, policy.weights)
    Subscriber(url, policy.empty(), trusted_keys=public).sync()


def test_a_refused_publisher_leaves_its_state_free(url, tmp_path):
    """What the error advises can be done at once."""
    policy = Policy()
    state = tmp_path / "state"
    with Publisher(url, policy.weights, state=state) as publisher:
        publisher.publish()
    for lost in (tmp_path / "store").glob("runs/*/run.json"):
        lost.unlink()
    with pytest.raises(SessionError, match="new_run=True"):
        Publisher(url, policy.weights, state=state)
    with Publisher(url, policy.weights, state=state, new_run=True) as replacing:
        replacing.publish()


def test_a_damaged_head_can_be_replaced(url, tmp_path):
    """Without a key too, where a new run is asked for; the error says so."""
    policy = Policy()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "head.json").write_text("")
    with pytest.raises(sparserl.SparserlError, match=r"damaged head.*new_run=True"):
        Publisher(url, policy.weights)
    with Publisher(url, policy.weights, new_run=True) as publisher:
        publisher.publish()
    assert Subscriber(url, policy.empty()).sync().run == publisher.run


def test_a_lost_baseline_is_said(url, log, monkeypatch):
    """A publisher that has to begin a new run of its own accord warns."""
    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
        policy.step()
        monkeypatch.setattr(type(publisher._committed.baseline), "advance", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publisher.publish()
        monkeypatch.undo()
        assert publisher.publish().version == 0
    assert log("WARNING") == [f"{url}: the baseline was lost, so a new run begins: subscribers fetch all weights"]


@pytest.mark.parametrize("step", [2**53 + 1, -1, 1.5, "3"], ids=repr)
def test_steps_that_nobody_could_read_are_refused(url, step):
    """Before anything is published."""
    with Publisher(url, Policy().weights) as publisher:
        with pytest.raises(SessionError, match="step"):
            publisher.publish(step=step)
        assert publisher.publish(step=np.int64(4)).version == 0


def test_a_source_that_cannot_be_looked_at_twice(url):
    """Tensors without a counter of writes, and a mapping that fails: what was published is published."""
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        weights = {"w": torch.zeros(100)}
    with Publisher(url, weights) as publisher:
        for version in range(4):
            assert publisher.publish().version == version


def test_sources_without_tensors_are_refused(url):
    """Whatever they are."""
    torch = pytest.importorskip("torch")
    for source in (dict, torch.nn.Identity()):
        with Publisher(url, source) as publisher, pytest.raises(WeightsError, match="no tensors"):
            publisher.publish()


def test_following_with_a_version_that_is_no_longer_there(url, tmp_path):
    """A folder that holds a version makes a store that is away no error at the end of the time."""
    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
    with Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
        subscriber.sync()
    (tmp_path / "store" / "head.json").unlink()
    with Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
        subscriber.follow(timeout=0.2)


def test_a_cast_by_name_is_asked_for_names_of_the_model(url):
    """And the config names the dtype of the weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    dtypes = dict.fromkeys(model.state_dict(), torch.float16)
    source = sparserl.sources.module(model, cast=dtypes.__getitem__)
    assert b'"float16"' in source.files()["config.json"]
    tracked = sparserl.sources.track(torch.optim.SGD(model.parameters()), model, cast=torch.bfloat16)
    assert b'"bfloat16"' in tracked.files()["config.json"]
    with Publisher(url, source) as publisher:
        publisher.publish()


def test_passwords_are_not_logged():
    """The URL of a store that is shown has none."""
    from sparserl.transport import open_store

    assert open_store("http://user:secret@host:80/x").url == "http://host:80/x"


@pytest.mark.parametrize("url", ["~nobody-of-this-name/x", "path:s3"])
def test_paths_that_cannot_be(url):
    """Homes that do not exist, and URLs that went through `Path`."""
    from pathlib import Path

    place = Path("s3://bucket/run") if url == "path:s3" else url
    with pytest.raises(sparserl.SparserlError):
        Publisher(place, Policy().weights)


def test_a_closed_publisher_says_so(url):
    """It is not taken for one that works."""
    with Publisher(url, Policy().weights) as publisher:
        publisher.publish()
    for publish in (publisher.publish, publisher.publish_in_background):
        with pytest.raises(SessionError, match="the publisher is closed"):
            publish()


def test_another_model_of_the_same_shapes(url, log):
    """Most of the elements that change at a restart are a sign of other weights."""
    with Publisher(url, Policy(1).weights) as publisher:
        publisher.publish()
    with Publisher(url, Policy(2).weights) as again:
        again.publish()
        again.publish()
    [line] = log("WARNING")
    assert "have changed since version 0, the last one before the restart" in line


def test_a_store_that_was_emptied(url, tmp_path):
    """It is not said that another publisher was there."""
    import shutil

    from sparserl.errors import Fenced

    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
        shutil.rmtree(tmp_path / "store")
        policy.step()
        with pytest.raises(Fenced, match="the store was emptied or moved"):
            publisher.publish()


def test_a_folder_with_other_files_is_refused(url, tmp_path):
    """A checkpoint, say: what is followed goes to a folder of its own."""
    Publisher(url, Policy().weights).publish()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"")
    with pytest.raises(sparserl.SparserlError, match=r"holds other files, such as 'model\.safetensors'"):
        Subscriber(url, targets.folder(tmp_path / "out")).sync()


class CountingStore(FolderStore):
    """A folder store that knows which objects were read."""

    def __init__(self, path):
        super().__init__(path)
        self.names = []

    def get(self, name, max_bytes):
        self.names.append(name)
        return super().get(name, max_bytes)

    def read(self, name, start, size):
        self.names.append(name)
        return super().read(name, start, size)


def test_state_saves_fetching_the_anchor(url, tmp_path):
    """With its state folder a publisher fetches the patches since its anchor, and nothing of the anchor."""
    policy = Policy()
    state = tmp_path / "state"
    with Publisher(url, policy.weights, state=state) as publisher:
        anchor = publisher.publish()
        policy.step()
        publisher.publish()
    fetched = {}
    for kind, options in (("with state", {"state": state}), ("without", {})):
        store = CountingStore(tmp_path / "store")
        with Publisher(store, policy.weights, **options) as again:
            assert (again.run, again.version) == (publisher.run, 1)
            fetched[kind] = {name for name in store.names if "/manifests/" in name}
    assert anchor.kind == "anchor"
    assert (len(fetched["with state"]), len(fetched["without"])) == (1, 2)
