"""The ranks of a sharded trainer, one of which is killed over and over: those that come after go on with its run.

    python -m tests.session.soak_writers --kills 300 --store file|seaweedfs|moto --seed 1

Every life has a drawn number of ranks, with what each has saved or from the store alone. A drawn rank is killed before
a drawn call of its own, or from outside at a drawn moment; then the others are, as a launcher does it. After each kill
a subscriber goes to the newest version. A line shows how far it is; the last line is a summary in JSON.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import sparserl
from sparserl.errors import NotFound
from sparserl.session.store.retention import read_head
from sparserl.weights.region import Region
from sparserl.weights.shards import Part, Shards
from tests.session.killed_processes import FILES, ended, fork, has_lost_head, settled, sha, synced, weights_at
from tests.session.soak import Lives, main

VERSIONS = 4  # that a life publishes if nothing ends it
CALLS = 400  # about as many as a rank makes in that time
PROFILES = ("auto", "ctx", "gap")


def shards(n: int, rank: int, size: int) -> Shards:
    """What a rank has of the weights of a step: some rows of every tensor; the last rank has what has no rows."""
    weights = weights_at(n)
    table = sparserl.tensor_table(weights)
    parts = []
    for name, bits in weights.items():
        shape = bits.array.shape
        if not shape or shape[0] < size:
            if rank == size - 1:
                parts.append(Part(name, Region((0,) * len(shape), shape), bits))
            continue
        first, last = (shape[0] * r // size for r in (rank, rank + 1))
        region = Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
        parts.append(Part(name, region, type(bits)(bits.array[first:last], bits.dtype)))
    return Shards(table, parts)


class Trainer:
    """A source: the shards of one rank at a step."""

    def __init__(self, n: int, rank: int, size: int) -> None:
        self.n = n
        self._rank = rank
        self._size = size

    def weights(self) -> Shards:
        return shards(self.n, self._rank, self._size)


class WriterSoak(Lives):
    """Ranks that publish together, and what they left behind."""

    def rank(self, life: int, rank: int, size: int, options: dict[str, Any]) -> None:
        """The life of a rank."""
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{self.root}/init-{life}", rank=rank, world_size=size)
        trainer = Trainer(life * 10_000, rank, size)
        publisher = sparserl.Publisher(
            self.store(),
            trainer,
            files=FILES,
            writers=dist.group.WORLD,
            threads=1,
            timeout=120,
            new_run=has_lost_head(self.store()),
            **options,
        )
        for n in range(trainer.n, trainer.n + VERSIONS):
            trainer.n = n
            version = 0 if publisher.version is None else publisher.version + 1
            if rank == 0:
                self.journal.add("attempt", run=publisher.run, version=version, sha=sha(weights_at(n)), n=n)
            report = publisher.publish(step=n)
            assert report.version == version
            if rank == 0:
                self.journal.add("published", run=report.run, version=version, sha=sha(weights_at(n)))
        publisher.close()

    def live(self, victim: int | None = None) -> bool:
        """One life of all ranks; whether they came to their end. A rank may be the victim."""
        self.lives += 1
        life = self.lives
        size = self.random.randint(1, 4)
        has_state = self.random.random() < 0.6
        options = {
            "profile": self.random.choice(PROFILES),
            "state": self.root / "state" if has_state else None,
            "anchor_after": self.random.choice((0.0, 0.5, 100.0)),
            "keep_anchors": 1,
            "grace": 0.0 if self.server is None else 1.5,
        }
        by_itself = self.random.random() < 0.7
        calls = self.random.randrange(CALLS)
        moment = time.monotonic() + (120 if by_itself else self.random.uniform(0.05, 1.5))
        children = []
        for rank in range(size):

            def work(rank: int = rank) -> None:
                if victim is not None and by_itself and rank == victim % size:
                    self.fuse.note = lambda where: self.journal.add("killed", who=f"rank {min(rank, 1)}", where=where)
                    self.fuse.left = calls
                self.rank(life, rank, size, options)

            children.append(fork(work))
        if victim is None:
            return all(ended(child) for child in children)
        chosen = children[victim % size]
        while not os.waitid(os.P_PID, chosen, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > moment:
                os.kill(chosen, signal.SIGKILL)
                self.kills[f"rank {min(victim % size, 1)}: at a moment"] += 1
                break
            time.sleep(0.001)
        lived = ended(chosen)
        for child in set(children) - {chosen}:
            if lived:
                ended(child)
            else:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)  # perhaps it has noticed that a rank is gone
        return lived

    def head(self) -> tuple[str, int] | None:
        """Run and version of the head. A child looks: clients of a server do not survive a fork."""

        def look() -> None:
            try:
                head = read_head(self.store())[0]
            except NotFound:
                self.journal.add("head", at=None)
            else:
                self.journal.add("head", at=[head.run, head.version])

        assert ended(fork(look))
        at = [line["at"] for line in self.journal.read() if line["what"] == "head"][-1]
        return None if at is None else (at[0], at[1])

    def run(self, kills: int) -> dict[str, Any]:
        done = 0
        while done < kills:
            before = self.head()
            done += not self.live(self.random.randrange(12))
            after = self.head()
            if before is not None:
                assert after is not None
                assert after[0] == before[0], "a new run has begun"
                assert after[1] >= before[1]
            if after is not None:
                assert ended(fork(lambda: synced(self.store(), self.journal)))
            self.show(done, kills)
        assert self.live()
        assert ended(fork(lambda: synced(self.store(), self.journal)))
        assert ended(fork(lambda: settled(self.store())))
        published = [line["sha"] for line in self.journal.read() if line["what"] == "published"]
        committed = [line["sha"] for line in self.journal.read() if line["what"] == "committed"]
        assert committed[-1] == published[-1]
        summary = self.summary(done, writers=True)
        assert summary["runs"] == 1
        return summary


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed  # noqa: F401  # every life has it then

    main(WriterSoak, __doc__, kills=300)
