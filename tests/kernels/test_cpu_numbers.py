"""Kernels that code numbers (steps, tokens, varints), against their specification."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.kernels import cpu, reference
from tests.kernels.guarded_buffers import each_width, int64, poisoned, random_bits, untouched


def run_steps(old, new, sign_magnitude):
    step = poisoned(old.size, old.dtype)
    cpu.changes.steps(old, new, sign_magnitude, step[: old.size])
    back = poisoned(old.size, old.dtype)
    cpu.changes.advance(old, step[: old.size], sign_magnitude, back[: old.size])
    assert untouched(step, old.size)
    assert untouched(back, old.size)
    return step[: old.size], back[: old.size]


def assert_steps(old, new, sign_magnitude):
    """The kernel's steps are those of the specification, and both ways lead back to the new bits."""
    step, back = run_steps(old, new, sign_magnitude)
    assert (step == reference.steps(old, new, sign_magnitude)).all()
    assert (back == new).all()
    assert (reference.advance(old, step, sign_magnitude) == new).all()


both_orders = pytest.mark.parametrize("sign_magnitude", [True, False])


@both_orders
def test_steps_between_all_pairs_of_bytes(sign_magnitude):
    """Every 8-bit pattern to every other: exact, and the 256 steps from one pattern are all different."""
    old, new = (a.ravel() for a in np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8)))
    assert_steps(old, new, sign_magnitude)
    table = reference.steps(old, new, sign_magnitude).reshape(256, 256)
    assert (np.sort(table, axis=0) == np.arange(256)[:, None]).all()


@both_orders
def test_steps_from_all_bf16_patterns(sign_magnitude):
    """From each of the 65536 patterns by small, large and extreme steps, across zero, infinity and the wrap."""
    old = np.arange(1 << 16, dtype=np.uint16)
    for step in (0, 1, 2, 3, 4, 5, 100, 101, 0x7FFE, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF):
        zigzag = np.full(old.size, step, np.uint16)
        new = reference.advance(old, zigzag, sign_magnitude)
        assert np.unique(new).size == old.size
        assert_steps(old, new, sign_magnitude)
        assert (run_steps(old, new, sign_magnitude)[0] == zigzag).all()


@both_orders
def test_steps_of_random_16_bit_pairs(sign_magnitude):
    """Half a million random pairs of 16-bit patterns."""
    rng = np.random.default_rng(10)
    assert_steps(random_bits(rng, 1 << 19, np.uint16), random_bits(rng, 1 << 19, np.uint16), sign_magnitude)


@both_orders
@each_width
def test_steps_wrap_all_the_way(uint, sign_magnitude):
    """The extremes of every width, each to each, and random pairs."""
    rng = np.random.default_rng(11)
    bits = 8 * np.dtype(uint).itemsize
    edges = {v % 2**bits for e in range(bits + 1) for v in (2**e - 1, 2**e, 2**e + 1, -(2**e))}
    edges = np.array(sorted(edges), uint)
    old, new = (a.ravel() for a in np.meshgrid(edges, edges))
    assert_steps(old, new, sign_magnitude)
    assert_steps(random_bits(rng, 5000, uint), random_bits(rng, 5000, uint), sign_magnitude)
    assert_steps(old[:0], new[:0], sign_magnitude)


def test_the_neighbour_in_value_is_one_step_away():
    """In the order of floats a step of one goes to the next value; -0.0 and +0.0 are neighbours too."""
    for uint, real in ((np.uint16, np.float16), (np.uint32, np.float32), (np.uint64, np.float64)):
        values = np.array([1.0, -1.0, 0.5, -0.5, 3e-8, -3e-8, 60000.0], real)
        above = np.nextafter(values, real(np.inf))
        assert reference.steps(values.view(uint), above.view(uint), True).tolist() == [2] * values.size
        assert reference.steps(above.view(uint), values.view(uint), True).tolist() == [1] * values.size
        zeros = np.array([-0.0, 0.0], real).view(uint)
        assert reference.steps(zeros[:1], zeros[1:], True).tolist() == [2]


