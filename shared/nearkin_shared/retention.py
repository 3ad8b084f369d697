"""Decide which versions retention policies keep, and delete the others.

    versions of a key, newest first -> each rule keeps some -> the others are deleted once they are old enough

The rules are those of restic's `forget`: the last N; for each of the last N hours, days, weeks, months, years that have
a version, the newest one; all within a time of the newest, or the newest of each such period within it; those with a
tag. Calendars are UTC's, weeks begin on Monday (ISO 8601).

Invariant: a version is deleted only if a policy with rules applies to its key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise

from nearkin_shared.config.storage import RetentionPolicy, RetentionSettings
from nearkin_shared.errors import BadInput, ClockSkew, NotFound, RetentionActive
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.tombstone import NO_REQUEST, Mark, MarkKind
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from nearkin_shared.results import Damage, VersionInfo
from nearkin_shared.storage.clock_records import RecordedTime
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.version_listing import infos_of
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.validation import RESERVED_PREFIX

WHO, REASON = "retention", "retention.policies"
_log = logging.getLogger("nearkin")
ALL = -1
"""Keep any number of versions."""


@frozen
class Decision:
    """A version and the names of the rules that keep it; without reasons it is deleted."""

    info: VersionInfo
    reasons: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Whether the version is kept."""
        return bool(self.reasons)


def policy_of(settings: RetentionSettings, tenant: str, key: str) -> RetentionPolicy | None:
    """Return the policy for a key: the longest prefix, and for equal ones the tenant's own."""
    matching = [policy for policy in settings.policies if _matches(policy, tenant, key) and has_rules(policy)]
    return max(matching, key=lambda policy: (len(policy.prefix), policy.tenant is not None), default=None)


def min_age_seconds(settings: RetentionSettings, tenant: str, key: str) -> int:
    """Return the age before which no caller may delete a version of the key.

    The longest age that a setting states. Checkpoints of backups have none: a backup deletes its own.
    """
    if key.startswith(RESERVED_PREFIX):
        return 0
    ages = [policy.min_age_seconds for policy in settings.policies if _matches(policy, tenant, key)]
    return max(settings.min_age_seconds, *ages, 0)


def retain_until_us(settings: RetentionSettings, tenant: str, key: str, now_us: int, known_time: RecordedTime) -> int:
    """Return the end of retention of a version that is committed now, in us since 1970."""
    seconds = min_age_seconds(settings, tenant, key)
    return min(known_time.latest_us(now_us) + seconds * 1_000_000, CREATED_US_MAX) if seconds else 0


def check_clock(infos: Iterable[VersionInfo], now: float) -> None:
    """Raise ClockSkew if a version is dated in the future, because ages are unknown then."""
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
    """Raise RetentionActive if a version is too recent to be deleted."""
    seconds = min_age_seconds(settings, tenant, info.key)
    if seconds and now < info.created.timestamp() + seconds:
        try:
            until = f"{(info.created + timedelta(seconds=seconds)).astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        except OverflowError:  # dated by a wrong clock
            until = "after the year 9999"
        raise RetentionActive(
            f"key {info.key!r} version {info.version}: is kept until {until} "
            "(retention.min_age_seconds); nothing was deleted"
        )


def guard_of(
    settings: RetentionSettings, clock: Callable[[], float]
) -> Callable[[str, str], Callable[[VersionInfo], None] | None]:
    """Return the check that `Deletions` calls for (tenant, key); None: no minimum age."""

    def check_for(tenant: str, key: str) -> Callable[[VersionInfo], None] | None:
        if not min_age_seconds(settings, tenant, key):
            return None
        return lambda info: check_age(settings, tenant, info, clock())

    return check_for


def has_rules(policy: RetentionPolicy) -> bool:
    """Return whether a policy has a rule; one without rules keeps every version."""
    counts = (policy.keep_last, *(getattr(policy, f"keep_{name}") for name in PERIODS))
    within = (policy.keep_within_seconds, *(getattr(policy, f"keep_within_{name}_seconds") for name in PERIODS))
    return any(counts) or any(within) or bool(policy.keep_tags)


def decide(
    versions: Sequence[VersionInfo],
    policy: RetentionPolicy,
    now: float,
    min_age: int = 0,
    superseded_seconds: int = 0,
) -> list[Decision]:
    """Decide about the versions of one key, newest first.

    `min_age`, seconds: more recent versions are kept. `superseded_seconds`: a version that was the newest less than
    this
    ago is kept, so that a caller who may only put cannot expire a good version by putting many.

    Versions are ordered by time. The current version is the one with the highest number, because a wrong clock may have
    dated it: the version that `get` returns is never deleted, and `keep-within` is counted from it.
    """
    newest_first = sorted(versions, key=lambda info: (info.created, info.version), reverse=True)
    current = max(versions, key=lambda info: info.version, default=None)
    rules = _rules_of(policy, current)
    by_number = sorted(versions, key=lambda info: info.version)
    superseded = {info.version: following.created for info, following in pairwise(by_number)}
    keeps_any = has_rules(policy)
    found = []
    for position, info in enumerate(newest_first):
        oldest = position == len(newest_first) - 1
        reasons = [rule.name for rule in rules if rule.keeps(info, oldest=oldest)]
        reasons += [f"tag {tags}" for tags in policy.keep_tags if has_tags(info, tags)]
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


def has_tags(info: VersionInfo, tags: str) -> bool:
    """Return whether a version has all of some tags, which commas separate."""
    return {tag.strip() for tag in tags.split(",")} <= {*info.tags}


