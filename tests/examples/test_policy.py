"""The policy of the RL example: weights from a quantized file, and what is learnt from lines."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from examples.rl import policy, task  # noqa: E402


def test_dither_stays_inside_the_step() -> None:
    """Every weight of a quantized block moves by at most half its step, in its own way; norms stay where they are."""
    torch.manual_seed(0)
    levels = torch.randint(0, 16, (64, policy.BLOCK))
    levels[:, :2] = torch.tensor([7, 8])  # so that two neighbours are in every block
    steps = torch.rand(64, 1) + 0.1
    before = levels * steps - 1
    model = torch.nn.Sequential(torch.nn.Linear(2 * policy.BLOCK, 32, bias=False), torch.nn.LayerNorm(32))
    model[0].weight.data = before.reshape(32, 2 * policy.BLOCK).clone()
    policy.dither(model, seed=1)
    moved = (model[0].weight.detach().reshape(64, policy.BLOCK) - before) / steps
    assert moved.abs().max() <= 0.5 + 1e-5
    assert moved.abs().max() > 0.45
    assert moved.unique().numel() > 2000
    assert torch.equal(model[1].weight, torch.ones(32))


def test_dither_leaves_a_constant_block() -> None:
    """There is no step to be inside of."""
    model = torch.nn.Linear(policy.BLOCK, 2, bias=False)
    model.weight.data.fill_(0.25)
    policy.dither(model, seed=0)
    assert bool((model.weight == 0.25).all())


def test_only_answers_are_learnt_from() -> None:
    """The loss is the mean over the tokens of answers, whatever stands before them."""
    model, characters, _ = policy.build("tiny", 0)
    lines = ["49131=11349\n", "20431=01234\n"]
    shown = "52810=01258\n"
    text = torch.tensor([characters.encode(shown + line) for line in lines])
    chances = policy.log_probs(model, text)[:, -task.LONGEST :]
    loss = policy.line_loss(model, characters, shown, lines)
    assert loss.item() == pytest.approx(-chances.mean().item(), rel=1e-5)
