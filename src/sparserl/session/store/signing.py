"""Ed25519 signatures over heads. A subscriber pins a public key; nothing in the store can change which one.

Head bytes are `{"body": …, "key": …, "signature": …}`: the body as text, so that what was signed is what is parsed.
"""

from __future__ import annotations

import re
from typing import Any

from ...errors import InvalidField, SessionError, Untrusted
from .records import FORMAT, canonical, parse

_SECRET = re.compile(r"sparserl-secret-([0-9a-f]{64})")
_PUBLIC = re.compile(r"sparserl-public-([0-9a-f]{64})")


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SessionError("signing needs cryptography: pip install 'sparserl[store]'") from error
    return ed25519


def keygen() -> tuple[str, str]:
    """A new secret key and its public key, as text."""
    secret = _library().Ed25519PrivateKey.generate()
    return f"sparserl-secret-{secret.private_bytes_raw().hex()}", public_key(
        f"sparserl-secret-{secret.private_bytes_raw().hex()}"
    )


def public_key(secret: str) -> str:
    """The public key of a secret one."""
    return f"sparserl-public-{_secret(secret).public_key().public_bytes_raw().hex()}"


def _secret(text: str) -> Any:
    found = _SECRET.fullmatch(text.strip())
    if found is None:
        raise SessionError("a secret key reads sparserl-secret-… with 64 hexadecimal digits; make one with keygen")
    return _library().Ed25519PrivateKey.from_private_bytes(bytes.fromhex(found[1]))


def _public(text: str) -> str:
    found = _PUBLIC.fullmatch(text.strip())
    if found is None:
        raise SessionError("a public key reads sparserl-public-… with 64 hexadecimal digits")
    return found[1]


def require_public(text: str) -> None:
    """Raise `SessionError` unless this is a public key."""
    _public(text)


def seal(body: bytes, secret: str | None) -> bytes:
    """A body with its signature, or with none."""
    if secret is None:
        return canonical({"format": FORMAT, "body": body.decode(), "key": None, "signature": None})
    key = _secret(secret)
    signature = key.sign(b"sparserl head\n" + body).hex()
    public = key.public_key().public_bytes_raw().hex()
    return canonical({"format": FORMAT, "body": body.decode(), "key": public, "signature": signature})


def unseal(data: bytes, pinned: str | None, what: str) -> bytes:
    """The body; with a key pinned, only if that key signed it."""
    record = parse(data, what)
    body = record.get("body")
    if not isinstance(body, str) or not body.isascii():
        raise InvalidField(f"{what} has no body, or one that is not plain text")
    if pinned is None:
        return body.encode()
    key, signature = record.get("key"), record.get("signature")
    if not isinstance(key, str) or not isinstance(signature, str):
        raise Untrusted(f"{what} is not signed, and a key is pinned")
    if key != _public(pinned):
        raise Untrusted(f"{what} is signed by another key than the one that is pinned")
    from cryptography.exceptions import InvalidSignature

    try:
        public = _library().Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), b"sparserl head\n" + body.encode())
    except (InvalidSignature, ValueError) as error:
        raise Untrusted(f"{what}: the signature does not hold") from error
    return body.encode()
