"""The few machine operations that NumPy-like code cannot say: vector compares, prefetch, popcount, raw memory.

Addresses are int64. Where a function takes a `tag`, only the tag's dtype matters: an empty array that tells the
width of the elements behind the address. LLVM lowers the vectors to AVX-512, AVX2, SSE2 or NEON.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils, config, event
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger("sparserl")
_I1, _I8, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 32, 64))
_LANES = 16  # of the digest: two AVX-512 registers in flight hide the latency of the multiplications
GOLDEN = 0x9E3779B97F4A7C15
ROTATE = 41
_ALL = (1 << 64) - 1


def kernel(function: F) -> F:
    """Compile for the CPU without the GIL, cached on disk where a folder for it can be written."""
    try:
        return cast("F", njit(nogil=True, cache=True)(function))
    except RuntimeError:
        return cast("F", njit(nogil=True)(function))


class _Notice(event.Listener):  # type: ignore[misc]  # Numba has no types
    """Says once that kernels are being compiled, so that nobody takes the first call for a hang.

    It is for people: it goes to a terminal, or to the handlers of a program that logs, and into nobody's pipe.
    """

    said = False

    def on_start(self, event: Any) -> None:
        ours = event.data["dispatcher"].py_func.__module__.startswith(__package__)
        if ours and not self.said and (_LOG.hasHandlers() or sys.stderr.isatty()):
            self.said = True
            _LOG.warning(
                "sparserl compiles its kernels for this processor: once for every dtype, up to half a minute for the "
                "first; later runs find them in Numba's cache"
            )

    def on_end(self, event: Any) -> None:
        """Nothing to say."""


event.register("numba:compile", _Notice())

inline = kernel  # for small functions that kernels call: LLVM puts them in line


@inline
def alive(array: Any) -> None:
    """Use an array once more: Numba frees what a kernel has made behind its last use, whoever has its address."""


def machine(function: Callable[..., Any]) -> Any:
    """Write LLVM by hand; kernels call the result with one argument less, the typing context."""
    return intrinsic(function)


def _pointer(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def _element(ctx: Any, tag: Any) -> Any:
    return ctx.get_data_type(tag.dtype)


def splat(b: Any, value: Any, vector: Any) -> Any:
    """A vector with the value in every lane."""
    empty = ir.Constant(vector, ir.Undefined)
    zeros = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return b.shuffle_vector(b.insert_element(empty, value, _I32(0)), empty, zeros)


@machine
def width(_: Any, tag: Any) -> Any:
    """Bytes of an element, known to the compiler, which the `itemsize` of an array is not."""
    return types.int64(tag), lambda ctx, b, sig, args: _I64(sig.args[0].dtype.bitwidth // 8)


@machine
def load(_: Any, tag: Any, address: Any) -> Any:
    """The element at an address, which need not be aligned."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.load(_pointer(b, args[1], _element(ctx, sig.args[0])))
        value.align = 1
        return value

    return tag.dtype(tag, types.int64), codegen


@machine
def store(_: Any, tag: Any, address: Any, value: Any) -> Any:
    """Write an element to an address, which need not be aligned."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[2], _pointer(b, args[1], _element(ctx, sig.args[0]))).align = 1
        return ctx.get_dummy_value()

    return types.void(tag, types.int64, tag.dtype), codegen


@machine
def differ64(_: Any, tag: Any, left: Any, right: Any) -> Any:
    """Mask of the 64 elements at two addresses that differ; bit 0 is the first."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vector = ir.VectorType(_element(ctx, sig.args[0]), 64)
        x, y = (b.load(_pointer(b, a, vector)) for a in args[1:])
        x.align = y.align = 1
        return b.bitcast(b.icmp_unsigned("!=", x, y), _I64)

    return types.uint64(tag, types.int64, types.int64), codegen


@machine
def prefetch(_: Any, address: Any) -> Any:
    """Ask for the cache line at an address; any address is allowed."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        b.call(function, [_pointer(b, args[0], _I8), _I32(0), _I32(3), _I32(1)])
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


@machine
def lowest(_: Any, mask: Any) -> Any:
    """Index of the lowest set bit of a mask that is not zero."""
    return types.int64(types.uint64), lambda ctx, b, sig, args: b.cttz(args[0], _I1(1))


@machine
def highest(_: Any, value: Any) -> Any:
    """Index of the highest set bit of a value that is not zero."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.sub(_I64(63), b.ctlz(args[0], _I1(1)))

    return types.int64(types.uint64), codegen


@machine
def popcount(_: Any, mask: Any) -> Any:
    """Number of set bits."""
    return types.int64(types.uint64), lambda ctx, b, sig, args: b.ctpop(args[0])


