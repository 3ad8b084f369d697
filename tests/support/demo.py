"""Run the demo.

Invariant: PASS means that every version was read back byte for byte, and the last again after an index rebuild.

    download three releases -> put them as versions of one key -> get each -> lose the index -> rebuild it -> get again

`python -m tests.support.demo` exits with 0 after PASS, else with 1 (2 for wrong usage).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.cli.output import print_ledger
from nearkin.cli.progress import bytes_bar
from nearkin_shared.errors import NearkinError, NotFound
from nearkin_shared.savings_table import format_speed, human_bytes, plural

if TYPE_CHECKING:
    from nearkin.store import Store

KEY = "botocore.tar"
VERSIONS = 3
INDEX_FOLDER = "index"


class DiffersError(NearkinError):
    """A restored version differs from its source."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.demo", description="Put, get, lose the index, get.")
    parser.add_argument("--versions", type=int, default=VERSIONS, metavar="N", help="releases to put (default: 3)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where downloads are kept (default: NEARKIN_CACHE)")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="a new folder for the store (default: a temporary one)"
    )
    options = parser.parse_args(arguments)
    try:
        with ExitStack() as cleanup:
            folder = options.store
            if folder is None:
                folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="nearkin-demo-"))) / "store"
            elif folder.exists():
                parser.error(f"--store {folder}: is there already; name a new folder")
            _demo(folder, _releases(options.versions, options.cache))
    except NearkinError as err:
        print(f"FAIL: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print("PASS")
    return 0


def _releases(versions: int, cache: Path | None) -> list[Path]:
    from nearkin.lab.corpus_cache import botocore, cache_dir

    print(f"fetching {versions} consecutive releases of botocore, where they are not cached yet ...", flush=True)
    return botocore(versions, cache or cache_dir())


def _demo(folder: Path, sources: Sequence[Path]) -> None:
    from nearkin.store import create_store, open_store

    with create_store(folder) as store:
        for source in sources:
            _put(store, source)
        stats = store.stats()
        print_ledger(stats.ledger, stats.seconds, f"{plural(stats.versions, 'version')} together")
        for version, source in enumerate(sources, 1):
            _compare(store, version, source)
    if not (folder / INDEX_FOLDER).is_dir():
        raise NotFound(f"{folder / INDEX_FOLDER}: there is no index to lose")
    shutil.rmtree(folder / INDEX_FOLDER)
    print("the index is deleted; containers and manifests are all that is left")
    with open_store(folder) as store:
        report = store.rebuild_index()
        found = f"{plural(report.containers, 'container')} and {plural(report.versions, 'manifest')}"
        print(f"rebuilt from {found} in {report.seconds:.2f} s")
        _compare(store, len(sources), sources[-1])


def _put(store: Store, source: Path) -> None:
    with bytes_bar(f"put {source.name}", source.stat().st_size, shown=True) as progress:
        result = store.put(KEY, source, progress=progress)
    title = f"{KEY} version {result.info.version}: {source.name}, {human_bytes(result.info.size_bytes)}"
    print_ledger(result.ledger, result.seconds, title)


def _compare(store: Store, version: int, source: Path) -> None:
    """Compare a version with its source piece by piece.

    Raises: DiffersError at the first piece that differs.
    """
    started = time.perf_counter()
    compared_bytes = 0
    blob = store.get(KEY, version)
    with source.open("rb") as original, bytes_bar(f"get version {version}", blob.size_bytes, shown=True) as progress:
        for piece in blob.pieces():
            if original.read(len(piece)) != bytes(piece):  # a copy and memcmp: a view is compared byte by byte
                raise DiffersError(f"version {version} differs from {source.name} after byte {compared_bytes}")
            compared_bytes += len(piece)
            if progress is not None:
                progress(len(piece))
        if original.read(1):
            raise DiffersError(f"version {version} ends at byte {compared_bytes}; {source.name} goes on")
    seconds = time.perf_counter() - started
    speed = format_speed(compared_bytes, seconds)
    print(f"version {version}: {human_bytes(compared_bytes)} restored byte for byte, {speed}")


if __name__ == "__main__":
    sys.exit(main())
