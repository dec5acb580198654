"""A line over a process group: frames, notes, and who is missing."""

from __future__ import annotations

import time

import pytest

from sparserl.errors import PeerLost
from sparserl.transport.groups.frames import Frame
from sparserl.transport.groups.line import CalledOff, Line
from tests.session.ranks import port, ranks, results

pytest.importorskip("torch")

SIZES = (5, 0, 1, 70_000, 3, 0, 1 << 20, 2)


def buckets(seed):
    return [bytes([(seed + i) % 256]) * size for i, size in enumerate(SIZES)]


def stops_after(count):
    yield from buckets(7)[:count]
    raise MemoryError("no room to encode")


def talk(rank, group, pipe):
    line = Line(group, 60.0)
    long = bytes(range(256)) * 10_000
    line.write_note(f"long/{rank}", long)
    line.write_note(f"short/{rank}", b"")
    assert line.await_notes({0: "long/0", 1: "long/1"}, "write") == {0: long, 1: long}
    assert line.read_note("short/1") in (b"", None)
    assert line.read_note("nobody wrote this") is None
    for source in (0, 1, 0):
        if rank == source:
            line.send(SIZES[0], iter(buckets(source)), len(SIZES))
        else:
            assert list(line.receive(source, SIZES[0], len(SIZES))) == buckets(source)
    assert line.traffic.messages == 3 * len(SIZES)
    for count in (1, 2, 5):  # the sender fails in the middle: all know, and the line is in order
        if rank == 0:
            with pytest.raises(MemoryError):
                line.send(SIZES[0], stops_after(count), len(SIZES))
        else:
            got = []
            with pytest.raises(CalledOff, match="rank 0"):
                got.extend(line.receive(0, SIZES[0], len(SIZES)))
    if rank == 0:
        line.send(SIZES[0], iter(buckets(3)), len(SIZES))
    else:
        assert list(line.receive(0, SIZES[0], len(SIZES))) == buckets(3)
    return _apart(rank, line)


def _apart(rank, line):
    """The length of the next frame is altered on the way: going on would leave the ranks out of step."""
    started = time.monotonic()
    if rank == 1:
        tail = Frame.tail
        Frame.tail = lambda frame: b"\1" + tail(frame)[1:]
        with pytest.raises(PeerLost, match="altered") as raised:
            list(line.receive(0, SIZES[0], len(SIZES)))
    else:
        line.send(SIZES[0], iter(buckets(3)[:1]), 1)
        with pytest.raises(PeerLost) as raised:
            line.await_notes({1: "never"}, "go on")
    assert time.monotonic() - started < 40  # the alarm was heard: nobody waits until time is up
    with pytest.raises(PeerLost, match="build a new one"):
        line.write_note("more", b"")
    line.close()
    return str(raised.value)


@pytest.mark.long
def test_frames_and_notes_arrive_as_they_were_sent():
    """Of any length, from any rank; a sender that fails is heard of; a line that is out of step is given up."""
    with ranks(2, talk) as started:
        messages = results(started)
    assert "all ranks answer" in messages[0]


def missing(rank, group, pipe):
    if rank == 1:
        pipe.recv()
        return ""
    line = Line(group, 1.0)
    with pytest.raises(PeerLost, match=r"rank 1 did not write within 1 s: it has never answered"):
        line.await_notes({1: "note"}, "write")
    assert line.broken is None
    return str(line.read_note("note"))


def test_a_rank_that_says_nothing_is_named():
    """Without a broadcast begun, the line stays in order."""
    with ranks(2, missing) as started:
        assert results(started[:1]) == ["None"]


def reborn(rank, group, pipe, at):
    """Groups over one store, one after the other, as they are with the agent of torchrun."""
    import torch.distributed as dist

    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", at, 2, rank == 0)
    lines = []
    for turn in range(3):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        world = dist.group.WORLD
        if rank == 1 and turn == 2:
            lines.append(Line(world, 60.0))  # before rank 0, which still beats for the old groups
            time.sleep(1.2)
            assert lines[-1].read_note("open") is None
            assert lines[-1].read_note("answer") is None
        dist.barrier()
        if rank == 0 or turn == 0:
            lines.append(Line(world, 60.0))  # rank 1 sits the second group out
        if turn != 1:
            lines[-1].write_note("answer" if rank else "open", bytes([turn]))
            assert lines[-1].await_notes({1 - rank: "open" if rank else "answer"}, "write") == {1 - rank: bytes([turn])}
            if rank == 0:  # another line over a group that is known
                assert Line(world, 60.0).read_note("answer") == bytes([turn])
        else:
            assert rank == 1 or lines[-1].read_note("open") is None
        dist.barrier()
        dist.destroy_process_group()
        _forget_addresses(store, rank, turn)
    return len(lines)


def _forget_addresses(store, rank, turn):
    """Gloo may try to connect to the old group, where its addresses are still in the store."""
    store.add(f"left/{turn}", 1)
    while store.add(f"left/{turn}", 0) < 2:
        time.sleep(0.01)
    if rank == 0:
        for key in store.list_keys():
            if "cpu/" in key:
                store.delete_key(key)
        store.set(f"forgotten/{turn}", "")
    store.wait([f"forgotten/{turn}"])


def test_a_group_built_anew_over_the_same_store_hears_nothing_of_the_old_one():
    """Whichever rank comes first, and though one had no line over the group before."""
    with ranks(2, reborn, port()) as started:
        assert results(started) == [3, 2]
