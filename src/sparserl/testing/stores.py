"""What a session relies on in a store."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..errors import Fenced, InvalidField, LimitExceeded, NotFound, Refused, Truncated
from ..session import Publisher, Subscriber
from ..session.store.retention import faults
from ..transport.stores.base import Store, exists, fetch
from ..weights.tensors import tensor_table
from .weights import bits, blank, versions


class StoreConformance:
    """Every store that can be written to passes this.

    A subclass has a fixture `opens`, of any scope: a function that opens the store at a place, named by a word. Two
    that are opened at one place see the same objects; a place that was never named before is empty.
    """

    @pytest.fixture
    def opens(self) -> Callable[[str], Store]:
        """To be overridden."""
        raise NotImplementedError("a subclass of StoreConformance has a fixture `opens`")

    @pytest.fixture
    def place(self) -> str:
        """A place that nobody has used."""
        return uuid.uuid4().hex

    @pytest.fixture
    def store(self, opens: Callable[[str], Store], place: str) -> Store:
        """An empty store."""
        return opens(place)

    def test_what_was_put_is_there(self, store: Store) -> None:
        """All of it, in parts, and as a memoryview; writing it again does no harm."""
        data = os.urandom(100_000)
        for _ in range(2):
            store.put("runs/a/b", memoryview(data))
        stored = store.get("runs/a/b", 100_000)
        assert stored.data == data
        assert stored.tag
        assert store.read("runs/a/b", 0, 1) == data[:1]
        assert store.read("runs/a/b", 99_990, 10) == data[-10:]
        assert store.read("runs/a/b", 500, 70_000) == data[500:70_500]
        store.put("empty", b"")
        assert store.get("empty", 0).data == b""

    def test_large_objects_travel_in_parts(self, store: Store) -> None:
        """Objects past the size at which they are cut, on the way there and back."""
        data = os.urandom(20 << 20)
        store.put("large", data)
        with ThreadPoolExecutor(4) as pool:
            assert fetch(store, "large", len(data), pool) == data
        assert fetch(store, "large", len(data)) == data

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        """An object that never was, one that is only the beginning of a name, one below an object."""
        store.put("runs/a/b", b"x")
        for name in ("nothing", "runs", "runs/a", "runs/a/b/c"):
            with pytest.raises(NotFound):
                store.get(name, 10)
            with pytest.raises(NotFound):
                store.read(name, 0, 1)
        assert exists(store, "runs/a/b")
        assert not exists(store, "runs/a")
        with pytest.raises(NotFound):
            store.changed("nothing", "a tag", 0)
        assert store.changed("nothing", None, 0) is None

    def test_bounds(self, store: Store) -> None:
        """More bytes than expected are not read, and bytes past the end are an error, told at once."""
        store.put("a", b"12345")
        assert store.get("a", 5).data == b"12345"
        for work, error in (
            (lambda: store.get("a", 4), LimitExceeded),
            (lambda: fetch(store, "a", 6), LimitExceeded),
            (lambda: store.read("a", 3, 3), Truncated),
            (lambda: store.read("a", 9, 3), Truncated),
        ):
            with pytest.raises(error):
                work()

    @pytest.mark.parametrize(
        "name",
        ["", "/", "a/", "/a", "a//b", ".", "..", "../a", "a/../b", ".tmp/x", "a/.b", "a b", "a\0", "ä", "a" * 401],
    )
    def test_names_that_could_mean_something_else_are_refused(self, store: Store, name: str) -> None:
        """Nothing that another store would read otherwise, or that leads out of this one."""
        for work in (
            lambda: store.get(name, 1),
            lambda: store.read(name, 0, 1),
            lambda: store.put(name, b""),
            lambda: store.swap(name, b"", None),
            lambda: store.delete([name]),
        ):
            with pytest.raises(InvalidField):
                work()

    def test_lists_what_is_there(self, store: Store) -> None:
        """By prefix, with sizes and times; deleted objects are gone, and deleting them again does no harm."""
        before = time.time() - 2
        names = [f"runs/{a}/{b}" for a in ("x", "xy") for b in ("1", "2/3")]
        for name in names:
            store.put(name, name.encode())
        store.put("other", b"")
        listed = {item.name: item for item in store.list("runs/")}
        assert sorted(listed) == names
        for name, item in listed.items():
            assert item.size == len(name)
            assert before < item.time < time.time() + 2
        assert sorted(item.name for item in store.list("runs/x/")) == names[:2]
        assert sorted(item.name for item in store.list("runs/x")) == names
        assert sorted(item.name for item in store.list("runs/xy/2")) == names[3:]
        assert sorted(item.name for item in store.list("")) == ["other", *names]
        assert list(store.list("nothing/")) == []
        store.delete([*names[1:], "never/was"])
        assert [item.name for item in store.list("runs/")] == names[:1]
        store.delete(names)
        store.delete([])
        assert list(store.list("runs/")) == []
        with pytest.raises(NotFound):
            store.get(names[0], 100)

    def test_many_objects(self, store: Store) -> None:
        """More than a page of a listing, or a request to delete, can hold."""
        names = [f"many/{i:04}" for i in range(1005)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, b"1"), names))
        assert sorted(item.name for item in store.list("many/")) == names
        store.delete(names)
        assert list(store.list("many/")) == []

    def test_deleting_objects_of_which_some_are_gone(self, store: Store) -> None:
        """A repeated request meets what it has deleted before; the others go all the same."""
        names = [f"some/{i:04}" for i in range(600)]
        kept = [name for i, name in enumerate(names) if i not in (0, 100, 599)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, b"1"), kept))
        store.delete(names)
        assert list(store.list("some/")) == []

    def test_swaps_hold_their_condition(self, store: Store) -> None:
        """Created once, then replaced by whoever knows the tag; a refused swap changes nothing."""
        with pytest.raises(Refused):
            store.swap("head", b"0", "a tag")
        first = store.swap("head", b"1", None)
        with pytest.raises(Refused):
            store.swap("head", b"2", None)
        assert store.get("head", 10) == (b"1", first)
        second = store.swap("head", b"3", first)
        assert second != first
        with pytest.raises(Refused):
            store.swap("head", b"4", first)
        assert store.get("head", 10) == (b"3", second)

    def test_one_of_many_wins(self, opens: Callable[[str], Store], place: str) -> None:
        """Of four writers at once exactly one creates the head, and exactly one replaces it, round after round."""
        stores = [opens(place) for _ in range(4)]
        tag: str | None = None
        for n in range(3):
            start = threading.Barrier(len(stores))

            def write(i: int, n: int = n, tag: str | None = tag, start: threading.Barrier = start) -> str | None:
                start.wait()
                try:
                    return stores[i].swap("head", b"%d %d" % (n, i), tag)
                except Refused:
                    return None

            with ThreadPoolExecutor(len(stores)) as pool:
                tags = list(pool.map(write, range(len(stores))))
            winners = [i for i, won in enumerate(tags) if won is not None]
            assert len(winners) == 1
            tag = tags[winners[0]]
            assert stores[0].get("head", 100) == (b"%d %d" % (n, winners[0]), tag)

    def test_changes_are_noticed(self, opens: Callable[[str], Store], place: str) -> None:
        """At once if there is another one, after a while if one comes, not at all if none does."""
        reader = opens(place)
        writer = opens(place)
        later = threading.Timer(0.3, lambda: writer.swap("head", b"1", None))
        later.start()
        first = reader.changed("head", None, 10)
        later.join()
        assert first is not None
        assert first.data == b"1"
        started = time.monotonic()
        assert reader.changed("head", first.tag, 0.3) is None
        assert 0.25 < time.monotonic() - started < 5
        later = threading.Timer(0.3, lambda: writer.swap("head", b"2", first.tag))
        later.start()
        again = reader.changed("head", first.tag, 10)
        later.join()
        assert again == reader.get("head", 10)
        assert reader.changed("head", first.tag, 0) == again

    def test_a_run_goes_through_it(self, opens: Callable[[str], Store], place: str) -> None:
        """Versions arrive bit for bit, also at one who comes late; a publisher that comes second takes over."""
        steps = versions(4)
        weights = {name: array.copy() for name, array in steps[0].items()}
        rollout, late = (blank(tensor_table(weights)) for _ in range(2))
        publisher = Publisher(opens(place), weights)
        subscriber = Subscriber(opens(place), rollout)
        for version, step in enumerate(steps[:3]):
            for name, array in step.items():
                weights[name][...] = array
            publisher.publish()
            subscriber.sync()
            assert subscriber.version == version
            assert bits(rollout) == bits(step)
        Subscriber(opens(place), late).sync()
        assert bits(late) == bits(steps[2])
        assert publisher.wait(2, 2, 5) == 2
        assert list(faults(publisher.store)) == []
        second = Publisher(opens(place), steps[3])
        second.publish()
        with pytest.raises(Fenced):
            publisher.publish()
        subscriber.sync()
        assert subscriber.run == second.run
        assert bits(rollout) == bits(steps[3])
