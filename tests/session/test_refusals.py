"""Mistakes of users and accidents of stores that sessions refuse, or say."""

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import ChainError, SessionError, SparserlError, StoreError, WeightsError
from sparserl.transport import open_store
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


@pytest.mark.parametrize("url", [None, 5, 1.5, [], {}, object(), b"store", "ftp://host/x"])
def test_what_is_no_store_is_refused(url, tmp_path, monkeypatch):
    """Alike wherever a store is given, and nothing is made of its name."""
    monkeypatch.chdir(tmp_path)
    weights = Policy().weights
    for use in (open_store, sparserl.pins, lambda url: Publisher(url, weights), lambda url: Subscriber(url, weights)):
        with pytest.raises(StoreError, match="is not the URL of a store"):
            list(use(url).list("")) if use is open_store else use(url)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["a\0b", "a\ud800"])
def test_paths_that_no_file_can_have(url, path, tmp_path, monkeypatch):
    """They are refused as a path that does not exist is."""
    monkeypatch.chdir(tmp_path)
    weights = Policy().weights
    with Publisher(url, weights) as publisher:
        publisher.publish()
    for use in (
        lambda: Publisher(path, weights),
        lambda: Publisher(url, weights, state=path),
        lambda: Subscriber(path, weights).sync(),
        lambda: Subscriber(url, targets.folder(path)).sync(),
    ):
        with pytest.raises(SparserlError, match="no path can be so"):
            use()


@pytest.mark.parametrize("key", [5, b"sparserl-secret-00", "sparserl-secret-00", ""])
def test_what_is_no_key_is_refused(url, key):
    weights = Policy().weights
    with pytest.raises(SessionError, match="a secret key reads"):
        Publisher(url, weights, signing_key=key)
    with pytest.raises(SessionError, match="a public key reads"):
        Subscriber(url, weights, trusted_keys=key)
    with pytest.raises(SessionError, match="a public key reads"):
        Subscriber(url, weights, trusted_keys=[key])


@pytest.mark.parametrize("near", [None, 5, "http://neighbour:9000"])
def test_neighbours_that_are_no_list_are_refused(url, near):
    with pytest.raises(SessionError, match="must be a list of URLs"):
        Subscriber(url, Policy().weights, near=near)


def test_what_is_no_patch_is_refused():
    """A list of patches, above all."""
    patch = sparserl.diff(*({"w": np.full(4, number, np.float32)} for number in (0, 1)))
    for wrong in ([patch], None, b"", "a.patch"):
        for join in (sparserl.merge, sparserl.squash):
            with pytest.raises(ChainError, match="is not a patch; write squash"):
                join(wrong)
            with pytest.raises(ChainError, match="is not a patch; write squash"):
                join(patch, wrong)


@pytest.mark.parametrize("link", [5, 1e9, b"25Gbit", []])
def test_what_is_no_link_is_refused(link):
    old, new = ({"w": np.full(4, number, np.float32)} for number in (0, 1))
    with pytest.raises(SparserlError, match="is not a bandwidth; write"):
        sparserl.diff(old, new, link=link)
