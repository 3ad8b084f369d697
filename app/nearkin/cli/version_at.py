"""Find the version that a key had at a time: `nearkin get --at`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nearkin.cli.verify import parse_moment
from nearkin_shared.errors import BadInput, Corrupt, NotFound

if TYPE_CHECKING:
    from nearkin.client.sync import RemoteStore
    from nearkin.store import Store
    from nearkin_shared.results import Damage, Deletion, VersionInfo


def find_version_at(store: Store | RemoteStore, key: str, text: str) -> int:
    """Return the number of the version that was the newest at a time.

    `text`: ISO 8601 in UTC, or how long ago. Raises BadInput, NotFound (none then; deleted versions that may have been
    it are named) and Corrupt (a version that may have been it cannot be read).
    """
    now = datetime.now(UTC)
    at = parse_moment("at", text, now)
    if at > now:
        raise BadInput(f"at {text!r}: is in the future")
    broken: list[Damage] = []
    versions = [one for one in store.versions(key, all_versions=True, broken=broken.append) if one.key == key]
    deleted = [one for one in store.list_deleted(key, broken=broken.append) if one.key == key]
    before = [info for info in versions if info.created <= at]
    found = max(before, key=lambda info: (info.created, info.version), default=None)
    after = [info.version for info in versions if info.created > at]
    _check_not_deleted(key, at, found, min(after, default=None), deleted)
    lower = 0 if found is None else found.version
    for damage in broken:
        lost = [number for name, number in damage.versions if name == key and number > lower]
        if lost and (not after or min(lost) < min(after)):
            raise Corrupt(
                f"key {key!r} version {min(lost)}: may be the version of {_format_moment(at)} and cannot be read: "
                f"{damage.problem}; name another with --version"
            )
    if found is None:
        raise NotFound(
            f"key {key!r}: had no version at {_format_moment(at)}; `nearkin ls --versions` lists their times"
        )
    return found.version


def _check_not_deleted(
    key: str, at: datetime, found: VersionInfo | None, following: int | None, deleted: list[Deletion]
) -> None:
    """Raise NotFound if a version deleted after `at` may have been the newest at that time.

    A deletion does not record when its version was created: numbers before the `following` visible version may have
    been.
    """
    newer = [one for one in deleted if found is None or one.version > found.version]
    lost = [one for one in newer if one.deleted > at and (following is None or one.version < following)]
    if lost:
        names = ", ".join(f"version {one.version} (deleted {_format_moment(one.deleted)})" for one in lost)
        raise NotFound(
            f"key {key!r}: {names} may be the version of {_format_moment(at)}; `nearkin undelete` restores it, or name "
            "another with --version"
        )


def _format_moment(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
