"""Output heads that are their models' embeddings are known under every name that they may have."""

from __future__ import annotations

from types import SimpleNamespace

from sparserl.sources.tying import tied_names

TIED = SimpleNamespace(tie_word_embeddings=True)
UNTIED = SimpleNamespace(tie_word_embeddings=False)


def test_heads_of_language_towers():
    """The head of a model may be beside its language tower, in it, or anywhere between."""
    embeddings = "model.language_model.embed_tokens.weight"
    names = ["model.visual.patch_embed.weight", embeddings]
    assert tied_names([UNTIED, TIED], names) == {
        "lm_head.weight": embeddings,
        "model.lm_head.weight": embeddings,
        "model.language_model.lm_head.weight": embeddings,
    }


def test_models_that_tie_nothing():
    """Without the option, or without embeddings among the names, every tensor must be loaded."""
    assert tied_names([UNTIED, None], ["model.embed_tokens.weight"]) == {}
    assert tied_names([TIED], ["lm_head.weight", "model.norm.weight"]) == {}
