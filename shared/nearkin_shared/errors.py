"""Errors. Invariant: callers ask `RetryableError` or `PermanentError`, never a vendor's type; the cause is always
kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class NearkinError(Exception):
    """Base of everything Nearkin raises on purpose; its text is one line and says what to do."""


class RetryableError(NearkinError):
    """The same call may succeed later: a full disk, a busy lock, an unreachable service."""

    retry_after_seconds: float | None = None
    """When, if whoever refused it said so."""


class PermanentError(NearkinError):
    """The same call will never succeed."""


class Corrupt(PermanentError):
    """Stored bytes are not what was written: a checksum, fingerprint or length does not agree."""


class BadInput(PermanentError):
    """The caller's input is refused: a key, a range, a file; names the value and what would be right."""


class ConfigError(BadInput):
    """A setting is refused: names the field, the value and what would be right."""


class WrongKey(ConfigError):
    """The key-encryption key that the settings name, if any, is not the one that the store's keys need."""


class AccessDenied(PermanentError):
    """The caller may not do this: its token is missing, unknown, expired or has no such scope."""


class RetentionActive(PermanentError):
    """No caller may delete a version yet: its manifest or retention.min_age_seconds retains it."""


class ClockSkew(RetryableError):
    """A version is dated in the future: which versions are old enough to be forgotten is not known."""


class PreconditionFailed(PermanentError):
    """The key's newest version is not the one that a conditional put was made for; nothing was stored."""


class GcPaused(PermanentError):
    """Garbage collection is paused, until somebody resumes it."""


class NotFound(PermanentError):
    """The store has no such key or version."""


class NoStore(NotFound):
    """There is no store at the path or in the bucket."""


class StoreUnavailable(RetryableError):
    """The object store or the index could not be reached or has no room."""


class NoRoom(StoreUnavailable):
    """The device of the store, or of its index, is full: what was to be written is not there."""

    def __init__(self, message: str, folder: Path | None = None) -> None:
        """`folder`: where there is no room, if that may be on another device than the store."""
        super().__init__(message)
        self.folder = folder


class NotWritable(StoreUnavailable):
    """The process may not write the store's lock or index: a read-only disk, or another user's files."""


class IndexDamaged(StoreUnavailable):
    """The index in files cannot be read: it is to be made anew."""


class IndexUnsafe(IndexDamaged):
    """Reading the index in files would end the process, or did so before: it is made again without being opened."""


class IndexStale(StoreUnavailable):
    """The index in files has an older state of the store: another machine wrote, or the store was copied."""


class IndexUnfinished(StoreUnavailable):
    """The index's file is there, what belongs in it is not: as good as no index."""


class IndexClosed(StoreUnavailable):
    """The index was closed by another thread, which puts another one in its place, or closes the store."""


class StoreLocked(RetryableError):
    """Somebody else has this store: another process writes to it, or another Store of this process is open on it."""


class SourceFailed(RetryableError):
    """The caller's file or stream failed while it was read; the cause is the error it gave. Nothing was stored."""


class TenantCollision(BadInput):
    """The hash of a tenant's name is taken by another name; the later tenant is refused."""


class TenantErased(PermanentError):
    """A tenant's keys were erased: what they sealed is there, perhaps, and can never be read again. No damage."""


class KeysLost(Corrupt):
    """A tenant's data keys are gone, and nobody erased them: what they sealed is unread until they are back."""


class NotAuthentic(PermanentError):
    """A record of an internal topic was not made by a process of this store: it is not acted on."""


class FormatTooNew(PermanentError):
    """Written by a later Nearkin: names the format version found and the one this code reads."""


def choose(field: str, value: object, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name: `features.algorithm "fineese": choose finesse, ntransform or odess`."""
    names = sorted(known)
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    return ConfigError(f'{field} "{value}": choose {listed}')
