"""The entropy coder against its specification, and on bytes that nobody wrote."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparserl.codec.coders import Rans, chunk_addresses, decode_chunks
from sparserl.errors import InvalidField
from sparserl.kernels import cpu, reference
from tests.effort import examples

POISON = 0xA5
SIZES = (
    1,
    2,
    3,
    255,
    256,
    2047,
    2048,
    4095,
    4096,
    4097,
    8191,
    8192,
    16_385,
    32_767,
    32_768,
    32_785,
    65_535,
    65_536,
    65_537,
)


def poisoned(count, dtype):
    out = np.empty(count, dtype)
    out.view(np.uint8)[:] = POISON
    return out


def frequencies(raw):
    """What the kernel makes of the counts, and the symbol that takes the rest."""
    freq = poisoned(256, np.uint32)
    most = cpu.rans.frequencies(np.frombuffer(raw, np.uint8), freq)
    return freq, int(most)


def drawn(rng, size, how):
    """Bytes of all sorts of distributions."""
    if how == "one symbol":
        return bytes((int(rng.integers(256)),)) * size
    if how == "all symbols":
        return rng.integers(0, 256, size, np.uint8).tobytes()
    if how == "two, one rare":
        return np.where(rng.random(size) < 0.001, 255, 0).astype(np.uint8).tobytes()
    return np.minimum(rng.geometric(0.3, size) - 1, 255).astype(np.uint8).tobytes()


KINDS = ("one symbol", "all symbols", "two, one rare", "geometric")


def encoded(raw, freq):
    """States and words of the kernel; nothing is written outside them."""
    symbols = np.frombuffer(raw, np.uint8)
    states, words = poisoned(cpu.rans.lanes(symbols.size), np.uint32), poisoned(symbols.size + 1, np.uint16)
    start = cpu.rans.encode(symbols, freq, states, words)
    return states, words[start:]


def with_spare(words):
    """The words, and as many behind them as a decoder may look at."""
    return np.append(words, np.full(cpu.rans.SPARE, 0xA5A5, np.uint16))


def decoded(states, words, freq, out, kernel=cpu.rans.decode):
    """Whether a chunk comes out even; its symbols go to `out`."""
    rows, spare = np.zeros((1, cpu.rans.MOST_LANES), np.uint32), with_spare(words)
    rows[0, : states.size] = states
    addresses = (np.array([array.ctypes.data]) for array in (spare, out))
    words_at, out_at = addresses
    return kernel(freq[None], rows, words_at, np.array([len(words)]), np.array([out.size]), out_at) == -1


def as_table(freq):
    return {s: int(f) for s, f in enumerate(freq) if f}


def assert_coded(raw):
    """Frequencies that add up, the reference's states and words, and the bytes again, from kernel and reference."""
    freq, most = frequencies(raw)
    assert int(freq.sum()) == 4096
    assert {s for s, f in enumerate(freq) if f} - {most} == set(raw) - {most}
    states, words = encoded(raw, freq)
    table = as_table(freq)
    assert (states.tolist(), words.tolist()) == reference.rans_encode(raw, table)
    out = poisoned(len(raw) + 64, np.uint8)
    assert decoded(states, words, freq, out[: len(raw)])
    assert out[: len(raw)].tobytes() == raw
    assert (out[len(raw) :] == POISON).all()
    assert reference.rans_decode(states.tolist(), words.tolist(), len(raw), table) == raw


def test_lanes_are_those_of_the_specification():
    """For every size up to where they no longer grow."""
    sizes = [*range(10_000), *(n + d for n in (1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 24) for d in (-1, 0, 1))]
    assert [cpu.rans.lanes(n) for n in sizes] == [reference.lanes(n) for n in sizes]


@pytest.mark.parametrize("how", KINDS)
def test_coding_equals_the_specification(how):
    """States and words are the reference's, whatever the bytes and however many lanes share them."""
    rng = np.random.default_rng(1)
    for size in SIZES:
        assert_coded(drawn(rng, size, how))


