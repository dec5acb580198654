"""Where a tensor stands in a model, by its name: its layer, and what kind it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_KINDS = tuple(  # the first that matches; the order of columns is below
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("norm", r"norm|(^|\.)ln_|layernorm|(^|\.)ln\d?\."),
        ("qkv", r"qkv|c_attn|query_key_value"),
        ("q", r"(^|\.)q_|(^|[._])query|\.wq\b"),
        ("k", r"(^|\.)k_|(^|[._])key|\.wk\b"),
        ("v", r"(^|\.)v_|(^|[._])value|\.wv\b"),
        ("o", r"(^|\.)o_proj|out_proj|attn\.c_proj|attention\.dense|\.wo\b|output\.dense"),
        ("router", r"router|mlp\.gate\.|(^|\.)gate\.weight"),
        ("gate", r"gate_proj|gate_up|\.w1\b"),
        ("up", r"up_proj|c_fc|fc1|fc_in|\.w3\b|dense_h_to_4h"),
        ("down", r"down_proj|mlp\.c_proj|fc2|fc_out|\.w2\b|dense_4h_to_h"),
        ("emb", r"embed|wte|wpe"),
        ("head", r"lm_head|(^|\.)head\."),
    )
)
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_FUSED_EXPERTS = re.compile(r"(?:^|\.)experts\.(?!\d)")
OTHER = "other"
ORDER = ("q", "k", "v", "qkv", "o", "router", "gate", "up", "down", "norm", "emb", "head", OTHER)


def place(name: str) -> tuple[int | None, str]:
    """The layer, None outside of all, and the kind.

    >>> place("model.layers.3.self_attn.q_proj.weight")
    (3, 'q')
    >>> place("lm_head.weight")
    (None, 'head')
    """
    layer = _LAYER.search(name)
    kind = next((kind for kind, pattern in _KINDS if pattern.search(name)), OTHER)
    return None if layer is None else int(layer[1]), kind


def expert(name: str) -> tuple[str, int] | None:
    """Which experts a tensor belongs to, and which one of them it is of; None for any other tensor.

    >>> expert("model.layers.3.mlp.experts.17.up_proj.weight")
    ('model.layers.3.mlp.experts', 17)
    """
    number = _EXPERT.search(name)
    return None if number is None else (name[: number.start(1) - 1], int(number[1]))


def fused_experts(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor has all experts of a layer, one after the other in its first dimension."""
    return len(shape) >= 3 and _FUSED_EXPERTS.search(name) is not None


def expert_group(name: str) -> str:
    """The experts that a tensor with all experts of a layer belongs to, as `expert` names them.

    >>> expert_group("model.layers.3.mlp.experts.gate_up_proj")
    'model.layers.3.mlp.experts'
    """
    found = _FUSED_EXPERTS.search(name)
    return name if found is None else name[: found.end() - 1]
