"""The workers of vLLM in this process, whose models a backend needs beside the one that it is given."""

from __future__ import annotations

import weakref
from typing import Any

workers: weakref.WeakSet[Any] = weakref.WeakSet()  # all that have begun to load a model, where the plugin was loaded
