"""Moving bytes: through stores of named objects, or between the ranks of a process group."""

from __future__ import annotations

from .stores import ObjectInfo, Store, StoredObject, open_store

__all__ = ["ObjectInfo", "Store", "StoredObject", "open_store"]
