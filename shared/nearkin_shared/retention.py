"""Retention. Invariant: a version goes only where a policy for its key says what stays; without one everything does.

versions of a key, newest first -> each rule keeps some -> the others may be forgotten, once they are old enough

The rules are restic's `forget`: the last N; of each of the last N days, weeks, months, years that have any the newest
version; all within a time of the newest one. Calendars are UTC's, weeks begin on Monday (ISO 8601).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise
from typing import Protocol

from nearkin_shared.config.storage import RetentionPolicy, RetentionSettings
from nearkin_shared.errors import BadInput, ClockSkew, NotFound, RetentionActive
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.tombstone import NO_REQUEST, Kind, Mark
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from nearkin_shared.results import Damage, VersionInfo
from nearkin_shared.storage.clock_records import RecordedTime
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.version_listing import infos_of
from nearkin_shared.utils.frozen import frozen

WHO, REASON = "retention", "retention.policies"
_log = logging.getLogger("nearkin")
ALL = -1
"""As a number of versions to keep."""


@frozen
class Decision:
    """What becomes of a version, and why it stays: names of rules, none where it goes."""

    info: VersionInfo
    reasons: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Return whether it stays."""
        return bool(self.reasons)


class Forgettable(Protocol):
    """A store, here or behind a gateway."""

    def versions(
        self, prefix: str = "", *, all_versions: bool = False, broken: Callable[[Damage], None] | None = None
    ) -> list[VersionInfo]:
        """Return the versions of keys that start with `prefix`, by key."""

    def delete(self, key: str, version: int | None = None, *, reason: str = "") -> int:
        """Delete a version."""


def policy_of(settings: RetentionSettings, tenant: str, key: str) -> RetentionPolicy | None:
    """Return the policy for a key: of the longest prefix; of two for one prefix the one that names the tenant."""
    matching = [policy for policy in settings.policies if _matches(policy, tenant, key) and has_rules(policy)]
    return max(matching, key=lambda policy: (len(policy.prefix), policy.tenant is not None), default=None)


def min_age_seconds(settings: RetentionSettings, tenant: str, key: str) -> int:
    """Return how old a version of the key must be before anyone may delete it: the longest that is set for it."""
    ages = [policy.min_age_seconds for policy in settings.policies if _matches(policy, tenant, key)]
    return max(settings.min_age_seconds, *ages, 0)


def retain_until_us(settings: RetentionSettings, tenant: str, key: str, now_us: int, known_time: RecordedTime) -> int:
    """Return up to when a version that is committed now is retained, microseconds since 1970; 0 for no retention.

    It counts from the time of the last GC run if this machine's clock is behind that. Raises StoreUnavailable.
    It is written into the manifest: every process honours it, whatever its own settings, and none can shorten it.
    """
    seconds = min_age_seconds(settings, tenant, key)
    return min(known_time.latest_us(now_us) + seconds * 1_000_000, CREATED_US_MAX) if seconds else 0


def check_clock(infos: Iterable[VersionInfo], now: float) -> None:
    """Raise ClockSkew where a version is dated in the future: which ones are old is not known then."""
    for info in infos:
        ahead_seconds = info.created.timestamp() - now
        if ahead_seconds > CLOCK_SKEW_SECONDS_MAX:
            raise ClockSkew(
                f"key {info.key!r} version {info.version}: created {info.created:%Y-%m-%dT%H:%M:%SZ}, "
                f"{ahead_seconds:.0f} s after this machine's clock (at most {CLOCK_SKEW_SECONDS_MAX} s are tolerated): "
                "nothing was forgotten; correct the clock of this machine, or `nearkin rm` the version if the other "
                "clock was wrong"
            )


def check_age(settings: RetentionSettings, tenant: str, info: VersionInfo, now: float) -> None:
    """Raise RetentionActive where a version is too young to be deleted."""
    seconds = min_age_seconds(settings, tenant, info.key)
    if seconds and now < info.created.timestamp() + seconds:
        try:
            until = f"{(info.created + timedelta(seconds=seconds)).astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        except OverflowError:  # dated by a clock that was wrong
            until = "after the year 9999"
        raise RetentionActive(
            f"key {info.key!r} version {info.version}: is kept until {until} "
            "(retention.min_age_seconds); nothing was deleted"
        )