@pytest.mark.long
def test_any_machine_reads_the_same(monkeypatch):
    """Where the vector instructions are missing, the plain loop gives the same bytes, and refuses the same."""
    monkeypatch.setattr(cpu.rans, "HAS_EXPAND", False)
    plain = numba.njit(cpu.rans.decode.py_func)
    rng = np.random.default_rng(4)
    for size in (4096, 32_768, 40_001, 65_537, 100_003):
        raw = drawn(rng, size, "geometric")
        freq, _ = frequencies(raw)
        states, words = encoded(raw, freq)
        for good, its_states, its_words in (
            (True, states, words),
            (False, states, words[:-1]),
            (False, states, np.append(words, words[:1])),
            (False, states ^ np.uint32(1 << 20), words),
        ):
            for kernel in (cpu.rans.decode, plain):
                out = poisoned(size + 64, np.uint8)
                assert decoded(its_states, its_words, freq, out[:size], kernel) is good
                assert not good or out[:size].tobytes() == raw
                assert (out[size:] == POISON).all()


def test_many_chunks_at_once():
    """Whatever their lanes and their order, each comes out as it would alone; one at fault is found among others."""
    rng = np.random.default_rng(5)
    sizes = [9, 65536, 40_001, 70_000, 33_000, 65_537, 32_768, 4096, 50_000, 65_536, 40_000, 33_333, 100_003]
    for turn in range(3):
        rng.shuffle(sizes)
        raw = [drawn(rng, size, KINDS[(i + turn) % len(KINDS)]) for i, size in enumerate(sizes)]
        coded = [bytes(Rans().encode(r)) for r in raw]
        assert decode_chunks(chunk_addresses(coded), sizes).tobytes() == b"".join(raw)
        for i in range(len(coded)):
            for broken in (coded[i][:-2], coded[i] + b"\0\0", coded[i][:-1]):
                assert decode_chunks(chunk_addresses([*coded[:i], broken, *coded[i + 1 :]]), sizes) is None


@given(st.binary(min_size=1, max_size=600))
@example(bytes(range(256)))
@example(bytes(range(256))[::-1] + b"\0" * 300)
@example(b"\xff" * 500 + b"\0")
def test_coding_of_any_bytes(raw):
    """Any bytes at all."""
    assert_coded(raw)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=256), st.integers(0, 2**32), st.integers(1, 3000))
