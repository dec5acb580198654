"""The load with which an engine starts shows where its weights are; what it does not explain is not believed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from sparserl.targets import first_load
from sparserl.targets.first_load import FirstLoad, NotExplained
from tests.targets.engines import Engine, checkpoint
from tests.targets.test_learn import require_learnt

SHAPE = (6, 8)


def weights(**shapes):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_watched(live, load, tensors, others=None, derived=None):
    """The pieces that a load of these tensors shows."""
    with FirstLoad(others or {}) as watched:
        load(watched.watched(tensors.items()))
    watched.ended_with(live)
    return watched.find_pieces(live, derived() if derived else {})


def copy_all(live):
    def load(some):
        for name, tensor in some:
            live[name].copy_(tensor)

    return load


class PaddedEngine(Engine):
    """Pads embeddings as vLLM does: first rows, then zeros behind them."""

    def load_one(self, name, tensor):
        if name != "model.embed_tokens.weight":
            super().load_one(name, tensor)
            return
        embed = self.live["embed"]
        mine = tensor[self.rank * len(embed) :][: len(embed)]
        embed[: len(mine)].copy_(mine)
        embed[len(mine) :].fill_(0)


def require_learnt_as_it_loads(engine, dtype):
    """All of an engine is found by its load, and stays what was loaded."""
    tensors = checkpoint(dtype)
    pieces = load_watched(engine.live, engine.load, tensors, {"table": engine.live["table"]})
    assert all(torch.equal(p.view(engine.live).cpu(), tensors[p.tensor][p.region.slices]) for p in pieces)
    require_learnt(pieces, engine, checkpoint(dtype, seed=9))
    assert "table" not in {piece.live for piece in pieces}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_an_engine_is_learnt_as_it_loads(ranks, dtype):
    """Fused, sharded, padded, stacked and transposed: all is found by the load itself, and stays what was loaded."""
    for rank in range(ranks):
        require_learnt_as_it_loads(PaddedEngine(rank, ranks, dtype), dtype)


def test_weights_that_are_cast():
    """A checkpoint in another dtype is compared as the engine has it."""
    live = {"w": torch.zeros(SHAPE, dtype=torch.bfloat16)}
    (piece,) = load_watched(live, copy_all(live), weights(w=SHAPE))
    assert piece.live == "w"


def give_to_numpy(live, tensor):
    live["w"].copy_(tensor)
    live["w"].numpy()


def unseen(change):
    """A change by another thread, whose operations are not watched."""
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()


def in_a_thread(live, tensor):
    unseen(lambda: live["w"].copy_(tensor))


def in_part(live, tensor):
    live["w"][:3].copy_(tensor[:3])


def rounded(live, tensor):
    live["w"].copy_(tensor.to(torch.bfloat16).float())


def doubled(live, tensor):
    live["w"].copy_(tensor * 2)


def read_as_a_number(live, tensor):
    live["w"].copy_(tensor)
    live["w"].max().item()


def read_as_numbers(live, tensor):
    live["w"].copy_(tensor)
    live["w"].tolist()


def read_by_address(live, tensor):
    live["w"].copy_(tensor)
    live["w"].data_ptr()  # as a kernel of Triton is launched


def compared(live, tensor):
    live["w"].copy_(tensor)
    torch.equal(live["w"], tensor)  # a loader may go one way or the other


def counted(live, tensor):
    live["w"].copy_(tensor)
    live["w"].nonzero()


def filled_twice(live, tensor):
    live["w"][:2].copy_(tensor[:2])
    in_a_thread({"w": live["w"][4:]}, tensor[4:])
    for rows in (slice(2, 4), slice(2, 4)):  # as many elements as are left
        live["w"][rows].zero_()


def partly_written_over(live, tensor):
    live["w"].copy_(tensor)
    live["w"][1:3].copy_(tensor[3:5].clone())  # rows 1 and 2 were there


def dropped(live, tensor):
    tensor[3:].clone()  # of which something may be computed unseen
    live["w"].resize_(3, 8)
    live["w"].copy_(tensor[:3])


def twice(live, tensor):
    live["w"].copy_(tensor)
    live["v"].copy_(tensor)


WAYS = [
    (give_to_numpy, "more than copied"),
    (in_a_thread, "not seen to be loaded"),
    (in_part, "not seen to be loaded"),
    (rounded, "more than copied"),
    (doubled, "more than copied"),
    (read_as_a_number, "more than copied"),
    (read_as_numbers, "more than copied"),
    (read_by_address, "more than copied"),
    (compared, "more than copied"),
    (counted, "more than copied"),
    (filled_twice, "not seen to be loaded"),
    (partly_written_over, "more than copied"),
    (dropped, r"'w' \[3:6, 0:8\] was loaded, but is not there any longer"),
    (twice, "several places"),
]


@pytest.mark.parametrize(("way", "reason"), WAYS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_not_explained(way, reason):
    """Anything but copies that are all seen, kept once and given to nobody leaves the engine to other ways."""
    live = {"w": torch.zeros(SHAPE)} | ({"v": torch.zeros(SHAPE)} if way is twice else {})

    def load(some):
        for _, tensor in some:
            way(live, tensor)

    with pytest.raises(NotExplained, match=reason):
        load_watched(live, load, weights(w=SHAPE))


@pytest.mark.parametrize("made", [lambda x: x, lambda x: 1 / x, lambda x: max(x, 1e-3), lambda x: float(x > 0)])
@pytest.mark.parametrize("value", [1.0, 0.75, float("inf")])
def test_numbers_that_may_have_been_computed(made, value):
    """A number that was read may have been written, or what is made of it, which may be the same by chance."""
    live = {"scale": torch.zeros(1)}

    def load(some):
        for _, tensor in some:
            live["scale"].fill_(made(tensor.item()))

    with pytest.raises(NotExplained, match="'v' is more than copied"):
        load_watched(live, load, {"v": torch.full((1,), value)})


def test_a_truth_value_that_was_read():
    """Neither is one: another may have been meant."""
    live = {"flag": torch.zeros(1, dtype=torch.bool)}

    def load(some):
        for _, tensor in some:
            live["flag"].fill_(tensor.item())

    with pytest.raises(NotExplained, match="'flag' is more than copied"):
        load_watched(live, load, {"flag": torch.ones(1, dtype=torch.bool)})


class Magnitudes(torch.Tensor):
    """A class of tensors whose views are absolute values, in memory that it had before."""

    memory = torch.zeros(SHAPE)

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls.memory.abs_()


def test_views_that_compute():
    """A class of tensors may compute where others give views: bits that are the same by chance are not believed."""
    live = {"w": torch.zeros(SHAPE)}

    def load(some):
        for _, tensor in some:
            Magnitudes.memory.copy_(tensor)
            live["w"].copy_(Magnitudes(tensor)[:])

    tensors = {"w": weights(w=SHAPE)["w"].abs()}
    with pytest.raises(NotExplained, match="not seen to be loaded"):
        load_watched(live, load, tensors)
    assert torch.equal(live["w"], tensors["w"])


def test_what_cannot_be_followed_does_not_end_a_load(monkeypatch):
    """An engine starts, whatever its operations are; then it is left to other ways."""
    live = {"w": torch.zeros(SHAPE)}

    def fail(*_):
        raise AttributeError("an operation of a kind that is new")

    monkeypatch.setattr(first_load.LoadWatch, "_note", fail)
    tensors = weights(w=SHAPE)
    with pytest.raises(NotExplained, match="of a kind that is new"):
        load_watched(live, copy_all(live), tensors)
    assert torch.equal(live["w"], tensors["w"])


def test_a_copy_that_is_changed_unseen():
    """Bits that are written behind PyTorch's back are compared with the checkpoint."""
    live = {"w": torch.zeros(SHAPE)}
    behind = live["w"].numpy()

    def load(some):
        copy_all(live)(some)
        behind[2, 3] += 1

    with pytest.raises(NotExplained, match=r"'w' \[0:6, 0:8\] does not have the bits of the checkpoint"):
        load_watched(live, load, weights(w=SHAPE))


