"""Moving bytes: stores, which hold named objects, and a server that shows one to the world."""

from __future__ import annotations

from .stores.base import Found, Listed, Store, open_store

__all__ = ["Found", "Listed", "Store", "open_store"]
