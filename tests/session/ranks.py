"""Real ranks: processes with a Gloo group over loopback, each with a pipe to the test; and such without either."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import traceback
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np

CONTEXT = get_context("forkserver")  # torch is imported once, not by every rank
CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "sparserl.session.group.relay", "tests.session.ranks"])
SHAPES = {"bf16": ("u2", (257, 33)), "f32": ("u4", (1000,)), "f8": ("u1", (4097,)), "none": ("u2", (0, 3))}


def port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def ranks(size, work, *args):
    """Processes that run `work(rank, group, pipe, *args)`; yields (process, pipe) of each. None outlives the block."""
    at, started = port(), []
    try:
        for rank in range(size):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_begin, args=(rank, size, at, there, work, args), daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        yield started
    finally:
        for process, pipe in started:
            pipe.close()
            if process.is_alive():
                process.kill()
            process.join()


def results(started, wait=240):
    """What each rank returned; raises where one failed."""
    out = []
    for rank, (_, pipe) in enumerate(started):
        assert pipe.poll(wait), f"rank {rank} has nothing to say"
        kind, value = pipe.recv()
        assert kind == "done", f"rank {rank}: {value}"
        out.append(value)
    return out


def _begin(rank, size, at, pipe, work, args):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["SPARSERL_THREADS"] = "1"
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{at}", rank=rank, world_size=size)
        pipe.send(("done", work(rank, dist.new_group(list(range(size))), pipe, *args)))
    except BaseException:  # noqa: BLE001  # the test raises it
        pipe.send(("failed", traceback.format_exc()))
    finally:
        with contextlib.suppress(EOFError):
            pipe.recv()  # rank 0 has the store of the group: it stays until the test is over
        os._exit(0)  # a group of which a rank is gone does not go down quietly


def launch(work, size, folder, *args):
    """Processes that run `work(rank, size, folder, *args)`, and print into files of that folder."""
    started = [CONTEXT.Process(target=_speak, args=(work, rank, size, str(folder), *args)) for rank in range(size)]
    for process in started:
        process.start()
    return started


def finish(started, folder, but=None):
    """What every rank printed; each must end well, but one that was killed."""
    said = []
    try:
        for rank, process in enumerate(started):
            process.join(600)
            said.append(_said(folder, rank).read_text())
            assert rank == but or process.exitcode == 0, f"rank {rank}: {process.exitcode}\n{said[-1]}"
    finally:
        for process in started:
            process.kill()
            process.join()
    return said


def _said(folder, rank):
    return Path(folder) / f"said-{rank}"


def _speak(work, rank, size, folder, *args):
    with _said(folder, rank).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    os.environ["SPARSERL_THREADS"] = "1"
    work(rank, size, folder, *args)


def together(work, args, size):
    """Run `work(rank, *args)` in so many processes. What one of them raises is raised here."""
    from torch.multiprocessing import start_processes

    start_processes(work, args, size, start_method="forkserver")


def policy(seed, shapes=SHAPES):
    """The bits of weights of several dtypes: every pattern may be there, NaNs and both zeros among them."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 8 * int(kind[1]), shape, kind) for name, (kind, shape) in shapes.items()}


def tensors(bits):
    """Torch tensors over the same memory."""
    import torch

    kinds = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
    return {name: torch.from_numpy(b.view(f"i{b.itemsize}")).view(kinds[b.itemsize]) for name, b in bits.items()}


def step(bits, rng, share=0.01):
    """Change some bits in place: any bit of an element, also only the sign of a zero."""
    for array in bits.values():
        flat = array.reshape(-1)
        at = np.flatnonzero(rng.random(flat.size) < share)
        flat[at] ^= rng.integers(1, 1 << 8 * flat.itemsize, at.size, flat.dtype)
        flat[:1] = 0 if rng.random() < 0.5 else 1 << 8 * flat.itemsize - 1


def seal(bits):
    """What tells one state of the bits from another."""
    return hashlib.sha256(b"".join(bits[name].tobytes() for name in sorted(bits))).hexdigest()
