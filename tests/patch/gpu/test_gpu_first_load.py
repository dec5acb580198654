"""What an engine loads to a GPU is summed up there, before anything else happens to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from sparserl.targets import first_load
from sparserl.targets.first_load import FirstLoad, NotExplained
from tests.patch.gpu.gpu_weights import CUDA, DEVICE, INTERPRETED, needs_gpu, needs_kernels
from tests.targets.test_first_load import (
    SHAPE,
    WAYS,
    PaddedEngine,
    copy_all,
    load_watched,
    require_learnt_as_it_loads,
    unseen,
    weights,
)

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = needs_gpu


class OneByOne(ThreadPoolExecutor):
    """Does at once what it is given."""

    def submit(self, function, *args):
        future = super().submit(function, *args)
        wait([future])
        return future


@pytest.fixture(autouse=True)
def _one_kernel_at_a_time(monkeypatch):
    """The interpreter has no two kernels at a time, and here all tensors are on a GPU."""
    if INTERPRETED:
        monkeypatch.setattr(first_load, "ThreadPoolExecutor", OneByOne)


class GpuEngine(PaddedEngine):
    """An engine on a GPU."""

    def __init__(self, rank, ranks, dtype):
        super().__init__(rank, ranks, dtype)
        self.live = {name: tensor.to(DEVICE) for name, tensor in self.live.items()}


@pytest.fixture
def summed_on_host(monkeypatch):
    """The names of the tensors that are read once more in host memory."""
    names = []
    sums = first_load._region_sums

    def region_sums(name, *rest):
        names.append(name)
        return sums(name, *rest)

    monkeypatch.setattr(first_load, "_region_sums", region_sums)
    return names


def on_gpu(**shapes):
    return {name: torch.zeros(shape, device=DEVICE) for name, shape in shapes.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_an_engine_is_learnt_as_it_loads(ranks, dtype):
    """Fused, sharded, padded, stacked and transposed: whatever kernels do not sum up is summed up in host memory."""
    for rank in range(ranks):
        require_learnt_as_it_loads(GpuEngine(rank, ranks, dtype), dtype)


@needs_kernels
def test_the_checkpoint_is_not_read_again(summed_on_host):
    """Only columns, casts and what is turned round are."""
    live = on_gpu(whole=SHAPE, rows=(3, 8), columns=(6, 4), turned=SHAPE)
    live["cast"] = torch.zeros(SHAPE, device=DEVICE, dtype=torch.bfloat16)

    def load(some):
        for name, tensor in some:
            if name == "turned":
                live[name].t().copy_(tensor.t())
            else:
                live[name].copy_({"rows": tensor[3:], "columns": tensor[:, 4:]}.get(name, tensor))

    pieces = load_watched(live, load, weights(**dict.fromkeys(live, SHAPE)))
    assert len(pieces) == len(live)
    assert sorted(summed_on_host) == ["cast", "columns", "turned"]


@pytest.mark.parametrize(("way", "reason"), WAYS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_not_explained(way, reason):
    """The same as in host memory."""
    if CUDA and way.__name__ == "give_to_numpy":
        pytest.skip("NumPy does not take tensors on a GPU")
    live = on_gpu(w=SHAPE) | (on_gpu(v=SHAPE) if way.__name__ == "twice" else {})

    def load(some):
        for _, tensor in some:
            way(live, tensor.to(DEVICE) if way.__name__ == "compared" else tensor)

    with pytest.raises(NotExplained, match=reason):
        load_watched(live, load, weights(w=SHAPE))


@pytest.mark.parametrize("before", ["the next tensor", "the end"])
def test_a_copy_that_is_changed_unseen(before):
    """Sums are of the bits as they came, even if another kernel changes them before the loader goes on."""
    live = on_gpu(w=SHAPE, v=SHAPE)

    def load(some):
        for name, tensor in some:
            live[name].copy_(tensor)
            if name == "w" and before == "the next tensor":
                unseen(lambda: live["w"].add_(1))
        if before == "the end":
            unseen(lambda: live["w"].add_(1))

    with pytest.raises(NotExplained, match=r"'w' \[0:6, 0:8\] does not have the bits of the checkpoint"):
        load_watched(live, load, weights(w=SHAPE, v=SHAPE))


@pytest.mark.parametrize("doubled", [False, True])
def test_bits_that_come_by_way_of_another_tensor(doubled):
    """They are those of the checkpoint only if nobody has changed them on the way."""
    live = on_gpu(w=SHAPE)

    def load(some):
        for name, tensor in some:
            between = tensor.clone()
            if doubled:
                unseen(lambda between=between: between.mul_(2))
            live[name].copy_(between)

    if doubled:
        with pytest.raises(NotExplained, match="does not have the bits of the checkpoint"):
            load_watched(live, load, weights(w=SHAPE))
    else:
        assert len(load_watched(live, load, weights(w=SHAPE))) == 1


@pytest.mark.parametrize(
    ("kept", "refusal"),
    [(torch.int16, "is more than copied"), (torch.bfloat16, "does not have the bits of the checkpoint")],
)
def test_bits_that_are_taken_for_another_dtype(kept, refusal):
    """Bits that a loader calls something else are not numbers of the checkpoint's dtype, or become other ones."""
    live = {"w": torch.zeros(SHAPE, device=DEVICE, dtype=kept)}
    tensors = {"w": torch.arange(1, 49, dtype=torch.int16).view(SHAPE)}

    def load(some):
        for name, tensor in some:
            live[name].copy_(tensor.view(torch.bfloat16))

    with pytest.raises(NotExplained, match=refusal):
        load_watched(live, load, tensors)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_loaders_that_keep_tensors_for_later(names):
    """The memory of a tensor that is gone may be another's: what comes later is left to other ways."""
    shapes = dict.fromkeys(names, SHAPE)
    live = on_gpu(**shapes)

    def load(some):
        kept = []
        for item in some:
            copy_all(live)(kept)
            kept = [item]
        copy_all(live)(kept)

    with pytest.raises(NotExplained, match=r"'a' .* was not summed"):
        load_watched(live, load, weights(**shapes))


