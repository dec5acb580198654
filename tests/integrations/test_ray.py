"""A real Ray on this machine: its object store as a store; a trainer and four rollouts as actors, and their deaths."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import sparserl
from sparserl.errors import StoreError
from sparserl.testing import StoreConformance
from sparserl.testing.weights import blank

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'sparserl[ray]'")
    from sparserl.integrations.ray import PublisherActor, RayStore, SubscriberActor

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of which it has many


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
        ray.init(num_cpus=6, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


class TestStore(StoreConformance):
    """Ray's object store does what every store does."""

    @pytest.fixture
    def opens(self) -> Iterator[Callable[[str], RayStore]]:
        stores: list[RayStore] = []

        def open(place: str) -> RayStore:
            stores.append(RayStore(place))
            return stores[-1]

        yield open
        for store in stores[:1]:
            store.destroy()


def policy() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(500, 700)).astype(np.float32), "b": rng.normal(size=700).astype(np.float16)}


def empty() -> dict[str, sparserl.Bits]:
    return blank(sparserl.tensor_table(policy()))


def step(weights: dict[str, np.ndarray], seed: int) -> None:
    """Change some elements in place."""
    rng = np.random.default_rng(seed)
    for array in weights.values():
        words = array.reshape(-1).view(f"u{array.itemsize}")
        words[rng.random(words.size) < 0.02] ^= 1


def digest(weights: object) -> str:
    return sparserl.digest(weights).hex


def pid(_: object) -> int:
    return os.getpid()


def test_a_rollout_is_killed_and_comes_back() -> None:
    """Four rollouts follow a trainer; one that is killed starts again, and holds the next version with the others."""
    store = RayStore(uuid.uuid4().hex)
    trainer = ray.remote(PublisherActor).remote(store, policy)
    again = {"max_restarts": -1, "max_task_retries": -1}
    rollouts = [ray.remote(SubscriberActor).options(**again).remote(store, empty) for _ in range(4)]

    def publish_and_sync(seed: int) -> list[str]:
        """What each rollout did to get to the new version, all of whose bits it then has."""
        ray.get(trainer.call.remote(step, seed))
        published = ray.get(trainer.publish.remote())
        assert published.version == seed
        reports = ray.get([rollout.sync.remote() for rollout in rollouts])
        assert [report.version for report in reports] == [seed] * 4
        wanted = {published.digest, ray.get(trainer.call.remote(digest))}
        assert {*wanted, *ray.get([rollout.call.remote(digest) for rollout in rollouts])} == {published.digest}
        return [report.kind for report in reports]

    assert publish_and_sync(0) == ["anchor"] * 4
    large = [item.name for item in store.list("") if item.size > 1 << 20]
    assert large, "the weights should lie in the object store"
    (reference,) = store._find(large[0])[0]
    assert isinstance(reference, ray.ObjectRef)
    assert publish_and_sync(1) == ["patch"] * 4
    before = ray.get(rollouts[2].call.remote(pid))
    os.kill(before, signal.SIGKILL)
    assert publish_and_sync(2) == ["patch", "patch", "anchor", "patch"]
    assert ray.get(rollouts[2].call.remote(pid)) != before
    assert publish_and_sync(3) == ["patch"] * 4

    newest = ray.get(rollouts[0].call.remote(digest))
    os.kill(ray.get(trainer.call.remote(pid)), signal.SIGKILL)
    mine = empty()
    sparserl.Subscriber(pickle.loads(pickle.dumps(store)), mine).sync()
    assert digest(mine) == newest, "what a trainer has published outlives it"
    for actor in rollouts:
        ray.kill(actor)
    store.destroy()
    with pytest.raises(StoreError, match="the actor that held it has died"):
        store.get("head.json", 10_000)