def guard_of(
    settings: RetentionSettings, clock: Callable[[], float]
) -> Callable[[str, str], Callable[[VersionInfo], None] | None]:
    """Return what `Deletions` asks before it deletes: (tenant, key) -> a check of each version, None where none is."""

    def guard(tenant: str, key: str) -> Callable[[VersionInfo], None] | None:
        if not min_age_seconds(settings, tenant, key):
            return None
        return lambda info: check_age(settings, tenant, info, clock())

    return guard


def has_rules(policy: RetentionPolicy) -> bool:
    """Return whether a policy says what stays; one that does not forgets nothing."""
    counts = (policy.keep_last, policy.keep_daily, policy.keep_weekly, policy.keep_monthly, policy.keep_yearly)
    return any(counts) or policy.keep_within_seconds > 0


def decide(
    versions: Sequence[VersionInfo],
    policy: RetentionPolicy,
    now: float,
    min_age: int = 0,
    superseded_seconds: int = 0,
) -> list[Decision]:
    """Return what becomes of the versions of one key, newest first. `min_age` seconds: younger ones stay.

    `superseded_seconds`: what was the newest version less than so long ago stays, so that a caller who may only put
    cannot push a good version out by putting many.

    Newest by time; by number where a clock that was wrong may have dated it: what `get` answers is never forgotten, and
    `keep-within` counts from it.
    """
    newest_first = sorted(versions, key=lambda info: (info.created, info.version), reverse=True)
    current = max(versions, key=lambda info: info.version, default=None)
    rules = [
        _Rule("last", policy.keep_last, lambda info: info.version),
        _Rule("daily", policy.keep_daily, lambda info: _utc(info).date()),
        _Rule("weekly", policy.keep_weekly, lambda info: _utc(info).isocalendar()[:2]),
        _Rule("monthly", policy.keep_monthly, lambda info: (_utc(info).year, _utc(info).month)),
        _Rule("yearly", policy.keep_yearly, lambda info: _utc(info).year),
    ]
    by_number = sorted(versions, key=lambda info: info.version)
    superseded = {info.version: following.created for info, following in pairwise(by_number)}
    keeps_any = has_rules(policy)
    found = []
    for place, info in enumerate(newest_first):
        oldest = place == len(newest_first) - 1
        reasons = [rule.name for rule in rules if rule.keeps(info, oldest=oldest)]
        if (
            policy.keep_within_seconds
            and current is not None
            and ((current.created - info.created).total_seconds() <= policy.keep_within_seconds)
        ):
            reasons.append("within")
        if min_age and now < info.created.timestamp() + min_age:
            reasons.append("min-age")
        elif info.retain_until is not None and now < info.retain_until.timestamp():
            reasons.append("retained")
        ended = superseded.get(info.version)
        if superseded_seconds and ended is not None and now < ended.timestamp() + superseded_seconds:
            reasons.append("superseded")
        if info is current and not reasons:
            reasons.append("newest")
        found.append(Decision(info, tuple(reasons) if keeps_any else ("no policy",)))
    return found


class _Rule:
    """One rule over the versions of a key, newest first."""

    def __init__(self, name: str, count: int, period: Callable[[VersionInfo], object]) -> None:
        self.name = name
        self._left = count
        self._period = period
        self._last: object = None

    def keeps(self, info: VersionInfo, *, oldest: bool) -> bool:
        """Return whether the rule keeps the next version: the newest of its period, or the oldest of all."""
        period = self._period(info)
        if not self._left or (period == self._last and not oldest):
            return False
        self._last = period
        self._left -= self._left > 0
        return True


