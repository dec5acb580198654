"""GRPO, DAPO and GSPO as functions of log-probabilities. All of them are minimised; none has a KL term.

`new` and `old` are log-probabilities of the sampled tokens, [sequences, tokens]: of the policy that is trained, and of
the one that sampled. `advantages` has one number for each sequence, `mask` is 1 where a token belongs to an answer.
Written below: rᵢₜ = exp(newᵢₜ - oldᵢₜ), Aᵢ the advantage, |oᵢ| the tokens of answer i, N the number of answers, and
surr(r, A) = min(r·A, clip(r, 1 - low, 1 + high)·A).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def group_advantages(rewards: Tensor) -> Tensor:
    """Aᵢ = (Rᵢ - mean R) / (std R + 1e-6) inside each group; rewards are [groups, answers]. Equal rewards give 0."""
    deviation = rewards.std(1, keepdim=True, correction=0)
    return (rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-6)


def informative(rewards: Tensor) -> Tensor:
    """Which groups teach anything: those whose answers are not all equally good."""
    return rewards.amax(1) > rewards.amin(1)


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """surr(r, A): what is gained, but never for moving further than the clip allows."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def grpo(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """L = -1/N Σᵢ 1/|oᵢ| Σₜ surr(rᵢₜ, Aᵢ): every answer counts the same. arXiv 2402.03300."""
    gain = surrogate((new - old).exp(), advantages[:, None], low, high)
    return -((gain * mask).sum(1) / mask.sum(1)).mean()


def dapo(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float = 0.2, high: float = 0.28) -> Tensor:
    """L = -1/Σ|oᵢ| Σᵢ Σₜ surr(rᵢₜ, Aᵢ), high > low: every token counts the same. arXiv 2503.14476.

    Dynamic sampling, its other half, is `informative`: workers sample until enough groups teach something.
    """
    gain = surrogate((new - old).exp(), advantages[:, None], low, high)
    return -(gain * mask).sum() / mask.sum()


def gspo(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float = 0.05, high: float = 0.05) -> Tensor:
    """L = -1/N Σᵢ surr(sᵢ, Aᵢ), sᵢ = exp(1/|oᵢ| Σₜ (newᵢₜ - oldᵢₜ)): one ratio for a sequence. arXiv 2507.18071.

    The clip is wider than the paper's 3e-4, since `old` comes from a rollout in a narrower dtype.
    """
    ratio = (((new - old) * mask).sum(1) / mask.sum(1)).exp()
    return -surrogate(ratio, advantages, low, high).mean()


ALGORITHMS: dict[str, Loss] = {"grpo": grpo, "dapo": dapo, "gspo": gspo}