@machine
def classify64(_: Any, kind: Any, address: Any, keep: Any, limits: Any, masks: Any, ranks: Any, row: Any) -> Any:
    """For each limit, the mask of the 64 elements at an address whose magnitude is below it, and how many there are.

    Where `kind` is unsigned, the magnitude is the bits in `keep`; where it is signed, the absolute value. Masks and
    int32 ranks have a row of so many items for each limit, and `masks` and `ranks` are addresses in the first row: the
    mask is stored there, and the rank that is there plus the number of elements goes behind it.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element = _element(ctx, sig.args[0])
        lanes = min(64, 512 // element.width)  # of a register: longer masks would have to be put together
        vector, part = ir.VectorType(element, lanes), ir.IntType(lanes)

        def everywhere(value: Any) -> Any:
            return splat(b, value if element.width == 64 else b.trunc(value, element), vector)

        def size(i: int) -> Any:
            x = b.load(_pointer(b, b.add(args[1], _I64(i * element.width // 8)), vector))
            x.align = 1
            if sig.args[0].dtype.signed:
                sign = b.ashr(x, ir.Constant(vector, [element.width - 1] * lanes))
                return b.sub(b.xor(x, sign), sign)
            return b.and_(x, everywhere(args[2]))

        sizes = [size(i) for i in range(0, 64, lanes)]
        for k in range(sig.args[3].count):
            limit = everywhere(b.extract_value(args[3], k))
            over = b.mul(args[6], _I64(k))
            mask_at, rank_at = b.add(args[4], b.mul(over, _I64(8))), b.add(args[5], b.mul(over, _I64(4)))
            count = b.load(_pointer(b, rank_at, _I32))
            for i, x in enumerate(sizes):
                mask = b.bitcast(b.icmp_unsigned("<", x, limit), part)
                b.store(mask, _pointer(b, b.add(mask_at, _I64(i * lanes // 8)), part)).align = 1
                bits = b.ctpop(mask)
                count = b.add(count, b.trunc(bits, _I32) if lanes > 32 else b.zext(bits, _I32) if lanes < 32 else bits)
            b.store(count, _pointer(b, b.add(rank_at, _I64(4)), _I32))
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(kind, i64, types.uint64, limits, i64, i64, i64), codegen


def _at_most(lanes: int) -> Any:
    @machine
    def at_most(_: Any, address: Any, value: Any) -> Any:
        """How many of the int32 numbers at an address are not above a value."""

        def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            vector = ir.VectorType(_I32, lanes)
            x = b.load(_pointer(b, args[0], vector))
            x.align = 4
            limit = splat(b, b.trunc(args[1], _I32), vector)
            mask = b.bitcast(b.icmp_signed("<=", x, limit), ir.IntType(lanes))
            return b.zext(b.ctpop(mask), _I64)

        return types.int64(types.int64, types.int64), codegen

    return at_most


at_most8, at_most16 = _at_most(8), _at_most(16)


def _has(feature: str) -> bool:
    """Whether the processor that Numba compiles for has a feature: this one, or the one that NUMBA_CPU_NAME names."""
    if config.CPU_NAME is not None:
        return f"+{feature}" in (config.CPU_FEATURES or "").split(",")
    return bool(binding.get_host_cpu_features().get(feature))


_HAS_PDEP = _has("bmi2")
HAS_EXPAND = _has("avx512vbmi2")  # words are spread over lanes in one instruction


@machine
def select(_: Any, mask: Any, rank: Any) -> Any:
    """Index of the set bit of a mask that has `rank` set bits below it; there must be one."""

    def deposit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.bmi.pdep.64")
        return b.cttz(b.call(function, [b.shl(_I64(1), args[1]), args[0]]), _I1(1))

    def halve(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        mask, rank, index = args[0], args[1], _I64(0)
        for width in (32, 16, 8, 4, 2, 1):
            low = b.ctpop(b.and_(mask, _I64((1 << width) - 1)))
            above = b.icmp_unsigned(">=", rank, low)
            rank = b.select(above, b.sub(rank, low), rank)
            mask = b.select(above, b.lshr(mask, _I64(width)), mask)
            index = b.select(above, b.add(index, _I64(width)), index)
        return index

    return types.int64(types.uint64, types.int64), deposit if _HAS_PDEP else halve


class _Rans:
    """What the steps of 16 rANS states have in common."""

    v1, v8, v16, v32, v64 = (ir.VectorType(k, 16) for k in (_I1, _I8, ir.IntType(16), _I32, _I64))

    def __init__(self, b: Any, states: Any) -> None:
        self.b, self.home = b, _pointer(b, states, self.v32)
        self.x = b.load(self.home)
        self.x.align = 4

    @classmethod
    def constant(cls, value: int) -> Any:
        return ir.Constant(cls.v32, [value] * 16)

    def call(self, name: str, kind: Any, *values: Any) -> Any:
        signature = ir.FunctionType(kind, [v.type for v in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, name), values)

    def gather(self, base: Any, index: Any, kind: Any) -> Any:
        """Items of a table of 32- or 64-bit numbers, one for each lane."""
        b, element = self.b, kind.element
        offset = b.zext(b.mul(index, self.constant(element.width // 8)), self.v64)
        places = b.inttoptr(b.add(splat(b, base, self.v64), offset), ir.VectorType(element.as_pointer(), 16))
        everywhere, nothing = ir.Constant(self.v1, [1] * 16), ir.Constant(kind, ir.Undefined)
        name = f"llvm.masked.gather.v16i{element.width}.v16p0"
        return self.call(name, kind, places, _I32(element.width // 8), everywhere, nothing)

    def keep(self, x: Any, due: Any) -> Any:
        """Store the states; how many words they took or gave."""
        self.b.store(x, self.home).align = 4
        return self.b.zext(self.b.ctpop(self.b.bitcast(due, ir.IntType(16))), _I64)


@machine
def rans16(_: Any, table: Any, states: Any, words: Any, out: Any) -> Any:
    """Decode one symbol from each of 16 states; all arguments are addresses. Returns how many words were taken.

    An item of the table is symbol << 24 | (frequency - 1) << 12 | rest. See `rans.decode` for the same, one by one.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        r = _Rans(b, args[1])
        twelve = r.constant(0xFFF)
        e = r.gather(args[0], b.and_(r.x, twelve), r.v32)
        frequency = b.add(b.and_(b.lshr(e, r.constant(12)), twelve), r.constant(1))
        x = b.add(b.mul(frequency, b.lshr(r.x, r.constant(12))), b.and_(e, twelve))
        due = b.icmp_unsigned("<", x, r.constant(1 << 16))
        source = _pointer(b, args[2], ir.IntType(16))
        word = r.call("llvm.masked.expandload.v16i16", r.v16, source, due, ir.Constant(r.v16, [0] * 16))
        longer = b.or_(b.shl(x, r.constant(16)), b.zext(word, r.v32))
        b.store(b.trunc(b.lshr(e, r.constant(24)), r.v8), _pointer(b, args[3], r.v8)).align = 1
        return r.keep(b.select(due, longer, x), due)

    i64 = types.int64
    return i64(i64, i64, i64, i64), codegen


