"""Prepare stores for tests and read them.

Invariant: functions here read a store by its public calls.

SMALL          settings under which a megabyte fills many blocks and several containers
ENCRYPTED      settings of an encrypted store
settings(...)  the settings of a test: nothing of the environment, only the given sections
objects(root)  every object that counts as stored, and its bytes
readable(...)  the current result of each version's `get`: its bytes or the error
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nearkin.store import Store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError
from nearkin_shared.formats.container import decode_container
from nearkin_shared.storage import chunking_record, descriptor

SMALL: Mapping[str, Mapping[str, object]] = {
    "block": {"raw_bytes": 64 * 1024, "delta_bytes": 4 * 1024},
    "container": {"target_bytes": 256 * 1024},
    "runner": {"batch_bytes": 2 * 1024 * 1024},
    # 64 GiB of address space a store is a lot where hundreds are opened by one process
    "index": {"map_bytes": 256 * 1024 * 1024},
}
"""The smallest bounds that the configuration allows."""

ENCRYPTED: Mapping[str, Mapping[str, object]] = {
    "storage": {"encryption": "aes-256-gcm", "key": "bmVhcmtpbiB0ZXN0cywgYSBrZXkgb2YgMzIgYnl0ZXM="}
}
"""Encryption of every object, with a key for tests."""

OBJECT_FOLDERS = ("containers", "manifests", "gc", "parity", "pause", "quarantine", "scrub", "keys")


def settings(*changes: Settings | Mapping[str, object]) -> Settings:
    """Return the default or given settings with changes merged in; environment variables are ignored."""
    chosen = Settings()
    for change in changes:
        chosen = change if isinstance(change, Settings) else with_changes(chosen, change)
    return chosen


def objects(root: Path) -> dict[str, bytes]:
    """Return every object of a local store by its name, including the descriptor, without index, lock and scratch."""
    paths = [path for folder in OBJECT_FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    paths += [root / name for name in (descriptor.NAME, chunking_record.NAME) if (root / name).is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(paths)}


def stored_bytes(root: Path) -> int:
    """Return every byte of a local store that counts as stored."""
    return sum(map(len, objects(root).values()))


def containers(root: Path) -> list[Path]:
    """Return the container files of a local store in stream order."""
    return sorted((root / "containers").rglob("*.nkc"))


def manifests(root: Path) -> list[Path]:
    """Return the manifest files of a local store."""
    return sorted((root / "manifests").rglob("*.nkm"))


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def attempt(store: Store, key: str, version: int) -> tuple[bytes, NearkinError | None]:
    """Return the bytes that a `get` yielded and the error that ended it, or None if it succeeded."""
    given = bytearray()
    try:
        for piece in store.get(key, version).pieces():
            given += piece
    except NearkinError as err:
        return bytes(given), err
    return bytes(given), None


def find_broken(store: Store, contents: Mapping[tuple[str, int], bytes]) -> set[tuple[str, int]]:
    """Return the versions of `contents` whose `get` fails.

    Raises AssertionError if one yields a wrong byte.
    """
    failed = set()
    for (key, version), content in contents.items():
        given, err = attempt(store, key, version)
        if err is None:
            if given != content:
                raise AssertionError(f"{key!r} version {version}: restored without error, and wrong")
        else:
            if content[: len(given)] != given:
                raise AssertionError(f"{key!r} version {version}: a wrong byte was given out before {err}")
            failed.add((key, version))
    return failed


def process(script: str, *arguments: str | Path, interpreter: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start `script` in a Python process that imports the same packages; the caller waits for it or ends it."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, *interpreter, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def blocks_of(path: Path) -> list[int]:
    """Return the offset of the payload of each existing block."""
    blocks = decode_container(path.read_bytes(), path.name).blocks
    return [int(offset) for offset, raw in zip(blocks.offsets, blocks.raw, strict=True) if raw]
