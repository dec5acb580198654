"""A read-only HTTP server for a folder store: `sparserl serve`. Needs starlette and uvicorn."""

from __future__ import annotations

from .run import listen, read_tokens, serve

__all__ = ["listen", "read_tokens", "serve"]
