"""Define the errors that Nearkin raises.

Invariant: callers test for `RetryableError` or `PermanentError`, never for a vendor's type; the cause is always kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class NearkinError(Exception):
    """Base of all errors that Nearkin raises itself; the text is one line with a remedy."""


class RetryableError(NearkinError):
    """The same call may succeed later: a full disk, a busy lock, an unreachable service."""

    retry_after_seconds: float | None = None
    """Delay before the next attempt, if the server stated one."""


class PermanentError(NearkinError):
    """The same call will never succeed."""


class Corrupt(PermanentError):
    """Stored bytes differ from those written: a checksum, fingerprint or length disagrees."""

    container: int | None = None
    """The container whose directory cannot be read, if that is the cause."""


class BadInput(PermanentError):
    """The caller's input is refused: a key, a range, a file.

    The text contains the value and the accepted values.
    """


class ConfigError(BadInput):
    """A setting is refused: the text contains the field, the value and the accepted values."""


class WrongKey(ConfigError):
    """The configured key-encryption key, if any, is not the one of the store's keys."""


class AccessDenied(PermanentError):
    """The caller has no permission: the token is missing, unknown, expired or lacks a scope."""


class QuotaExceeded(PermanentError):
    """The tenant's quota of bytes does not allow the upload; nothing was stored."""


class RetentionActive(PermanentError):
    """A version is dated in the future, so the ages of versions are unknown."""


class ClockSkew(RetryableError):
    """A version is dated in the future, so that the ages of versions are unknown."""


class PreconditionFailed(PermanentError):
    """The key's newest version fails the condition of a put; nothing was stored."""


class BaseUnusable(PermanentError):
    """The version that an upload copies ranges of is missing, no tree or damaged.

    Nothing was stored: send all bytes.
    """


class GcPaused(PermanentError):
    """Garbage collection is paused until an operator resumes it."""


class NotFound(PermanentError):
    """The store has no such key or version."""


class NoStore(NotFound):
    """There is no store at the path or in the bucket."""


class StoreUnavailable(RetryableError):
    """The object store or the index is unreachable or full."""


class NoRoom(StoreUnavailable):
    """The device of the store, or of its index, is full; the data were not written."""

    def __init__(self, message: str, folder: Path | None = None) -> None:
        """Keep the folder without room, if it may be on another device than the store."""
        super().__init__(message)
        self.folder = folder


class NotWritable(StoreUnavailable):
    """The process may not write the store's lock or index: read-only disk, or other owner."""


class IndexDamaged(StoreUnavailable):
    """The index in files cannot be read and must be rebuilt."""


class IndexUnsafe(IndexDamaged):
    """Reading the index would crash the process, or did so, or LMDB reported damage.

    It is rebuilt without being opened.
    """


class IndexStale(StoreUnavailable):
    """The index in files has an older state of the store.

    Another machine wrote to the store, or the store was copied.
    """


class IndexUnfinished(StoreUnavailable):
    """The index's file exists without its contents; it counts as missing."""


class IndexClosed(StoreUnavailable):
    """Another thread closed the index, to replace it or to close the store."""


class StoreLocked(RetryableError):
    """Another process writes to this store, or another Store of this process has it open."""


class SourceFailed(RetryableError):
    """The caller's file or stream failed while it was read; nothing was stored.

    The cause is the error that it raised.
    """


class TenantCollision(BadInput):
    """The hash of a tenant's name belongs to another name; the later tenant is refused."""


class TenantErased(PermanentError):
    """The tenant's encryption keys were erased, so that its objects cannot be decrypted.

    The objects may still exist. This is not data corruption.
    """


class KeysLost(Corrupt):
    """A tenant's data keys are missing without an erasure.

    Its objects cannot be decrypted until the keys are restored.
    """


class NotAuthentic(PermanentError):
    """A record of an internal topic was not written by a process of this store; it is ignored."""


class FormatTooNew(PermanentError):
    """The data were written by a later Nearkin.

    The text contains the format version found and the one that this code reads.
    """


def choose(field: str, value: object, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the known ones.

    For example `features.algorithm "fineese": choose finesse, ntransform or odess`.
    """
    names = sorted(known)
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    return ConfigError(f'{field} "{value}": choose {listed}')