def _rules_of(policy: RetentionPolicy, current: VersionInfo | None) -> list[_Rule]:
    """Return the rules that count versions or periods, from the current version back."""
    rules = [_Rule("last", policy.keep_last, _number)]
    rules += [_Rule(name, getattr(policy, f"keep_{name}"), period) for name, period in PERIODS.items()]
    if current is None:
        return rules
    for name, period in {"": _number, **PERIODS}.items():
        seconds = getattr(policy, f"keep_within_{name}_seconds" if name else "keep_within_seconds")
        if seconds:
            earliest = current.created.timestamp() - seconds
            rules.append(_Rule(f"within {name}".rstrip(), ALL, period, earliest))
    return rules


class _Rule:
    """One rule, applied to the versions of a key in order, newest first."""

    def __init__(
        self, name: str, count: int, period: Callable[[VersionInfo], object], earliest: float = -math.inf
    ) -> None:
        self.name = name
        self._remaining = count
        self._period = period
        self._earliest = earliest
        self._last_period: object = None

    def keeps(self, info: VersionInfo, *, oldest: bool) -> bool:
        """Return whether the rule keeps the next version.

        It keeps the newest version of a period, or the oldest of all.
        """
        if not self._remaining or info.created.timestamp() < self._earliest:
            return False
        period = self._period(info)
        if period == self._last_period and not oldest:
            return False
        self._last_period = period
        self._remaining -= self._remaining > 0
        return True


def decisions(
    list_versions: Callable[..., list[VersionInfo]],
    prefix: str,
    policy_for: Callable[[str], RetentionPolicy | None],
    min_age_for: Callable[[str], int],
    now: float,
    broken: Callable[[Damage], None],
    superseded_seconds: int = 0,
    matches: Callable[[str], bool] = lambda _key: True,
) -> Iterator[Decision]:
    """Yield the decision about every version of keys that start with `prefix` and match.

    Ordered by key, newest first. If a version of a key cannot be read, its creation time is unknown, so that all
    versions of the key are kept. `list_versions`: as `Store.versions`; it should report every version whose
    manifest is damaged. Raises ClockSkew.
    """
    damaged: set[str] = set()

    def record_damage(damage: Damage) -> None:
        damaged.update(key for key, _ in damage.versions)
        if not damage.versions or any(matches(key) for key, _ in damage.versions):
            broken(damage)

    found = [info for info in list_versions(prefix, all_versions=True, broken=record_damage) if matches(info.key)]
    check_clock(found, now)
    for key, versions in groupby(found, key=lambda info: info.key):
        policy = policy_for(key)
        if key in damaged or policy is None:
            reason_name = "a version is damaged" if key in damaged else "no policy"
            yield from (Decision(info, (reason_name,)) for info in versions)
        else:
            yield from decide(list(versions), policy, now, min_age_for(key), superseded_seconds)


def forget(delete: Callable[[str, int], object], found: Iterable[Decision]) -> list[Decision]:
    """Delete the versions that are not kept, oldest first of each key; return all outcomes.

    `delete` deletes a version of a key. One that the store finds too recent is kept. Raises as `delete` does.
    """
    done = []
    for decision in sorted(found, key=lambda decision: (decision.info.key, decision.info.version)):
        try:
            if not decision.kept:
                with suppress(NotFound):  # another process deleted it first
                    delete(decision.info.key, decision.info.version)
            done.append(decision)
        except RetentionActive:
            done.append(Decision(decision.info, ("min-age",)))
        except BadInput as err:  # the version has the maximum number of tombstones
            _log.warning("forget: %s", err)
            done.append(Decision(decision.info, ("marks",)))
    return done


def find_expired(
    settings: RetentionSettings, keys: Iterable[tuple[str, str]], manifests: ManifestStore, now: float
) -> Iterator[tuple[str, VersionInfo]]:
    """Yield (tenant, version) of versions of `keys` that the settings' policies do not keep.

    `keys` are (tenant, key). A key with an unreadable version keeps all versions. Raises ClockSkew.
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
    """Delete the versions of `keys`, (tenant, key), that the policies do not keep.

    Oldest first; without `deletions` they are only counted. Returns the number of versions and the bytes of their
    tombstones.

    Raises: Corrupt, StoreUnavailable; some versions may be deleted by then.
    """
    count = marks_bytes = 0
    for tenant, info in find_expired(settings, keys, manifests, now) if any(map(has_rules, settings.policies)) else ():
        mark = Mark(tenant, info.key, info.version, 1, MarkKind.DELETED, 0, 0, NO_REQUEST, WHO, REASON)
        if deletions is not None:
            try:
                deletions.delete(
                    tenant, info.key, info.version, undelete_seconds=undelete_seconds, who=WHO, reason=REASON
                )
            # another process deleted it first, or the clock that guards deletions is behind
            except (NotFound, RetentionActive):
                continue
            except BadInput as err:  # the version has the maximum number of tombstones; continue with others
                _log.warning("retention.policies: %s", err)
                continue
        count, marks_bytes = count + 1, marks_bytes + manifests.takes_bytes(mark)
    return count, marks_bytes


def _matches(policy: RetentionPolicy, tenant: str, key: str) -> bool:
    return key.startswith(policy.prefix) and policy.tenant in (None, tenant)


def _number(info: VersionInfo) -> object:
    return info.version


def _utc(info: VersionInfo) -> datetime:
    return info.created.astimezone(UTC)


PERIODS: dict[str, Callable[[VersionInfo], object]] = {
    "hourly": lambda info: (_utc(info).date(), _utc(info).hour),
    "daily": lambda info: _utc(info).date(),
    "weekly": lambda info: _utc(info).isocalendar()[:2],
    "monthly": lambda info: (_utc(info).year, _utc(info).month),
    "yearly": lambda info: _utc(info).year,
}
"""The period of a version by the name of the rule that keeps one version of each."""
