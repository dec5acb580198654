"""What the URL of an http(s) store, its options and the environment say about requests."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import re
import ssl
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

from ...errors import StoreError

PORTS = {"http": 80, "https": 443}
VISIBLE = re.compile(r"[!-~]{1,1000}")
HEADER_VALUE = re.compile(r"[ -~]*")
_REQUEST_TIMEOUT = 120.0  # seconds without a byte, and for a request besides what its bytes take
_CONNECT_TIMEOUT = 5.0
_OPTIONS = frozenset(
    ("allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "root_certificate", "timeout")
)


class Origin(NamedTuple):
    """A server. A token is sent to its own origin only."""

    scheme: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """`host:port`, as a proxy is asked for it."""
        return f"{self._bracketed}:{self.port}"

    @property
    def host_header(self) -> str:
        """`host`, with the port where it is not the usual one."""
        return self._bracketed if self.port == PORTS[self.scheme] else self.address

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True)
class Settings:
    """How a server is reached, and what every request to it says."""

    origin: Origin
    path: str  # of the folder, with a slash at its end
    headers: dict[str, str]
    request_timeout: float
    connect_timeout: float
    tls: ssl.SSLContext | None
    proxy: SplitResult | None


def read_settings(url: str, token: str | None, options: dict[str, Any]) -> Settings:
    """Read a URL, the options of a store, and the proxies that the environment names."""
    place = _split(url)
    client = _client_options(url, options)
    origin = read_origin(place, url)
    tls = _tls_context(url, client) if origin.scheme == "https" else None
    proxy = find_proxy(origin)
    headers = _headers(origin, place, token, client.get("default_headers") or {})
    if proxy is not None and tls is None:
        headers |= proxy_headers(proxy)
    return Settings(
        origin,
        quote(place.path.rstrip("/"), safe="/%~:@!$&'()*+,;=") + "/",
        headers,
        _seconds(url, client.get("timeout"), _REQUEST_TIMEOUT),
        _seconds(url, client.get("connect_timeout"), _CONNECT_TIMEOUT),
        tls,
        proxy,
    )


def without_password(url: str) -> str:
    """A URL as it may be printed and logged."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def read_origin(place: SplitResult, url: str) -> Origin:
    """The server that a URL names."""
    try:
        host = place.hostname
        port = place.port
    except ValueError as error:
        raise StoreError(f"{url!r} is not a URL: {error}") from error
    if not host or not host.isascii() or not HEADER_VALUE.fullmatch(host):
        raise StoreError(f"{url!r} names no host")
    return Origin(place.scheme, host, PORTS[place.scheme] if port is None else port)


def find_proxy(origin: Origin) -> SplitResult | None:
    """The proxy that the environment names for a server."""
    proxies = urllib.request.getproxies()
    url = proxies.get(origin.scheme) or proxies.get("all")
    if not url or _bypasses_proxy(origin, proxies.get("no", "")):
        return None
    place = _split(url if "://" in url else f"http://{url}")
    if place.scheme != "http":
        raise StoreError(f"the environment names a proxy of scheme {place.scheme!r}; only http proxies are supported")
    return place


def proxy_headers(proxy: SplitResult) -> dict[str, str]:
    """What a proxy is told about who asks."""
    return {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy)}


def _split(url: str) -> SplitResult:
    try:
        place = urlsplit(url)
    except ValueError as error:
        raise StoreError(f"{url!r} is not a URL: {error}") from error
    if place.query or place.fragment:
        raise StoreError(f"{url!r}: a store is a folder; write https://host/path")
    return place


def _headers(origin: Origin, place: SplitResult, token: str | None, extra: dict[str, str]) -> dict[str, str]:
    headers = {
        "Host": origin.host_header,
        "Accept-Encoding": "identity",
        "User-Agent": "sparserl",
        **{str(name).title(): str(value) for name, value in extra.items()},
    }
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    elif place.username is not None:
        headers["Authorization"] = _basic(place)
    for name, value in headers.items():
        if not VISIBLE.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
            raise StoreError(f"{name[:80]!r} cannot be sent as a header; write visible ASCII")
    return headers


def _basic(place: SplitResult) -> str:
    pair = f"{unquote(place.username or '')}:{unquote(place.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()


def _bypasses_proxy(origin: Origin, exceptions: str) -> bool:
    """Whether `no_proxy` names a server, or a network that its address is in."""
    if urllib.request.proxy_bypass(origin.address):
        return True
    try:
        address = ipaddress.ip_address(origin.host)
    except ValueError:
        return False
    for exception in exceptions.split(","):
        with contextlib.suppress(ValueError):  # the name of a host
            if address in ipaddress.ip_network(exception.strip(), strict=False):
                return True
    return False


def _client_options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    client = dict(options.get("client_options") or {})
    unknown = sorted((options.keys() - {"client_options"}) | (client.keys() - _OPTIONS))
    if unknown:
        raise StoreError(f"{url}: an http(s) store has no option {unknown[0]!r}")
    return client


def _seconds(url: str, value: object, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise StoreError(f"{url}: {value!r} is not a timeout; give a timedelta")


def _tls_context(url: str, client: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if client.get("allow_invalid_certificates"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if (root := client.get("root_certificate")) is not None:
        try:
            context.load_verify_locations(cadata=root.decode() if isinstance(root, bytes) else root)
        except (ValueError, ssl.SSLError) as error:
            raise StoreError(f"{url}: the root certificate cannot be used: {describe(error)}") from error
    return context


def describe(error: BaseException) -> str:
    """An error of the system or of a library, in one short line."""
    return " ".join(f"{type(error).__name__} {error}".split())[:300]
