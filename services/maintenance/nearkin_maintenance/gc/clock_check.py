"""Check the clock before a GC run.

    the object store's server: its date of an object just written     over 300 s before this clock -> refused
    the store: containers, the last GC run                            no sign of time for months   -> refused

Invariant: nothing expires by a clock that is ahead of all times that the store knows. Graces, retentions and undelete
windows would all end early. With a clock that is behind they end late, which is reported. A period that begins by a
clock that is behind would end early by a correct one: deletions count the undelete window, and puts `min_age_seconds`,
from the last recorded time at least (RecordedTime). Not covered: a grace that a GC run begins by a clock that is
behind, and a clock that is behind by less than a day, or before the first record.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import pairwise

from nearkin_shared.config.storage import GcSettings
from nearkin_shared.errors import ClockSkew, StoreUnavailable
from nearkin_shared.formats.manifest import CREATED_US_MAX, moment_of
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.storage.clock_records import ClockRecords

DAY_US = 86_400_000_000
"""Interval between time records in an object store without a server clock."""
GAP_SECONDS_MAX = 90 * 86_400
"""A clock this far ahead of the last container or run is probably wrong; a store may rest for a quarter of a year."""
_SKEW_US = CLOCK_SKEW_SECONDS_MAX * 1_000_000
_log = logging.getLogger("nearkin")


def check_clock(objects: ObjectStore, containers: Collection[int], now: float, settings: GcSettings) -> None:
    """Raise ClockSkew if the clock `now` is ahead; else record it.

    `containers`: ids, which begin with their time of creation. Steps: 1 compare with the store  2 record the time  3
    compare with the server's date of that record
    """
    now_us = int(now * 1e6)
    if not 0 <= now_us <= CREATED_US_MAX:
        return  # a GC run refuses such a time itself
    records = ClockRecords(objects)
    times_us = [(container >> 20) * 1000 for container in containers]
    newest_us = max(times_us, default=0)
    if newest_us > now_us + _SKEW_US:
        _log.warning(
            "gc: a container was written at %s by its writer's clock, but this clock shows %s: one of them is wrong",
            _time(newest_us),
            _time(now_us),
        )
    if not settings.trust_clock:
        _check_gap(records, times_us, now_us)  # 1
    last_us = records.read()
    if last_us is not None and not settings.trust_clock:
        if not records.has_server_clock and now_us - last_us < DAY_US:
            return
        recorded_us = max(now_us, last_us)  # a clock that is behind does not lower the record
    else:
        recorded_us = now_us
    try:
        name = records.write(recorded_us)  # 2
    except StoreUnavailable as err:  # for example a full disk: a run that frees space must not fail
        _log.warning("gc: the time of this run was not recorded: %s", err)
        return
    server = None if name is None else records.server_seconds(name)  # 3
    if server is not None and now - server > CLOCK_SKEW_SECONDS_MAX and not settings.trust_clock:
        raise ClockSkew(
            f"this machine's clock shows {_time(now_us)}, the object store's {_time(int(server * 1e6))}, "
            f"{now - server:.0f} s less (at most {CLOCK_SKEW_SECONDS_MAX} s are tolerated): nothing is freed; correct "
            "the wrong clock, or set gc.trust_clock for one run if this one is right"
        )


def _check_gap(records: ClockRecords, times_us: list[int], now_us: int) -> None:
    """Raise ClockSkew if the store has no sign of a time before `now_us` for too long.

    Every gap since the last record counts; without a record, every gap between containers: the newest ones may have
    been written by the clock under check.
    """
    seen = sorted(time_us for time_us in times_us if time_us <= now_us)
    last_us = records.read()
    if last_us is not None:
        seen = [min(last_us, now_us), *(time_us for time_us in seen if time_us > last_us)]
    for before_us, after_us in pairwise([*seen, now_us]):
        if after_us - before_us > GAP_SECONDS_MAX * 1_000_000:
            raise ClockSkew(
                f"this machine's clock shows {_time(now_us)}, and between {_time(before_us)} and {_time(after_us)} the "
                f"store has neither a container nor a GC run (at most {GAP_SECONDS_MAX} s are "
                "tolerated): nothing is freed; correct the clock, or set gc.trust_clock for one run if "
                "it is right"
            )


def _time(us: int) -> str:
    return f"{moment_of(min(us, CREATED_US_MAX)):%Y-%m-%dT%H:%M:%SZ}"
