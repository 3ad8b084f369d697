"""`nearkin backup`: store folders as one version of a key."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import (
    AsWritten,
    Session,
    complete_file,
    current_session,
    force_option,
    shared_options,
)
from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.store_copy import AnyStore
    from nearkin.trees.backup_plan import PlannedCounts
    from nearkin.trees.backup_walk import BackupCounts, BackupOptions, FileReport
    from nearkin.trees.exclusions import ExclusionOptions
    from nearkin.trees.parent_tree import ParentTree
    from nearkin.trees.store_backup import BackupResult
    from nearkin_shared.reading.tree_reader import TreeReader

PATH_LIST_BYTES_MAX = 256 << 20
RESERVED_METADATA = ("content-type", "paths", "tags")
"""Names that a backup sets itself."""


@click.command(cls=AsWritten, options_metavar="[OPTIONS]")
@click.argument("key", metavar="KEY")
@click.argument("paths", metavar="PATH...", nargs=-1, shell_complete=complete_file)
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="Stored with the version; repeatable.")
@click.option("--meta", "--metadata", metavar="NAME=VALUE", multiple=True, help="Metadata of the version; repeatable.")
@click.option("-e", "--exclude", metavar="PATTERN", multiple=True, help="Leave out what matches; as in .gitignore.")
@click.option(
    "--exclude-file", metavar="FILE", multiple=True, type=click.Path(path_type=Path), help="Patterns, one a line."
)
@click.option("--exclude-caches", is_flag=True, help="Leave out the content of folders with a CACHEDIR.TAG.")
@click.option(
    "--exclude-if-present", metavar="NAME", multiple=True, help="Leave out the content of folders with this file."
)
@click.option("--exclude-larger-than", metavar="SIZE", help="Leave out larger files: 100MB, 2GiB.")
@click.option("--files-from", metavar="FILE", multiple=True, help="Paths, one a line or ended by NUL; - is stdin.")
@click.option("--from-command", "--stdin-from-command", "--stdin", "from_stream", is_flag=True, hidden=True)
@click.option("-x", "--one-file-system", is_flag=True, help="Enter no folder on which another file system is mounted.")
@click.option("-f", "--force-rescan", is_flag=True, help="Read all files, also those that seem unchanged.")
@click.option("--ignore-ctime", is_flag=True, help="A file of the same size, mtime and inode is unchanged.")
@click.option("--ignore-inode", is_flag=True, help="The same with another inode: for network file systems.")
@click.option("--skip-if-unchanged", is_flag=True, help="Store no version if nothing changed since the newest.")
@click.option("-n", "--dry-run", is_flag=True, help="Report what would be read and left out; store nothing.")
@click.option("-v", "--verbose", is_flag=True, help="List new and changed files; with --dry-run unchanged ones too.")
@click.option("--progress", is_flag=True, help="With --json: a JSON line each second, then the result as the last one.")
@force_option
@shared_options
def backup(
    key: str,
    paths: tuple[str, ...],
    tags: tuple[str, ...],
    meta: tuple[str, ...],
    exclude: tuple[str, ...],
    exclude_file: tuple[Path, ...],
    exclude_caches: bool,
    exclude_if_present: tuple[str, ...],
    exclude_larger_than: str | None,
    files_from: tuple[str, ...],
    from_stream: bool,
    one_file_system: bool,
    force_rescan: bool,
    ignore_ctime: bool,
    ignore_inode: bool,
    skip_if_unchanged: bool,
    dry_run: bool,
    verbose: bool,
    progress: bool,
) -> int:
    """Store folders and files as one version of KEY.

    Names, modes, owners, times, links, devices, holes, extended attributes and ACLs are kept. Files that are unchanged
    since the newest version of KEY are not read: same path, size, mtime, ctime and inode.

    nearkin backup home /home/ana
    nearkin backup etc /etc /usr/local/etc --tag nightly
    nearkin backup home /home/ana -e '*.o' -e '/Downloads/' -e '!important.o' --exclude-caches
    nearkin backup root / --one-file-system --exclude-if-present .nobackup --exclude-larger-than 4GiB
    find /srv -newer mark -print0 | nearkin backup recent --files-from -
    nearkin backup home /home/ana --dry-run -v     # each file: new, changed or unchanged; entries left out
    nearkin backup home /home/ana -v               # new and changed files
    nearkin -q backup home /home/ana               # for cron: prints errors alone
    nearkin backup home /home/ana --json --progress    # for programs: status, error and summary lines

    The output of a command, or stdin, is stored by nearkin put db --from-command -- pg_dump shop.
    Then: nearkin ls home:/, nearkin restore home -o DIR, nearkin diff home@1 home@2.

    One PATH that is a folder becomes the root of the tree; several paths keep their names below the deepest folder
    that contains all of them; the first line of the result names the root. Patterns are those of .gitignore files,
    relative to that root: `*.o` anywhere, `/build/` at the root alone, `!keep.o` includes again; one that begins with a
    PATH, such as /home/ana/build/, counts from there. A PATH that is a symlink is stored as one, unless it is the only
    one or ends with /; a symlink that leads to a PATH below it is stored as the folder that it leads to.

    An entry that cannot be read, or changes while it is read, and a PATH that does not exist are reported on stderr;
    all others are stored, and the exit code is 3. A PATH that does not exist does not count for the root, unless the
    newest version of KEY has that root. Sockets, /proc, /sys, the store itself and mounts of stores are left out. An
    interrupted backup continues at the next one of the same KEY.
    """
    from nearkin.cli.arguments import check_key, parse_size
    from nearkin.trees.backup_walk import BackupOptions, ComparisonOptions
    from nearkin.trees.exclusions import ExclusionOptions

    session = current_session()
    _refuse_stream(key, paths, is_option=from_stream)
    check_key(key)
    metadata = parse_tree_metadata(meta)
    larger = None if exclude_larger_than is None else parse_size("--exclude-larger-than", exclude_larger_than)
    options = BackupOptions(
        tags=parse_tags(tags),
        metadata=metadata,
        exclusions=ExclusionOptions(exclude, exclude_file, exclude_if_present, larger, exclude_caches),
        comparison=ComparisonOptions(force_rescan, ignore_ctime, ignore_inode),
        one_file_system=one_file_system,
        skip_if_unchanged=skip_if_unchanged,
    )
    chosen = [*paths, *(path for name in files_from for path in _read_paths(name))]
    if not chosen:
        raise BadInput(
            f"backup: no path is given; name folders or files after KEY, here {key!r}, or list them with --files-from"
        )
    _check_exclusions(options.exclusions)
    if progress and not session.as_json:
        raise BadInput("--progress: prints JSON lines; give --json")
    output = FileOutput(session, as_lines=progress, is_verbose=verbose)
    options = replace(options, on_file=output.add if verbose else None)
    return (_plan if dry_run else _back_up)(output, key, chosen, options)


class FileOutput:
    """Prints the files of a backup, and its result as JSON."""

    def __init__(self, session: Session, *, as_lines: bool, is_verbose: bool) -> None:
        """`as_lines`: as JSON lines. `is_verbose`: with files."""
        self.session = session
        self.as_lines = as_lines
        self._is_verbose = is_verbose
        self._files: list[FileReport] = []
        """Of a JSON value, up to PROBLEMS_SHOWN_MAX."""

    @property
    def has_bar(self) -> bool:
        """Whether a progress bar may be drawn: not between lines on the same terminal."""
        has_lines = self._is_verbose and sys.stdout is not None and sys.stdout.isatty()
        return not self.session.as_json and not has_lines

    def add(self, one: FileReport) -> None:
        """Print a file, or keep it for the JSON value; the thread that walks the folders calls it."""
        from nearkin.cli.json_progress import print_json_message
        from nearkin.cli.output import print_line
        from nearkin.cli.tree_output import PROBLEMS_SHOWN_MAX, show_path
        from nearkin_shared.savings_table import human_bytes

        if self.as_lines:
            fields = {"action": one.state, "item": os.fsdecode(one.path), "data_size": one.size_bytes}
            print_json_message("verbose_status", fields)
        elif self.session.as_json:
            if len(self._files) < PROBLEMS_SHOWN_MAX:
                self._files.append(one)
        elif not self.session.quiet:
            print_line(f"{one.state:<9}  {human_bytes(one.size_bytes):>9}  {show_path(one.path)}")

    def print_result(self, fields: Mapping[str, object]) -> None:
        """Print the JSON value of the result, with --verbose and its files."""
        from nearkin.cli.json_progress import print_json_message
        from nearkin.cli.output import print_json

        if self.as_lines:
            print_json_message("summary", fields)
            return
        files = [
            {"path": os.fsdecode(one.path), "state": one.state, "size_bytes": one.size_bytes} for one in self._files
        ]
        print_json({**fields, "file_states": files} if self._is_verbose else fields)


def _refuse_stream(key: str, paths: Sequence[str], *, is_option: bool) -> None:
    """Refuse stdin and the output of a command.

    Raises BadInput with the command that stores them.
    """
    name = shlex.quote(key)
    if "-" in paths:
        raise BadInput(
            f"backup {key!r}: - is stdin, and a backup stores folders and files; `nearkin put {name} -` stores stdin, "
            "--files-from - reads paths from it, ./- is a file of this name"
        )
    if is_option:
        words = shlex.join(paths) or "COMMAND"
        raise BadInput(
            f"backup {key!r}: stores folders and files; `nearkin put {name} --from-command -- {words}` stores what a "
            f"command writes, `nearkin put {name} -` stores stdin"
        )


def parse_tags(values: Sequence[str]) -> list[str]:
    """Return the tags; a value may have several, separated by commas. Raises BadInput."""
    from nearkin.cli.arguments import check_prefix

    tags = [tag.strip() for value in values for tag in value.split(",")]
    if not all(tags):
        raise BadInput("--tag '': must not be empty")
    return [check_prefix(tag, "tag") for tag in tags]


def parse_tree_metadata(pairs: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a tree's version. Raises BadInput."""
    from nearkin.cli.arguments import parse_metadata

    metadata = parse_metadata(pairs)
    for name in RESERVED_METADATA:
        if name in metadata:
            remedy = "give --tag" if name == "tags" else "a tree has its own"
            raise BadInput(f"--meta {name}=...: is set by the backup; {remedy}")
    if not metadata.get("host", "-").strip():
        raise BadInput("--meta host=: must not be empty; name a host, or leave it out for the name of this machine")
    return metadata


