"""Every error that sparserl raises on purpose, as one tree.

SparserlError
├── WeightsError            the given tensors cannot be used as they are
│   ├── UnsupportedTensor   a dtype, device or memory layout that is not supported
│   ├── TensorMismatch      new, missing, reshaped or retyped tensors
│   ├── TiedConflict        two names share memory, but the patch gives them different bits
│   └── CheckpointError     a file or folder that is not a readable checkpoint
├── WrongBase               the weights are neither the patch's base nor its result
├── NeedsBase               this operation on this profile needs the base weights
├── ChainError              patches that do not follow one another, or do not fit together
│   └── RegionOverlap       two entries change the same elements
├── StoreError              a store cannot do what it was asked to do
│   ├── NotFound            there is no object of that name
│   ├── Refused             the condition of a write does not hold: another writer was first
│   └── Unavailable         temporary trouble that outlasted all retries
├── SessionError            a publisher or subscriber cannot continue
│   ├── Fenced              another publisher has taken over
│   ├── NotRetained         a version that the store does not have, or not any more
│   ├── CommitFailed        a commit was undone; the weights are as they were
│   ├── PeerLost            a rank of the process group hangs or is gone
│   ├── WrongVersion        an engine does not have the version that is demanded of it
│   └── Untrusted           unsigned, signed by another key, replayed or rolled back
└── FormatError             bytes that are not a valid patch
    ├── Truncated           the bytes end too early
    ├── ChecksumMismatch    the bytes were altered
    ├── UnsupportedFormat   a version, feature, profile or coder that this release does not know
    ├── LimitExceeded       a count or length beyond what the tensor table or the limits allow
    └── InvalidField        a value that contradicts the rest of the patch
"""

from __future__ import annotations


class SparserlError(Exception):
    """The base class of all errors that sparserl raises on purpose. Catch it to catch them all.

    Example:
        >>> import sparserl
        >>> try:
        ...     sparserl.Patch.from_bytes(b"not a patch")
        ... except sparserl.SparserlError as error:
        ...     print(type(error).__name__)
        InvalidField
    """


class WeightsError(SparserlError):
    """The given tensors cannot be used as they are. The message names the tensor and what is wrong with it."""


class UnsupportedTensor(WeightsError):
    """A tensor has a dtype, device or memory layout that is not supported.

    Convert it first: move it to a CPU or CUDA device, make it strided, or pass the local shard of a DTensor.
    """


class TensorMismatch(WeightsError):
    """Two sets of weights differ in names, dtypes or shapes, or a part does not fit its tensor.

    The message lists the differences. Compare or patch only weights of the same model.
    """


class TiedConflict(WeightsError):
    """Two names share memory, but the patch gives them different bits. Apply the patch to separate copies."""


class CheckpointError(WeightsError):
    """A file or folder cannot be read as a checkpoint. The message names the path and what is wrong with it."""


class WrongBase(SparserlError):
    """The weights are neither the base of the patch nor its result; nothing was changed.

    Find the patches that lead from the weights you have, or start again from a whole version.
    """


class NeedsBase(SparserlError):
    """The operation needs the base weights for the profiles in this patch. Pass them as `base`."""


class ChainError(SparserlError):
    """Patches do not follow one another or do not fit together. Pass them in order, without gaps."""


class RegionOverlap(ChainError):
    """Two parts or entries contain the same elements of a tensor. The message names the tensor and both regions."""


class StoreError(SparserlError):
    """A store cannot do what it was asked to do. The message gives its URL and the reason."""


class NotFound(StoreError):
    """There is no object of that name in the store. Check the URL, or publish a first version."""


class Refused(StoreError):
    """The condition of a write does not hold, because another writer was first. Sessions handle this themselves."""


class Unavailable(StoreError):
    """The store had temporary trouble that outlasted all retries. Try again later."""


class SessionError(SparserlError):
    """A publisher or subscriber cannot continue, or was given options that do not fit. The message says what to do."""


class Fenced(SessionError):
    """Another publisher has taken over this store. Close this one: it must not publish any more."""


class NotRetained(SessionError):
    """The store does not have this version, or not any more. Ask for a version that it lists.

    Attributes:
        is_refused: Whether the store has it, but in profiles that this receiver does not take.
    """

    is_refused: bool = False


class CommitFailed(SessionError):
    """A commit failed and was undone; the weights are as they were before it. Stage the version again."""


class PeerLost(SessionError):
    """A rank of the process group hangs, has ended or never came. The message names it."""


class WrongVersion(SessionError):
    """An engine has neither the version that a request demands nor a later one of its run. Commit it, then ask again.

    The message names both versions. A version of another run is never later.
    """


class Untrusted(SessionError):
    """A trusted key was given, and the store has something unsigned, signed by another key, or older than before.

    The message says which. Nothing of it was used. Check who can write to the store, and which keys you trust.
    """


class FormatError(SparserlError):
    """The bytes are not a valid patch. Nothing was changed; fetch or create the patch again."""


class Truncated(FormatError):
    """The bytes end too early. The file or download is incomplete; fetch it again."""


class ChecksumMismatch(FormatError):
    """The bytes are not those that were written. Fetch them again; if it persists, check the disk or the store."""


class UnsupportedFormat(FormatError):
    """A format version, required feature, profile, dtype or coder that this release does not know.

    A newer release wrote it: update sparserl. For a name that you passed, the message lists the names that exist.
    """


class LimitExceeded(FormatError):
    """A count or length is beyond what the tensor table or the fixed limits allow. The patch is damaged or hostile."""


class InvalidField(FormatError):
    """A value contradicts the rest of the patch. The patch is damaged or hostile; create it again."""
