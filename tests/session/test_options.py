"""Options are checked by the constructor that they are given to, and the message names what is allowed."""

from __future__ import annotations

import inspect
import math
import re

import numpy as np
import pytest

import sparserl
from sparserl import GroupPublisher, GroupSubscriber, Publisher, Relay, Subscriber
from sparserl.errors import SparserlError, WeightsError
from sparserl.session.options import AUDIT_EVERY

dist = pytest.importorskip("torch.distributed")

WEIGHTS = {"w": np.zeros(3, np.float32)}
CLASSES = (Publisher, Subscriber, GroupPublisher, GroupSubscriber, Relay)
NAN = math.nan

# Option, a value that cannot be used, and what the message says is allowed.
BAD_OPTIONS = [
    ("keep_anchors", 0, "1 or more"),
    ("keep_anchors", 1.5, "an integer"),
    ("grace", -5, "0 or more"),
    ("grace", NAN, "0 or more"),
    ("lease", -1, "0 or more"),
    ("anchor_after", -1, "0 or more"),
    ("anchor_after", "often", "a number"),
    ("ladder", (1, 8), "2 or more"),
    ("ladder", (8, 4), "8 or more"),
    ("ladder", 8, "a pair"),
    ("threads", 0, "1 or more"),
    ("threads", -2, "1 or more"),
    ("threads", 1.5, "an integer"),
    ("profile", "zip", "'auto', 'raw', 'gap', 'ulp', 'ctx'"),
    ("link", "quick", "25Gbit"),
    ("link", 5, "25Gbit"),
    ("link", "measured", "without one, auto takes the smallest"),
    ("baseline", "disk", "'auto', 'host', 'device', 'none'"),
    ("memory", -1, "0 or more"),
    ("timeout", 0, "a positive number of seconds"),
    ("timeout", NAN, "a positive number of seconds"),
    ("timeout", math.inf, "a positive number of seconds"),
    ("clock", 5, "a function"),
    ("audit_every", 0, "1 or more"),
    ("before", 7, "a function"),
    ("after", 7, "a function"),
    ("progress", 7, "a function"),
    ("callbacks", sparserl.SyncReport, "a sequence"),
    ("run", "last", "16 hexadecimal digits"),
    ("name", "a/b", "letters, digits"),
    ("signing_key", "hunter2", "sparserl-secret-"),
    ("trusted_keys", "hunter2", "sparserl-public-"),
    ("source", {}, "at least one tensor"),
    ("source", 5, "a mapping of tensors"),
    ("targets", {}, "at least one tensor"),
    ("targets", [WEIGHTS, {}], "at least one tensor"),
    ("writers", (), "at least one"),
    ("writers", (0, 0), "distinct ranks"),
    ("writers", (0, 9), "distinct ranks"),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def takes(kind, option):
    """Whether a class has the option; `writers` of a Publisher is a process group, and no ranks."""
    return option in inspect.signature(kind).parameters and (kind, option) != (Publisher, "writers")


def build(kind, group, url, **options):
    """An object of the class, with everything but some options as it should be."""
    values = {"url": url, "process_group": group, "source": WEIGHTS, "targets": WEIGHTS} | options
    required = {name: values[name] for name in values if takes(kind, name)}
    return kind(**required)


@pytest.mark.parametrize(("option", "value", "allowed"), BAD_OPTIONS)
def test_a_bad_option_is_refused_at_once(option, value, allowed, group, tmp_path):
    """By every class that has the option, before anything is written."""
    kinds = [kind for kind in CLASSES if takes(kind, option)]
    assert kinds
    for kind in kinds:
        with pytest.raises(SparserlError, match=re.escape(allowed)):
            build(kind, group, f"file://{tmp_path}/store", **{option: value})
    assert not (tmp_path / "store").exists()


def test_options_that_can_be_used(tmp_path):
    """The smallest values that are allowed are allowed."""
    options = {"keep_anchors": 1, "grace": 0, "lease": 0, "anchor_after": 0, "ladder": (2, 2), "memory": 1 << 20}
    with Publisher(f"file://{tmp_path}", WEIGHTS, threads=1, **options) as publisher:
        publisher.publish()
    with Subscriber(f"file://{tmp_path}", [], audit_every=1, threads=1, run=publisher.run) as subscriber:
        subscriber.sync()


def test_all_bits_are_read_now_and_then_by_default():
    """Whatever receives: what something else wrote does not stay for ever."""
    for kind in (Subscriber, GroupSubscriber, Relay):
        assert inspect.signature(kind).parameters["audit_every"].default == AUDIT_EVERY <= 100


def test_a_clock_that_is_wrong_by_far_is_refused(tmp_path):
    """Its times could not be written down."""
    with pytest.raises(SparserlError, match="the clock of this machine says"):
        Publisher(f"file://{tmp_path}", WEIGHTS, clock=lambda: NAN)


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_threads_are_one_or_more(threads):
    """Wherever they are given, also outside of sessions."""
    old = {"w": np.zeros(100, np.float32)}
    new = {"w": np.ones(100, np.float32)}
    patch = sparserl.diff(old, new)
    calls = (
        lambda: sparserl.diff(old, new, threads=threads),
        lambda: sparserl.digest(old, threads=threads),
        lambda: patch.apply(old, threads=threads),
        lambda: sparserl.squash(patch, patch.invert(old), base=old, threads=threads),
    )
    for call in calls:
        with pytest.raises(SparserlError, match="1 or more"):
            call()
    assert not old["w"].any()


@pytest.mark.parametrize("kind", CLASSES)
def test_every_option_can_be_seen(kind):
    """Its name, a type and a sentence: no `**options`, nothing that tools cannot see."""
    parameters = inspect.signature(kind).parameters.values()
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    assert all(p.annotation is not p.empty for p in parameters)
    arguments = inspect.getdoc(kind).split("\nArgs:\n")[1].split("\n\n")[0]
    assert re.findall(r"^    (\w+): [A-Z]", arguments, re.MULTILINE) == [p.name for p in parameters]


def test_sources_with_nothing_in_them(tmp_path):
    """Shards of an empty tensor table are no weights either."""
    shards = sparserl.Shards(sparserl.TensorTable([]), [])
    with pytest.raises(WeightsError, match="at least one tensor"):
        Publisher(f"file://{tmp_path}", shards)
