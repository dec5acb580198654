"""Our own sources pass the suite that everybody's must."""

from __future__ import annotations

import pytest

from sparserl import sources, tensor_table
from sparserl.sources.layout import Layout, Span, stack
from sparserl.testing import SourceConformance

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")


class Trained(SourceConformance):
    """A tied module in bf16 under SGD, with steps so small that few bits change."""

    @pytest.fixture
    def source(self):
        torch.manual_seed(0)
        self.model = self.made()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1e-2)
        return self.source_of(self.model)

    def made(self):
        model = torch.nn.Sequential(torch.nn.Embedding(40, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 40, False))
        model[2].weight = model[0].weight
        return model.to(torch.bfloat16)

    def source_of(self, model):
        raise NotImplementedError

    def step(self, source) -> None:
        self.optimizer.zero_grad()
        tokens = torch.arange(40)
        torch.nn.functional.cross_entropy(self.model(tokens).float(), tokens).backward()
        self.optimizer.step()


class TestModule(Trained):
    """A torch module."""

    def source_of(self, model):
        return sources.module(model)


class TestTracked(Trained):
    """One whose optimizer is looked at."""

    def source_of(self, model):
        return sources.track(self.optimizer, model)


class TestCast(Trained):
    """Masters in fp32, published in bf16."""

    def made(self):
        return super().made().float()

    def source_of(self, model):
        return sources.track(self.optimizer, model, cast=torch.bfloat16)


class TestQuantized(Trained):
    """Weights in fp8, with scales."""

    def source_of(self, model):
        return sources.quantized(model, sources.fp8_blockwise((8, 8)))


class TestQuantizedAndTracked(Trained):
    """What a rollout holds, with marks of what changed."""

    def source_of(self, model):
        return sources.quantized(sources.track(self.optimizer, model), sources.int8(), track=True)


class TestLayout(Trained):
    """Two tensors that lie in one parameter."""

    def made(self):
        return torch.nn.Sequential(torch.nn.Embedding(40, 16), torch.nn.Linear(16, 40, False)).to(torch.bfloat16)

    def source_of(self, model):
        whole = {name: torch.zeros(20, 16, dtype=torch.bfloat16) for name in ("up", "gate", "low", "high")}
        table = tensor_table(whole)
        rows = {"0.weight": ("gate", "up"), "1.weight": ("low", "high")}
        return sources.mapped(
            Layout(table, {name: stack(table, [Span(t, 0, 20) for t in names]) for name, names in rows.items()}), model
        )


class TestAdapter(Trained):
    """An adapter alone."""

    def made(self):
        config = peft.LoraConfig(r=4, target_modules=["1"], init_lora_weights=False)
        return peft.get_peft_model(super().made(), config)

    def source_of(self, model):
        return sources.lora(model)


class TestMerged(TestAdapter):
    """One that is merged into the base weights."""

    def source_of(self, model):
        return sources.lora(model, merged=True)


del Trained  # it is no test itself