def _read_paths(name: str) -> list[str]:
    """Return the paths of a `--files-from`. Raises BadInput."""
    try:
        if name == "-":
            if sys.stdin is None:
                raise BadInput('--files-from "-": stdin is closed')
            data = sys.stdin.buffer.read(PATH_LIST_BYTES_MAX + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(PATH_LIST_BYTES_MAX + 1)
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        raise BadInput(f'--files-from "{name}": {reason.lower()}') from err
    if len(data) > PATH_LIST_BYTES_MAX:
        raise BadInput(f'--files-from "{name}": more than {PATH_LIST_BYTES_MAX:,} bytes')
    end = b"\0" if b"\0" in data else b"\n"
    paths = [os.fsdecode(line) for line in data.split(end) if line]
    if not paths:
        raise BadInput(f'--files-from "{name}": lists no path; an empty version would hide a failed command')
    return paths


def _check_exclusions(options: ExclusionOptions) -> None:
    """Refuse a pattern that does not parse before the store is opened. Raises BadInput."""
    from nearkin.trees.exclusions import Exclusions

    Exclusions(options)


def _back_up(output: FileOutput, key: str, paths: Sequence[str], options: BackupOptions) -> int:
    from nearkin.trees.backup_walk import BackupCounts

    started = time.perf_counter()
    counts = BackupCounts()
    with output.session.open(read_only=False) as store:
        _check_key(store, key, paths)
        with _progress(store, key, paths, options, counts, output):
            try:
                result = store.backup(key, paths, options=options, counts=counts)
            except BaseException as err:
                if counts.checkpoints and not options.comparison.force_rescan:
                    err.add_note("run the same command again: it continues behind what is stored")
                raise
    return _report(output, key, result, time.perf_counter() - started)


def _check_key(store: AnyStore, key: str, paths: Sequence[str]) -> None:
    """Refuse a key that names something else; name one whose newest version is a blob.

    Raises BadInput.
    """
    from nearkin.cli.output import notice
    from nearkin.cli.path_keys import check_new_key, describe_other_kind

    check_new_key(store, key, paths, "backup")
    other_kind = describe_other_kind(store, key, is_tree=True)
    if other_kind is not None:
        notice(other_kind)


@contextmanager
def _progress(
    store: AnyStore,
    key: str,
    paths: Sequence[str],
    options: BackupOptions,
    counts: BackupCounts,
    output: FileOutput,
) -> Iterator[None]:
    """Show the progress; its total is the content of the newest tree, or counted meanwhile."""
    from nearkin.cli.json_progress import json_lines
    from nearkin.cli.progress import EntriesDone, entries_bar, is_drawn

    if not output.as_lines and not is_drawn(shown=output.has_bar):
        yield
        return
    newest = _newest_tree_bytes(store, key)
    counted, stop, is_counted = [0], Event(), Event()

    def read() -> EntriesDone:
        total = newest if newest is not None else counted[0] if is_counted.is_set() else None
        return EntriesDone(counts.files, counts.read_bytes + counts.reused_bytes, counts.unread + counts.changed, total)

    def count() -> None:
        from nearkin.trees.backup_plan import BackupPlan, PlannedCounts, count_in_background

        def add(size_bytes: int) -> None:
            counted[0] += size_bytes

        count_in_background(BackupPlan(paths, options, _store_folders(store), PlannedCounts()), add, stop)
        is_counted.set()

    thread = Thread(target=count, name="nearkin-count", daemon=True) if newest is None else None
    try:
        if thread is not None:
            thread.start()
        with json_lines(read, counts.problems) if output.as_lines else entries_bar("backup", read, shown=True):
            yield
    finally:
        stop.set()
        if thread is not None:
            thread.join()


def _newest_tree_bytes(store: AnyStore, key: str) -> int | None:
    from nearkin_shared.errors import Corrupt, NotFound

    try:
        return store.tree(key).content_bytes
    except (NotFound, Corrupt):
        return None


def _store_folders(store: AnyStore) -> list[Path]:
    from nearkin.store import Store

    return [store.root, store.index_folder] if isinstance(store, Store) else []


def _plan(output: FileOutput, key: str, paths: Sequence[str], options: BackupOptions) -> int:
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.json_progress import json_lines
    from nearkin.cli.output import print_line
    from nearkin.cli.progress import EntriesDone, entries_bar
    from nearkin.trees.backup_plan import BackupPlan, PlannedCounts
    from nearkin_shared.utils.terminal import printable

    counts = PlannedCounts()

    def read() -> EntriesDone:
        return EntriesDone(counts.files, counts.read_bytes + counts.reused_bytes, counts.unread, None)

    with output.session.open() as store:
        _check_key(store, key, paths)
        newest, unfinished, merged = _parent_trees(store, key)
        root = None if newest is None else newest.summary.root
        plan = BackupPlan(paths, options, _store_folders(store), counts, lambda: root)
        bar = entries_bar("dry run", read, shown=output.has_bar)
        with json_lines(read, counts.problems) if output.as_lines else bar:
            plan.run(newest, unfinished, merged)
    code = ExitCode.INCOMPLETE if counts.unread else ExitCode.DONE
    if output.session.as_json:
        output.print_result({"dry_run": True, "key": key, **_counts_json(counts), "removed": counts.removed})
        return code
    _print_problems(counts)
    for line in _plan_lines(printable(key), counts):
        print_line(line)
    return code


def _parent_trees(store: AnyStore, key: str) -> tuple[TreeReader | None, TreeReader | None, Sequence[ParentTree]]:
    """Return the newest tree of a key, and what unfinished backups after it left.

    In a store a checkpoint; on a server the newest tree with its checkpoints, if it has any.
    """
    from nearkin.store import Store
    from nearkin.trees.remote_sources import RemoteSources
    from nearkin_shared.errors import AccessDenied, BaseUnusable, Corrupt, FormatTooNew, NotFound
    from nearkin_shared.validation import checkpoint_key_of

    newest = unfinished = created = None
    merged: Sequence[ParentTree] = ()
    with suppress(NotFound, Corrupt):
        created = store.info(key).created
        newest = store.tree(key)
    if isinstance(store, Store):
        with suppress(NotFound, Corrupt):
            found = store.info(checkpoint_key_of(key))
            if created is None or found.created > created:
                unfinished = store.tree(found.key, found.version)
    else:  # a server may take no ranges, or not from this token: then the backup reads all files
        with suppress(AccessDenied, BaseUnusable, Corrupt, FormatTooNew, NotFound):
            sources = RemoteSources.open(store, key)
            merged = sources.parents() if sources.checkpoint_bytes else ()
    return newest, unfinished, merged


def _plan_lines(name: str, counts: PlannedCounts) -> Iterator[str]:
    from nearkin_shared.savings_table import human_bytes, plural

    yield f"{name}: would store {_entries_text(counts)}"
    yield (
        f"would read {human_bytes(counts.read_bytes)}: {plural(counts.new_files, 'new file')}, "
        f"{counts.changed_files:,} changed"
    )
    yield f"would take over {human_bytes(counts.reused_bytes)}: {plural(counts.unchanged_files, 'unchanged file')}"
    if counts.removed:
        yield f"{plural(counts.removed, 'entry', 'entries')} of the newest version would not be in the next one"


def _report(output: FileOutput, key: str, result: BackupResult, seconds: float) -> int:
    """Print the result of a backup; return the exit code."""
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.output import report, warn
    from nearkin_shared.results_json import put_json
    from nearkin_shared.savings_table import human_bytes, plural
    from nearkin_shared.utils.terminal import printable

    counts, put = result.counts, result.put
    code = ExitCode.DONE if result.is_complete else ExitCode.INCOMPLETE
    if output.session.as_json:
        stored = {"key": key, "version": None} if put is None else put_json(put)
        output.print_result({**stored, "dry_run": False, **_counts_json(counts), "seconds": seconds})
        return code
    _print_problems(counts)
    name = printable(key)
    if put is None:
        report(f"{name}: nothing changed, no version was stored")
        return code
    report(f"{name} version {put.info.version}: {_entries_text(counts)} in {seconds:.2f} s")
    report(
        f"read {human_bytes(counts.read_bytes)}, took over {human_bytes(counts.reused_bytes)} of "
        f"{plural(counts.unchanged_files, 'unchanged file')}, stored {human_bytes(put.ledger.stored_bytes)}"
    )
    if code:
        remedy = (
            "check the named paths and the permissions of this user"
            if counts.unread
            else "run it again while no program writes to them"
        )
        warn(
            f"incomplete: {counts.unread:,} could not be read, {counts.changed:,} changed while they were read; all "
            f"else is stored; {remedy}"
        )
    return code


def _entries_text(counts: BackupCounts) -> str:
    from nearkin.cli.tree_output import show_path
    from nearkin_shared.savings_table import human_bytes, plural

    total = human_bytes(counts.read_bytes + counts.reused_bytes)
    others = f", {plural(counts.others, 'other')}" if counts.others else ""
    root = show_path(counts.root)
    return f"{plural(counts.files, 'file')}, {plural(counts.folders, 'folder')}{others}, {total} of {root}"


def _print_problems(counts: BackupCounts) -> None:
    from nearkin.cli.output import notice, warn
    from nearkin.cli.tree_output import path_lines, show_path, unmatched_line

    if counts.newest_root not in (b"", counts.root):
        notice(
            f"the root is {show_path(counts.root)}, and that of the newest version before it "
            f"{show_path(counts.newest_root)}: names in the tree differ, and files of other names are read again"
        )
    if counts.unmatched_patterns:
        notice(unmatched_line(counts.unmatched_patterns))
    for line in path_lines("skipped", counts.skips, counts.skipped):
        notice(line)
    for line in path_lines("", counts.problems, counts.unread + counts.changed):
        warn(line)


def _counts_json(counts: BackupCounts) -> dict[str, object]:
    from nearkin.cli.tree_output import patterns_json, problems_json

    return {
        "root": os.fsdecode(counts.root),
        "newest_root": os.fsdecode(counts.newest_root) or None,
        "files": counts.files,
        "folders": counts.folders,
        "others": counts.others,
        "new_files": counts.new_files,
        "changed_files": counts.changed_files,
        "unchanged_files": counts.unchanged_files,
        "read_bytes": counts.read_bytes,
        "reused_bytes": counts.reused_bytes,
        "unread": counts.unread,
        "changed": counts.changed,
        "skipped": counts.skipped,
        "problems": problems_json(counts.problems),
        "skips": problems_json(counts.skips),
        "unmatched_patterns": patterns_json(counts.unmatched_patterns),
    }
