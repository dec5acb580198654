"""Verify an engine: compare its live weights with a checkpoint or a run, however it got them.

    caller:  names, dtypes and shapes of the checkpoint ──► engine: digests of what all ranks have ──► caller: compare

The engine reads its own memory only. Checkpoint and store are read here, and a version of a run is fetched only if the
digest of the engine is not that of the version. vLLM and SGLang call their ranks between two steps; see their pages in
docs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ..errors import SessionError
from ..parallel import require_threads
from ..session.options import require_timeout
from ..session.store.records import HEAD, layout_to_bytes
from ..session.store.signing import PublicKeys
from ..session.store.stored_run import StoredRun
from ..sources import open_checkpoint
from ..transport.stores.base import Store
from ..transport.stores.opening import open_store
from ..transport.stores.versioned import split_version
from ..weights.digest import Digest, element_sums, table_digest
from ..weights.dtypes import DType
from ..weights.engine_sums import EngineSums, RankSums
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.table import TensorTable
from ..weights.tensors import memory_of, tensor_table
from .engine_server import EngineServer, ServerError, require_address
from .vllm_plugin import SUMS

AskSums = Callable[[TensorTable], EngineSums]


@dataclass(frozen=True)
class ExpectedWeights:
    """What an engine should have.

    Attributes:
        label: What it is, in words.
        table: Its tensors.
        weights: Returns them.
        digest: Their digest, if it is known without reading them.
        run: The run, if they are a version of one.
        version: The version.
    """

    label: str
    table: TensorTable
    weights: Callable[[], Weights]
    digest: Digest | None = None
    run: str | None = None
    version: int | None = None


@dataclass(frozen=True)
class EngineComparison:
    """How the weights of an engine compare with what it should have.

    Attributes:
        expected: What they were compared with, in words.
        tensors: How many tensors were compared.
        bytes: How many bytes these have in the engine.
        different: The checkpoint tensors that differ.
        uncompared: Tensors that could not be compared, and why: of the checkpoint, and of the engine.
        cast: Tensors that the engine has in another dtype, and the dtype: what they were cast to was compared.
        run: The run, if they were compared with one.
        version: Its version.
    """

    expected: str
    tensors: int
    bytes: int
    different: tuple[str, ...] = ()
    uncompared: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, str] = field(default_factory=dict)
    run: str | None = None
    version: int | None = None

    @property
    def answer(self) -> str:
        """`equal`; `different` if a tensor differs; `incomplete` if none does, but some could not be compared."""
        if self.different:
            return "different"
        return "incomplete" if self.uncompared else "equal"


def verify_engine(
    engine: Any,
    weights: str | PathLike[str] | Weights,
    *,
    trusted_keys: PublicKeys | None = None,
    token: str | None = None,
    api_key: str | None = None,
    timeout: float = 600.0,
    threads: int | None = None,
) -> EngineComparison:
    """Compare the live weights of an engine with what it should have, bit by bit. Nothing in the engine changes.

    Args:
        engine: The address of a vLLM or SGLang server, or an `LLM` of vLLM in this process.
        weights: A checkpoint folder or safetensors file, a run in a store (`URL`, or `URL@VERSION`), or tensors by
            name. This process reads them, the engine does not.
        trusted_keys: The public keys to trust, as for a `Subscriber`.
        token: The token of an http(s) store.
        api_key: The key of the engine's server, if it requires one; for SGLang its admin key.
        timeout: How many seconds to wait for the engine.
        threads: How many threads read the checkpoint.

    Returns:
        The comparison. Its `answer` is `equal` only if every tensor was compared.

    Raises:
        SessionError: The engine cannot be reached, or cannot tell what it has.

    >>> verify_engine("http://localhost:8000", "s3://bucket/run@42").answer                        # doctest: +SKIP
    'equal'
    """
    require_threads(threads)
    ask = asking(engine, api_key, timeout)
    if isinstance(weights, Mapping):
        return compare(ask, ExpectedWeights("these tensors", tensor_table(weights), lambda: weights), threads)
    url, version = split_version(fspath(weights))
    if not is_run(url, version):
        return compare(ask, expected_checkpoint(Path(url)), threads)
    with contextlib.closing(open_store(url, token=token)) as store:
        return compare(ask, expected_version(store, version, trusted_keys, threads), threads)


def is_run(url: str, version: int | None) -> bool:
    """Whether a run in a store is meant, not a checkpoint."""
    return "://" in url or version is not None or (Path(url) / HEAD).is_file()


def expected_checkpoint(path: Path) -> ExpectedWeights:
    """A checkpoint on disk."""
    checkpoint = open_checkpoint(path)
    return ExpectedWeights(str(path), tensor_table(checkpoint), lambda: checkpoint)


def expected_version(
    store: Store, version: int | None, trusted_keys: PublicKeys | None = None, threads: int | None = None
) -> ExpectedWeights:
    """A version of the run in a store, by default the newest. The store must stay open."""
    run = StoredRun.read(store, trusted_keys)
    last = run.head.version if version is None else version
    run.require(last)
    label = f"version {last} of run {run.head.run}"
    table = run.run_at(last).layout
    return ExpectedWeights(label, table, lambda: run.weights(last, threads), run.digests[last], run.head.run, last)


def compare(ask: AskSums, expected: ExpectedWeights, threads: int | None = None) -> EngineComparison:
    """Ask an engine for the digests of its weights, and compare them."""
    sums = ask(expected.table)
    table = sums.engine_table(expected.table)
    specs = [spec for spec in table.specs if spec.name in sums.sums]
    different = {*sums.inconsistent}
    total = sum(sums.sums.values(), table_digest(table))
    if different or len(specs) < len(table) or total != expected.digest or table is not expected.table:
        weights = expected.weights()
        for spec in specs:
            tensor = _cast(spec.name, weights[spec.name], spec.dtype)
            if sums.sums[spec.name] != _tensor_sums(spec.name, tensor, threads):
                different.add(spec.name)
    return EngineComparison(
        expected.label,
        len(specs),
        sum(spec.numel * spec.dtype.width for spec in specs),
        tuple(sorted(different)),
        sums.uncompared,
        sums.dtypes,
        expected.run,
        expected.version,
    )


def _tensor_sums(name: str, tensor: Any, threads: int | None) -> Digest:
    local = LocalWeights.of({name: tensor})
    return element_sums(local, local.places, threads)


def _cast(name: str, tensor: Any, dtype: DType) -> Any:
    """A tensor in the dtype that an engine has it in."""
    memory = memory_of(name, tensor)
    if memory.dtype is dtype:
        return tensor
    import torch

    wide = torch.from_numpy(memory.copied()).view(getattr(torch, memory.dtype.name))
    return wide.to(getattr(torch, dtype.name))


def asking(engine: Any, api_key: str | None = None, timeout: float = 600.0) -> AskSums:
    """How to ask an engine for the digests of its weights: an `LLM`, or a server by its address."""
    require_timeout("timeout", timeout)
    if not isinstance(engine, str):
        return _VllmEngine(lambda method, args: engine.collective_rpc(method, args=args)).sums
    url = require_address("engine", engine)
    server = EngineServer(url, api_key, timeout)
    if _is_vllm(server):
        return _VllmEngine(partial(_post_to_workers, server)).sums
    from .sglang import Client

    return Client(url, api_key=api_key, timeout=timeout).sums


def _is_vllm(server: EngineServer) -> bool:
    """Whether a server is vLLM's: only that has this path."""
    try:
        return "version" in server.ask("version")
    except ServerError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
    return False


def _post_to_workers(server: EngineServer, method: str, args: tuple[str, ...]) -> list[Any]:
    """What all workers of a vLLM server answer."""
    try:
        return list(server.ask("collective_rpc", {"method": method, "args": args})["results"])
    except ServerError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
    raise SessionError(f"{server.url} does not let its workers be called: start vLLM with VLLM_SERVER_DEV_MODE=1")


class _VllmEngine:
    """An engine of vLLM, whose workers have the method of sparserl's plugin."""

    def __init__(self, call_workers: Callable[[str, tuple[str, ...]], list[Any]]) -> None:
        self._call_workers = call_workers

    def sums(self, table: TensorTable) -> EngineSums:
        """The digests that all ranks have of the tensors of a table."""
        if not all(SUMS in names for names in self._call_workers("__dir__", ())):  # a missing method is no mere error
            raise SessionError("sparserl is not installed where vLLM runs: pip install it there, and start vLLM again")
        answers = self._call_workers(SUMS, (layout_to_bytes(table).decode(),))
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise SessionError(f"rank {rank} of the engine: {answer['error']}")
        return EngineSums.combine(table, map(RankSums.of, answers))
