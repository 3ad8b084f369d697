"""`nearkin get --salvage`: write what is left of a damaged version, and list its holes.

Invariant: the exit code is 0 only if nothing is lost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nearkin.cli.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from nearkin.salvage import Hole
    from nearkin.store_copy import AnyStore

HOLES_SHOWN_MAX = 1000
"""Lines on stderr; --json lists all."""


def salvage(
    session: Session,
    output: str | None,
    choose: Callable[[AnyStore], tuple[str, int | None]],
    *,
    is_raw: bool,
) -> int:
    """Write the readable bytes of a version and zeros for the rest; report the holes.

    `choose` returns the key and the version's number, None for the newest. Returns the exit code. Raises BadInput for a
    store behind a server, and for a tree unless `is_raw`.
    """
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.get import refuse_tree
    from nearkin.cli.output import print_json
    from nearkin.cli.output_file import OutputFile
    from nearkin.cli.progress import bytes_bar
    from nearkin_shared.results_json import info_json

    started = time.perf_counter()
    with session.open_local() as store:
        blob = store.salvage(*choose(store))
        if not is_raw:
            refuse_tree(blob.info)
        with OutputFile(output) as file, bytes_bar("salvage", blob.size_bytes, shown=not session.as_json) as progress:
            blob.write_to(file, progress=progress)
    if session.as_json:
        print_json(
            {
                **info_json(blob.info),
                "written_bytes": blob.size_bytes,
                "lost_bytes": blob.lost_bytes,
                "holes": [_hole_json(hole) for hole in blob.holes],
                "seconds": time.perf_counter() - started,
            }
        )
    elif blob.holes:
        _warn_holes(blob.info.key, blob.info.version, blob.size_bytes, blob.holes)
    return ExitCode.DAMAGED if blob.holes else ExitCode.DONE


def _hole_json(hole: Hole) -> dict[str, object]:
    return {
        "offset": hole.offset,
        "length_bytes": hole.length_bytes,
        "object_name": hole.object_name,
        "reason": hole.reason,
    }


def _warn_holes(key: str, version: int, size_bytes: int, holes: list[Hole]) -> None:
    from nearkin.cli.output import to_stderr, warn
    from nearkin_shared.savings_table import plural
    from nearkin_shared.utils.terminal import printable

    for hole in holes[:HOLES_SHOWN_MAX]:
        problem = hole.reason.removeprefix(hole.object_name).removeprefix(":").strip()
        to_stderr(f"hole: offset {hole.offset}, {hole.length_bytes} bytes, {hole.object_name}: {printable(problem)}")
    lost = sum(hole.length_bytes for hole in holes)
    more = f" ({len(holes) - HOLES_SHOWN_MAX:,} more are not listed)" if len(holes) > HOLES_SHOWN_MAX else ""
    warn(
        f"{printable(repr(key))} version {version}: {lost:,} of {size_bytes:,} bytes are lost, in "
        f"{plural(len(holes), 'hole')} of zeros{more}"
    )
