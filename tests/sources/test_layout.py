"""Layouts: parameters of a rank, as boxes of the checkpoint's tensors."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparserl
from sparserl import Region
from sparserl.errors import RegionOverlap, TensorMismatch, UnsupportedTensor
from sparserl.sources import Layout, Local, Slice, Span, joined, mapped, require_cover
from sparserl.sources.layout import boxes, flat, split, stack
from sparserl.weights.digest import table_digest
from sparserl.weights.region import whole

Q, K = np.arange(48, dtype=np.float32).reshape(8, 6), 100 + np.arange(24, dtype=np.float32).reshape(4, 6)
WEIGHTS = {"q": Q, "k": K}
TABLE = sparserl.tensor_table(WEIGHTS)


def held(layout, parameters):
    """The checkpoint as far as one rank has it; NaN elsewhere."""
    out = {name: np.full(tensor.shape, np.nan, np.float32) for name, tensor in WEIGHTS.items()}
    for part in layout.shards(parameters).parts:
        out[part.tensor][part.region.slices] = part.data
    return out


def test_split():
    """Equal parts along any dimension."""
    for dim, rank in ((0, 1), (1, 0), (1, 2)):
        size = 2 if dim == 0 else 3
        local = split(TABLE, "q", dim, rank, size)
        mine = np.split(Q, size, dim)[rank]
        got = held(Layout(TABLE, {"p": local}), {"p": mine})["q"]
        want = np.full_like(Q, np.nan)
        np.split(want, size, dim)[rank][...] = mine
        assert np.array_equal(got, want, equal_nan=True)
    with pytest.raises(TensorMismatch, match=r"'q': dimension 0 of \[8, 6\] cannot be cut into 3 equal parts"):
        split(TABLE, "q", 0, 0, 3)


@pytest.mark.parametrize("size", [1, 2, 7, 14])
def test_stack(size):
    """Interleaved rows and padding, cut anywhere, also in the middle of a run."""
    runs = [Span("q", 0, 4), Span("k", 0, 2), Span("q", 4, 4), Span("k", 2, 2), Span(None, 0, 2)]
    fused = np.concatenate([Q[:4], K[:2], Q[4:], K[2:], np.zeros((2, 6), np.float32)])
    layouts = [Layout(TABLE, {"p": stack(TABLE, runs, rank, size)}) for rank in range(size)]
    require_cover(layouts)
    for layout, mine in zip(layouts, np.split(fused, size), strict=True):
        for name, got in held(layout, {"p": mine}).items():
            there = ~np.isnan(got)
            assert np.array_equal(got[there], WEIGHTS[name][there])


def test_stack_refuses():
    """Rows of several shapes, and rows that cannot be cut evenly."""
    table = sparserl.tensor_table({"a": np.zeros((2, 3)), "b": np.zeros((2, 4))})
    with pytest.raises(TensorMismatch, match="'a', 'b' cannot be stacked"):
        stack(table, [Span("a", 0, 2), Span("b", 0, 2)])
    with pytest.raises(TensorMismatch, match="'a' cannot be cut into 3 equal parts"):
        stack(table, [Span("a", 0, 2)], 0, 3)


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_boxes(shape, data):
    """The boxes of a flat range hold its elements in order, and are no more than the rank needs."""
    numel = math.prod(shape)
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    numbers = np.arange(numel).reshape(shape)
    found = list(boxes(shape, low, high))
    got = [n for box in found for n in numbers[box.slices].reshape(-1).tolist()]
    assert got == list(range(low, high))
    assert all(box.fits(shape) for box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_flat_shards(data):
    """A buffer of several tensors and padding, cut into flat shards anywhere, is the checkpoint."""
    pad = data.draw(st.integers(0, 5))
    buffer = np.concatenate([Q.reshape(-1), np.zeros(pad, np.float32), K.reshape(-1)])
    ends = [0, *sorted(data.draw(st.lists(st.integers(1, 71), min_size=1, max_size=4))), buffer.size]
    spans = (("q", 0, 48), (None, 48, 48 + pad), ("k", 48 + pad, buffer.size))
    layouts, digests = [], table_digest(TABLE)
    for low, high in zip(ends, ends[1:], strict=False):
        cut = [(t, a, max(low, a), min(high, b)) for t, a, b in spans]
        layouts.append(Layout(TABLE, {"flat": flat(TABLE, [Span(t, a - o, b - a) for t, o, a, b in cut if a < b])}))
        shards = layouts[-1].shards({"flat": buffer[low:high]})
        assert all(np.array_equal(part.data, WEIGHTS[part.tensor][part.region.slices]) for part in shards.parts)
        digests += sparserl.digest(shards, threads=1)
    require_cover(layouts)
    assert digests == sparserl.digest(WEIGHTS)


def test_parts_are_views():
    """Nothing is copied: what is written to a parameter later is seen, in boxes and through another shape."""
    experts = np.zeros((2, 8, 6), np.float32)
    table = sparserl.tensor_table({"0": Q, "1": Q})
    slices = tuple(Slice(str(e), whole((8, 6)), Region((e, 0, 0), (1, 8, 6))) for e in range(2))
    parts = Layout(table, {"experts": Local((2, 8, 6), slices)}).shards({"experts": experts}).parts
    experts[1, 3, 4] = 7
    assert parts[0].data.max() == 0
    assert parts[1].data[3, 4] == 7


def test_torch_views():
    """Torch parameters in any memory layout are seen where they lie; what cannot be seen so is refused."""
    torch = pytest.importorskip("torch")
    table = sparserl.tensor_table({"w": np.zeros((4, 3), np.float32)})
    stacked = Layout(table, {"p": Local((1, 4, 3), (Slice("w", whole((4, 3)), whole((1, 4, 3))),))})
    turned = torch.zeros(3, 4).t().unsqueeze(0)
    part = stacked.shards({"p": turned}).parts[0]
    turned[0, 1, 2] = 5
    assert part.data[1, 2] == 5
    bent = Layout(table, {"p": Local((3, 4), (Slice("w", whole((4, 3)), whole((3, 4))),))})
    assert bent.shards({"p": torch.zeros(3, 4)}).parts[0].data.shape == (4, 3)
    with pytest.raises(UnsupportedTensor, match="parameter 'p': view size is not compatible"):
        bent.shards({"p": torch.zeros(4, 3).t()})


def test_numpy_copies_are_refused():
    """An array that cannot take the region's shape where it lies."""
    table = sparserl.tensor_table({"w": np.zeros((4, 3), np.float32)})
    layout = Layout(table, {"p": Local((3, 4), (Slice("w", whole((4, 3)), whole((3, 4))),))})
    with pytest.raises(UnsupportedTensor, match=r"'p': \[3, 4\] has no view of shape \[4, 3\]"):
        layout.shards({"p": np.zeros((4, 3), np.float32).T})


