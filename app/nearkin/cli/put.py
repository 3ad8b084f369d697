"""Run `nearkin put`.

Invariant: a name that can be refused is refused before the first byte is stored.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.cli.session import Session
    from nearkin.client.sync import RemoteStore
    from nearkin.store import Store
    from nearkin_shared.results import PutResult

DESCRIPTOR_PATHS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Paths of an open descriptor: empty content may be the output of a failed command."""
JSON_BLOBS_MAX = 1_000_000
"""Files of one `put -r --json`: its result is one value, held in memory at about 1 kB a file."""


class _Plan(NamedTuple):
    """The files and sizes that `put -r` found before it stored anything."""

    files: int
    total_bytes: int


class PutOptions(NamedTuple):
    """The options of `Store.put` that the command line sets."""

    metadata: dict[str, str]
    sha256: bytes | None
    if_match: str | None
    if_none_match: str | None


def put_one(
    session: Session,
    key: str,
    source: str,
    options: PutOptions,
    *,
    command: Sequence[str] = (),
    allow_empty: bool = False,
) -> None:
    """Put one file, stdin or the output of `command`, and print its cost.

    Raises BadInput, SourceFailed.
    """
    from nearkin.cli.arguments import check_key
    from nearkin.cli.input_sources import run_command
    from nearkin.cli.output import print_json, print_ledger
    from nearkin.cli.progress import bytes_bar
    from nearkin_shared.results_json import put_json
    from nearkin_shared.savings_table import human_bytes
    from nearkin_shared.utils.terminal import printable

    check_key(key)
    with ExitStack() as opened:
        content, total_bytes = (None, None) if command else _open_source(source, opened, allow_empty=allow_empty)
        store = opened.enter_context(session.open(read_only=False))
        if content is None:  # a command starts only if there is a store for its output
            running = run_command(command, allow_empty=allow_empty, show_stderr=not session.as_json)
            content = cast("BinaryIO", opened.enter_context(running))
        progress = opened.enter_context(bytes_bar("put", total_bytes, shown=not session.as_json))
        result = store.put(
            key,
            content,
            **options._asdict(),
            progress=progress,
        )
    warn_if_changed(result, source, as_json=session.as_json)
    if session.as_json:
        print_json(put_json(result))
        return
    if session.quiet:
        return
    info = result.info
    title = f"{printable(info.key)} version {info.version}: {human_bytes(info.size_bytes)}, {info.digest}"
    print_ledger(result.ledger, result.seconds, title)


def warn_if_changed(result: PutResult, source: str, *, as_json: bool) -> None:
    """Warn on stderr if the source changed while it was read; JSON has it as `source_changed`."""
    from nearkin.cli.output import warn
    from nearkin_shared.utils.terminal import printable

    if result.source_changed and not as_json:
        name = f"{printable(result.info.key)} version {result.info.version}"
        warn(f"source {printable(source)}: changed while it was read, {name} may mix two states of it; put it again")


def _open_source(source: str, opened: ExitStack, *, allow_empty: bool) -> tuple[Path | BinaryIO, int | None]:
    """Return what `Store.put` takes, and its size where that is known beforehand."""
    from nearkin.cli.arguments import check_source
    from nearkin.cli.input_sources import PipeSource

    if source == "-":
        if sys.stdin is None:
            raise BadInput('source "-": stdin is closed')
        return cast("BinaryIO", PipeSource(sys.stdin.buffer, "standard input", allow_empty=allow_empty)), None
    if not source:
        raise BadInput('source "": must not be empty; "-" is stdin')
    path = Path(source)
    status = check_source(path)
    if stat.S_ISREG(status.st_mode) and (status.st_size or not source.startswith(DESCRIPTOR_PATHS)):
        return path, status.st_size
    file = cast("BinaryIO", opened.enter_context(path.open("rb", buffering=0)))  # read once, as it arrives
    return cast("BinaryIO", PipeSource(file, f'source "{source}"', allow_empty=allow_empty)), None