@machine
def rans16_encode(_: Any, shares: Any, inverses: Any, states: Any, symbols: Any, words: Any) -> Any:
    """Encode one symbol into each of 16 states; all arguments are addresses. Returns how many words were given.

    They lie just before `words`. `shares` has frequency << 16 | start of each symbol, `inverses` what to multiply by
    instead of dividing by the frequency. See `rans.encode` for the same, one by one.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        r = _Rans(b, args[2])
        symbol = b.load(_pointer(b, args[3], r.v8))
        symbol.align = 1
        symbol = b.zext(symbol, r.v32)
        share, inverse = r.gather(args[0], symbol, r.v32), r.gather(args[1], symbol, r.v64)
        frequency, start = b.lshr(share, r.constant(16)), b.and_(share, r.constant(0xFFFF))
        due = b.icmp_unsigned(">=", b.lshr(r.x, r.constant(20)), frequency)
        given = b.zext(b.ctpop(b.bitcast(due, ir.IntType(16))), _I64)
        target = _pointer(b, b.sub(args[4], b.shl(given, _I64(1))), ir.IntType(16))
        r.call("llvm.masked.compressstore.v16i16", ir.VoidType(), b.trunc(r.x, r.v16), target, due)
        x = b.select(due, b.lshr(r.x, r.constant(16)), r.x)
        quotient = b.lshr(b.mul(b.zext(x, r.v64), inverse), ir.Constant(r.v64, [44] * 16))
        quotient = b.trunc(quotient, r.v32)
        rest = b.sub(x, b.mul(quotient, frequency))
        return r.keep(b.add(b.add(b.shl(quotient, r.constant(12)), start), rest), due)

    i64 = types.int64
    return i64(i64, i64, i64, i64, i64), codegen


class _Mix:
    """The mix of the digest, for 16 elements at a time."""

    vector = ir.VectorType(_I64, _LANES)

    def __init__(self, b: Any, key: Any) -> None:
        self.b, self.key = b, splat(b, key, self.vector)

    @classmethod
    def constant(cls, *values: int) -> Any:
        return ir.Constant(cls.vector, [v & _ALL for v in (values * _LANES if len(values) == 1 else values)])

    def wide(self, element: Any, pointer: Any, index: Any) -> Any:
        """16 elements from an index on, as 64-bit numbers."""
        at = self.b.bitcast(self.b.gep(pointer, [index]), ir.VectorType(element, _LANES).as_pointer())
        bits = self.b.load(at)
        bits.align = 1
        return bits if element.width == 64 else self.b.zext(bits, self.vector)

    def turn(self, z: Any) -> Any:
        b = self.b
        product = b.mul(b.and_(z, self.constant(0xFFFFFFFF)), b.lshr(z, self.constant(32)))
        turned = b.or_(b.shl(z, self.constant(ROTATE)), b.lshr(z, self.constant(64 - ROTATE)))
        return b.add(product, turned)

    def both(self, weyl: Any, bits: Any) -> tuple[Any, Any]:
        """What the elements add to the first sum and to the second."""
        z = self.b.add(self.turn(self.b.xor(weyl, bits)), self.key)
        z = self.turn(self.turn(z))
        return z, self.turn(z)

    def sums(self, blocks: Any, step: Any) -> list[Any]:
        """Run `step(index of the block, [two sums]) -> [two sums]` over the blocks and add up the lanes."""
        b = self.b
        before, loop, done = b.block, b.append_basic_block("blocks"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        i, s, t = b.phi(_I64), b.phi(self.vector), b.phi(self.vector)
        after = (b.add(i, _I64(1)), *step(i, s, t))
        for phi, start, value in zip((i, s, t), (_I64(0), self.constant(0), self.constant(0)), after, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_unsigned("<", after[0], blocks), loop, done)
        b.position_at_end(done)
        out = []
        for total in after[1:]:
            lanes = [b.extract_element(total, _I32(k)) for k in range(_LANES)]
            while len(lanes) > 1:
                lanes = [b.add(x, y) for x, y in zip(lanes[::2], lanes[1::2], strict=True)]
            out.append(lanes[0])
        return out


_SUMS = types.UniTuple(types.uint64, 2)


@machine
def digest_blocks(_: Any, tag: Any, address: Any, blocks: Any, weyl: Any, key: Any) -> Any:
    """Both digest sums over `blocks` (at least one) blocks of 16 elements; `weyl` belongs to the first element."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element, mix = _element(ctx, sig.args[0]), _Mix(b, args[4])
        base = _pointer(b, args[1], element)
        first = b.add(splat(b, args[3], mix.vector), mix.constant(*(i * GOLDEN for i in range(_LANES))))

        def step(i: Any, s: Any, t: Any) -> list[Any]:
            weyl = b.add(first, splat(b, b.mul(i, _I64(_LANES * GOLDEN & _ALL)), mix.vector))
            x, y = mix.both(weyl, mix.wide(element, base, b.mul(i, _I64(_LANES))))
            return [b.add(s, x), b.add(t, y)]

        return ctx.make_tuple(b, sig.return_type, mix.sums(args[2], step))

    return _SUMS(tag, types.int64, types.int64, types.uint64, types.uint64), codegen


