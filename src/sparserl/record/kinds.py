"""Where a tensor stands in a model, by its name: its layer, and what kind it is."""

from __future__ import annotations

import re

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
ORDER = ("q", "k", "v", "qkv", "o", "router", "gate", "up", "down", "norm", "emb", "head", "other")


def place(name: str) -> tuple[int | None, str]:
    """The layer, None outside of all, and the kind.

    >>> place("model.layers.3.self_attn.q_proj.weight")
    (3, 'q')
    >>> place("lm_head.weight")
    (None, 'head')
    """
    layer = _LAYER.search(name)
    kind = next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")
    return None if layer is None else int(layer[1]), kind
