"""Our own targets pass the suite that everybody's must, and refuse what they cannot use."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from sparserl import targets
from sparserl.errors import SparserlError
from sparserl.sources import lora, open_checkpoint
from sparserl.targets.engine import EngineTarget
from sparserl.testing import TargetConformance
from sparserl.testing.weights import blank
from sparserl.weights.tensors import tensor_table

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")


class TestArrays(TargetConformance):
    """NumPy arrays in a mapping."""

    @pytest.fixture
    def target(self, versions):
        self.mine = blank(tensor_table(versions[0]))
        return targets.module(self.mine)

    def seen(self, target):
        return self.mine


class Tree(torch.nn.Module):
    """A module with parameters of given names."""

    def __init__(self, weights) -> None:
        super().__init__()
        for name, array in weights.items():
            *path, last = name.split(".")
            place = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, torch.nn.Module())
                place = getattr(place, part)
            place.register_parameter(last, torch.nn.Parameter(torch.zeros_like(torch.from_numpy(array))))


class TestModule(TargetConformance):
    """The parameters of a torch module, seen through its state_dict."""

    @pytest.fixture
    def target(self, versions):
        self.module = Tree(versions[0])
        return targets.module(self.module)

    def seen(self, target):
        return self.module.state_dict()


class TestFolder(TargetConformance):
    """A checkpoint folder, seen as an engine would load it."""

    @pytest.fixture
    def target(self, tmp_path: Path):
        yield (made := targets.folder(tmp_path / "folder"))
        made.close()

    def seen(self, target):
        return dict(open_checkpoint(target.current)) if target.current.exists() else None


def adapted(seed: int):
    """A small peft model in bf16, whose base weights are always the same."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 8)).to(torch.bfloat16)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False, use_dora=True)
    return peft.get_peft_model(base, config)


class TestAdapter(TargetConformance):
    """One adapter of a peft model."""

    merged = False

    @pytest.fixture
    def versions(self):
        return [{n: t.clone() for n, t in lora(adapted(seed)).weights().items()} for seed in range(1, 5)]

    @pytest.fixture
    def target(self):
        self.model = adapted(9)
        return targets.lora(self.model, merged=self.merged)

    def seen(self, target):
        return peft.get_peft_model_state_dict(self.model)


class TestMergedAdapter(TestAdapter):
    """One that is merged; the base weights are then always what peft makes of the adapter that is seen."""

    merged = True

    def seen(self, target):
        found = super().seen(target)
        twin = adapted(9)
        peft.set_peft_model_state_dict(twin, copy.deepcopy(found))
        expected = twin.merge_and_unload().state_dict()
        layers = {
            name: layer.get_base_layer() for name, layer in self.model.named_modules() if hasattr(layer, "merged")
        }
        assert len(layers) == 2
        for name, layer in layers.items():
            assert layer.weight.equal(expected[f"{name.rpartition('.')[2]}.weight"])
        return found


def test_threads_that_cannot_be_used():
    """They are refused by the target that they are given to."""
    with pytest.raises(SparserlError, match="threads is 0; it must be an integer, 1 or more"):
        EngineTarget((), dict, threads=0)