def decisions(
    store: Forgettable,
    prefix: str,
    policy_for: Callable[[str], RetentionPolicy | None],
    min_age_for: Callable[[str], int],
    now: float,
    broken: Callable[[Damage], None],
    superseded_seconds: int = 0,
) -> Iterator[Decision]:
    """Yield what becomes of every version of the keys that start with `prefix`, by key, newest first.

    Of a key of which a version cannot be read nothing goes: when that was made is not known. Raises ClockSkew.
    """
    damaged: set[str] = set()

    def note(damage: Damage) -> None:
        damaged.update(key for key, _ in damage.versions)
        broken(damage)

    found = store.versions(prefix, all_versions=True, broken=note)
    check_clock(found, now)
    for key, versions in groupby(found, key=lambda info: info.key):
        policy = policy_for(key)
        if key in damaged or policy is None:
            why = "a version is damaged" if key in damaged else "no policy"
            yield from (Decision(info, (why,)) for info in versions)
        else:
            yield from decide(list(versions), policy, now, min_age_for(key), superseded_seconds)


def forget(store: Forgettable, found: Iterable[Decision], reason: str) -> list[Decision]:
    """Delete what does not stay, oldest first of each key; return what became of each. Raises as `delete` does.

    What the store holds to be too young stays.
    """
    done = []
    for decision in sorted(found, key=lambda decision: (decision.info.key, decision.info.version)):
        try:
            if not decision.kept:
                with suppress(NotFound):  # somebody else was faster
                    store.delete(decision.info.key, decision.info.version, reason=reason)
            done.append(decision)
        except RetentionActive:
            done.append(Decision(decision.info, ("min-age",)))
        except BadInput as err:  # it was deleted and undeleted as often as there are marks
            _log.warning("forget: %s", err)
            done.append(Decision(decision.info, ("marks",)))
    return done


def find_expired(
    settings: RetentionSettings, keys: Iterable[tuple[str, str]], manifests: ManifestStore, now: float
) -> Iterator[tuple[str, VersionInfo]]:
    """Yield (tenant, version) of those that the settings' policies do not keep, of `keys` as (tenant, key).

    Of a key of which a version cannot be read nothing goes. Raises ClockSkew.
    """
    for tenant, key in keys:
        policy = policy_of(settings, tenant, key)
        if policy is None:
            continue
        histories = manifests.histories(tenant, key)
        entries = list(infos_of(manifests, tenant, key, (histories[version] for version in sorted(histories))))
        infos = [entry for entry in entries if isinstance(entry, VersionInfo)]
        check_clock(infos, now)
        if len(infos) == len(entries):
            min_age = min_age_seconds(settings, tenant, key)
            found = decide(infos, policy, now, min_age, settings.superseded_seconds)
            yield from ((tenant, decision.info) for decision in reversed(found) if not decision.kept)


def apply_policies(
    settings: RetentionSettings,
    keys: Iterable[tuple[str, str]],
    manifests: ManifestStore,
    deletions: Deletions | None,
    undelete_seconds: float,
    now: float,
) -> tuple[int, int]:
    """Delete what the policies do not keep, of `keys` as (tenant, key), oldest first; without `deletions` only count.

    Returns how many versions, and the bytes of their marks. Raises Corrupt, StoreUnavailable: some may be deleted.
    """
    count = marks_bytes = 0
    for tenant, info in find_expired(settings, keys, manifests, now) if any(map(has_rules, settings.policies)) else ():
        mark = Mark(tenant, info.key, info.version, 1, Kind.DELETED, 0, 0, NO_REQUEST, WHO, REASON)
        if deletions is not None:
            try:
                deletions.delete(
                    tenant, info.key, info.version, undelete_seconds=undelete_seconds, who=WHO, reason=REASON
                )
            except (NotFound, RetentionActive):  # somebody else was faster; or the clock that guards is behind
                continue
            except BadInput as err:  # it was deleted and undeleted as often as there are marks: others go all the same
                _log.warning("retention.policies: %s", err)
                continue
        count, marks_bytes = count + 1, marks_bytes + manifests.takes_bytes(mark)
    return count, marks_bytes


def _matches(policy: RetentionPolicy, tenant: str, key: str) -> bool:
    return key.startswith(policy.prefix) and policy.tenant in (None, tenant)


def _utc(info: VersionInfo) -> datetime:
    return info.created.astimezone(UTC)