def test_a_constant_that_is_changed_unseen():
    """Padding has the number that it was filled with."""
    live = {"w": torch.ones(8, 8)}
    behind = live["w"].numpy()

    def load(some, changed=False):
        for _, tensor in some:
            live["w"][:6].copy_(tensor)
            live["w"][6:].fill_(0)
        behind[7, 7] += changed

    assert len(load_watched(live, load, weights(w=SHAPE))) == 1
    with pytest.raises(NotExplained, match="16 elements that were not seen"):
        load_watched(live, lambda some: load(some, changed=True), weights(w=SHAPE))


def test_tensors_that_no_load_touches():
    """A buffer has the bits that it had before, or it may come from the weights."""
    live = {"w": torch.zeros(SHAPE), "table": torch.arange(5.0)}
    others = {"table": live["table"]}
    behind = live["table"].numpy()
    tensors = weights(w=SHAPE)
    assert len(load_watched(live, copy_all(live), tensors, others)) == 1

    def load(some):
        copy_all(live)(some)
        behind[2] = 7

    with pytest.raises(NotExplained, match="'table' has 5 elements"):
        load_watched(live, load, tensors, others)
    with pytest.raises(NotExplained, match="'table' has 5 elements"):
        load_watched(live, copy_all(live), tensors)


def test_values_that_are_the_same_by_chance():
    """What was written to in a load has the bits that it had, but of other weights it would not."""
    live = {"w": torch.zeros(SHAPE)}
    others = {"limit": torch.ones(1)}

    def load(some):
        for _, tensor in some:
            live["w"].copy_(tensor)
            others["limit"].copy_(tensor.abs().max().clamp(min=10) / 10)

    with pytest.raises(NotExplained, match="'limit' has 1 elements"):
        load_watched(live, load, weights(w=SHAPE), others, lambda: others)
    assert others["limit"] == 1


