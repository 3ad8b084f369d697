"""Measure the cost of encryption.

Invariant: the compared variants alternate in one run, on one core.

    taskset -c 1 python -m benchmarks.encryption [--rounds 3] [--megabytes 96] [FILE ...]

Measures pages of several sizes; then puts and gets without and with `storage.encryption`, of random bytes (all are
stored) and of the given files as versions of one key (most chunks are duplicates). Seconds are CPU time without waits
for the disk.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from tests.support.data.stores import ENCRYPTED, objects

MB = 1_000_000
OBJECT_BYTES = 4 << 20


def timed(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, over all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def pages() -> None:
    """Print the speed of encrypting an object of 4 MiB in pages of several sizes."""
    data, cipher, aad = memoryview(random_bytes(OBJECT_BYTES, 1)), AESGCM(secrets.token_bytes(32)), bytes(128)
    for page_bytes in (4096, 16_384, 32_768, 65_536, 262_144):
        into = memoryview(bytearray(page_bytes + 16))

        def seal(page_bytes: int = page_bytes, into: memoryview = into) -> None:
            for at in range(0, OBJECT_BYTES, page_bytes):
                cipher.encrypt_into(at.to_bytes(12, "little"), data[at : at + page_bytes], aad, into)

        seconds = min(timed(seal) for _ in range(9))
        print(f"pages of {page_bytes:>7,} bytes: {OBJECT_BYTES / seconds / 1e9:.1f} GB/s")


def life(chosen: Settings, contents: Sequence[bytes | Path]) -> tuple[float, float, int]:
    """Return the seconds of putting and of getting all contents, and the bytes stored."""

    def put() -> None:
        for content in contents:
            store.put("k", content)

    def get() -> None:
        for version in range(1, len(contents) + 1):
            for _ in store.get("k", version).pieces():
                pass

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "store")
        with open_store(root, settings=chosen, create=True) as store:
            put_seconds = timed(put)
        with open_store(root, settings=chosen, create=True) as store:
            return put_seconds, timed(get), sum(map(len, objects(root).values()))


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args()
    pages()
    kinds: dict[str, list[bytes | Path]] = {"random": [random_bytes(given.megabytes * MB, 1)]}
    if given.files:
        kinds["files"] = list(given.files)
    for kind, contents in kinds.items():
        megabytes = sum(len(c) if isinstance(c, bytes) else c.stat().st_size for c in contents) / MB
        found: dict[str, list[tuple[float, float, int]]] = {"none": [], "aes-256-gcm": []}
        for _ in range(given.rounds):
            found["none"].append(life(Settings(), contents))
            found["aes-256-gcm"].append(life(with_changes(Settings(), ENCRYPTED), contents))
        medians = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
        }
        for name, (put_seconds, get_seconds, stored_bytes) in medians.items():
            speeds = f"put {megabytes / put_seconds:6.0f} MB/s, get {megabytes / get_seconds:6.0f} MB/s"
            print(f"{kind}, {megabytes:,.0f} MB, {name:>11}: {speeds}, {stored_bytes:,.0f} bytes stored")
        ratios = [with_it / without for without, with_it in zip(*medians.values(), strict=True)]
        print(f"{kind}: encrypted / in clear: put {ratios[0]:.3f}, get {ratios[1]:.3f}, bytes {ratios[2]:.5f}")


if __name__ == "__main__":
    main()
