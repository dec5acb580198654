"""Where bits lie: which tensors are taken as they are, which are refused and in which words, and who shares memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparserl
from sparserl import Part, Shards
from sparserl.errors import TensorMismatch, TiedConflict, UnsupportedTensor
from sparserl.weights.dtypes import BY_NAME, DTYPES, Bits
from sparserl.weights.memory import tied_groups
from sparserl.weights.region import Region
from sparserl.weights.tensors import memories, memory_of, require_writable, table_of, tensor_table

NAME = "model.layers.0.w"


class Elsewhere(torch.Tensor):
    """A tensor that says it lives on a GPU."""

    @property
    def is_cpu(self):
        return False

    @property
    def device(self):
        return torch.device("cuda:0")


class Distributed(torch.Tensor):
    """A tensor with a device mesh."""

    device_mesh = object()


def strided_oddly():
    """float32 elements seven bytes apart."""
    return np.lib.stride_tricks.as_strided(np.zeros(100, np.uint8).view(np.float32), (5,), (7,))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(3, device="meta"), "meta"),
        (torch.ones(3).as_subclass(Elsewhere), "cuda:0"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.ones(3).as_subclass(Distributed), "DTensor"),
        (torch.ones(3, dtype=torch.complex64).conj(), "lazy conjugate"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "lazy conjugate or negative"),
        (torch.zeros(3, dtype=torch.complex128), "complex128"),
        (np.zeros(3, np.complex128), "complex128"),
        (np.zeros(3, np.longdouble), "float128"),
        (np.zeros(3, object), "object"),
        (np.zeros(3, "U4"), "<U4"),
        (np.zeros(3, "M8[s]"), "datetime64"),
        (np.zeros(3, [("a", "f4"), ("b", "f4")]), "not supported"),
        (np.zeros(3, ">f4"), "big-endian"),
        (np.zeros(3, ">u2"), "big-endian"),
        (strided_oddly(), "not multiples of the element size"),
        ([1.0, 2.0], "list"),
        (3.0, "float"),
        (None, "NoneType"),
        (np.float32(3), "float32"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_used_is_refused_by_name(tensor, words):
    """The error names the tensor and says what is wrong with it, wherever it is handed in."""
    good = {NAME: np.zeros(3, np.float32)}
    for call in (
        lambda: memory_of(NAME, tensor),
        lambda: sparserl.digest({NAME: tensor}),
        lambda: sparserl.diff({NAME: tensor}, good),
        lambda: sparserl.diff(good, {NAME: tensor}),
        lambda: sparserl.diff(good, good).apply({NAME: tensor}),
    ):
        with pytest.raises(UnsupportedTensor) as caught:
            call()
        assert NAME in str(caught.value)
        assert words in str(caught.value)


def layouts():
    """Arrays of one shape in all sorts of memory, each with a fresh owner."""
    values = np.arange(4 * 6, dtype=np.uint16).reshape(4, 6)
    wide = np.zeros((4, 12), np.uint16)
    wide[:, ::2] = values
    spaced = np.zeros((8, 7), np.uint16)
    spaced[1::2, :6] = values
    backwards = np.ascontiguousarray(values[::-1, ::-1])[::-1, ::-1]
    shifted = np.zeros(4 * 6 * 2 + 3, np.uint8)
    odd = np.ndarray((4, 6), np.uint16, shifted, offset=3)
    odd[...] = values
    return {
        "contiguous": values,
        "transposed": np.ascontiguousarray(values.T).T,
        "every other column": wide[:, ::2],
        "rows of a wider array": spaced[1::2, :6],
        "negative strides": backwards,
        "unaligned": odd,
        "torch": torch.from_numpy(values.copy()),
        "torch transposed": torch.from_numpy(np.ascontiguousarray(values.T)).T,
        "torch slice": torch.from_numpy(wide.copy())[:, ::2],
        "bits": Bits(values.copy(), BY_NAME["uint16"]),
    }


@pytest.mark.parametrize("layout", layouts())
def test_any_strided_layout_reads_the_same(layout):
    """Row-major order is that of the tensor, not that of its memory: whole, and box by box."""
    tensor = layouts()[layout]
    expected = layouts()["contiguous"]
    memory = memory_of(NAME, tensor)
    assert memory.shape == (4, 6)
    assert (memory.view() == expected).all()
    for region in (
        None,
        Region((0, 0), (4, 6)),
        Region((1, 0), (2, 6)),
        Region((1, 2), (3, 2)),
        Region((3, 5), (1, 1)),
    ):
        part = expected if region is None else expected[region.slices]
        address, owner = memory.read(region)
        read = np.ndarray(part.size, np.uint16, (np.ctypeslib.ctypes.c_uint16 * part.size).from_address(address))
        assert (read == part.ravel()).all()
        del owner


@pytest.mark.parametrize("layout", layouts())
def test_any_strided_layout_is_patched_in_place(layout):
    """A patch lands in the memory at hand, whatever its strides."""
    old, target = layouts()["contiguous"], layouts()[layout]
    new = old.copy()
    new[[0, 1, 3], [5, 0, 5]] += np.uint16(9)
    for profile in ("raw", "gap", "ulp", "ctx", "auto"):
        sparserl.diff({NAME: old}, {NAME: new}, profile=profile).apply({NAME: target})
        assert (memory_of(NAME, target).view() == new).all()
        sparserl.diff({NAME: new}, {NAME: old}, profile=profile).apply({NAME: target})
        assert (memory_of(NAME, target).view() == old).all()


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1, 1), (3, 0, 2), (0, 0)])
def test_scalars_and_empty_tensors(make, shape):
    """0-dim and empty tensors are tensors like any other."""
    kind = {np.zeros: np.float32, torch.zeros: torch.float32}[make]
    weights = {NAME: make(shape, dtype=kind)}
    assert table_of(memories(weights))[0].shape == shape
    assert memory_of(NAME, weights[NAME]).copied().shape == shape  # NumPy before 2.4 refuses address 0
    new = {NAME: make(shape, dtype=kind)}
    new[NAME][...] = -0.0
    patch = sparserl.diff(weights, new)
    assert patch.changed == int(np.prod(shape))
    patch.apply(weights)
    assert sparserl.digest(weights) == sparserl.digest(new) == patch.result


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_torch_and_bits_of_every_dtype_agree(dtype):
    """A torch tensor of any supported dtype is the same table row and the same digest as its patterns."""
    bits = np.arange(6, dtype=dtype.uint).reshape(2, 3)
    tensor = torch.from_numpy(bits.copy()).view(getattr(torch, dtype.name))
    theirs, ours = {NAME: tensor}, {NAME: Bits(bits, dtype)}
    assert tensor_table(theirs) == tensor_table(ours)
    assert sparserl.digest(theirs) == sparserl.digest(ours)
    if dtype.name != "complex32":  # torch warns where it makes one
        assert tensor_table({NAME: tensor.to("meta")}) == tensor_table(ours)


def test_parameters_need_no_detaching():
    """A module's parameters are taken as they are, gradients or not, and patched under autograd's eyes."""
    layer = torch.nn.Linear(4, 3)
    new = {k: v.detach() + 1 for k, v in layer.named_parameters()}
    sparserl.diff(dict(layer.named_parameters()), new).apply(dict(layer.named_parameters()))
    assert all(torch.equal(v, new[k]) for k, v in layer.named_parameters())


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (read_only(np.zeros((3, 4), np.float32)), "read-only"),
        (np.broadcast_to(np.zeros(4, np.float32), (3, 4)), "read-only"),
        (torch.zeros(4).expand(3, 4), "share"),
        (torch.zeros(6).unfold(0, 4, 1), "share"),
        (torch.zeros(6).as_strided((3, 4), (1, 1)), "share"),
        (np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), (3, 4), (4, 4)), "share"),
    ],
    ids=["read-only", "broadcast", "expand", "unfold", "torch strides", "numpy strides"],
)
def test_memory_that_cannot_take_a_patch(tensor, words):
    """Read-only memory, and memory in which elements share an address, is read but never written."""
    old, new = {NAME: np.zeros((3, 4), np.float32)}, {NAME: np.zeros((3, 4), np.float32)}
    new[NAME][1, 2] = 5
    weights = {NAME: tensor}
    assert sparserl.digest(weights) == sparserl.digest(old)
    for profile in ("raw", "ulp"):
        with pytest.raises(UnsupportedTensor, match=rf"'{NAME}'.*{words}"):
            sparserl.diff(old, new, profile=profile).apply(weights)
    assert sparserl.digest(weights) == sparserl.digest(old)


def test_memory_that_is_not_touched_may_be_read_only():
    """Only the tensors that a patch changes must be writable."""
    old = {"fixed": read_only(np.zeros(3, np.float32)), "free": np.zeros(3, np.float32)}
    new = {"fixed": old["fixed"], "free": np.ones(3, np.float32)}
    sparserl.diff(old, new).apply(old)
    assert (old["free"] == 1).all()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, 4).permute(2, 0, 1),
        torch.zeros(8, 8)[::2, ::3],
        torch.zeros(5, 1).expand(5, 1),
        torch.zeros(3, 4).as_strided((3, 1, 4), (4, 0, 1)),
        np.zeros((6, 6), np.float32)[::-2, ::-1],
    ],
    ids=["permuted", "strided", "one column", "stride of nothing", "backwards"],
)
def test_memory_without_shared_elements_is_writable(tensor):
    """Permuted, sliced and reversed views are one address per element."""
    require_writable([(NAME, memory_of(NAME, tensor))])


def test_tied_groups_are_the_names_of_the_same_memory():
    """Equal address, dtype, shape and strides: one group, in the order of names, also among torch tensors."""
    a, b, c = np.zeros(10, np.float32), np.zeros(10, np.float32), torch.zeros(4, 4)
    held = memories({"z": a, "b": b, "y": a, "x": a[:], "t": c, "u": c.view(4, 4), "v": torch.zeros(4, 4)})
    assert sorted(map(sorted, tied_groups(held))) == [["t", "u"], ["x", "y", "z"]]
    assert tied_groups(memories({"b": b})) == []
    assert tied_groups({}) == []


def test_interleaved_views_do_not_share():
    """Even and odd columns, or q, k and v of one fused tensor, are disjoint however their spans cross."""
    fused = np.zeros((6, 8), np.float32)
    held = memories({"even": fused[:, ::2], "odd": fused[:, 1::2]})
    assert tied_groups(held) == []
    rows = {"q": fused[:2], "k": fused[2:4], "v": fused[4:]}
    assert tied_groups(memories(rows)) == []
    columns = {"q": fused[:, :3], "k": fused[:, 3:5], "v": fused[:, 5:], "again": fused[:, 3:5]}
    assert tied_groups(memories(columns)) == [["again", "k"]] or tied_groups(memories(columns)) == [["k", "again"]]


@pytest.mark.parametrize(
    "other",
    [
        lambda a: a[1:],
        lambda a: a[:-1],
        lambda a: a[::2],
        lambda a: a.reshape(2, 6),
        lambda a: a.view(np.int32),
        lambda a: a[::-1],
        lambda a: a.view(np.uint16),
    ],
    ids=["tail", "head", "half", "reshaped", "other dtype", "reversed", "narrower"],
)
def test_partly_shared_memory_is_refused(other):
    """Memory shared without being the same tensor cannot be patched safely; both names are in the error."""
    a = np.zeros(12, np.float32)
    weights = {"first": a, "second": other(a)}
    with pytest.raises(TiedConflict, match=r"(?s)first.*second|second.*first"):
        tied_groups(memories(weights))
    old = {k: v.copy() for k, v in weights.items()}
    new = {k: v.copy() for k, v in weights.items()}
    new["first"][3] = 1
    with pytest.raises(TiedConflict):
        sparserl.diff(old, new).apply(weights)
    assert (a == 0).all()


def test_memory_that_may_be_shared_is_refused(monkeypatch):
    """Where telling whether two views overlap would take too long, they are taken to overlap."""

    def too_hard(*_, **__):
        raise np.exceptions.TooHardError

    monkeypatch.setattr("sparserl.weights.memory._shares_memory", too_hard)
    fused = np.zeros((6, 8), np.float32)
    with pytest.raises(TiedConflict, match=r"even.*odd|odd.*even"):
        tied_groups(memories({"even": fused[:, ::2], "odd": fused[:, 1::2]}))


def test_the_table_is_sorted_and_has_each_name_once():
    """The order of the mapping is irrelevant; tables compare by their rows."""
    a, b = np.zeros(2, np.float32), np.zeros((2, 3), np.int8)
    assert tensor_table({"b": b, "a": a}) == tensor_table({"a": a, "b": b})
    assert [s.name for s in tensor_table({"b": b, "a": a}).specs] == ["a", "b"]
    assert hash(tensor_table({"b": b, "a": a})) == hash(tensor_table({"a": a, "b": b}))
    assert tensor_table({"a": a}) != tensor_table({"b": a})
    assert repr(tensor_table({"a": a, "b": b})) == "<TensorTable of 2 tensors, 8 elements>"
    assert tensor_table({"b": b})[0].shape == (2, 3)
    spec = tensor_table({"a": a})[0]
    with pytest.raises(TensorMismatch, match="twice"):
        sparserl.TensorTable([spec, spec])


def freed():
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short():
    tensor = torch.zeros(1000)[::2]
    tensor.untyped_storage().resize_(100)
    return tensor


def made_smaller():
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(16)
    return tensor


def made_smaller_in_the_middle():
    tensor = torch.zeros(1010)[10:]
    tensor.untyped_storage().resize_(4000)
    return torch.nn.Parameter(tensor)


def freed_from_the_middle():
    whole = torch.zeros(1010)
    tensor = whole[10:]
    whole.untyped_storage().resize_(0)
    return tensor


def zeros_without_memory():
    return torch._efficientzerotensor((1000,))


@pytest.mark.parametrize(
    "make",
    [freed, freed_from_the_middle, made_smaller, made_smaller_in_the_middle, cut_short, zeros_without_memory],
)
def test_tensors_without_memory(make):
    """A tensor whose storage was freed, was made smaller or never was there is refused by name: not read or written."""
    weights = {"v": torch.zeros(4), "w": make()}
    ones = {"v": torch.ones(4), "w": torch.ones(1000)}
    patch = sparserl.diff({name: torch.zeros_like(one) for name, one in ones.items()}, ones)
    region = Region((0,), (1000,))
    shards = Shards(sparserl.tensor_table(ones), [Part("w", region, weights["w"])])
    for use in (
        lambda: sparserl.digest(weights),
        lambda: sparserl.digest(shards),
        lambda: sparserl.diff(weights, ones),
        lambda: sparserl.diff(ones, weights),
        lambda: patch.apply(weights),
    ):
        with pytest.raises(UnsupportedTensor, match=r"'w'.*no memory"):
            use()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_negative_views_are_refused(dtype):
    """Their bits are not those in memory, whatever their dtype; so are conjugates."""
    for odd in (torch._neg_view(torch.ones(4, dtype=dtype)), torch.ones(4, dtype=torch.complex64).conj()):
        with pytest.raises(UnsupportedTensor, match=r"'w' is a lazy conjugate or negative view"):
            sparserl.digest({"v": torch.zeros(4), "w": odd})


@pytest.mark.parametrize("weights", [{1: np.zeros(2)}, {"a": np.zeros(2), 1: np.zeros(2)}, {"\ud800": np.zeros(2)}])
def test_names_that_are_no_text(weights):
    """Names must be text that can be encoded as UTF-8."""
    with pytest.raises(UnsupportedTensor, match="a tensor name must be text"):
        sparserl.digest(weights)


def test_weights_that_are_no_mapping():
    """A module is not its weights: the error says what to hand over."""
    with pytest.raises(UnsupportedTensor, match="state_dict"):
        sparserl.digest(torch.nn.Linear(2, 2))
