"""The environment variables of integrations whose framework passes them no options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import SessionError


def store_url() -> str:
    """The store between a trainer and its rollouts.

    Raises:
        SessionError: SPARSERL_URL is not set.
    """
    try:
        return os.environ["SPARSERL_URL"]
    except KeyError:
        raise SessionError(
            "SPARSERL_URL is not set: set it to the store between the trainer and its rollouts"
        ) from None


def trusted_keys() -> list[str] | None:
    """The public keys that rollouts trust; None if they trust every run."""
    keys = os.environ.get("SPARSERL_TRUSTED_KEYS")
    return None if keys is None else keys.split(",")


def publisher_options() -> dict[str, Any]:
    """The options of a `Publisher`: the key that signs, and the folder for what a restart needs."""
    key_file = os.environ.get("SPARSERL_SIGNING_KEY_FILE")
    return {
        "signing_key": None if key_file is None else Path(key_file).read_text().strip(),
        "state": os.environ.get("SPARSERL_STATE"),
    }
