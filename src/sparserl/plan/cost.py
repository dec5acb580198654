"""The cost model: how long a sync takes in each profile and dense, given speeds and a link.

    total = find + encode  +  send  +  decode + apply
            S, changes        X        S, changes

S is the dense bytes, X the bytes sent. Encoding and decoding take some seconds for each dense byte and for each change;
sending takes the latency and X over the bandwidth. The stages add up: none is assumed to overlap another. An anchor
has all weights: it takes some seconds for each dense byte, and is sent as it is or coded.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import SparserlError
from ..files import replacing
from ..humanize import parse_duration

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_NUMBER = r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"(?:([kKmMgGtT]i?)?(b|bits?|B|[bB]ytes?)(?:/s|ps)?)?\s*")
_NEAR = 1.08  # times the least time: bytes are worth that much
_FILE_VERSION = 2  # of the file that holds speeds


@dataclass(frozen=True)
class Link:
    """The link between sender and receiver: bits per second, and the seconds until the first bit arrives."""

    bits_per_second: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str, latency: float | str = 0.0) -> Link:
        """A link from text: bits ("25Gbit", "100Mbit/s", "10Gbps"), bytes ("3GB/s"), or bare bits per second ("1e9").

        >>> Link.parse("3GB/s", "20ms")
        Link(bits_per_second=24000000000.0, latency_s=0.02)
        """
        match = _BANDWIDTH.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            how = "write bits per second as 25Gbit, 100Mbit or 1e9, and bytes as 3GB/s"
            if text == "measured":
                how = f"links are not measured any more: without one, auto takes the smallest; to name one, {how}"
            raise SparserlError(f"{text!r} is not a bandwidth; {how}")
        number, prefix, unit = match.groups()
        byte = unit is not None and (unit == "B" or unit.lower().startswith("byte"))
        speed = float(number) * _PREFIX[(prefix or "").lower()] * (8 if byte else 1)
        if not 0 < speed < math.inf:
            raise SparserlError(f"{text!r} is not a bandwidth: it must be more than 0 and finite")
        return cls(speed, _seconds(latency) if isinstance(latency, str) else latency)

    def seconds(self, nbytes: float) -> float:
        """How long bytes take to arrive."""
        return self.latency_s + 8 * nbytes / self.bits_per_second

    def __str__(self) -> str:
        delay = f" + {1000 * self.latency_s:g} ms" if self.latency_s else ""
        return bandwidth(self.bits_per_second) + delay


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise SparserlError(str(error)) from error


def bandwidth(bits_per_second: float) -> str:
    """Bits per second as text, with a unit."""
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits_per_second < 1000:
            return f"{bits_per_second:.3g} {unit}"
        bits_per_second /= 1000
    return f"{bits_per_second:,.3g} Gbit/s" if bits_per_second < 1000 else f"{bits_per_second:,.0f} Gbit/s"


@dataclass(frozen=True)
class Work:
    """Seconds that a stage takes for each dense byte it covers and for each change."""

    per_byte: float
    per_change: float

    def scaled(self, share: float) -> Work:
        """A share of this work."""
        return Work(share * self.per_byte, share * self.per_change)

    @classmethod
    def fit(cls, nbytes: int, few: tuple[int, float], many: tuple[int, float]) -> Work:
        """From (changes, seconds) of two measurements over `nbytes`; noise does not make either field negative."""
        few_changes, few_seconds = few
        many_changes, many_seconds = many
        per_change = max(0.0, (many_seconds - few_seconds) / (many_changes - few_changes))
        return cls(max(0.0, few_seconds - per_change * few_changes) / nbytes, per_change)

    def seconds(self, nbytes: float, changes: float) -> float:
        return self.per_byte * nbytes + self.per_change * changes


@dataclass(frozen=True)
class Speed:
    """One profile: the work on both sides, and its bits per change, which fall as density grows."""

    encode: Work
    decode: Work
    bits_at_percent: float  # bits per change where one element in a hundred changed
    bits_per_halving: float  # how many more where half as many did: gaps are twice as long, a bit or less each

    def bits(self, density: float) -> float:
        return max(1.0, self.bits_at_percent + self.bits_per_halving * math.log2(0.01 / density))


@dataclass(frozen=True)
class AnchorSpeed:
    """One way to write an anchor: seconds for each dense byte on both sides, and the bytes that it takes for each."""

    encode: float
    decode: float
    share: float


@dataclass(frozen=True)
class Speeds:
    """How fast one machine is with a number of threads. `patch.measure` measures it, `save` and `load` store it."""

    threads: int
    copy: float  # seconds per byte of copying dense weights to their memory
    profiles: Mapping[str, Speed]
    anchors: Mapping[str, AnchorSpeed]  # "dense" and "coded"
    origin: str  # a text for people: how the figures were made

    def save(self) -> Path:
        """Store them for this user and number of threads."""
        path = _speeds_path(self.threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({"shape": _FILE_VERSION, **asdict(self)}, indent=1).encode())
        return path

    @classmethod
    def load(cls, threads: int) -> Speeds | None:
        """The stored speeds for this number of threads; None if there are none, or another release stored them."""
        try:
            values: dict[str, Any] = json.loads(_speeds_path(threads).read_text())
            if values.pop("shape") != _FILE_VERSION:
                return None
            profiles = {name: _speed(**speed) for name, speed in values.pop("profiles").items()}
            anchors = {name: AnchorSpeed(**speed) for name, speed in values.pop("anchors").items()}
            return cls(profiles=profiles, anchors=anchors, **values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def load_or_built_in(cls, threads: int) -> Speeds:
        """The stored speeds, or the built-in ones. A training run measures nothing by itself."""
        return cls.load(threads) or (BUILT_IN if threads == 1 else BUILT_IN.on(threads))

    def on(self, threads: int) -> Speeds:
        """Those of so many threads, each as fast as one of these: a guess, where nothing was measured."""
        share = self.threads / threads
        profiles = {
            name: replace(speed, encode=speed.encode.scaled(share), decode=speed.decode.scaled(share))
            for name, speed in self.profiles.items()
        }
        anchors = {
            name: replace(speed, encode=share * speed.encode, decode=share * speed.decode)
            for name, speed in self.anchors.items()
        }
        return replace(self, threads=threads, copy=share * self.copy, profiles=profiles, anchors=anchors)


def _speed(encode: dict[str, float], decode: dict[str, float], **bits: float) -> Speed:
    return Speed(Work(**encode), Work(**decode), **bits)


def _speeds_path(threads: int) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sparserl" / f"speeds-{threads}.json"


# The times of one thread of a server core, doubled, for machines that were never measured. With slow speeds,
# `auto` prefers the profiles that take the least work, unless the link is slow, too.
BUILT_IN = Speeds(
    threads=1,
    copy=0.25e-9,
    profiles={
        "raw": Speed(Work(0.5e-9, 40e-9), Work(0.1e-9, 40e-9), 48.0, 0.0),
        "gap": Speed(Work(0.5e-9, 70e-9), Work(0.1e-9, 60e-9), 19.0, 1.1),
        "ulp": Speed(Work(0.5e-9, 70e-9), Work(0.1e-9, 60e-9), 10.5, 1.1),
        "ctx": Speed(Work(0.8e-9, 120e-9), Work(0.4e-9, 100e-9), 6.5, 0.5),
    },
    anchors={
        "dense": AnchorSpeed(2.6e-9, 1.8e-9, 1.0),
        "coded": AnchorSpeed(4.6e-9, 3.8e-9, 0.68),
    },
    origin="built in, not measured here",
)


@dataclass(frozen=True)
class AnchorEstimate:
    """The bytes and predicted times of one way to send all weights."""

    name: str
    bytes: float
    encode_s: float
    send_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.encode_s + self.send_s + self.decode_s


@dataclass(frozen=True)
class Estimate(AnchorEstimate):
    """The bytes and predicted times of one way to send what changed.

    `break_even` is the speed of a link, in bits per second, above which dense weights are faster; None for dense.
    """

    bits_per_change: float
    break_even: float | None = None

    @property
    def sparse(self) -> bool:
        return self.break_even is not None


def predict(
    elements: float,
    width: float,
    density: float,
    link: Link,
    speeds: Speeds,
    bits: Mapping[str, float] | None = None,
) -> list[Estimate]:
    """The predicted times of sending dense weights, and then of every profile.

    Args:
        elements: How many elements the weights have.
        width: Bytes of an element.
        density: Which share of the elements changed.
        link: The link that carries them.
        speeds: How fast this machine encodes and decodes.
        bits: Bits per change by profile, where they are known better than by the speeds.
    """
    dense_bytes = elements * width
    changes = elements * density
    out = [
        Estimate(
            name="dense",
            bytes=dense_bytes,
            encode_s=0.0,
            send_s=link.seconds(dense_bytes),
            decode_s=speeds.copy * dense_bytes,
            bits_per_change=8 * dense_bytes / changes,
        )
    ]
    for name, speed in speeds.profiles.items():
        per_change = (bits or {}).get(name) or (8.0 * (4 + width) if name == "raw" else speed.bits(density))
        sparse_bytes = min(per_change * changes / 8, dense_bytes)
        encode = speed.encode.seconds(dense_bytes, changes)
        decode = speed.decode.seconds(dense_bytes, changes)
        extra_seconds = encode + decode - out[0].decode_s
        break_even = 8 * (dense_bytes - sparse_bytes) / extra_seconds if extra_seconds > 0 else math.inf
        out.append(
            Estimate(
                name=name,
                bytes=sparse_bytes,
                encode_s=encode,
                send_s=link.seconds(sparse_bytes),
                decode_s=decode,
                bits_per_change=8 * sparse_bytes / changes,
                break_even=break_even,
            )
        )
    return out


def predict_anchor(dense_bytes: float, link: Link, speeds: Speeds) -> list[AnchorEstimate]:
    """The predicted times of sending all weights as an anchor: as they are, and coded."""
    return [
        AnchorEstimate(
            name=name,
            bytes=speed.share * dense_bytes,
            encode_s=speed.encode * dense_bytes,
            send_s=link.seconds(speed.share * dense_bytes),
            decode_s=speed.decode * dense_bytes,
        )
        for name, speed in speeds.anchors.items()
    ]


_AnyEstimate = TypeVar("_AnyEstimate", bound=AnchorEstimate)


def best(estimates: Sequence[_AnyEstimate]) -> _AnyEstimate:
    """The fastest estimate; the first if several are equally fast."""
    return min(estimates, key=lambda e: e.total_s)


@dataclass(frozen=True)
class Chooser:
    """Chooses a bucket's profile for a link: the smallest of those near the least time to encode, send and apply."""

    link: Link
    speeds: Speeds

    def pick(self, costs: Mapping[str, float], nbytes: int, changes: int) -> str:
        """The smallest of the profiles whose predicted time is near the least; `costs` are the bits in each."""

        def seconds(name: str) -> float:
            speed = self.speeds.profiles[name]
            work = speed.encode.seconds(nbytes, changes) + speed.decode.seconds(nbytes, changes)
            return work + costs[name] / self.link.bits_per_second

        times = {name: seconds(name) for name in costs}
        limit = _NEAR * min(times.values())
        return min((name for name in costs if times[name] <= limit), key=lambda name: (costs[name], name))