def test_a_default_device():
    """Loaders work inside `torch.device(...)`, which is not for what sums up their weights."""
    live = on_gpu(w=SHAPE)
    tensors = weights(w=SHAPE)
    with torch.device("meta"), FirstLoad({}) as watched:
        copy_all(live)(watched.watched(tensors.items()))
    watched.ended_with(live)
    assert len(watched.find_pieces(live, {})) == 1


class Flipped(torch.Tensor):
    """Gives another tensor what is copied to it, with its rows in another order."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.copy_.default
        args[0].other.copy_(args[1].flip(0))
        return args[0]


class Doubling(TorchDispatchMode):
    """Doubles what is copied."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            out.mul_(2)
        return out


def copy_flipped(live, tensor):
    flipped = torch.Tensor._make_subclass(Flipped, live)
    flipped.other = live
    flipped.copy_(tensor)


@needs_kernels
@pytest.mark.parametrize("copy", [lambda live, tensor: live.copy_(tensor.conj()), copy_flipped], ids=["conj", "class"])
def test_copies_that_change_bits(copy):
    """Conjugates, and classes of tensors whose copies are others', are compared with the checkpoint."""
    live = {"w": torch.zeros(SHAPE, device=DEVICE, dtype=torch.complex64)}

    def load(some):
        for name, tensor in some:
            copy(live[name], tensor)

    tensors = {"w": torch.view_as_complex(torch.randn(*SHAPE, 2))}
    with pytest.raises(NotExplained, match=r"does not have the bits|more than copied|not seen"):
        load_watched(live, load, tensors)


def test_modes_that_change_bits():
    """What another mode makes of a copy is compared with the checkpoint."""
    live = on_gpu(w=SHAPE)
    with Doubling(), FirstLoad({}) as watched:
        copy_all(live)(watched.watched(weights(w=SHAPE).items()))
    watched.ended_with(live)
    with pytest.raises(NotExplained, match="does not have the bits"):
        watched.find_pieces(live, {})


def test_a_zero_that_loses_its_sign():
    """A number that Python takes for the one of the checkpoint may have other bits: zeros are not believed."""
    live = {"scale": torch.ones((), device=DEVICE)}

    def load(some):
        for name, tensor in some:
            live[name].fill_(abs(tensor.item()))

    with pytest.raises(NotExplained, match="'scale' is more than copied"):
        load_watched(live, load, {"scale": torch.tensor(-0.0)})


class Buffer:
    """Memory that tensors of the checkpoint are read into, one after the other."""

    def __init__(self):
        self.bytes = bytearray(4 * 48)

    def read(self, number):
        self.bytes[:] = np.full(48, number, np.float32).tobytes()
        return torch.frombuffer(self.bytes, dtype=torch.float32).view(SHAPE)


def end_early(some, _):
    name, _ = next(some)
    some.close()
    return name


def take_other_memory(some, _):
    name, tensor = next(some)
    tensor.data = torch.zeros(SHAPE)
    return name


def keep_going(some, kept):
    name, _ = next(some)
    kept.append(some)
    return name


@pytest.mark.parametrize("way", [end_early, take_other_memory, keep_going])
def test_memory_that_is_read_into_again(way):
    """What has the address of a tensor that the engine was given need not be that tensor any longer."""
    live = on_gpu(w=SHAPE)
    buffer = Buffer()
    kept = []

    def load(some):
        name = way(some, kept)
        live[name].copy_(buffer.read(7))

    with FirstLoad({}) as watched:
        load(watched.watched((name, buffer.read(1)) for name in "w"))
    watched.ended_with(live)
    with pytest.raises(NotExplained):
        watched.find_pieces(live, {})


def test_a_load_that_ends_early():
    """What was copied, and is kept nowhere, is missed even if the engine asks for no other tensor."""
    live = on_gpu(w=(3, 8))

    def load(some):
        _, tensor = next(some)
        live["w"].copy_(tensor[:3])
        tensor[3:, :4].clone()
        some.close()

    with pytest.raises(NotExplained, match=r"'w' \[3:6, 0:4\] was loaded, but is not there any longer"):
        load_watched(live, load, weights(w=SHAPE))


@needs_kernels
def test_kernels_that_fail_are_tried_once(monkeypatch):
    """An engine starts without them, no later than it must."""
    tried = []

    def fail(*_):
        tried.append(True)
        raise RuntimeError("out of memory")

    monkeypatch.setattr("sparserl.weights.gpu_sums.tensor_sums", fail)
    live = on_gpu(a=SHAPE, b=SHAPE)
    with pytest.raises(NotExplained, match="out of memory") as raised:
        load_watched(live, copy_all(live), weights(a=SHAPE, b=SHAPE))
    assert len(tried) == 1
    assert raised.value.__cause__.__traceback__ is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_loaders_in_torchscript():
    """They read no addresses, though the kernels that sum up their weights do."""
    script = torch.jit.script(_copy_rows)
    live = on_gpu(w=SHAPE)

    def load(some):
        for name, tensor in some:
            script(live[name], tensor)

    assert len(load_watched(live, load, weights(w=SHAPE))) == 1


def _copy_rows(live: torch.Tensor, tensor: torch.Tensor) -> None:
    live.copy_(tensor)
