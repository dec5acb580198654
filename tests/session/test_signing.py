"""With a key pinned, a subscriber believes nothing but what that key has signed, and nothing older than it has seen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparserl import Publisher, Subscriber, targets
from sparserl.errors import Fenced, FormatError, SessionError, SparserlError, Untrusted
from sparserl.session.store import signing
from sparserl.session.store.fields import canonical, sha256
from sparserl.session.store.records import HEAD, HeadRecord, Index, path
from sparserl.session.store.retention import faults, read_head
from sparserl.transport import open_store
from tests.session.policy import Policy, bits

SECRET, PUBLIC = signing.keygen()
OTHER, OTHERS = signing.keygen()


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store"


class Scene:
    """A signed run of two versions, and a subscriber that holds the newer one."""

    def __init__(self, url, key=SECRET, pinned=PUBLIC):
        self.policy = Policy()
        self.publisher = Publisher(url, self.policy.weights, signing_key=key)
        self.store = self.publisher.store
        self.publisher.publish()
        self.first = self.store.get(HEAD, 1 << 16)
        self.policy.step()
        self.publisher.publish()
        self.mine = self.policy.empty()
        self.subscriber = Subscriber(url, self.mine, trusted_keys=pinned)

    def replace_head(self, data):
        self.store.swap(HEAD, data, self.store.get(HEAD, 1 << 16).tag)

    def refused(self, match, kind=Untrusted):
        before = bits(self.mine)
        with pytest.raises(kind, match=match):
            self.subscriber.sync()
        assert bits(self.mine) == before


def test_what_the_key_signed_is_taken(url):
    """And a subscriber without a key takes it, too."""
    scene = Scene(url)
    scene.subscriber.sync()
    assert bits(scene.mine) == bits(scene.policy.weights)
    assert Subscriber(url, scene.policy.empty()).sync().version == 1
    assert list(faults(scene.store, PUBLIC)) == []
    assert list(faults(scene.store, OTHERS)) != []


def test_unsigned_and_foreign_heads(url, tmp_path):
    """Without a signature, or with another's, nothing is fetched."""
    Scene(url, key=None).refused("not signed")
    Scene(f"{url}-2", key=OTHER).refused("another key")


def test_a_signature_belongs_to_its_body(url):
    """Any change to the signed body, or a signature from another head, is refused."""
    scene = Scene(url)
    sealed = json.loads(scene.store.get(HEAD, 1 << 16).data)
    body = json.loads(sealed["body"])
    for name, value in body.items():
        if name == "format":
            continue
        forged = dict(body)
        forged[name] = value + 1 if isinstance(value, (int, float)) else ("0" if value[0] != "0" else "1") + value[1:]
        scene.replace_head(canonical({**sealed, "body": canonical(forged).decode()}))
        scene.refused("signature is not valid")
    first = json.loads(scene.first.data)
    scene.replace_head(canonical({**sealed, "signature": first["signature"]}))
    scene.refused("signature is not valid")
    for junk in ("", "00", "zz" * 64, sealed["signature"][:-2]):
        scene.replace_head(canonical({**sealed, "signature": junk}))
        scene.refused("signature is not valid")
    scene.replace_head(canonical({**sealed, "key": None}))
    scene.refused("not signed")


def test_a_rolled_back_store(url):
    """An older head that the key did sign is refused once a newer one was seen."""
    scene = Scene(url)
    scene.subscriber.sync()
    scene.replace_head(scene.first.data)
    scene.refused("rolled back")
    assert scene.subscriber.version == 1


def test_a_rolled_back_store_after_a_restart(url, tmp_path):
    """A checkpoint folder remembers what it held: an older head is refused by the next process, too."""
    scene = Scene(url)
    folder = targets.folder(tmp_path / "out")
    Subscriber(url, folder, trusted_keys=PUBLIC).sync()
    folder.close()
    scene.replace_head(scene.first.data)
    again = targets.folder(tmp_path / "out")
    with pytest.raises(Untrusted, match="rolled back"):
        Subscriber(url, again, trusted_keys=PUBLIC).sync()
    assert again.current.readlink().name.endswith("-000000000001")