def test_values_computed_of_weights():
    """What an engine keeps beside its weights must be a constant, or what it was."""
    live = {"w": torch.zeros(SHAPE)}
    tensors = weights(w=SHAPE)
    made = {}

    def load(some, make):
        copy_all(live)(some)
        made["it"] = make()

    for make in (lambda: torch.tensor(1.0), lambda: torch.zeros(3), lambda: torch.ones_like(live["w"])):
        assert load_watched(live, lambda some, make=make: load(some, make), tensors, derived=lambda: made)
    for make in (lambda: live["w"] * 2, live["w"].clone, lambda: torch.from_numpy(np.ones(3))):
        with pytest.raises(NotExplained, match=r"'it' has|several places"):
            load_watched(live, lambda some, make=make: load(some, make), tensors, derived=lambda: made)


def test_a_tensor_that_was_replaced():
    """Where the engine has other tensors than when it had loaded, addresses say nothing."""
    live = {"w": torch.zeros(SHAPE)}
    with FirstLoad({}) as watched:
        copy_all(live)(watched.watched(weights(w=SHAPE).items()))
    watched.ended_with(live)
    with pytest.raises(NotExplained, match="'w' has moved"):
        watched.find_pieces({"w": live["w"].clone()}, {})


def test_checkpoints_whose_tensors_share_memory():
    """Their addresses do not tell them apart."""
    both = torch.randn(2, 6, 8)
    live = {"a": torch.zeros(SHAPE), "b": torch.zeros(SHAPE)}
    with pytest.raises(NotExplained, match="'b' shares memory"):
        load_watched(live, copy_all(live), {"a": both[0], "b": both[1]})


def test_loaders_that_keep_tensors_for_later():
    """What is copied after the next tensor was asked for was not summed, and is left to other ways."""
    live = {"a": torch.zeros(SHAPE), "b": torch.zeros(SHAPE)}
    with pytest.raises(NotExplained, match="was not summed"):
        load_watched(live, lambda some: copy_all(live)([*some]), weights(a=SHAPE, b=SHAPE))


def test_tensors_wait_for_their_sums_in_bounds(monkeypatch):
    """A checkpoint that is read faster than it is summed does not pile up in memory."""
    monkeypatch.setattr(first_load, "_MOST_WAITING", 2 * 6 * 8 * 4)
    names = [f"layers.{i}" for i in range(20)]
    live = {name: torch.zeros(SHAPE) for name in names}
    waiting = []
    with FirstLoad({}) as watched:
        for name, tensor in watched.watched(weights(**dict.fromkeys(names, SHAPE)).items()):
            live[name].copy_(tensor)
            waiting.append(sum(not future.done() for future in watched._sums.values()))
    watched.ended_with(live)
    assert max(waiting) <= 2
    assert len(watched.find_pieces(live, {})) == 20
