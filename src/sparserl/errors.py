"""Every error sparserl raises on purpose, as one tree.

SparserlError
├── WeightsError            the tensors handed over cannot be used as they are
│   ├── UnsupportedTensor   a dtype, device or memory layout we do not handle
│   ├── TensorMismatch      new, missing, reshaped or retyped tensors
│   ├── TiedConflict        two names share memory, the patch wants them to differ
│   └── CheckpointError     a file or folder that is not a readable checkpoint
├── WrongBase               the weights are neither the patch's base nor its result
├── NeedsBase               this operation on this profile needs the base weights
├── ChainError              patches that do not follow one another, or do not fit together
│   └── RegionOverlap       two entries claim the same elements
├── StoreError              a store cannot do what is asked of it
│   ├── NotFound            there is no object of that name
│   ├── Refused             the condition of a write does not hold: another writer was first
│   └── Unavailable         transient trouble that outlasted all retries
├── SessionError            a publisher or subscriber cannot go on as it is
│   ├── Fenced              another publisher has taken over
│   ├── NotRetained         a version that the store does not have, or has no more
│   ├── CommitFailed        a commit was undone; the weights are as they were
│   ├── PeerLost            a rank of the process group hangs or is gone
│   └── Untrusted           unsigned, foreign, replayed or rolled back
└── FormatError             bytes that are not a valid patch
    ├── Truncated           the bytes end too early
    ├── ChecksumMismatch    the bytes were altered
    ├── UnsupportedFormat   a version, feature, profile or coder this release does not know
    ├── LimitExceeded       a count or length past what the tensor table or the limits allow
    └── InvalidField        a value that contradicts the rest of the patch
"""

from __future__ import annotations


class SparserlError(Exception):
    """Base of all errors raised by sparserl."""


class WeightsError(SparserlError):
    """The tensors handed over cannot be used as they are."""


class UnsupportedTensor(WeightsError):
    """A dtype, device or memory layout that is not handled."""


class TensorMismatch(WeightsError):
    """Two sets of weights differ in names, dtypes or shapes."""


class TiedConflict(WeightsError):
    """Two names share memory, but the patch wants their bits to differ."""


class CheckpointError(WeightsError):
    """A file or folder that cannot be read as a checkpoint."""


class WrongBase(SparserlError):
    """The weights are neither the base of the patch nor its result; nothing was touched."""


class NeedsBase(SparserlError):
    """The operation needs the base weights for the profiles in this patch."""


class ChainError(SparserlError):
    """Patches that do not follow one another or do not fit together."""


class RegionOverlap(ChainError):
    """Two entries claim the same elements of a tensor."""


class StoreError(SparserlError):
    """A store cannot do what is asked of it."""


class NotFound(StoreError):
    """There is no object of that name."""


class Refused(StoreError):
    """The condition of a write does not hold: another writer was first."""


class Unavailable(StoreError):
    """Transient trouble that outlasted all retries."""


class SessionError(SparserlError):
    """A publisher or subscriber cannot go on as it is."""


class Fenced(SessionError):
    """Another publisher has taken over; this one must not go on."""


class NotRetained(SessionError):
    """A version that the store does not have, or has no more."""


class CommitFailed(SessionError):
    """A commit was undone; the weights are as they were before it."""


class PeerLost(SessionError):
    """A rank of the process group hangs, is gone, or did not come; the message names it."""


class Untrusted(SessionError):
    """With a key pinned: something unsigned, signed by another, from another run, or older than what is held."""


class FormatError(SparserlError):
    """Bytes that are not a valid patch."""


class Truncated(FormatError):
    """The bytes end before what they announce."""


class ChecksumMismatch(FormatError):
    """The bytes are not those that were written."""


class UnsupportedFormat(FormatError):
    """A format version, required feature, profile, dtype or coder this release does not know."""


class LimitExceeded(FormatError):
    """A count or length past what the tensor table or the hard limits allow."""


class InvalidField(FormatError):
    """A value that contradicts the rest of the patch."""