def run_pack(values):
    tokens, lows = poisoned(values.size, np.uint8), poisoned(values.size + 1, np.uint64)
    bits = cpu.changes.pack(values, tokens[: values.size], lows[: values.size + 1])
    assert untouched(tokens, values.size)
    assert untouched(lows, bits // 64 + 1)
    return tokens[: values.size].tobytes(), lows.tobytes()[: (bits + 7) // 8], int(bits)


def run_unpack(tokens, lows, limit, dtype, bits=None):
    words = np.zeros(len(lows) // 8 + 2, np.uint64)
    words.view(np.uint8)[: len(lows)] = np.frombuffer(lows, np.uint8)
    out = poisoned(len(tokens), dtype)
    heads = np.frombuffer(tokens, np.uint8)
    limit_bits = 8 * len(lows) if bits is None else bits
    bad = cpu.changes.unpack(heads, words, limit_bits, np.uint64(limit), out[: len(tokens)])
    assert untouched(out, len(tokens))
    return int(bad), out[: len(tokens)]


@pytest.mark.parametrize("behind", ["tokens", "lows"])
@pytest.mark.parametrize("uint", [np.uint16, np.uint32, np.uint64])
def test_unpack_chunks(uint, behind, last_page):
    """Chunks one after the other, with nothing to read behind the last one; the number at fault is named."""
    rng = np.random.default_rng(int(np.dtype(uint).itemsize))
    values = rng.integers(0, 1 << rng.integers(1, 16, 4000)).astype(uint)
    chunks = [reference.pack(values[i : i + 256]) for i in range(0, values.size, 256)]
    tokens, lows = ([np.frombuffer(part, np.uint8) for part in parts] for parts in zip(*chunks, strict=True))
    tokens = np.concatenate(tokens)
    end = tokens if behind == "tokens" else lows[-1]
    last_page[-end.size :] = end
    if behind == "tokens":
        tokens = last_page[-end.size :]
    else:
        lows[-1] = last_page[-end.size :]
    at = tokens, int64(*(w.ctypes.data for w in lows)), int64(*(w.size for w in lows))
    out = poisoned(values.size, uint)
    assert cpu.changes.unpack_chunks(*at, 8, np.uint64(1 << 16), out[: values.size]) == -1
    assert (out[: values.size] == values).all()
    assert untouched(out, values.size)
    limit = int(values[3000:].max()) - 1
    assert cpu.changes.unpack_chunks(*at, 8, np.uint64(limit), out[: values.size]) == int(np.argmax(values > limit))
    at[2][7] -= 1
    assert 7 * 256 <= cpu.changes.unpack_chunks(*at, 8, np.uint64(1 << 16), out[: values.size]) <= 8 * 256


NUMBERS = [0, 1, 2, 14, 15, 16, 17, 31, 32, 2**16 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("seed", range(4))
def test_pack_and_unpack_64_bit_numbers(seed):
    """Numbers of every magnitude: the bytes of the specification, and the numbers back again."""
    rng = np.random.default_rng(seed)
    spread = [int(rng.integers(0, 2**64, dtype=np.uint64)) >> int(rng.integers(64)) for _ in range(2000)]
    edges = [v % 2**64 for e in range(65) for v in (2**e - 1, 2**e, 2**e + 1)]
    values = np.array([*NUMBERS, *edges, *spread], np.uint64)
    values = rng.permutation(values)
    tokens, lows, bits = run_pack(values)
    assert (tokens, lows) == reference.pack(values)
    assert bits == sum(reference.token(int(v))[2] for v in values)
    bad, back = run_unpack(tokens, lows, 2**64 - 1, np.uint64)
    assert bad == -1
    assert (back == values).all()


@each_width
def test_pack_in_every_width(uint):
    """Every length up to 300 of numbers of a width, also all of them small, a bit larger, or largest."""
    rng = np.random.default_rng(12)
    most = 2 ** (8 * np.dtype(uint).itemsize) - 1
    for size in range(0, 301, 3):
        any_size = random_bits(rng, size, uint) >> rng.integers(0, 8 * np.dtype(uint).itemsize, size).astype(uint)
        small, larger = rng.integers(0, 16, size).astype(uint), rng.integers(0, 256, size).astype(uint)
        for values in (random_bits(rng, size, uint), np.full(size, most, uint), small, larger, any_size):
            tokens, lows, _ = run_pack(values)
            assert (tokens, lows) == reference.pack(values)
            bad, back = run_unpack(tokens, lows, most, uint)
            assert bad == -1
            assert (back == values).all()


def test_untoken_undoes_token():
    """The specification itself: a token and its low bits are the number, and tokens fit a byte."""
    for value in [*range(5000), *NUMBERS, *(2**e + d for e in range(5, 64) for d in (-1, 0, 1))]:
        token, low, width = reference.token(value)
        assert token < 256
        assert low < 2**width
        assert reference.untoken(token, low) == value


@pytest.mark.parametrize("at", [0, 1, 57, 99])
def test_unpack_names_the_first_number_past_its_limit(at):
    """A number above the limit is found where it stands."""
    values = np.full(100, 1000, np.uint32)
    values[at] = 1001
    tokens, lows, _ = run_pack(values)
    assert run_unpack(tokens, lows, 1001, np.uint32)[0] == -1
    assert run_unpack(tokens, lows, 1000, np.uint32)[0] == at


def test_unpack_refuses_low_bits_that_do_not_match():
    """Too few low bits, a byte too many, and set bits in the padding are all errors."""
    values = np.array([5, 1000, 3, 70_000, 17], np.uint32)
    tokens, lows, _ = run_pack(values)
    assert run_unpack(tokens, lows, 2**32 - 1, np.uint32)[0] == -1
    assert run_unpack(tokens, lows[:-1], 2**32 - 1, np.uint32)[0] >= 0
    assert run_unpack(tokens, lows + b"\0", 2**32 - 1, np.uint32)[0] == values.size
    spare = bytes([lows[-1] | 0x80])
    assert run_unpack(tokens, lows[:-1] + spare, 2**32 - 1, np.uint32)[0] == values.size
    assert run_unpack(b"\x03", b"", 2**32 - 1, np.uint32)[0] == -1
    assert run_unpack(b"\x03", b"\0", 2**32 - 1, np.uint32)[0] == 1


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unpack_names_the_first_number_without_its_low_bits(dtype):
    """However many low bits are missing, the first number that lacks some is named, and none behind the end is read."""
    values = (np.random.default_rng(3).geometric(0.006, 70) & 0xFFFF).astype(dtype)
    tokens, lows, _ = run_pack(values)
    upto = np.cumsum([reference.token(int(v))[2] for v in values])
    for cut in range(len(lows)):
        assert run_unpack(tokens, lows[:cut], 0xFFFF, dtype)[0] == int(np.argmax(upto > 8 * cut))


def leb128(value):
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_varints_and_back():
    """Numbers of every length, written as LEB128 says, read back from any offset."""
    rng = np.random.default_rng(14)
    spread = [int(rng.integers(0, 2**64, dtype=np.uint64)) >> int(rng.integers(64)) for _ in range(3000)]
    values = np.array([*NUMBERS, *(2**e - 1 for e in range(65)), *(2**e for e in range(64)), *spread], np.uint64)
    out = poisoned(10 * values.size, np.uint8)
    size = cpu.changes.varints(values, out)
    expected = b"".join(leb128(int(v)) for v in values)
    assert out[:size].tobytes() == expected
    assert untouched(out, size)
    back = poisoned(values.size, np.uint64)
    data = np.frombuffer(b"\xff\xff\xff" + expected + b"\x80", np.uint8)
    assert cpu.changes.read_varints(data, 3, np.uint64(2**64 - 1), back[: values.size]) == 3 + size
    assert (back[: values.size] == values).all()
    assert untouched(back, values.size)


@pytest.mark.parametrize(
    ("data", "limit", "end"),
    [
        (b"\x05", 5, 1),
        (b"\x05", 4, -1),
        (b"", 9, -1),
        (b"\x80", 9, -1),
        (b"\x80\x00", 9, -1),
        (b"\x85\x80\x00", 9, -1),
        (b"\xff" * 9 + b"\x01", 2**64 - 1, 10),
        (b"\xff" * 9 + b"\x02", 2**64 - 1, -1),
        (b"\xff" * 9 + b"\x81", 2**64 - 1, -1),
        (b"\xff" * 10 + b"\x01", 2**64 - 1, -1),
        (b"\x80" * 9 + b"\x01", 2**63, 10),
        (b"\x80" * 9 + b"\x01", 2**63 - 1, -1),
    ],
)
def test_read_varints_takes_only_canonical_numbers(data, limit, end):
    """Cut short, padded, too long or above the limit: refused, and never read past the end."""
    out = poisoned(1, np.uint64)
    assert cpu.changes.read_varints(np.frombuffer(data, np.uint8), 0, np.uint64(limit), out[:1]) == end
    assert untouched(out, 1)
