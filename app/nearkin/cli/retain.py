# size: one command in a module of its own, imported when it is called
"""Run `nearkin retain`: extend the retention of a version.

Invariant: exit code 0 means that the extension is durable.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from nearkin.cli.session import current_session
from nearkin_shared.errors import BadInput


def parse_end(until: str | None, duration: str | None, now: datetime) -> datetime:
    """Return the time that `--until` or `--for` names. Raises BadInput."""
    from nearkin.cli.forget import parse_duration

    if (until is None) == (duration is None):
        raise BadInput("--until, --for: give one of them")
    try:
        if until is None:
            assert duration is not None
            return now + timedelta(seconds=parse_duration("for", duration))
        found = datetime.fromisoformat(until)
        return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as err:
        raise BadInput(f"until {until or duration!r}: want a time such as 2027-11-20 or 2027-11-20T18:00Z") from err


def retain(key: str, version: int | None, until: str | None, duration: str | None, reason: str) -> None:
    """Extend the retention of a version and print until when it holds."""
    from nearkin.cli.arguments import check_key
    from nearkin.cli.output import print_json, report
    from nearkin.cli.tree_location import resolve_key
    from nearkin_shared.results_json import info_json
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    check_key(key)
    end = parse_end(until, duration, datetime.now(UTC))
    with session.open(read_only=False) as store:
        named, number = resolve_key(store, "retain", key, version)
        info = store.retain(named, end, number, reason=reason)
    if session.as_json:
        print_json(info_json(info))
        return
    assert info.retain_until is not None
    report(f"{printable(info.key)} version {info.version}: retained until {info.retain_until:%Y-%m-%dT%H:%M:%SZ}")
