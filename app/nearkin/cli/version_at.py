"""Find the version that a key had at a time: `nearkin get --at`."""

from __future__ import annotations

import shlex
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
    after = [info for info in versions if info.created > at]
    following = min(after, key=lambda info: info.version, default=None)
    remedy = _other_version(found or following)
    _check_not_deleted(key, at, _find_deleted(at, found, following, deleted), remedy)
    lower = 0 if found is None else found.version
    for damage in broken:
        lost = [number for name, number in damage.versions if name == key and number > lower]
        if lost and (following is None or min(lost) < following.version):
            raise Corrupt(
                f"key {key!r} version {min(lost)}: may be the version of {_format_moment(at)} and cannot be read: "
                f"{damage.problem}{remedy or '; `nearkin verify` names the damage'}"
            )
    if found is None:
        raise NotFound(
            f"key {key!r}: had no version at {_format_moment(at)}; `nearkin ls --versions` lists their times"
        )
    return found.version


def _find_deleted(
    at: datetime, found: VersionInfo | None, following: VersionInfo | None, deleted: list[Deletion]
) -> list[Deletion]:
    """Return the versions deleted after `at` of which one may have been the newest then.

    `found` and `following`: the visible versions before and after `at`. A deleted version whose time of creation is
    unknown may have been the newest if its number is between theirs.
    """
    later = [one for one in deleted if one.deleted > at]
    known = [(one.created, one.version, one) for one in later if one.created is not None and one.created <= at]
    newest = max(known, key=lambda entry: entry[:2], default=None)
    lower, upper = 0 if found is None else found.version, None if following is None else following.version
    lost = [
        one for one in later if one.created is None and lower < one.version and (upper is None or one.version < upper)
    ]
    if newest is not None and (found is None or newest[:2] > (found.created, found.version)):
        lost.append(newest[2])
    return lost


def _check_not_deleted(key: str, at: datetime, lost: list[Deletion], remedy: str) -> None:
    """Raise NotFound, with its remedy, if one of `lost` may have been the version of `at`."""
    if not lost:
        return
    names = ", ".join(f"version {one.version} (deleted {_format_moment(one.deleted)})" for one in lost)
    fact = "may be" if any(one.created is None for one in lost) else "was"
    undelete = " or ".join(f"`nearkin undelete {shlex.quote(f'{key}@{one.version}')}`" for one in lost)
    raise NotFound(f"key {key!r}: {names} {fact} the version of {_format_moment(at)}; {undelete} restores it{remedy}")


def _other_version(nearest: VersionInfo | None) -> str:
    """Return the end of an error, which names the visible version next to a time if any."""
    if nearest is None:
        return ""
    return f", or name another: {shlex.quote(f'{nearest.key}@{nearest.version}')} of {_format_moment(nearest.created)}"


def _format_moment(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