def put_tree(session: Session, prefix: str, folder: str, metadata: dict[str, str]) -> int:
    """Put every file below `folder` under `prefix/` and print their cost together.

    Returns the exit code: 3 if an entry could not be read; all others are stored then. Raises BadInput.
    """
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.output import notice, print_json, print_ledger, warn
    from nearkin.cli.progress import bytes_bar
    from nearkin_shared.results import Ledger
    from nearkin_shared.results_json import ledger_json, put_json
    from nearkin_shared.savings_table import plural
    from nearkin_shared.utils.terminal import printable

    store_folder = session.folder()
    store_path = None if store_folder is None else os.path.realpath(store_folder)
    left_out = _LeftOut(session.as_json)
    root, under, plan = _plan_tree(session, prefix, folder, store_path, left_out)
    blobs: list[dict[str, object]] = []
    total, files = Ledger(), 0
    started = time.perf_counter()
    with (
        session.open(read_only=False) as store,
        bytes_bar("put", plan.total_bytes, shown=not session.as_json) as progress,
    ):
        for result in _put_files(store, root, under, store_path, metadata, left_out, progress):
            total, files = total + result.ledger, files + 1
            warn_if_changed(result, result.info.key, as_json=session.as_json)
            if session.as_json:
                blobs.append(put_json(result))
    seconds = time.perf_counter() - started
    code = ExitCode.INCOMPLETE if left_out.unread else ExitCode.DONE
    if session.as_json:
        notices = {"skipped": left_out.skipped, "unread": left_out.unread}
        print_json({"blobs": blobs, "files": files, **notices, **ledger_json(total, seconds)})
        return code
    if not files:
        notice(f"no files below {printable(folder)}")
    if not session.quiet:
        print_ledger(total, seconds, f"{plural(files, 'file')} below {printable(folder)}")
    if left_out.unread:
        warn(f"{len(left_out.unread)} could not be read and are not stored: run this again as a user who may read them")
    return code


class _LeftOut:
    """The entries that are not put, each reported once even if the tree is walked twice."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._paths: set[str] = set()
        self.skipped: list[dict[str, str]] = []
        """Only with JSON."""
        self.unread: list[dict[str, str]] = []

    def skip(self, path: str, why: str) -> None:
        """Leave out what is not meant to be stored."""
        from nearkin.cli.output import notice

        self._report(path, why, "skipped", self.skipped if self._as_json else [], notice)

    def cannot_read(self, path: str, why: str) -> None:
        """Leave out what should be stored."""
        from nearkin.cli.output import warn

        self._report(path, why, "cannot be read", self.unread, warn)

    def _report(self, path: str, why: str, what: str, kept: list[dict[str, str]], show: Callable[[str], None]) -> None:
        from nearkin_shared.utils.terminal import printable

        if path in self._paths:
            return
        if len(self._paths) < JSON_BLOBS_MAX:
            self._paths.add(path)
        if len(kept) < JSON_BLOBS_MAX:
            kept.append({"path": printable(path), "why": why})
        if not self._as_json:
            show(f"{what}, {why}: {printable(path)}")


def _plan_tree(
    session: Session, prefix: str, folder: str, store_path: str | None, left_out: _LeftOut
) -> tuple[Path, str, _Plan]:
    """List the tree once before anything is put.

    A refused name thus stops the whole command, and the bar knows its end.
    """
    from nearkin.cli.arguments import check_key, walk_files

    if folder == "-":
        raise BadInput("--recursive takes a folder, not stdin")
    if not folder:
        raise BadInput('source "": want a folder; "." is the current one')
    root = Path(folder)
    if os.path.realpath(root) == store_path:
        raise BadInput(f'source "{folder}": is the store itself')
    if root.exists() and not root.is_dir():
        raise BadInput(f'source "{folder}": not a folder; leave out --recursive to put one file')
    under = f"{check_key(prefix).rstrip('/')}/" if prefix else ""
    files = total_bytes = 0
    for file in walk_files(root, under, store_path, left_out.skip, left_out.cannot_read):
        files, total_bytes = files + 1, total_bytes + file.size_bytes
    if session.as_json and files > JSON_BLOBS_MAX:
        raise BadInput(f'folder "{folder}": {files:,} files, at most {JSON_BLOBS_MAX:,} with --json')
    return root, under, _Plan(files, total_bytes)


def _put_files(
    store: Store | RemoteStore,
    root: Path,
    under: str,
    store_path: str | None,
    metadata: dict[str, str],
    left_out: _LeftOut,
    progress: Callable[[int], None] | None,
) -> Iterator[PutResult]:
    from nearkin.cli.arguments import walk_files

    files = walk_files(root, under, store_path, left_out.skip, left_out.cannot_read)
    if not metadata:
        yield from store.put_many(((file.key, file.path) for file in files), progress=progress)
        return
    for file in files:
        yield store.put(file.key, file.path, metadata=metadata, progress=progress)