def test_coding_under_any_frequencies(weights, seed, size):
    """Any table that adds up will do, not only those that fit the bytes; rare symbols are exact too."""
    rng = np.random.default_rng(seed)
    share = np.maximum(1, np.array(weights) * (4096 - len(weights)) // (sum(weights) + 1))
    share[int(share.argmax())] += 4096 - share.sum()
    freq = np.zeros(256, np.uint32)
    freq[np.sort(rng.choice(256, len(weights), replace=False))] = share
    raw = rng.choice(np.flatnonzero(freq), size).astype(np.uint8).tobytes()
    states, words = encoded(raw, freq)
    assert (states.tolist(), words.tolist()) == reference.rans_encode(raw, as_table(freq))
    out = poisoned(size, np.uint8)
    assert decoded(states, words, freq, out)
    assert out.tobytes() == raw


def rounded(f):
    """The nearest frequency with five significant bits, ties up; at least 1."""
    shift = max(0, int(f).bit_length() - 5)
    return max(1, ((f + ((1 << shift) >> 1)) >> shift) << shift)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_frequencies_are_near_the_counts(how, size):
    """Each is the count's share of 4096 in five significant bits, the most frequent symbol takes what is left."""
    raw = drawn(np.random.default_rng(size), size, how)
    freq, most = frequencies(raw)
    counts = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
    assert counts[most] == counts.max()
    for scale in range(4096, -1, -64):
        share = [rounded((c * scale + size // 2) // size) if c else 0 for c in counts.tolist()]
        expected = [0 if s == most else f for s, f in enumerate(share)]
        if sum(expected) < 4096:
            break
    expected[most] = 4096 - sum(expected)
    assert freq.tolist() == expected


def table_of(freq, most):
    out = poisoned(cpu.rans.MOST_TABLE, np.uint8)
    size = cpu.rans.write_table(freq, most, out)
    assert not out[size:].any()
    return out[:size]


@given(
    st.dictionaries(st.integers(0, 255), st.integers(1, 15).flatmap(lambda m: st.integers(0, 8).map(lambda e: m << e))),
    st.integers(0, 255),
)
def test_tables_there_and_back(some, most):
    """Any frequencies of five significant bits, wherever the symbols lie; the table says how long it is."""
    freq, left = np.zeros(256, np.uint32), 4096
    for symbol, f in some.items():
        if symbol != most and f < left:
            freq[symbol] = f
            left -= f
    freq[most] = left
    table = table_of(freq, most)
    for behind in (b"", b"\xff" * 9):
        back = poisoned(256, np.uint32)
        assert cpu.rans.read_table(np.frombuffer(table.tobytes() + behind, np.uint8), back) == table.size
        assert (back == freq).all()
    for end in range(table.size):
        assert cpu.rans.read_table(table[:end].copy(), back) == -1


def test_the_longest_table():
    """Frequencies that jump as far as they can from symbol to symbol still fit the room."""
    freq = np.ones(256, np.uint32)
    freq[1:9:2] = 960
    freq[0] = 4096 - (freq.sum() - 1)
    table = table_of(freq, 0)
    back = np.empty(256, np.uint32)
    assert cpu.rans.read_table(table, back) == table.size < cpu.rans.MOST_TABLE
    assert (back == freq).all()


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\0\0",
        b"\1\xff\0",  # symbols past 255
        b"\xff\1\0",
        b"\0\1\2",  # the most frequent one is none of them
        b"\0\1\0",  # no frequency for the other
        b"\0\1\0\xff",
        b"\0\1\0" + b"\xff" * 2000,  # an exponent that never ends
        b"\0\1\0\xff\x03",  # exponent 13: above the total
        b"\0\2\0\xff\xde\x03",  # 3968 and as much again
        b"\0\2\0\xff\0\0",  # 2048 and as much again: nothing is left
        b"\0\1\0\x80",  # bits behind the last frequency
    ],
)
def test_tables_that_do_not_add_up_are_refused(table):
    """No table, no symbols."""
    freq = np.empty(256, np.uint32)
    assert cpu.rans.read_table(np.frombuffer(table, np.uint8), freq) == -1
    with pytest.raises(InvalidField, match="no valid table"):
        Rans().decode(table + bytes(100), 10)


@given(st.binary(max_size=60))
@settings(max_examples=examples(300))
def test_any_table_adds_up_or_is_refused(data):
    """Whatever stands where a table should be: refused, or frequencies of 4096 in all."""
    freq = np.empty(256, np.uint32)
    size = cpu.rans.read_table(np.frombuffer(data, np.uint8), freq)
    assert size == -1 or (3 <= size <= len(data) and int(freq.sum()) == 4096)


CHUNKS = {
    "short": b"abracadabra" * 3,
    "one symbol": b"\7" * 50,
    "all symbols": bytes(range(256)) * 2,
    "two lanes": np.random.default_rng(2).geometric(0.6, 4100).astype(np.uint8).tobytes(),
}


def try_to_decode(coded, size):
    """Refused, or bytes of the right length."""
    try:
        out = Rans().decode(bytes(coded), size)
    except InvalidField:
        return None
    assert len(out) == size
    return bytes(out)


@pytest.mark.parametrize("name", CHUNKS)
def test_truncated_chunks_are_refused(name):
    """At every offset: a chunk that ends early never passes for whole."""
    raw = CHUNKS[name]
    coded = bytes(Rans().encode(raw))
    assert try_to_decode(coded, len(raw)) == raw
    for end in range(len(coded)):
        assert try_to_decode(coded[:end], len(raw)) is None


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_with_something_behind_them_are_refused(name):
    """A word too many is as wrong as a word too few."""
    raw = CHUNKS[name]
    coded = bytes(Rans().encode(raw))
    for extra in (b"\0", b"\0\0", b"\1", b"ab", bytes(100), coded):
        assert try_to_decode(coded + extra, len(raw)) is None


@pytest.mark.parametrize("name", CHUNKS)
def test_flipped_bits_never_leave_the_arrays(name):
    """Any single flip is refused, or gives bytes of the same number: those of the specification."""
    raw = CHUNKS[name]
    coded = bytes(Rans().encode(raw))
    for bit in range(8 * len(coded)):
        bad = bytearray(coded)
        bad[bit >> 3] ^= 1 << (bit & 7)
        out = try_to_decode(bad, len(raw))
        if len(raw) < 100:
            assert out == specified(bytes(bad), len(raw))


def specified(coded, size):
    """What the reference makes of a chunk; None where it does not come out even."""
    freq = np.empty(256, np.uint32)
    begin = cpu.rans.read_table(np.frombuffer(coded, np.uint8), freq)
    end = begin + 4 * reference.lanes(size)
    if begin < 0 or end > len(coded) or (len(coded) - end) % 2:
        return None
    states, words = np.frombuffer(coded[begin:end], "<u4").tolist(), np.frombuffer(coded[end:], "<u2").tolist()
    try:
        return reference.rans_decode(states, words, size, as_table(freq))
    except (ValueError, IndexError):  # uneven, or a word too few
        return None


def test_words_that_are_missing_are_not_zeros():
    """States that come back to their beginning by way of words that are not there are refused."""
    table = table_of(np.full(256, 16, np.uint32), 0).tobytes()
    coded = table + (1 << 16).to_bytes(4, "little")
    assert try_to_decode(coded + b"\0\0", 2) == specified(coded + b"\0\0", 2) == b"\0\0"
    assert try_to_decode(coded, 2) is specified(coded, 2) is None
    coded = table + (1).to_bytes(4, "little")  # below all states, and one word away from the end
    assert try_to_decode(coded + b"\0\0", 1) == specified(coded + b"\0\0", 1) == b"\0"
    assert try_to_decode(coded, 1) is specified(coded, 1) is None


@given(st.binary(max_size=200), st.integers(0, 5000))
@settings(max_examples=examples(300))
def test_any_bytes_as_a_chunk(data, size):
    """Bytes that no coder wrote, for any size: refused, or as many symbols as were due."""
    try_to_decode(data, size)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=1), st.binary(max_size=40), st.integers(0, 300))
def test_any_states_and_words(states, words, size):
    """A good table, then anything: nothing but an even end is believed, and it is the reference's end."""
    freq, most = frequencies(b"abracadabra")
    words = words[: len(words) // 2 * 2]
    coded = table_of(freq, most).tobytes() + np.array(states, "<u4").tobytes() + words
    assert try_to_decode(coded, size) == specified(coded, size)


def test_near_the_entropy():
    """Skewed bytes, also below a bit each, take at most one percent and a table more than their entropy."""
    rng = np.random.default_rng(3)
    for p in (0.02, 0.1, 0.5, 0.9, 0.99):
        raw = np.minimum(rng.geometric(p, 1 << 16) - 1, 255).astype(np.uint8)
        share = np.bincount(raw)[np.bincount(raw) > 0] / raw.size
        entropy = float(-(share * np.log2(share)).sum()) * raw.size / 8
        assert len(Rans().encode(raw.tobytes())) < 1.01 * entropy + 300
