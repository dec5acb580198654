"""Stores hold named objects: a folder, object storage, or a web server."""

from __future__ import annotations

from .base import ObjectInfo, Store, StoredObject
from .opening import open_store

__all__ = ["ObjectInfo", "Store", "StoredObject", "open_store"]
