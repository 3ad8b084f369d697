"""Run `nearkin forget`.

Invariant: the versions that a dry run lists are exactly those that the command deletes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING

from nearkin_shared.errors import BadInput, Corrupt

if TYPE_CHECKING:
    from nearkin.cli.session import Session
    from nearkin_shared.config.storage import RetentionPolicy
    from nearkin_shared.results import Damage
    from nearkin_shared.retention import Decision

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
_DURATION = re.compile(r"(?:[0-9]{1,9}[smhdwy])+", re.ASCII)
SECONDS_MAX = 3_153_600_000


def parse_duration(name: str, text: str) -> int:
    """Read a time such as 36h, 30d or 1y6w as seconds; a year has 365 days. Raises BadInput."""
    if _DURATION.fullmatch(text):
        seconds = sum(int(number) * _UNITS[unit] for number, unit in re.findall("([0-9]+)([smhdwy])", text))
        if 0 < seconds <= SECONDS_MAX:
            return seconds
    raise BadInput(f"{name} {text!r}: want a time of up to 100 years in s, m, h, d, w or y, such as 36h or 30d")


def forget_versions(session: Session, prefix: str, policy: RetentionPolicy, min_age: int, *, dry_run: bool) -> None:
    """Delete the versions that no rule keeps, or show which these would be.

    The policies of the settings apply if no rule is given.
    """
    from nearkin.cli.arguments import check_prefix
    from nearkin.cli.output import print_json, unreadable
    from nearkin.store import Store
    from nearkin_shared.retention import decisions, forget, has_rules

    check_prefix(prefix)
    given = policy if has_rules(policy) else None
    broken: list[Damage] = []
    with session.open(read_only=dry_run) as store:
        if isinstance(store, Store):
            found = store.forget(prefix, given, min_age=min_age, dry_run=dry_run, broken=broken.append)
        elif given is None:
            raise BadInput("forget: say what to keep, such as --keep-last 7; the policies are the server's own")
        else:
            found = list(
                decisions(store.versions, prefix, lambda _: given, lambda _: min_age, time.time(), broken.append)
            )
            if not dry_run:
                found = forget(store, found, "forget")
    if session.as_json:
        print_json({"dry_run": dry_run, "versions": [_json(decision) for decision in found]})
    elif dry_run or not session.quiet:
        _print(found, dry_run=dry_run)
    if broken:
        raise Corrupt(unreadable(broken))


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
