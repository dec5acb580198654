"""The few machine operations that NumPy-like code cannot say: vector compares, prefetch, popcount, raw memory.

Addresses are int64. Where a function takes a `tag`, only the tag's dtype matters: an empty array that tells the
width of the elements behind the address. LLVM lowers the vectors to AVX-512, AVX2, SSE2 or NEON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

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


inline = kernel  # for small functions that kernels call: LLVM puts them in line


def machine(function: Callable[..., Any]) -> Any:
    """Write LLVM by hand; kernels call the result with one argument less, the typing context."""
    return intrinsic(function)


def _pointer(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def _element(ctx: Any, tag: Any) -> Any:
    return ctx.get_data_type(tag.dtype)


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
def digest_blocks(_: Any, tag: Any, address: Any, blocks: Any, weyl: Any, key: Any) -> Any:
    """Both digest sums over `blocks` (at least one) blocks of 16 elements; `weyl` belongs to the first element."""
    vector = ir.VectorType(_I64, _LANES)

    def constant(value: int) -> Any:
        return ir.Constant(vector, [value & _ALL] * _LANES)

    def splat(b: Any, value: Any) -> Any:
        empty = ir.Constant(vector, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES)
        return b.shuffle_vector(b.insert_element(empty, value, _I32(0)), empty, zeros)

    def round_(b: Any, z: Any) -> Any:
        product = b.mul(b.and_(z, constant(0xFFFFFFFF)), b.lshr(z, constant(32)))
        turned = b.or_(b.shl(z, constant(ROTATE)), b.lshr(z, constant(64 - ROTATE)))
        return b.add(product, turned)

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element = _element(ctx, sig.args[0])
        base = _pointer(b, args[1], element)
        offsets = ir.Constant(vector, [i * GOLDEN & _ALL for i in range(_LANES)])
        first, tensor_key = b.add(splat(b, args[3]), offsets), splat(b, args[4])
        before, loop, done = b.block, b.append_basic_block("blocks"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        i, w, s, t = (b.phi(k) for k in (_I64, vector, vector, vector))
        at = b.bitcast(b.gep(base, [b.mul(i, _I64(_LANES))]), ir.VectorType(element, _LANES).as_pointer())
        bits = b.load(at)
        bits.align = 1
        z = b.xor(w, bits if element.width == 64 else b.zext(bits, vector))
        z = b.add(round_(b, z), tensor_key)
        z = round_(b, round_(b, z))
        after = (
            b.add(i, _I64(1)),
            b.add(w, constant(_LANES * GOLDEN)),
            b.add(s, z),
            b.add(t, round_(b, z)),
        )
        for phi, start, value in zip((i, w, s, t), (_I64(0), first, constant(0), constant(0)), after, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_unsigned("<", after[0], args[2]), loop, done)
        b.position_at_end(done)
        sums = []
        for total in after[2:]:
            lanes = [b.extract_element(total, _I32(k)) for k in range(_LANES)]
            while len(lanes) > 1:
                lanes = [b.add(x, y) for x, y in zip(lanes[::2], lanes[1::2], strict=True)]
            sums.append(lanes[0])
        return ctx.make_tuple(b, sig.return_type, sums)

    signature = types.UniTuple(types.uint64, 2)(tag, types.int64, types.int64, types.uint64, types.uint64)
    return signature, codegen
