"""Ed25519 signatures over heads. A subscriber is told which public keys to trust; nothing in the store can change that.

Head bytes are `{"body": …, "key": …, "signature": …}`: the body as text, so that what was signed is what is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidField, SessionError, Untrusted
from .fields import FORMAT, canonical, parse

_SECRET = re.compile(r"sparserl-secret-([0-9a-f]{64})")
_PUBLIC = re.compile(r"sparserl-public-([0-9a-f]{64})")
_CONTEXT = b"sparserl head\n"  # signed before the body, so that a signature holds for nothing but a head

PublicKeys = str | Sequence[str]


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SessionError("signing needs cryptography: pip install 'sparserl[store]'") from error
    return ed25519


def keygen() -> tuple[str, str]:
    """A new secret key and its public key, as text."""
    secret = f"sparserl-secret-{_library().Ed25519PrivateKey.generate().private_bytes_raw().hex()}"
    return secret, public_key(secret)


def public_key(secret: str) -> str:
    """The public key of a secret one."""
    return f"sparserl-public-{_secret(secret).public_key().public_bytes_raw().hex()}"


def _secret(text: str) -> Any:
    match = _SECRET.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise SessionError("a secret key reads sparserl-secret-… with 64 hexadecimal digits; make one with keygen")
    return _library().Ed25519PrivateKey.from_private_bytes(bytes.fromhex(match[1]))


def _public(text: str) -> str:
    match = _PUBLIC.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise SessionError("a public key reads sparserl-public-… with 64 hexadecimal digits")
    return match[1]


def public_keys(keys: PublicKeys | None) -> tuple[str, ...] | None:
    """The keys that are trusted, as hexadecimal digits; None where signatures are not asked for.

    Raises:
        SessionError: One of them is no public key, or there are none.
    """
    if keys is None:
        return None
    texts = [*keys] if isinstance(keys, Iterable) and not isinstance(keys, str) else [keys]
    if not texts:
        raise SessionError("trusted_keys is empty; give at least one public key, or None to accept what is not signed")
    return tuple(_public(text) for text in texts)


@dataclass(frozen=True)
class PublisherKeys:
    """The secret key that a publisher signs with, and the public keys of the heads that it goes on from."""

    signing_key: str | None
    accepted: tuple[str, ...] | None  # None where heads are not signed

    @classmethod
    def of(cls, signing_key: str | None, trusted_keys: PublicKeys | None) -> PublisherKeys:
        """The publisher's own key, and further ones that it trusts."""
        public_keys(trusted_keys)
        if signing_key is None:
            if trusted_keys is not None:
                raise SessionError("a publisher with trusted_keys needs a signing_key too")
            return cls(None, None)
        others = [trusted_keys] if isinstance(trusted_keys, str) else list(trusted_keys or ())
        return cls(signing_key, (public_key(signing_key), *others))


def seal(body: bytes, secret: str | None) -> bytes:
    """A body with its signature, or with none."""
    if secret is None:
        return canonical({"format": FORMAT, "body": body.decode(), "key": None, "signature": None})
    key = _secret(secret)
    signature = key.sign(_CONTEXT + body).hex()
    public = key.public_key().public_bytes_raw().hex()
    return canonical({"format": FORMAT, "body": body.decode(), "key": public, "signature": signature})


def unseal(data: bytes, trusted_keys: PublicKeys | None, label: str) -> bytes:
    """The body; where keys are trusted, only if one of them has signed it."""
    record = parse(data, label)
    body = record.get("body")
    if not isinstance(body, str) or not body.isascii():
        raise InvalidField(f"{label} has no body, or one that is not plain text")
    trusted = public_keys(trusted_keys)
    if trusted is None:
        return body.encode()
    key = record.get("key")
    signature = record.get("signature")
    if not isinstance(key, str) or not isinstance(signature, str):
        raise Untrusted(f"{label} is not signed, and only what a trusted key has signed is accepted")
    if key not in trusted:
        raise Untrusted(f"{label} is signed by another key, which is not among the trusted keys")
    _require_signature(body.encode(), key, signature, label)
    return body.encode()


def require_unsigned(data: bytes, label: str) -> None:
    """Refuse what is signed, for who has no key to sign what follows it.

    Raises:
        Untrusted: It is signed.
    """
    if parse(data, label).get("key") is not None:
        raise Untrusted(f"{label} is signed, and this publisher has no signing_key")


def _require_signature(body: bytes, key: str, signature: str, label: str) -> None:
    """Refuse a body that the key has not signed."""
    from cryptography.exceptions import InvalidSignature

    try:
        public = _library().Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), _CONTEXT + body)
    except (InvalidSignature, ValueError) as error:
        raise Untrusted(f"{label}: the signature is not valid") from error