def test_an_older_run_is_not_newer(url):
    """The head of a run that began earlier, replayed, is refused; one that began later is a new run."""
    scene = Scene(url)
    older = scene.store.get(HEAD, 1 << 16).data
    scene.subscriber.sync()
    second = Policy(5)
    newer = Publisher(url, second.weights, signing_key=SECRET, new_run=True)
    newer.publish()
    assert scene.subscriber.sync().run == newer.run
    assert bits(scene.mine) == bits(second.weights)
    scene.replace_head(older)
    scene.refused("older than run")


def test_only_the_run_that_was_asked_for(url):
    """With a run pinned, another one is refused, whoever signed it."""
    scene = Scene(url)
    mine = scene.policy.empty()
    pinned = Subscriber(url, mine, trusted_keys=PUBLIC, run=scene.publisher.run)
    pinned.sync()
    Publisher(url, Policy(5).weights, signing_key=SECRET, new_run=True).publish()
    with pytest.raises(Untrusted, match="only follows run"):
        pinned.sync()


def tampered(store, name, change):
    data = store.get(name, 1 << 30).data
    store.put(name, change(data))


def flip(data):
    return bytes((data[0] ^ 1,)) + data[1:]


def test_everything_below_the_head_is_bound_by_hash(url):
    """Run, index, manifest and bucket of the signed head cannot be exchanged, cut or lengthened."""
    scene = Scene(url)
    head, _ = read_head(scene.store)
    names = [item.name for item in scene.store.list("runs/") if "/leases/" not in item.name]
    wanted = {n.split("/")[2] for n in names}
    assert wanted == {"run.json", "index", "manifests", "buckets"}
    refused = set()
    for name in names:
        data = scene.store.get(name, 1 << 30).data
        for change in (flip, lambda d: d[:-1], lambda d: d + b" "):
            scene.store.put(name, change(data))
            subscriber = Subscriber(url, scene.policy.empty(), trusted_keys=PUBLIC)
            try:
                subscriber.sync()
            except FormatError:
                refused.add(name.split("/")[2])
            else:  # an object that this head no longer leads to
                assert "index" in name
                assert head.index not in name
            scene.store.put(name, data)
    assert refused == wanted


def test_an_index_of_another_run(url):
    """Even a signed head must lead to an index of its own run."""
    scene = Scene(url)
    head, _ = read_head(scene.store)
    index = Index("0" * 16, scene.publisher._committed.index.steps).to_bytes()
    scene.store.put(path(head.run, "index", sha256(index)), index)
    body = HeadRecord(**{**vars(head), "index": sha256(index)}).body()
    scene.replace_head(signing.seal(body, SECRET))
    scene.refused("that of run 0000", FormatError)


def test_a_publisher_does_not_sign_what_another_wrote(url):
    """A head without our signature is not taken for a tool's: the publisher stops instead of signing a forged index."""
    scene = Scene(url)
    head, _ = read_head(scene.store)
    index = Index(head.run, scene.publisher._committed.index.steps[:1]).to_bytes()
    scene.store.put(path(head.run, "index", sha256(index)), index)
    scene.replace_head(
        signing.seal(HeadRecord(**{**vars(head), "index": sha256(index), "nonce": "0" * 16}).body(), None)
    )
    scene.policy.step()
    with pytest.raises(Fenced):
        scene.publisher.publish()


def test_keys_that_are_none(url):
    """What is not a key is said to be none, before anything is fetched or written."""
    policy = Policy()
    with pytest.raises(SessionError, match="secret key"):
        Publisher(url, policy.weights, signing_key=PUBLIC)
    assert not list(open_store(url).list("head.json"))
    Publisher(url, policy.weights, signing_key=SECRET).publish()
    with pytest.raises(SessionError, match="public key"):
        Subscriber(url, policy.empty(), trusted_keys=SECRET)
    assert signing.public_key(SECRET) == PUBLIC


def test_an_index_that_contradicts_itself(url):
    """Two digests for one version are refused, whoever signed them."""
    scene = Scene(url)
    head, _ = read_head(scene.store)
    steps = scene.publisher._committed.index.steps
    for liar in (replace(steps[0], version=1), replace(steps[1], base_digest=steps[1].digest)):
        index = Index(head.run, (*steps, liar)).to_bytes()
        scene.store.put(path(head.run, "index", sha256(index)), index)
        scene.replace_head(signing.seal(HeadRecord(**{**vars(head), "index": sha256(index)}).body(), SECRET))
        scene.refused("do not agree", FormatError)