@machine
def digest_moves(
    _: Any, tag: Any, positions: Any, old: Any, new: Any, blocks: Any, origin: Any, stride: Any, key: Any
) -> Any:
    """How both sums move over `blocks` (at least one) blocks of 16 changes; `positions`, `old` and `new` are addresses.

    The Weyl number of an element is `origin` plus its position times `stride`.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element, mix = _element(ctx, sig.args[0]), _Mix(b, args[7])
        at, was, now = (_pointer(b, a, k) for a, k in zip(args[1:4], (_I32, element, element), strict=True))
        origin, stride = splat(b, args[5], mix.vector), splat(b, args[6], mix.vector)

        def step(i: Any, s: Any, t: Any) -> list[Any]:
            index = b.mul(i, _I64(_LANES))
            weyl = b.add(origin, b.mul(mix.wide(_I32, at, index), stride))
            before, after = mix.both(weyl, mix.wide(element, was, index)), mix.both(weyl, mix.wide(element, now, index))
            return [b.add(total, b.sub(y, x)) for total, x, y in zip((s, t), before, after, strict=True)]

        return ctx.make_tuple(b, sig.return_type, mix.sums(args[4], step))

    i64, u64 = types.int64, types.uint64
    return _SUMS(tag, i64, i64, i64, i64, u64, u64, u64), codegen
