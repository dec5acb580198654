"""A read-only HTTP server for a folder store: `sparserl serve`. Needs starlette and uvicorn."""

from __future__ import annotations

from .run import BackgroundServer, listen, read_tokens, serve

__all__ = ["BackgroundServer", "listen", "read_tokens", "serve"]