def test_what_does_not_fit_is_refused():
    """Slices outside their tensor or parameter, of unequal size, of unknown tensors."""
    for piece, said in (
        (Slice("q", Region((7, 0), (2, 6)), Region((0, 0), (2, 6))), "does not lie in q"),
        (Slice("q", Region((0, 0), (2, 6)), Region((7, 0), (2, 6))), r"does not lie in \[8, 6\]"),
        (Slice("q", Region((0, 0), (2, 6)), Region((0, 0), (1, 6))), "cannot be"),
        (Slice("x", Region((0, 0), (2, 6)), Region((0, 0), (2, 6))), "'x' is not in the tensor table"),
    ):
        with pytest.raises(TensorMismatch, match=said):
            Layout(TABLE, {"p": Local((8, 6), (piece,))})
    layout = Layout(TABLE, {"p": split(TABLE, "q", 0, 0, 2)})
    with pytest.raises(TensorMismatch, match=r"\['p'\] are missing, \['other'\] are not in the layout"):
        layout.shards({"other": Q})
    with pytest.raises(TensorMismatch, match=r"'p' has shape \[8, 6\], in the layout \[4, 6\]"):
        layout.shards({"p": Q})


def test_cover():
    """Holes and overlaps among the ranks are found before anything runs."""
    all_of_q = Layout(TABLE, {"p": split(TABLE, "q", 0, 0, 1)})
    with pytest.raises(TensorMismatch, match=r"hold only 0 of 24 elements of 'k'"):
        require_cover([all_of_q])
    with pytest.raises(RegionOverlap, match="'q'"):
        require_cover([all_of_q, Layout(TABLE, {"p": split(TABLE, "q", 1, 1, 2)})])
    require_cover(
        [all_of_q, Layout(TABLE, {"p": split(TABLE, "q", 0, 0, 1).owned(False), "k": split(TABLE, "k", 0, 0, 1)})]
    )


def test_sources():
    """A mapping, a function that returns one, and several sources joined, as one source."""
    first, second = Layout(TABLE, {"q": split(TABLE, "q", 0, 0, 1)}), Layout(TABLE, {"k": split(TABLE, "k", 0, 0, 1)})
    both = joined(mapped(first, {"q": Q}), mapped(second, lambda: {"k": K}))
    assert isinstance(both, sparserl.sources.Source)
    assert sparserl.digest(both.weights()) == sparserl.digest(WEIGHTS)
    with pytest.raises(UnsupportedTensor, match="got int"):
        mapped(first, 3)
    other = sparserl.tensor_table({"k": K})
    stranger = mapped(Layout(other, {"k": split(other, "k", 0, 0, 1)}), {"k": K})
    with pytest.raises(TensorMismatch, match="'q' is in source 0 but not in source 1"):
        joined(mapped(first, {"q": Q}), stranger).weights()


def test_modules():
    """A torch module is asked anew: memory that has moved is found."""
    torch = pytest.importorskip("torch")
    table = sparserl.tensor_table({"up": np.zeros((2, 3), np.float32), "gate": np.zeros((2, 3), np.float32)})
    source = mapped(
        Layout(table, {"weight": stack(table, [Span("gate", 0, 2), Span("up", 0, 2)])}),
        torch.nn.Linear(3, 4, bias=False),
    )
    before = sparserl.digest(source.weights())
    with pytest.raises(TensorMismatch, match="'bias'"):
        mapped(source.layout, torch.nn.Linear(3, 4)).weights()
    module = torch.nn.Linear(3, 4, bias=False)
    source = mapped(source.layout, module)
    module.weight = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    whole_of = {"gate": torch.arange(6.0).view(2, 3), "up": torch.arange(6.0, 12.0).view(2, 3)}
    assert sparserl.digest(source.weights()) == sparserl.digest(whole_of) != before


def test_the_page_about_shards():
    """What docs/how-to/shards.md works out runs, and is what the page draws."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "shards.md").read_text()
    *_, made, used = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"rank": 1}
    exec(made, names)
    shapes = {name: local.shape for name, local in names["layout"](1, 2).parameters.items()}
    names["module"] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    exec(used, names)
    assert [f"{part.tensor}{part.region}" for part in names["shards"].parts] == [
        "q_proj.weight[4:8, 0:16]",
        "k_proj.weight[2:4, 0:16]",
        "v_proj.weight[2:4, 0:16]",
        "o_proj.weight[0:16, 4:8]",
    ]
