"""Run `nearkin forget`.

Invariant: the versions that a dry run lists are exactly those that the command deletes.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from nearkin.cli.session import AsWritten, Session, current_session, shared_options
from nearkin_shared.errors import BadInput, Corrupt, NotFound

if TYPE_CHECKING:
    from nearkin.cli.key_patterns import KeyPattern
    from nearkin.store_copy import AnyStore
    from nearkin_shared.config.storage import RetentionPolicy
    from nearkin_shared.results import Damage
    from nearkin_shared.retention import Decision

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
_DURATION = re.compile(r"(?:[0-9]{1,9}[smhdwy])+", re.ASCII)
SECONDS_MAX = 3_153_600_000
_COUNT = click.IntRange(min=-1)
_PERIOD_SECONDS = {"hourly": 3600, "daily": 86_400, "weekly": 604_800, "monthly": 28 * 86_400, "yearly": 31_536_000}
"""The shortest time that --keep-within-PERIOD accepts: 6m, six months for restic, are six minutes here."""


def _count_option(name: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(f"--keep-{name}", metavar="N", type=_COUNT, help=text)


@click.command(cls=AsWritten)
@click.argument("pattern", metavar="[KEY|GLOB]", default="")
@_count_option("last", "The newest N versions of each key; -1: all.")
@_count_option("hourly", "The newest of each of the last N hours with a version.")
@_count_option("daily", "The same of days.")
@_count_option("weekly", "The same of weeks, from Monday on.")
@_count_option("monthly", "The same of months.")
@_count_option("yearly", "The same of years.")
@click.option("--keep-within", metavar="TIME", help="All within this of a key's newest version: 36h, 30d, 2w.")
@click.option("--keep-within-hourly", metavar="TIME", help="The newest of each hour within this of the newest version.")
@click.option("--keep-within-daily", metavar="TIME", help="The same of days.")
@click.option("--keep-within-weekly", metavar="TIME", help="The same of weeks.")
@click.option("--keep-within-monthly", metavar="TIME", help="The same of months.")
@click.option("--keep-within-yearly", metavar="TIME", help="The same of years.")
@click.option("--keep-tag", metavar="TAG[,TAG]", multiple=True, help="Those with this tag (all of them); repeatable.")
@click.option("--min-age", metavar="TIME", help="Keep versions that are more recent than this.")
@click.option("--literal", is_flag=True, help="Take * ? [ in KEY as they are.")
@click.option("-n", "--dry-run", is_flag=True, help="Show what would stay and what would go; delete nothing.")
@click.option("--prune", is_flag=True, hidden=True)
@shared_options
def forget(pattern: str, min_age: str | None, literal: bool, dry_run: bool, prune: bool, **rules: Any) -> None:
    """Delete the versions that no rule keeps.

    The command applies to KEY alone, to the keys that GLOB matches, as in `nearkin ls`, or without one to all. Rules
    work as in restic: a version stays if any rule keeps it; hours, days, weeks, months and years are in UTC, and those
    without a version do not count; while a rule could keep more, the oldest version stays too. Without a rule,
    retention.policies of the settings apply; keys without a policy keep all versions. Versions more recent than
    retention.min_age_seconds always stay.

    A TIME is a sum of numbers with s, m (minutes), h, d, w or y: 36h, 30d, 1y6w.

    nearkin forget --keep-last 3 --keep-daily 7 --keep-weekly 4 --dry-run
    nearkin forget 'db/*' --keep-within 30d        # in quotes, or the shell expands it
    nearkin forget home --keep-within-daily 14d --keep-within-monthly 1y --keep-tag release
    nearkin forget                                 # by retention.policies
    """
    from nearkin.cli.key_patterns import KeyPattern, parse_key_or_glob

    if prune:
        raise BadInput(
            "--prune: forget frees no space; run it without --prune; `nearkin gc` frees the space once the versions "
            "cannot be brought back (deletion.undelete_seconds), `nearkin gc --now` at once"
        )
    seconds = 0 if min_age is None else parse_duration("min-age", min_age)
    wanted = parse_key_or_glob(pattern, literal=literal) if pattern else KeyPattern("", lambda _key: True)
    forget_versions(current_session(), pattern, wanted, parse_policy(rules), seconds, dry_run=dry_run)


def parse_policy(rules: Mapping[str, Any]) -> RetentionPolicy:
    """Return the policy that options name, by parameters such as `keep_daily`.

    Raises BadInput, also where counts are given and none of the options is a rule.
    """
    from nearkin_shared.config.storage import RetentionPolicy
    from nearkin_shared.retention import has_rules

    values: dict[str, Any] = {}
    for name, value in rules.items():
        if name == "keep_tag":
            values["keep_tags"] = tuple(value)
            if not all(tag.strip() for text in value for tag in text.split(",")):
                raise BadInput(f"--keep-tag {','.join(value)!r}: want a tag, or several separated by commas")
        elif name.startswith("keep_within"):
            values[f"{name}_seconds"] = 0 if value is None else _parse_within(name, value)
        else:
            values[name] = value or 0
    policy = RetentionPolicy(**values)
    zero = next((name for name, value in rules.items() if value == 0), None)
    if zero is not None and not has_rules(policy):
        option = zero.replace("_", "-")
        raise BadInput(f"--{option} 0: is no rule, and no other is given; want a number above 0, or -1 to keep all")
    return policy


def _parse_within(name: str, text: str) -> int:
    option, period = name.replace("_", "-"), name.rpartition("_")[2]
    seconds = parse_duration(option, text)
    least = _PERIOD_SECONDS.get(period, 0)
    if seconds < least:
        raise BadInput(
            f"--{option} {text!r}: {seconds:,} s, shorter than one period of the rule ({least:,} s); m is minutes, six "
            "months are 26w"
        )
    return seconds


def parse_duration(name: str, text: str) -> int:
    """Read a time such as 36h, 30d or 1y6w as seconds; a year has 365 days. Raises BadInput."""
    if _DURATION.fullmatch(text):
        seconds = sum(int(number) * _UNITS[unit] for number, unit in re.findall("([0-9]+)([smhdwy])", text))
        if 0 < seconds <= SECONDS_MAX:
            return seconds
    raise BadInput(f"{name} {text!r}: want a time of up to 100 years in s, m, h, d, w or y, such as 36h or 30d")


def forget_versions(
    session: Session, pattern: str, wanted: KeyPattern, policy: RetentionPolicy, min_age: int, *, dry_run: bool
) -> None:
    """Delete the versions that no rule keeps, or show which these would be.

    The policies of the settings apply if no rule is given. Raises NotFound if a pattern is given and no key matches.
    """
    from nearkin.cli.output import print_json, print_line, unreadable
    from nearkin.store import Store
    from nearkin_shared.retention import decisions, forget, has_rules

    prefix, matches = wanted
    given = policy if has_rules(policy) else None
    broken: list[Damage] = []
    with session.open(read_only=dry_run) as store:
        if isinstance(store, Store):
            found = store.forget(prefix, given, min_age=min_age, dry_run=dry_run, broken=broken.append, matches=matches)
        elif given is None:
            raise BadInput("forget: say what to keep, such as --keep-last 7; the policies are the server's own")
        else:
            found = list(
                decisions(
                    store.versions, prefix, lambda _: given, lambda _: min_age, time.time(), broken.append, 0, matches
                )
            )
            if not dry_run:
                found = forget(partial(store.delete, reason="forget"), found)
        if pattern and not found and not broken:
            _refuse_version(store, pattern)
    if pattern and not found and not broken:
        raise NotFound(
            f"forget {pattern!r}: no such key; KEY is taken as a whole, and {pattern + '*'!r} stands for all that "
            "start with it"
        )
    if session.as_json:
        print_json({"dry_run": dry_run, "versions": [_json(decision) for decision in found]})
    elif dry_run or not session.quiet:
        _print(found, dry_run=dry_run)
        if not dry_run and isinstance(store, Store) and not all(decision.kept for decision in found):
            print_line("`nearkin gc` frees their space, once `nearkin undelete` can no longer restore them")
    if broken:
        raise Corrupt(unreadable(broken))


def _refuse_version(store: AnyStore, text: str) -> None:
    """Refuse KEY@VERSION of an existing key. Raises BadInput."""
    from nearkin.cli.tree_location import resolve_key
    from nearkin_shared.utils.terminal import printable

    with suppress(NotFound, Corrupt):
        key, version = resolve_key(store, "forget", text, None)
        if version is not None:
            raise BadInput(
                f"forget {printable(text)!r}: names one version, and rules apply to all versions of "
                f"{printable(key)!r}; `nearkin rm {shlex.quote(f'{key}@{version}')}` deletes it"
            )


def _json(decision: Decision) -> dict[str, object]:
    from nearkin_shared.results_json import info_json

    return {**info_json(decision.info), "kept": decision.kept, "reasons": list(decision.reasons)}


def _print(found: Sequence[Decision], *, dry_run: bool) -> None:
    from nearkin.cli.output import print_line, print_table
    from nearkin_shared.savings_table import human_bytes, plural
    from nearkin_shared.utils.terminal import printable

    rows = [
        (
            "keep" if decision.kept else "forget",
            f"{decision.info.created.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
            human_bytes(decision.info.size_bytes),
            str(decision.info.version),
            printable(decision.info.key),
            ", ".join(decision.reasons),
        )
        for decision in found
    ]
    if rows:
        names = ("", "created", "size", "version", "key", "kept by")
        print_table(names, rows, whole=("", "created", "size", "version"), right=("size", "version"))
    going = sum(not decision.kept for decision in found)
    print_line(f"{'would forget' if dry_run else 'forgot'} {plural(going, 'version')} of {len(found):,}")
