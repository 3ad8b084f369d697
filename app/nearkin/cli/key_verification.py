"""Verify the versions of one key: `nearkin verify KEY`.

local store    manifests -> the containers that they reach, bases included -> every checksum and fingerprint
server         every version is downloaded and compared with its BLAKE3; nothing is kept

Invariant: exit code 5 if any of the versions is damaged, 8 if one has a later format (I8).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nearkin.cli.arguments import check_key
from nearkin.cli.output import print_json, print_line
from nearkin.cli.progress import count_bar
from nearkin.cli.session import current_session
from nearkin.cli.tree_location import resolve_key
from nearkin.cli.verify import verification_code, verify_json, verify_lines
from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.results import Damage, VerifyReport

if TYPE_CHECKING:
    from nearkin.cli.progress import Counted
    from nearkin.client.sync import RemoteStore


def verify_key(key: str, version: int | None) -> int:
    """Verify all versions of a key, or one; print the report and return the exit code."""
    from nearkin.store import Store

    session = current_session()
    check_key(key)
    with session.open(read_only=False) as store, count_bar("verify", shown=not session.as_json) as progress:
        key, version = resolve_key(store, "verify", key, version)
        if isinstance(store, Store):
            report = store.verify_key(key, version, progress)
        else:
            report = _download_versions(store, key, version, progress)
    if session.as_json:
        print_json({"key": key, "version": version, **verify_json(report, None, None)})
    else:
        for line in verify_lines(report):
            print_line(line)
    return verification_code(report.damage)


def _download_versions(store: RemoteStore, key: str, version: int | None, progress: Counted | None) -> VerifyReport:
    """Download versions from a server and compare each with its BLAKE3.

    Raises NotFound, AccessDenied, StoreUnavailable.
    """
    started = time.perf_counter()
    damage: list[Damage] = []
    if version is not None:
        infos = [store.info(key, version)]
    else:
        listed = store.versions(key, all_versions=True, broken=damage.append)
        infos = [info for info in listed if info.key == key]
        damage = [one for one in damage if any(name == key for name, _ in one.versions)]
    if not infos and not damage:
        raise NotFound(f"key {key!r}: the store has none; `nearkin ls` lists the keys")
    read_bytes = 0
    for done, info in enumerate(infos):
        try:
            for piece in store.get(key, info.version).pieces():
                read_bytes += len(piece)
        except Corrupt as err:
            damage.append(Damage(f"{key!r} version {info.version}", str(err), ((key, info.version),)))
        if progress is not None:
            progress(done + 1, len(infos))
    return VerifyReport(
        containers=0,
        chunks=sum(info.chunks for info in infos),
        versions=len(infos),
        bytes_read=read_bytes,
        damage=tuple(damage),
        seconds=time.perf_counter() - started,
    )
