"""Machine operations that NumPy-like code cannot express: vector compares, prefetch, popcount, raw memory.

Addresses are int64. A `tag` is an empty array of which only the dtype matters: it is that of the elements at the
address. LLVM lowers the vectors to AVX-512, AVX2, SSE2 or NEON.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import binding, ir
from numba import carray, extending, types
from numba.core import cgutils, config

from .compiling import inline

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
ARM = platform.machine() in ("aarch64", "arm64")
GOLDEN = 0x9E3779B97F4A7C15
ROTATE = 41
_ALL = (1 << 64) - 1


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function written in LLVM by hand; kernels call it without its first argument, the typing context."""
    return extending.intrinsic(function)


@intrinsic
def keep_alive(_: Any, array: Any) -> Any:
    """Keep an array until here: Numba frees a kernel's arrays after their last use, whoever has their address."""
    return types.void(array), lambda ctx, b, sig, args: ctx.get_dummy_value()


def _pointer(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def _element(ctx: Any, tag: Any) -> Any:
    return ctx.get_data_type(tag.dtype)


def splat(b: Any, value: Any, vector: Any) -> Any:
    """A vector with the value in every lane."""
    empty = ir.Constant(vector, ir.Undefined)
    zeros = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return b.shuffle_vector(b.insert_element(empty, value, _I32(0)), empty, zeros)


@intrinsic
def width(_: Any, tag: Any) -> Any:
    """Bytes of an element, as a constant for the compiler, unlike the `itemsize` of an array."""
    return types.int64(tag), lambda ctx, b, sig, args: _I64(sig.args[0].dtype.bitwidth // 8)


@intrinsic
def load(_: Any, tag: Any, address: Any) -> Any:
    """The element at an address, which need not be aligned."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.load(_pointer(b, args[1], _element(ctx, sig.args[0])))
        value.align = 1
        return value

    return tag.dtype(tag, types.int64), codegen


@intrinsic
def load32(_: Any, address: Any) -> Any:
    """The uint32 at an address, which need not be aligned, as an int64."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.load(_pointer(b, args[0], _I32))
        value.align = 1
        return b.zext(value, _I64)

    return types.int64(types.int64), codegen


@intrinsic
def store(_: Any, tag: Any, address: Any, value: Any) -> Any:
    """Write an element to an address, which need not be aligned."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[2], _pointer(b, args[1], _element(ctx, sig.args[0]))).align = 1
        return ctx.get_dummy_value()

    return types.void(tag, types.int64, tag.dtype), codegen


@intrinsic
def _byte_pointer(_: Any, address: Any) -> Any:
    return types.CPointer(types.uint8)(types.int64), lambda ctx, b, sig, args: _pointer(b, args[0], _I8)


@inline
def bytes_at(address: Any, size: Any) -> Any:
    """The bytes at an address as an array, whose owner must be kept alive."""
    return carray(_byte_pointer(address), size)


@intrinsic
def copy_bytes(_: Any, at: Any, size: Any, to: Any) -> Any:
    """Copy so many bytes from one address to another."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        cgutils.raw_memcpy(b, _pointer(b, args[2], _I8), _pointer(b, args[0], _I8), args[1], 1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _neon(b: Any, name: str, kind: Any, *values: Any) -> Any:
    """An instruction of Arm's vectors."""
    signature = ir.FunctionType(kind, [v.type for v in values])
    return b.call(cgutils.get_or_insert_function(b.module, signature, f"llvm.aarch64.neon.{name}"), values)


def _pairs(b: Any, x: Any, y: Any) -> Any:
    """Sums of neighbours in two vectors of 16 bytes, on Arm."""
    return _neon(b, "addp.v16i8", x.type, x, y)


def _mask(b: Any, parts: list[Any]) -> Any:
    """64 booleans, in parts, as bits, the first one lowest. Arm has no such instruction: parts of 16 are added up."""
    if ARM:
        kind = ir.VectorType(_I8, 16)
        each = ir.Constant(kind, [1 << (i % 8) for i in range(16)])
        bits = [b.and_(b.sext(part, kind), each) for part in parts]
        fours = _pairs(b, _pairs(b, *bits[:2]), _pairs(b, *bits[2:]))
        return b.extract_element(b.bitcast(_pairs(b, fours, fours), ir.VectorType(_I64, 2)), _I32(0))
    mask = _I64(0)
    lanes = 64 // len(parts)
    for i, part in enumerate(parts):
        bits = b.bitcast(part, ir.IntType(lanes))
        mask = b.or_(mask, b.shl(bits if lanes == 64 else b.zext(bits, _I64), _I64(i * lanes)))
    return mask


def _count(b: Any, lanes: Any) -> Any:
    """How many of 8 or 16 booleans are true."""
    many = lanes.type.count
    if not ARM:
        return b.zext(b.ctpop(b.bitcast(lanes, ir.IntType(many))), _I64)
    total = b.sext(lanes, ir.VectorType(_I16, many))
    if many == 16:
        total = b.add(_take_lanes(b, total, range(8)), _take_lanes(b, total, range(8, 16)))
    return b.neg(b.sext(b.trunc(_neon(b, "saddv.i32.v8i16", _I32, total), _I16), _I64))


@intrinsic
def differ64(_: Any, tag: Any, left: Any, right: Any) -> Any:
    """Mask of the 64 elements at two addresses that differ; bit 0 is the first."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element = _element(ctx, sig.args[0])
        lanes = 16 if ARM else 64
        parts = []
        for first in range(0, 64, lanes):
            places = (b.add(a, _I64(first * element.width // 8)) for a in args[1:])
            x, y = (b.load(_pointer(b, at, ir.VectorType(element, lanes))) for at in places)
            x.align = y.align = 1
            parts.append(b.icmp_unsigned("!=", x, y))
        return _mask(b, parts)

    return types.uint64(tag, types.int64, types.int64), codegen


def _fetch(b: Any, address: Any, near: bool = not ARM) -> None:
    """Prefetch the cache line at an address into the nearest cache or the second.

    On Arm the second can wait for more lines at a time.
    """
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [_pointer(b, address, _I8), _I32(0), _I32(3 if near else 2), _I32(1)])


@intrinsic
def prefetch(_: Any, address: Any) -> Any:
    """Prefetch the cache line at an address; any address is allowed."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _fetch(b, args[0])
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def prefetch_near(_: Any, address: Any) -> Any:
    """`prefetch` into the nearest cache."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _fetch(b, args[0], near=True)
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def lowest(_: Any, mask: Any) -> Any:
    """Index of the lowest set bit of a mask that is not zero."""
    return types.int64(types.uint64), lambda ctx, b, sig, args: b.cttz(args[0], _I1(1))


@intrinsic
def highest(_: Any, value: Any) -> Any:
    """Index of the highest set bit of a value that is not zero."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.sub(_I64(63), b.ctlz(args[0], _I1(1)))

    return types.int64(types.uint64), codegen


@intrinsic
def popcount(_: Any, mask: Any) -> Any:
    """Number of set bits."""
    return types.int64(types.uint64), lambda ctx, b, sig, args: b.ctpop(args[0])


STRETCH = 128  # blocks of 64 elements that are classified at a time
_WALKERS = 4


class _LimitMasks:
    """Compares blocks of 64 elements with limits: for each limit a mask per block, and how many elements came before.

    Masks and int16 ranks have a row of `row` items for each limit; `masks` and `ranks` are addresses in the first row.
    For every block its mask is stored there; the rank that is there plus the elements so far is stored behind it. On
    Arm, where masks are slow, only ranks are stored, and `class_mask` makes the masks of the few blocks with changes.
    """

    def __init__(self, b: Any, blocks: Any, limits: int, masks: Any, ranks: Any, row: Any) -> None:
        self.b = b
        self.blocks = blocks
        self.limits = limits
        self.masks = masks
        self.ranks = ranks
        self.row = row

    def run(self, compare: Callable[[Any], list[list[Any]]]) -> None:
        """`compare(index of the block)` gives the elements below each limit, in parts, the first elements first."""
        if ARM:
            self.count(compare)
            return
        b = self.b
        rows = [b.mul(self.row, _I64(k)) for k in range(self.limits)]
        mask_at = [_pointer(b, b.add(self.masks, b.mul(row, _I64(8))), _I64) for row in rows]
        rank_at = [_pointer(b, b.add(self.ranks, b.mul(row, _I64(2))), _I16) for row in rows]
        first = [b.zext(b.load(at), _I32) for at in rank_at]
        before = b.block
        loop = b.append_basic_block("blocks")
        done = b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", self.blocks, _I64(0)), loop, done)
        b.position_at_end(loop)
        i = b.phi(_I64)
        counts = [b.phi(_I32) for _ in rows]
        after = b.add(i, _I64(1))
        for k, parts in enumerate(compare(i)):
            lanes = parts[0].type.count
            total = counts[k]
            for j, below in enumerate(parts):
                mask = b.bitcast(below, ir.IntType(lanes))
                place = b.gep(b.bitcast(b.gep(mask_at[k], [i]), mask.type.as_pointer()), [_I64(j)])
                b.store(mask, place).align = 1
                bits = b.ctpop(mask)
                total = b.add(total, b.trunc(bits, _I32) if lanes > 32 else b.zext(bits, _I32) if lanes < 32 else bits)
            b.store(b.trunc(total, _I16), b.gep(rank_at[k], [after]))
            counts[k].add_incoming(first[k], before)
            counts[k].add_incoming(total, loop)
        i.add_incoming(_I64(0), before)
        i.add_incoming(after, loop)
        b.cbranch(b.icmp_signed("<", after, self.blocks), loop, done)
        b.position_at_end(done)

    def count(self, compare: Callable[[Any], list[list[Any]]]) -> None:
        """The ranks alone (and up to seven too many), for four limits at a time, on Arm."""
        b = self.b
        v8 = ir.VectorType(_I16, 8)
        v16 = ir.VectorType(_I8, 16)
        rank_at = [_pointer(b, b.add(self.ranks, b.mul(self.row, _I64(2 * k))), _I16) for k in range(self.limits)]
        for begin in range(0, self.limits, 4):  # there are four or seven
            rows = rank_at[begin : begin + 4]
            first = ir.Constant(v8, [0] * 8)
            for k, row in enumerate(rows):
                first = b.insert_element(first, b.load(row), _I32(k))
            total = cgutils.alloca_once_value(b, first)
            ranks = cgutils.alloca_once(b, ir.VectorType(_I16, 4), size=_I64(STRETCH + 8))
            with cgutils.for_range(b, self.blocks, intp=_I64) as loop:
                sums = []
                for below in compare(loop.index)[begin : begin + 4]:
                    parts = [b.sext(part, v16) for part in below]  # -1 where it is
                    sums.append(b.add(b.add(*parts[:2]), b.add(*parts[2:])))
                sums += [ir.Constant(v16, [0] * 16)] * (4 - len(sums))
                fours = _pairs(b, _pairs(b, *sums[:2]), _pairs(b, *sums[2:]))
                twos = _neon(b, "saddlp.v8i16.v16i8", v8, fours)
                upto = b.sub(b.load(total), _neon(b, "addp.v8i16", v8, twos, twos))
                b.store(upto, total)
                b.store(_take_lanes(b, upto, range(4)), b.gep(ranks, [loop.index]))
            with cgutils.for_range_slice(b, _I64(0), self.blocks, _I64(8), _I64) as (i, _):
                eight = b.load(b.bitcast(b.gep(ranks, [i]), ir.VectorType(_I16, 32).as_pointer()))
                eight.align = 8
                for k, row in enumerate(rows):
                    at = b.bitcast(b.gep(row, [b.add(i, _I64(1))]), v8.as_pointer())
                    b.store(_take_lanes(b, eight, range(k, 32, 4)), at).align = 2


def _fetch_ahead(b: Any, start: Any, i: Any, line: int) -> None:
    """Prefetch one block of the next stretch, from several places in turn, which keeps memory busier."""
    place = b.add(b.mul(b.urem(i, _I64(_WALKERS)), _I64(STRETCH // _WALKERS)), b.udiv(i, _I64(_WALKERS)))
    at = b.add(start, b.mul(b.add(place, _I64(STRETCH)), _I64(line)))
    for byte in range(0, line, 64):
        _fetch(b, b.add(at, _I64(byte)))


class _Magnitudes:
    """The magnitudes of 64 elements: of an unsigned `kind` the bits in `keep`, of a signed one the absolute value.

    They are in parts of one register each, since masks of more would have to be joined; on Arm all are.
    """

    def __init__(self, ctx: Any, b: Any, kind: Any, keep: Any) -> None:
        self.b = b
        self.element = _element(ctx, kind)
        self.signed = kind.dtype.signed
        self.lanes = 16 if ARM else min(64, 512 // self.element.width)
        self.vector = ir.VectorType(self.element, self.lanes)
        self.keep = self.broadcast(keep)

    def broadcast(self, value: Any) -> Any:
        return splat(self.b, value if self.element.width == 64 else self.b.trunc(value, self.element), self.vector)

    def at(self, address: Any) -> list[Any]:
        b = self.b
        parts = []
        for j in range(0, 64, self.lanes):
            x = b.load(_pointer(b, b.add(address, _I64(j * self.element.width // 8)), self.vector))
            x.align = 1
            if self.signed:
                sign = b.ashr(x, ir.Constant(self.vector, [self.element.width - 1] * self.lanes))
                parts.append(b.sub(b.xor(x, sign), sign))
            else:
                parts.append(b.and_(x, self.keep))
        return parts


def _high_bytes(b: Any, at: Any) -> list[Any]:
    """The highest eight bits of the magnitudes of the 64 floats of 16 bits at an address, in parts of a register."""
    many = 8 if ARM else 32
    shorts = ir.VectorType(_I16, many)
    halves = []
    for byte in range(0, 128, 2 * many):
        x = b.load(_pointer(b, b.add(at, _I64(byte)), shorts))
        x.align = 1
        if ARM:  # the high half of twice as much
            halves.append(_neon(b, "addhn.v8i8", ir.VectorType(_I8, many), x, x))
        else:
            halves.append(b.bitcast(b.shl(x, ir.Constant(shorts, [1] * many)), ir.VectorType(_I8, 2 * many)))
    order = ir.Constant(ir.VectorType(_I32, 2 * many), [i if ARM else 2 * i + 1 for i in range(2 * many)])
    return [b.shuffle_vector(x, y, order) for x, y in zip(halves[::2], halves[1::2], strict=True)]


@intrinsic
def classify(
    _: Any, kind: Any, start: Any, blocks: Any, keep: Any, limits: Any, masks: Any, ranks: Any, row: Any
) -> Any:
    """For each limit, the elements of blocks whose magnitude is below it: see `_LimitMasks` and `_Magnitudes`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        many = sig.args[4].count
        sizes = _Magnitudes(ctx, b, sig.args[0], args[3])
        limits = [sizes.broadcast(b.extract_value(args[4], k)) for k in range(many)]

        def compare(i: Any) -> list[list[Any]]:
            line = 8 * sizes.element.width
            _fetch_ahead(b, args[1], i, line)
            parts = sizes.at(b.add(args[1], b.mul(i, _I64(line))))
            return [[b.icmp_unsigned("<", x, limit) for x in parts] for limit in limits]

        _LimitMasks(b, args[2], many, *args[5:]).run(compare)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(kind, i64, i64, types.uint64, limits, i64, i64, i64), codegen


@intrinsic
def classify_short(_: Any, start: Any, blocks: Any, limits: Any, masks: Any, ranks: Any, row: Any) -> Any:
    """The same for 16-bit floats and limits of which only the highest eight bits of a magnitude are set.

    These eight bits of all 64 elements fit one register, and a comparison gives a whole mask.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        bytes_ = ir.VectorType(_I8, 16 if ARM else 64)
        many = sig.args[2].count
        high = [b.trunc(b.lshr(b.extract_value(args[2], k), _I64(7)), _I8) for k in range(many)]
        limits = [splat(b, value, bytes_) for value in high]

        def compare(i: Any) -> list[list[Any]]:
            _fetch_ahead(b, args[0], i, 128)
            sizes = _high_bytes(b, b.add(args[0], b.mul(i, _I64(128))))
            return [[b.icmp_unsigned("<", x, limit) for x in sizes] for limit in limits]

        _LimitMasks(b, args[1], many, *args[3:]).run(compare)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, limits, i64, i64, i64), codegen


@intrinsic
def class_mask(_: Any, kind: Any, address: Any, keep: Any, low: Any, span: Any) -> Any:
    """The mask of the 64 elements at an address whose magnitude is not below `low` and at most `span` above it."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        sizes = _Magnitudes(ctx, b, sig.args[0], args[2])
        low, span = (sizes.broadcast(value) for value in args[3:])
        return _mask(b, [b.icmp_unsigned("<=", b.sub(x, low), span) for x in sizes.at(args[1])])

    u64 = types.uint64
    return u64(kind, types.int64, u64, u64, u64), codegen


@intrinsic
def class_mask_short(_: Any, address: Any, low: Any, span: Any) -> Any:
    """The same for 16-bit floats, by the highest eight bits of a magnitude."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        parts = _high_bytes(b, args[0])
        low, span = (splat(b, b.trunc(b.lshr(value, _I64(7)), _I8), parts[0].type) for value in args[1:])
        # The complement, inverted: LLVM would merge the end of this with that of `class_mask`, and be slower.
        return b.not_(_mask(b, [b.icmp_unsigned(">", b.sub(x, low), span) for x in parts]))

    return types.uint64(types.int64, types.uint64, types.uint64), codegen


def _at_most(b: Any, numbers: Any, value: Any) -> Any:
    """How many numbers are at most a value."""
    return _count(b, b.icmp_signed("<=", numbers, splat(b, b.trunc(value, _I16), numbers.type)))


@intrinsic
def every8(_: Any, low: Any, high: Any, out: Any) -> Any:
    """Store every eighth of the 128 int16 numbers at `high` less those at `low`; all arguments are addresses.

    Two more bytes behind the last are read.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vector = ir.VectorType(_I32, 16)
        wide = ir.VectorType(_I64, 16)
        steps = ir.Constant(wide, [16 * i for i in range(16)])
        rows = [_gather(b, b.add(splat(b, at, wide), steps), vector) for at in args[:2]]
        numbers = _resized(b, b.sub(rows[1], rows[0]), _I16)
        b.store(numbers, _pointer(b, args[2], numbers.type)).align = 2
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64), codegen


@intrinsic
def at_most16(_: Any, address: Any, value: Any) -> Any:
    """How many of the 16 int16 numbers at an address are at most a value."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x = b.load(_pointer(b, args[0], ir.VectorType(_I16, 16)))
        x.align = 2
        return _at_most(b, x, args[1])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def at_most8(_: Any, low: Any, high: Any, value: Any) -> Any:
    """How many of the 8 int16 numbers at `high` less those at `low` are at most a value."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x, y = (b.load(_pointer(b, at, ir.VectorType(_I16, 8))) for at in args[:2])
        x.align = y.align = 2
        return _at_most(b, b.sub(y, x), args[2])

    return types.int64(types.int64, types.int64, types.int64), codegen


def _has(feature: str) -> bool:
    """Whether the processor that Numba compiles for has a feature: this one, or the one that NUMBA_CPU_NAME names."""
    if config.CPU_NAME is not None:
        return f"+{feature}" in (config.CPU_FEATURES or "").split(",")
    return bool(binding.get_host_cpu_features().get(feature))


_HAS_PDEP = _has("bmi2")
HAS_EXPAND = _has("avx512vbmi2")  # one instruction spreads words over lanes


_BITS_OF_BYTES = ir.Constant(  # for every rank and byte, the index of the set bit that has so many set bits below it
    ir.ArrayType(_I8, 8 * 256),
    [
        next((i for i in range(8) if b >> i & 1 and (b & (1 << i) - 1).bit_count() == r), 0)
        for r in range(8)
        for b in range(256)
    ],
)


@intrinsic
def select(_: Any, mask: Any, rank: Any) -> Any:
    """Index of the set bit of a mask that has `rank` set bits below it; there must be one."""

    def deposit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.bmi.pdep.64")
        return b.cttz(b.call(function, [b.shl(_I64(1), args[1]), args[0]]), _I1(1))

    def look_up(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        """Find the byte by sums of bytes, and the bit by a table.

        If there is no such bit, because someone wrote to the weights meanwhile, the index is still one of the 64.
        """
        mask, rank = args
        each = _I64(0x0101010101010101)
        tops = _I64(0x80 * 0x0101010101010101)
        v8 = ir.VectorType(_I8, 8)
        ctpop = cgutils.get_or_insert_function(b.module, ir.FunctionType(v8, [v8]), "llvm.ctpop.v8i8")
        upto = b.mul(b.bitcast(b.call(ctpop, [b.bitcast(mask, v8)]), _I64), each)
        above = b.and_(b.sub(b.or_(upto, tops), b.mul(b.add(rank, _I64(1)), each)), tops)
        shift = b.and_(b.cttz(above, _I1(0)), _I64(56))
        rank = b.and_(b.sub(rank, b.lshr(b.shl(upto, _I64(8)), shift)), _I64(7))
        place = b.or_(b.shl(rank, _I64(8)), b.and_(b.lshr(mask, shift), _I64(0xFF)))
        table = cgutils.global_constant(b, "sparserl_bits_of_bytes", _BITS_OF_BYTES)
        return b.add(shift, b.zext(b.load(b.gep(table, [_I64(0), place])), _I64))

    return types.int64(types.uint64, types.int64), deposit if _HAS_PDEP else look_up


def _gather(b: Any, addresses: Any, kind: Any) -> Any:
    """The 32- or 64-bit numbers at 16 addresses."""
    size = kind.element.width // 8
    everywhere = ir.Constant(ir.VectorType(_I1, 16), [1] * 16)
    places = b.inttoptr(addresses, ir.VectorType(kind.element.as_pointer(), 16))
    signature = ir.FunctionType(kind, [places.type, _I32, everywhere.type, kind])
    name = f"llvm.masked.gather.v16i{kind.element.width}.v16p0"
    function = cgutils.get_or_insert_function(b.module, signature, name)
    return b.call(function, [places, _I32(size), everywhere, ir.Constant(kind, ir.Undefined)])


def _gather32(b: Any, base: Any, index: Any, scale: int) -> Any:
    """The 32-bit numbers at 16 distances from an address, in units of `scale` bytes."""
    if HAS_EXPAND:
        vector = ir.VectorType(_I32, 16)
        everywhere = ir.Constant(ir.VectorType(_I1, 16), [1] * 16)
        values = ir.Constant(vector, [0] * 16), _pointer(b, base, _I8), index, everywhere, _I32(scale)
        signature = ir.FunctionType(vector, [v.type for v in values])
        function = cgutils.get_or_insert_function(b.module, signature, "llvm.x86.avx512.mask.gather.dpi.512")
        return b.call(function, values)
    out = ir.Constant(index.type, ir.Undefined)
    for lane in range(16):
        place = b.zext(b.extract_element(index, _I32(lane)), _I64)
        number = b.load(_pointer(b, b.add(base, b.mul(place, _I64(scale))), _I32))
        number.align = 1
        out = b.insert_element(out, number, _I32(lane))
    return out


def _resized(b: Any, vector: Any, element: Any) -> Any:
    """16 numbers in another width."""
    kind = ir.VectorType(element, 16)
    width = vector.type.element.width
    if width == element.width:
        return vector
    return b.zext(vector, kind) if width < element.width else b.trunc(vector, kind)


def _lanes16(value: int) -> Any:
    """The same 32-bit number 16 times."""
    return ir.Constant(ir.VectorType(_I32, 16), [value] * 16)


def _take_lanes(b: Any, vector: Any, lanes: range) -> Any:
    """A vector of some lanes of another."""
    kind = ir.VectorType(_I32, len(lanes))
    return b.shuffle_vector(vector, vector, ir.Constant(kind, list(lanes)))


def _join_neighbours(b: Any, low: Any, width: Any, many: int) -> tuple[Any, Any]:
    """Join the bits of two neighbours each, which gives so many; and the sums of their widths."""
    even = range(0, 2 * many, 2)
    odd = range(1, 2 * many, 2)
    first = _take_lanes(b, low, even)
    shift = _take_lanes(b, width, even)
    return b.or_(first, b.shl(_take_lanes(b, low, odd), shift)), b.add(shift, _take_lanes(b, width, odd))


@intrinsic
def tokenize16(_: Any, values: Any, at: Any, tokens: Any, out: Any) -> Any:
    """The tokens of 16 values of at most four bytes, and their low bits in eight words, in four, and in two.

    `values` gives their dtype; the others are addresses. Low bits of two values each go to `out` as eight uint64 with
    eight widths behind them, then those of four values each as four and four, then as two and two. Returns which of
    them hold all bits: 1 for the two words, 2 for the four and 3 for the eight; 0 if there are no low bits, and nothing
    was stored. `changes.tokenize` does the same for one value.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        v32 = ir.VectorType(_I32, 16)
        v64 = ir.VectorType(_I64, 8)
        element = _element(ctx, sig.args[0])
        v = b.load(_pointer(b, args[1], ir.VectorType(element, 16)))
        v.align = element.width // 8
        v = _resized(b, v, _I32)
        large = b.icmp_unsigned(">=", v, _lanes16(16))
        ctlz = cgutils.get_or_insert_function(b.module, ir.FunctionType(v32, [v32, _I1]), "llvm.ctlz.v16i32")
        e = b.sub(_lanes16(31), b.call(ctlz, [b.or_(v, _lanes16(16)), _I1(1)]))
        width = b.select(large, b.sub(e, _lanes16(2)), _lanes16(0))
        head = b.add(b.shl(e, _lanes16(2)), b.and_(b.lshr(v, width), _lanes16(3)))
        token = b.trunc(b.select(large, head, v), ir.VectorType(_I8, 16))
        b.store(token, _pointer(b, args[2], token.type)).align = 1
        before = b.block
        some = b.append_basic_block("lows")
        done = b.append_basic_block("done")
        b.cbranch(_any(b, large), some, done)
        b.position_at_end(some)
        low = b.and_(v, b.sub(b.shl(_lanes16(1), width), _lanes16(1)))

        halves = []
        for lanes in (range(0, 16, 2), range(1, 16, 2)):
            halves += [b.zext(_take_lanes(b, x, lanes), v64) for x in (low, width)]
        eights = b.or_(halves[0], b.shl(halves[2], halves[1]))
        widths = b.add(halves[1], halves[3])
        at = args[3]
        fours = _join_neighbours(b, eights, widths, 4)
        for part in (eights, widths, *fours, *_join_neighbours(b, *fours, 2)):
            b.store(part, _pointer(b, at, part.type)).align = 8
            at = b.add(at, _I64(8 * part.type.count))
        pairs = b.add(width, b.shuffle_vector(width, width, ir.Constant(v32, [i ^ 1 for i in range(16)])))
        many = _I64(1)
        for most in (16, 32):  # bits of two values, so that eight or four fit a word
            many = b.add(many, b.zext(_any(b, b.icmp_unsigned(">", pairs, _lanes16(most))), _I64))
        b.branch(done)
        b.position_at_end(done)
        result = b.phi(_I64)
        result.add_incoming(_I64(0), before)
        result.add_incoming(many, some)
        return result

    i64 = types.int64
    return i64(values, i64, i64, i64), codegen


def _any(b: Any, lanes: Any) -> Any:
    """Whether one of 16 is true."""
    return b.icmp_unsigned("!=", b.bitcast(lanes, ir.IntType(16)), ir.Constant(ir.IntType(16), 0))


@intrinsic
def falls16(_: Any, address: Any) -> Any:
    """Whether one of 16 uint32 is not above its predecessor; that of the first lies before the address."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        numbers, before = (b.load(_pointer(b, b.sub(args[0], _I64(k)), ir.VectorType(_I32, 16))) for k in (0, 4))
        numbers.align = before.align = 1
        return b.zext(_any(b, b.icmp_unsigned("<=", numbers, before)), _I64)

    return types.int64(types.int64), codegen


def _running_sums(b: Any, v: Any) -> Any:
    """Sums of 16 numbers from the first to each."""
    for step in (1, 2, 4, 8):
        moved = ir.Constant(v.type, [16 + i - step if i >= step else 0 for i in range(16)])
        v = b.add(v, b.shuffle_vector(_lanes16(0), v, moved))
    return v


@intrinsic
def sums16(_: Any, gaps: Any, last: Any, to: Any) -> Any:
    """Store the 16 positions behind a last one, from 16 gaps. Returns the last of them.

    A gap is the number of elements between two positions; all must fit 32 bits.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        v32 = ir.VectorType(_I32, 16)
        gaps = b.load(_pointer(b, args[0], v32))
        gaps.align = 4
        upto = _running_sums(b, b.add(gaps, _lanes16(1)))
        positions = b.add(upto, splat(b, b.trunc(args[1], _I32), v32))
        b.store(positions, _pointer(b, args[2], v32)).align = 4
        return b.add(args[1], b.zext(b.extract_element(upto, _I32(15)), _I64))

    i64 = types.int64
    return i64(i64, i64, i64), codegen


@intrinsic
def number16(_: Any, out: Any, tokens: Any, lows: Any, at: Any, end: Any, limit: Any, to: Any) -> Any:
    """16 numbers of at most four bytes from their tokens and a string of low bits, from bit `at` on.

    `out` gives their dtype; `tokens`, `lows` and `to` are addresses. Returns how many bits they took, or -1 if one is
    above the limit, has more than 25 low bits, or lies behind bit `end`; then what was stored means nothing.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        v32 = ir.VectorType(_I32, 16)
        element = _element(ctx, sig.args[0])
        zero = _lanes16(0)
        t = b.load(_pointer(b, args[1], ir.VectorType(_I8, 16)))
        t.align = 1
        t = b.zext(t, v32)
        large = b.icmp_unsigned(">=", t, _lanes16(16))
        width = b.select(large, b.sub(b.lshr(t, _lanes16(2)), _lanes16(2)), zero)
        wide = b.icmp_unsigned(">", width, _lanes16(25))
        width = b.select(wide, zero, width)
        head = b.select(large, b.shl(b.or_(b.and_(t, _lanes16(3)), _lanes16(4)), width), t)
        upto = _running_sums(b, width)
        total = b.zext(b.extract_element(upto, _I32(15)), _I64)
        within = b.icmp_signed("<=", b.add(args[3], total), args[4])
        # If they end too soon, read where there is something.
        fine = b.select(within, b.trunc(args[3], _I32), _I32(0))
        first = b.select(within, b.sub(upto, width), zero)
        bit = b.add(splat(b, b.and_(fine, _I32(7)), v32), first)
        start = b.add(args[2], b.select(within, b.lshr(args[3], _I64(3)), _I64(0)))
        before = b.block
        some = b.append_basic_block("lows")
        all_ = b.append_basic_block("all")
        no_lows = b.icmp_unsigned("==", total, _I64(0))  # small numbers have none, and are often together
        b.cbranch(no_lows, all_, some)
        b.position_at_end(some)
        words = _gather32(b, start, b.lshr(bit, _lanes16(3)), 1)
        low = b.and_(b.lshr(words, b.and_(bit, _lanes16(7))), b.sub(b.shl(_lanes16(1), width), _lanes16(1)))
        with_lows = b.or_(head, low)
        b.branch(all_)
        b.position_at_end(all_)
        v = b.phi(v32)
        v.add_incoming(head, before)
        v.add_incoming(with_lows, some)
        most = b.select(b.icmp_unsigned(">", args[5], ir.Constant(_I64, 0xFFFFFFFF)), _I64(0xFFFFFFFF), args[5])
        above = b.or_(wide, b.icmp_unsigned(">", v, splat(b, b.trunc(most, _I32), v32)))
        b.store(_resized(b, v, element), _pointer(b, args[6], ir.VectorType(element, 16))).align = element.width // 8
        return b.select(b.and_(within, b.not_(_any(b, above))), total, _I64(-1))

    i64 = types.int64
    return i64(out, i64, i64, i64, i64, types.uint64, i64), codegen


@intrinsic
def advance16(_: Any, tag: Any, old: Any, steps: Any, sign_magnitude: Any, to: Any) -> Any:
    """The bits 16 zigzag steps further than old ones; all are addresses. `changes.advance_bits` does one."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element = _element(ctx, sig.args[0])
        vector = ir.VectorType(element, 16)

        def broadcast(value: int) -> Any:
            return ir.Constant(vector, [value] * 16)

        old, step = (b.load(_pointer(b, a, vector)) for a in args[1:3])
        old.align = step.align = 1
        backwards = b.lshr(b.sext(args[3], element), element(1))  # the bits by which negative numbers are mirrored
        mirrors = splat(b, backwards, vector)
        sign = broadcast(element.width - 1)
        word = b.xor(old, b.and_(b.ashr(old, sign), mirrors))
        word = b.add(word, b.xor(b.lshr(step, broadcast(1)), b.neg(b.and_(step, broadcast(1)))))
        word = b.xor(word, b.and_(b.ashr(word, sign), mirrors))
        b.store(word, _pointer(b, args[4], vector)).align = 1
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(tag, i64, i64, types.boolean, i64), codegen


@intrinsic
def copy16(_: Any, tag: Any, at: Any, to: Any) -> Any:
    """Copy 16 elements from one address to another."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vector = ir.VectorType(_element(ctx, sig.args[0]), 16)
        bits = b.load(_pointer(b, args[1], vector))
        bits.align = 1
        b.store(bits, _pointer(b, args[2], vector)).align = 1
        return ctx.get_dummy_value()

    return types.void(tag, types.int64, types.int64), codegen


_WORDS_TO_LANES = (
    ir.Constant(  # for every subset of four lanes that take a word: which bytes of the words go to each lane
        ir.ArrayType(ir.VectorType(_I8, 16), 16),
        [
            [
                2 * (which & (1 << lane) - 1).bit_count() + byte if which >> lane & 1 and byte < 2 else 255
                for lane in range(4)
                for byte in range(4)
            ]
            for which in range(16)
        ],
    )
)


class _Rans:
    """What encoding and decoding with 16 rANS states have in common. Only with `HAS_EXPAND`, or on Arm."""

    v1, v8, v16, v32, v64 = (ir.VectorType(k, 16) for k in (_I1, _I8, ir.IntType(16), _I32, _I64))
    constant = staticmethod(_lanes16)

    def __init__(self, b: Any) -> None:
        self.b = b
        self.none = _lanes16(0)

    def call(self, name: str, kind: Any, *values: Any) -> Any:
        signature = ir.FunctionType(kind, [v.type for v in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, name), values)

    def states(self, address: Any, vector: int) -> Any:
        """Where the 16 states of a vector are."""
        return _pointer(self.b, self.b.add(address, _I64(64 * vector)), self.v32)

    def count(self, mask: Any) -> Any:
        """How many lanes a mask has."""
        return self.b.zext(self.b.ctpop(self.b.bitcast(mask, ir.IntType(16))), _I64)

    def advance(self, state: Any, entry: Any, word: Any) -> tuple[Any, Any]:
        """The states after decoding the symbols of their table entries, and how many words they took."""
        b = self.b
        twelve = self.constant(0xFFF)
        frequency = b.add(b.and_(b.lshr(entry, self.constant(12)), twelve), self.constant(1))
        x = b.add(b.mul(frequency, b.lshr(state, self.constant(12))), b.and_(entry, twelve))
        due = b.icmp_unsigned("<", x, self.constant(1 << 16))
        words, count = self.next_words(word, due)
        return b.select(due, b.or_(b.shl(x, self.constant(16)), words), x), count

    def next_words(self, word: Any, due: Any) -> tuple[Any, Any]:
        """The next words, one in each lane that is due one, in order, and how many these are."""
        b = self.b
        if not ARM:
            ahead = b.load(_pointer(b, word, self.v16))
            ahead.align = 1
            taken = self.call("llvm.x86.avx512.mask.expand.v16i32", self.v32, b.zext(ahead, self.v32), self.none, due)
            return taken, self.count(due)
        four = ir.VectorType(_I32, 4)
        eight = ir.VectorType(_I8, 8)
        bytes_ = ir.VectorType(_I8, 16)
        weights = ir.Constant(four, [16 + (1 << lane) for lane in range(4)])  # which lanes, and how many
        table = cgutils.global_constant(b, "sparserl_words_to_lanes", _WORDS_TO_LANES)
        at = word
        parts = []
        for lane in range(0, 16, 4):
            which = b.and_(b.sext(_take_lanes(b, due, range(lane, lane + 4)), four), weights)
            lane_sum = b.zext(_neon(b, "uaddv.i32.v4i32", _I32, which), _I64)
            order = b.load(b.gep(table, [_I64(0), b.and_(lane_sum, _I64(15))]))
            ahead = b.load(_pointer(b, at, eight))
            ahead.align = 1
            words = _neon(b, "tbl1.v16i8", bytes_, _take_lanes(b, ahead, range(16)), order)
            parts.append(b.bitcast(words, four))
            at = b.add(at, b.and_(b.lshr(lane_sum, _I64(3)), _I64(14)))
        while len(parts) > 1:
            joined = ir.Constant(ir.VectorType(_I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
            parts = [b.shuffle_vector(x, y, joined) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0], b.lshr(b.sub(at, word), _I64(1))


def rans_rows(chunks: int, vectors: int) -> Any:
    """A function that decodes chunks in step, each with `vectors` vectors of 16 states, until one runs out of words.

    A single chunk would wait for memory and multiplications between two symbols of a state. `rans.decode` has the same
    for one symbol at a time.
    """

    @intrinsic
    def rows(_: Any, slots: Any, states: Any, most: Any) -> Any:
        """Decode up to `most` (at least one) symbols with every state. Returns how many.

        For each chunk there are four numbers at `slots`: the addresses of its table, of the next word and of the next
        symbol, which are advanced, and how many words are left; and 32 states at `states`. An item of a table is
        symbol << 24 | (frequency - 1) << 12 | rest. 32 words behind the last one must be readable.
        """

        def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            r = _Rans(b)
            twelve = _lanes16(0xFFF)
            home = [[b.gep(_pointer(b, args[0], _I64), [_I64(4 * c + k)]) for k in range(4)] for c in range(chunks)]
            at = [[r.states(b.add(args[1], _I64(128 * c)), v) for v in range(vectors)] for c in range(chunks)]
            table = [b.load(slot[0]) for slot in home]
            begin = [b.load(place) for slot in home for place in slot[1:]]
            for chunk_states in at:
                for place in chunk_states:
                    begin.append(b.load(place))
                    begin[-1].align = 4
            before = b.block
            loop = b.append_basic_block("rows")
            done = b.append_basic_block("done")
            b.branch(loop)
            b.position_at_end(loop)
            i = b.phi(_I64)
            phis = [b.phi(value.type) for value in begin]
            after: list[Any] = list(phis)
            entries = [
                _gather32(b, table[j // vectors], b.and_(x, twelve), 4) for j, x in enumerate(phis[3 * chunks :])
            ]
            next_row = b.add(i, _I64(1))
            more = b.icmp_signed("<", next_row, args[2])
            for c in range(chunks):
                word, out, left = after[3 * c : 3 * c + 3]
                for v in range(vectors):
                    j = c * vectors + v
                    e = entries[j]
                    x = phis[3 * chunks + j]
                    after[3 * chunks + j], took = r.advance(x, e, word)
                    b.store(b.trunc(b.lshr(e, r.constant(24)), r.v8), _pointer(b, out, r.v8)).align = 1
                    word = b.add(word, b.shl(took, _I64(1)))
                    out = b.add(out, _I64(16))
                    left = b.sub(left, took)
                after[3 * c : 3 * c + 3] = word, out, left
                more = b.and_(more, b.icmp_signed(">=", left, _I64(0)))
            for phi, first, value in zip((i, *phis), (_I64(0), *begin), (next_row, *after), strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(value, loop)
            b.cbranch(more, loop, done)
            b.position_at_end(done)
            places = [place for slot in home for place in slot[1:]] + [
                place for chunk_states in at for place in chunk_states
            ]
            for place, value in zip(places, after, strict=True):
                b.store(value, place).align = 4
            return next_row

        i64 = types.int64
        return i64(i64, i64, i64), codegen

    return rows


@intrinsic
def rans16_encode(_: Any, shares: Any, inverses: Any, states: Any, symbols: Any, words: Any) -> Any:
    """Encode one symbol into each of 16 states; all arguments are addresses. Returns how many words it wrote.

    They lie just before `words`. `shares` has frequency << 16 | start of each symbol, `inverses` what to multiply by
    instead of dividing by the frequency. `rans.encode` has the same for one symbol at a time.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        r = _Rans(b)
        home = r.states(args[2], 0)
        state = b.load(home)
        state.align = 4
        symbol = b.load(_pointer(b, args[3], r.v8))
        symbol.align = 1
        symbol = b.zext(symbol, r.v32)
        share = _gather32(b, args[0], symbol, 4)
        inverse_at = b.add(splat(b, args[1], r.v64), b.zext(b.shl(symbol, r.constant(3)), r.v64))
        inverse = _gather(b, inverse_at, r.v64)
        frequency = b.lshr(share, r.constant(16))
        start = b.and_(share, r.constant(0xFFFF))
        due = b.icmp_unsigned(">=", b.lshr(state, r.constant(20)), frequency)
        given = r.count(due)
        target = _pointer(b, b.sub(args[4], b.shl(given, _I64(1))), _I16)
        r.call("llvm.masked.compressstore.v16i16", ir.VoidType(), b.trunc(state, r.v16), target, due)
        x = b.select(due, b.lshr(state, r.constant(16)), state)
        quotient = b.lshr(b.mul(b.zext(x, r.v64), inverse), ir.Constant(r.v64, [44] * 16))
        quotient = b.trunc(quotient, r.v32)
        rest = b.sub(x, b.mul(quotient, frequency))
        b.store(b.add(b.add(b.shl(quotient, r.constant(12)), start), rest), home).align = 4
        return given

    i64 = types.int64
    return i64(i64, i64, i64, i64, i64), codegen


# The digest takes 16 elements at a time, and how many of them in one vector: two registers of AVX-512 hide the latency
# of the multiplications. Arm has narrow vectors and can multiply scalars at the same time: half the elements each.
_BLOCK = 16
_SIDE_BY_SIDE = (8, 1, 1, 1, 1, 1, 1, 1, 1) if ARM else (16,)


class _Mix:
    """The mix of the digest, for a vector of elements, or for one."""

    def __init__(self, b: Any, key: Any, lanes: int) -> None:
        self.b = b
        self.lanes = lanes
        self.kind = ir.VectorType(_I64, lanes) if lanes > 1 else _I64
        self.key = self.broadcast(key)

    def broadcast(self, value: Any) -> Any:
        return splat(self.b, value, self.kind) if self.lanes > 1 else value

    def constant(self, *values: int) -> Any:
        every = [v & _ALL for v in (values * self.lanes if len(values) == 1 else values)]
        return ir.Constant(self.kind, every if self.lanes > 1 else every[0])

    def wide(self, element: Any, pointer: Any, index: Any) -> Any:
        """The elements from an index on, as 64-bit numbers."""
        at = self.b.gep(pointer, [index])
        if self.lanes > 1:
            at = self.b.bitcast(at, ir.VectorType(element, self.lanes).as_pointer())
        bits = self.b.load(at)
        bits.align = 1
        return bits if element.width == 64 else self.b.zext(bits, self.kind)

    def weyl(self, first: Any, index: Any) -> Any:
        """The Weyl numbers of consecutive elements from an index on; `first` belongs to index 0."""
        b = self.b
        start = self.broadcast(b.add(first, b.mul(index, ir.Constant(_I64, GOLDEN))))
        return b.add(start, self.constant(*(i * GOLDEN for i in range(self.lanes))))

    def turn(self, z: Any) -> Any:
        b = self.b
        product = b.mul(b.and_(z, self.constant(0xFFFFFFFF)), b.lshr(z, self.constant(32)))
        turned = b.or_(b.shl(z, self.constant(ROTATE)), b.lshr(z, self.constant(64 - ROTATE)))
        return b.add(product, turned)

    def terms(self, weyl: Any, bits: Any) -> list[Any]:
        """What the elements add to the first sum and to the second."""
        z = self.b.add(self.turn(self.b.xor(weyl, bits)), self.key)
        z = self.turn(self.turn(z))
        return [z, self.turn(z)]

    def delta(self, changes: list[Any], index: Any, origin: Any, stride: Any) -> list[Any]:
        """How both sums change with the changes from an index on: positions, old bits and new bits behind pointers."""
        b = self.b
        at, old, new = changes
        element = old.type.pointee
        weyl = b.add(self.broadcast(origin), b.mul(self.wide(_I32, at, index), self.broadcast(stride)))
        before, after = (self.terms(weyl, self.wide(element, bits, index)) for bits in (old, new))
        return [b.sub(y, x) for x, y in zip(before, after, strict=True)]


class _Sums:
    """Sums, as both of the digest, over blocks of 16 elements.

    `step(mix, index)` gives what the elements from an index on add to each; there are `many` sums.
    """

    def __init__(self, b: Any, key: Any, step: Callable[[_Mix, Any], list[Any]], many: int = 2) -> None:
        self.b = b
        self.step = step
        self.many = many
        self.mixes = {lanes: _Mix(b, key, lanes) for lanes in _SIDE_BY_SIDE}

    def add(self, first: Any, accumulators: dict[int, list[Any]]) -> None:
        """Add a block, from an index on, to the sums behind pointers, which are `many` for each number of lanes."""
        b = self.b
        lane = 0
        total: dict[int, list[Any]] = {}
        for lanes in _SIDE_BY_SIDE:
            more = self.step(self.mixes[lanes], b.add(first, _I64(lane)))
            total[lanes] = [b.add(x, y) for x, y in zip(total[lanes], more, strict=True)] if lanes in total else more
            lane += lanes
        for lanes, sums in total.items():
            for home, more in zip(accumulators[lanes], sums, strict=True):
                before = b.load(home)
                before.align = 8
                b.store(b.add(before, more), home).align = 8

    def run(self, blocks: Any) -> list[Any]:
        """Add up blocks, and then the lanes."""
        b = self.b
        accumulators = {
            lanes: [cgutils.alloca_once_value(b, mix.constant(0)) for _ in range(self.many)]
            for lanes, mix in self.mixes.items()
        }
        with cgutils.for_range(b, blocks, intp=_I64) as loop:
            self.add(b.mul(loop.index, _I64(_BLOCK)), accumulators)
        out = []
        for which in range(self.many):
            lanes = []
            for many, home in accumulators.items():
                total = b.load(home[which])
                lanes += [b.extract_element(total, _I32(k)) for k in range(many)] if many > 1 else [total]
            out.append(reduce(b.add, lanes))
        return out


_SUMS = types.UniTuple(types.uint64, 2)


@intrinsic
def digest_blocks(_: Any, tag: Any, address: Any, blocks: Any, weyl: Any, key: Any) -> Any:
    """Both digest sums over blocks of 16 elements; `weyl` belongs to the first element."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element = _element(ctx, sig.args[0])
        base = _pointer(b, args[1], element)

        def step(mix: _Mix, index: Any) -> list[Any]:
            return mix.terms(mix.weyl(args[3], index), mix.wide(element, base, index))

        return ctx.make_tuple(b, sig.return_type, _Sums(b, args[4], step).run(args[2]))

    return _SUMS(tag, types.int64, types.int64, types.uint64, types.uint64), codegen


@intrinsic
def digest_blocks_and_zeros(_: Any, tag: Any, address: Any, blocks: Any, weyl: Any, key: Any) -> Any:
    """Both digest sums over blocks of 16 elements, both over zeros in their place, and how many are not zero."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element = _element(ctx, sig.args[0])
        base = _pointer(b, args[1], element)

        def step(mix: _Mix, index: Any) -> list[Any]:
            weyl = mix.weyl(args[3], index)
            bits = mix.wide(element, base, index)
            zero = mix.constant(0)
            is_set = b.zext(b.icmp_unsigned("!=", bits, zero), mix.kind)
            return [*mix.terms(weyl, bits), *mix.terms(weyl, zero), is_set]

        return ctx.make_tuple(b, sig.return_type, _Sums(b, args[4], step, many=5).run(args[2]))

    return types.UniTuple(types.uint64, 5)(tag, types.int64, types.int64, types.uint64, types.uint64), codegen


@intrinsic
def digest_zero_blocks(_: Any, blocks: Any, weyl: Any, key: Any) -> Any:
    """Both digest sums over blocks of 16 zeros, for which no memory is read."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        def step(mix: _Mix, index: Any) -> list[Any]:
            return mix.terms(mix.weyl(args[1], index), mix.constant(0))

        return ctx.make_tuple(b, sig.return_type, _Sums(b, args[2], step).run(args[0]))

    return _SUMS(types.int64, types.uint64, types.uint64), codegen


def _delta_sums(ctx: Any, b: Any, sig: Any, places: Any, origin: Any, stride: Any, key: Any) -> _Sums:
    """Sums of what changes add; the places are the addresses of positions, old bits and new bits."""
    element = _element(ctx, sig.args[0])
    changes = [_pointer(b, at, kind) for at, kind in zip(places, (_I32, element, element), strict=True)]
    return _Sums(b, key, lambda mix, index: mix.delta(changes, index, origin, stride))


@intrinsic
def digest_delta_blocks(
    _: Any, tag: Any, positions: Any, old: Any, new: Any, blocks: Any, origin: Any, stride: Any, key: Any
) -> Any:
    """How both sums change over blocks of 16 changes; `positions`, `old` and `new` are addresses.

    The Weyl number of an element is `origin` plus its position times `stride`.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        sums = _delta_sums(ctx, b, sig, args[1:4], *args[5:]).run(args[4])
        return ctx.make_tuple(b, sig.return_type, sums)

    i64 = types.int64
    u64 = types.uint64
    return _SUMS(tag, i64, i64, i64, i64, u64, u64, u64), codegen


def _accumulators(b: Any, sums: _Sums, address: Any) -> dict[int, list[Any]]:
    """Pointers to the 16 lanes of each sum, which are consecutive at an address."""
    accumulators = {}
    lane = 0
    for lanes, mix in sums.mixes.items():
        places = [b.add(address, _I64(8 * (lane + first))) for first in (0, _BLOCK)]
        accumulators[lanes] = [_pointer(b, at, mix.kind) for at in places]
        lane += lanes
    return accumulators


@intrinsic
def digest_delta16(
    _: Any, tag: Any, positions: Any, old: Any, new: Any, origin: Any, stride: Any, key: Any, sums: Any
) -> Any:
    """The same for one block, added to the 16 lanes of each sum, which are consecutive at an address."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        sums = _delta_sums(ctx, b, sig, args[1:4], *args[4:7])
        sums.add(_I64(0), _accumulators(b, sums, args[7]))
        return ctx.get_dummy_value()

    i64 = types.int64
    u64 = types.uint64
    return types.void(tag, i64, i64, i64, u64, u64, u64, i64), codegen


@intrinsic
def read16(_: Any, tag: Any, base: Any, positions: Any, ahead: Any, to: Any) -> Any:
    """Copy the 16 elements at positions from `base` on to an address, and prefetch those `ahead` positions later."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element = _element(ctx, sig.args[0])
        base, positions, ahead, to = args[1:]
        size = element.width // 8
        for lane in range(_BLOCK):
            at = []
            for place in (b.add(ahead, _I64(lane)), _I64(lane)):
                position = b.load(_pointer(b, b.add(positions, b.mul(place, _I64(4))), _I32))
                position.align = 1
                at.append(b.add(base, b.mul(b.zext(position, _I64), _I64(size))))
            _fetch(b, at[0])
            bits = b.load(_pointer(b, at[1], element))
            bits.align = 1
            b.store(bits, _pointer(b, b.add(to, _I64(lane * size)), element)).align = 1
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(tag, i64, i64, i64, i64), codegen