def test_a_step_that_takes_more_than_it_says(url):
    """What a patch takes is known before it is fetched."""
    scene = Scene(url)
    head, _ = read_head(scene.store)
    first, second = scene.publisher._committed.index.steps
    index = Index(head.run, (replace(first, bytes=3), second)).to_bytes()
    scene.store.put(path(head.run, "index", sha256(index)), index)
    scene.replace_head(signing.seal(HeadRecord(**{**vars(head), "index": sha256(index)}).body(), SECRET))
    scene.refused("promises 3", FormatError)


@pytest.mark.parametrize(
    "data",
    [
        b'{"format":1,"body":"\\ud800"}',
        b"",
        b"[]",
        b"{",
        b'{"format":1}',
        b'{"format":2,"body":"{}"}',
        b'{"format":1,"body":"{}","body":"{}"}',
        b"\xff",
    ],
)
def test_heads_that_are_none(url, data):
    """Bytes that are no head are refused by name, with and without a key."""
    scene = Scene(url)
    scene.replace_head(data or b" ")
    for key in (None, PUBLIC):
        with pytest.raises(SparserlError, match=r"head\.json"):
            Subscriber(url, scene.policy.empty(), trusted_keys=key).sync()


def test_a_key_is_replaced_while_a_run_goes_on(url, tmp_path):
    """Who trusts the old and the new key follows one run across the change; who trusts the old one alone stops."""
    policy = Policy()
    rollout = policy.empty()
    state = tmp_path / "state"
    subscriber = Subscriber(url, rollout, trusted_keys=[PUBLIC, OTHERS])
    with Publisher(url, policy.weights, signing_key=SECRET, state=state) as publisher:
        publisher.publish()
        subscriber.sync()
        run = publisher.run
    behind = Subscriber(url, policy.empty(), trusted_keys=PUBLIC)
    behind.sync()
    policy.step()
    with Publisher(url, policy.weights, signing_key=OTHER, trusted_keys=PUBLIC, state=state) as publisher:
        assert (publisher.run, publisher.version) == (run, 0)
        report = publisher.publish()
        assert (report.run, report.version, report.kind) == (run, 1, "patch")
    assert subscriber.sync().kind == "patch"
    assert bits(rollout) == bits(policy.weights)
    with pytest.raises(Untrusted, match="another key"):
        behind.sync()
    assert behind.version == 0


def test_a_new_key_alone_replaces_no_run(url, tmp_path):
    """A publisher neither goes on with a run that it has no reason to trust, nor replaces it unless it is told to.

    Who trusts both keys follows the new run.
    """
    policy = Policy()
    rollout = policy.empty()
    state = tmp_path / "state"
    subscriber = Subscriber(url, rollout, trusted_keys=(PUBLIC, OTHERS))
    old = Publisher(url, policy.weights, signing_key=SECRET, state=state)
    old.publish()
    subscriber.sync()
    policy.step()
    with pytest.raises(SessionError, match=f"has run {old.run} at version 0.*another key.*new_run=True"):
        Publisher(url, policy.weights, signing_key=OTHER)
    with Publisher(url, policy.weights, signing_key=OTHER, new_run=True) as publisher:
        assert publisher.run is None
        assert publisher.publish().kind == "anchor"
        assert publisher.run != old.run
    with pytest.raises(Fenced):
        old.publish()
    assert subscriber.sync().run == publisher.run
    assert bits(rollout) == bits(policy.weights)


NOT_PUBLIC = {"none": (), "empty": [], "no key": "sparserl-public-", "secret": SECRET, "one secret": [PUBLIC, SECRET]}


@pytest.mark.parametrize("keys", NOT_PUBLIC.values(), ids=NOT_PUBLIC.keys())
def test_trusted_keys_are_public_keys(url, keys):
    """One or more of them; a secret key, an empty list or part of a key is refused at once, on both sides."""
    with pytest.raises(SessionError, match="public key"):
        Subscriber(url, Policy().empty(), trusted_keys=keys)
    with pytest.raises(SessionError, match="public key"):
        Publisher(url, Policy().weights, signing_key=SECRET, trusted_keys=keys)


def test_a_publisher_that_trusts_keys_signs(url):
    """Without a signing key it would replace signed heads by unsigned ones."""
    with pytest.raises(SessionError, match="needs a signing_key"):
        Publisher(url, Policy().weights, trusted_keys=PUBLIC)
