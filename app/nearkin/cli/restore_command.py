"""`nearkin restore`: restore a tree, or a part of it, into a folder."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import AsWritten, Session, complete_folder, current_session, shared_options
from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.cli.tree_location import ResolvedLocation
    from nearkin.store_copy import AnyStore
    from nearkin.trees.exclusions import PathPatterns
    from nearkin.trees.restore_counts import RestoreCounts, RestoreOptions, RestoreProblem
    from nearkin.trees.restore_plan import PlannedAction, PlannedRestore
    from nearkin.trees.target_deletion import DeletionCounts
    from nearkin.trees.unmatched_patterns import PatternSource
    from nearkin_shared.formats.tree_entry_group import TreeEntry
    from nearkin_shared.reading.tree_reader import TreeReader

POLICIES = ("always", "if-changed", "never")
"""Values of nearkin.trees.restore_counts.Overwrite, which is imported once the command runs."""


@click.command(cls=AsWritten, options_metavar="[OPTIONS]")
@click.argument("location", metavar="KEY[@VERSION][:/PATH]")
@click.option(
    "-o",
    "--output",
    "-t",
    "--target",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    shell_complete=complete_folder,
    help="Restore into this folder; it is made if it does not exist.",
)
@click.option(
    "--overwrite", type=click.Choice(POLICIES), default="always", help="Policy for files that exist [always]."
)
@click.option("--delete", is_flag=True, help="Delete what restored folders contain and the tree does not.")
@click.option("--delete-excluded", is_flag=True, help="With --delete: also what the backup left out, and sockets.")
@click.option("-i", "--include", metavar="PATTERN", multiple=True, help="Restore only what matches; repeatable.")
@click.option("-e", "--exclude", metavar="PATTERN", multiple=True, help="Leave out what matches; repeatable.")
@click.option("-n", "--dry-run", is_flag=True, help="Report what would be written and deleted; change nothing.")
@click.option(
    "-v", "--verbose", is_flag=True, help="List what is deleted or kept by --delete; with --dry-run all entries."
)
@shared_options
def restore(
    location: str,
    output: Path,
    overwrite: str,
    *,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    **flags: bool,
) -> int:
    """Restore a tree or a part of it into a folder.

    VERSION is a number, latest, or a time: the version that was the newest then. PATH counts from the root of the
    tree, which `nearkin ls KEY:/` lists. The content of a folder is restored into DIR itself, a file as DIR/name. Each
    file is compared with its digest.

    nearkin restore home -o /tmp/home
    nearkin restore home@3:/mail -o ./mail
    nearkin restore home@2026-11-20T18:00Z:/notes.txt -o .       # DIR/notes.txt
    nearkin restore home@36h -o /home/ana --overwrite if-changed # writes only files whose size or mtime differ
    nearkin restore home -o /home/ana --delete --dry-run         # what would be written and deleted
    nearkin restore home -o /tmp/some --include '*.tex' --include '/mail/'

    --overwrite always replaces existing files, if-changed keeps those of the same size and mtime, never keeps all.
    --delete makes DIR equal to the tree, which is the content of the folder that was backed up (here /home/ana). It
    keeps folders of a store, what is below a mount point, sockets, and what is in folders of which the backup left
    something out; --delete-excluded deletes the last two as well.
    Patterns are those of .gitignore files, relative to the root of the tree; one that begins with the path that was
    backed up, such as /home/ana/mail/, counts from there. Folders that lead to a match are restored
    with their own modes, owners and times.

    Owners, modes, times, extended attributes, ACLs, devices and holes are restored. Attributes that this user or file
    system cannot set are counted by kind on stderr, and the exit code is 3; so it is if an entry cannot be written.
    Nothing is written through a symlink out of DIR.
    """
    from nearkin.cli.tree_location import open_tree, parse_location, resolve_location
    from nearkin.trees.restore_counts import Overwrite, RestoreOptions

    session = current_session()
    parse_location(location)
    delete, delete_excluded = flags["delete"], flags["delete_excluded"]
    if delete_excluded and not delete:
        raise BadInput("--delete-excluded: extends --delete; add it")
    if delete and (include or exclude):
        raise BadInput("--delete: not with --include or --exclude, which would delete what they leave out")
    _compile(include, exclude)  # refuses a pattern before the store is opened
    with session.open() as store:
        found = resolve_location(store, location)
        tree = open_tree(store, found)
        patterns = _compile(include, exclude, partial(_from_root, store, found, tree))
        accepts = _accepting(*patterns) if include or exclude else None
        options = RestoreOptions(Overwrite(overwrite), delete, delete_excluded, accepts)
        if flags["dry_run"]:
            from nearkin.trees.restore_plan import PlannedRestore, plan_restore
            from nearkin.trees.target_deletion import identities

            protected = identities(store.own_folders)
            planned = PlannedRestore(on_entry=_print_entry if flags["verbose"] and not session.as_json else None)
            plan_restore(tree, found.path or b"", output, options, planned, protected=protected)
            return _report_plan(session, found, output, planned, _unmatched(patterns))
        started = time.perf_counter()
        with _progress(tree, found.path or b"", options, shown=not session.as_json) as counts:
            store.restore(
                found.key, output, version=found.version, path=found.path or b"", options=options, counts=counts
            )
    seconds = time.perf_counter() - started
    return _report(session, found, output, counts, seconds, _unmatched(patterns), verbose=flags["verbose"])


def _from_root(
    store: AnyStore, found: ResolvedLocation, tree: TreeReader, sources: Sequence[PatternSource]
) -> Sequence[PatternSource]:
    """Return patterns that name paths of the source as they count from the root."""
    from nearkin.trees.source_patterns import restored_prefixes, translate_patterns
    from nearkin_shared.errors import NotFound

    def has_entry(path: bytes) -> bool:
        try:
            tree.find(path)
        except NotFound:
            return False
        return True

    prefixes = restored_prefixes(tree.summary.root, store.info(found.key, found.version).paths)
    return translate_patterns(sources, prefixes, has_entry)


def _compile(
    include: Sequence[str],
    exclude: Sequence[str],
    translate: Callable[[Sequence[PatternSource]], Sequence[PatternSource]] = tuple,
) -> tuple[PathPatterns | None, PathPatterns | None]:
    """Return the patterns of both options. Raises BadInput."""
    if not include and not exclude:
        return None, None
    from nearkin.trees.exclusions import PathPatterns
    from nearkin.trees.unmatched_patterns import PatternSource

    included, excluded = (
        PathPatterns(translate([PatternSource(text, option=option) for text in texts])) if texts else None
        for option, texts in (("--include", include), ("--exclude", exclude))
    )
    return included, excluded


def _unmatched(patterns: Sequence[PathPatterns | None]) -> list[PatternSource]:
    """Return the patterns that matched no entry of the tree."""
    return [source for one in patterns if one is not None for source in one.use.unmatched()]


def _print_unmatched(unmatched: Sequence[PatternSource]) -> None:
    """Name the patterns that matched no entry of the tree."""
    from nearkin.cli.output import notice
    from nearkin.cli.tree_output import unmatched_line

    if unmatched:
        notice(unmatched_line(unmatched))


def _accepting(included: PathPatterns | None, excluded: PathPatterns | None) -> Callable[[TreeEntry], bool]:
    """Return whether an entry matches the patterns."""

    def accepts(entry: TreeEntry) -> bool:
        is_folder = entry.kind == 1
        is_excluded = excluded is not None and excluded.matches(entry.path, is_folder=is_folder)
        is_included = included is None or included.matches(entry.path, is_folder=is_folder)
        return is_included and not is_excluded

    return accepts


@contextmanager
def _progress(tree: TreeReader, path: bytes, options: RestoreOptions, *, shown: bool) -> Iterator[RestoreCounts]:
    """Draw a progress bar; its total is the content of the selected entries."""
    from nearkin.cli.progress import EntriesDone, entries_bar, is_drawn
    from nearkin.trees.restore_counts import RestoreCounts
    from nearkin.trees.restore_plan import selected_bytes

    counts = RestoreCounts()
    total = selected_bytes(tree, path, options) if is_drawn(shown=shown) else None
    with entries_bar(
        "restore",
        lambda: EntriesDone(counts.files + counts.kept_files, counts.written_bytes, counts.failed, total),
        shown=shown,
    ):
        yield counts


def _print_entry(action: PlannedAction, entry: TreeEntry) -> None:
    from nearkin.cli.output import print_line
    from nearkin.cli.tree_output import show_path
    from nearkin_shared.savings_table import human_bytes

    print_line(f"{action:<9}  {human_bytes(entry.content_bytes):>9}  {show_path(entry.path)}")


def _report_plan(
    session: Session,
    found: ResolvedLocation,
    target: Path,
    counts: PlannedRestore,
    unmatched: Sequence[PatternSource],
) -> int:
    """Print what a restore would do; return the exit code that it would have."""
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.output import print_json, print_line, warn
    from nearkin.cli.tree_output import patterns_json

    code = ExitCode.INCOMPLETE if counts.failed else ExitCode.DONE
    if session.as_json:
        fields = {**_location_json(found, target), **_planned_json(counts)}
        print_json({"dry_run": True, **fields, "unmatched_patterns": patterns_json(unmatched)})
        return code
    _print_unmatched(unmatched)
    for line in _failure_lines(counts.problems, counts.failed):
        warn(line)
    for line in _plan_lines(counts):
        print_line(line)
    return code


def _planned_json(counts: PlannedRestore) -> dict[str, object]:
    return {
        "files": counts.files,
        "folders": counts.folders,
        "others": counts.others,
        "replaced": counts.replaced,
        "kept_files": counts.kept_files,
        **_deletion_json(counts.deletion),
        "written_bytes": counts.bytes,
        "failed": counts.failed,
        "problems": _failures_json(counts.problems),
    }


def _plan_lines(counts: PlannedRestore) -> Iterator[str]:
    from nearkin_shared.savings_table import human_bytes, plural

    others = f", {plural(counts.others, 'other')}" if counts.others else ""
    yield (
        f"would restore {plural(counts.files, 'file')}, {plural(counts.folders, 'folder')}{others}, "
        f"{human_bytes(counts.bytes)}"
    )
    if counts.replaced or counts.kept_files:
        yield f"of those that exist {counts.replaced:,} would be replaced; {counts.kept_files:,} more would be kept"
    if counts.failed:
        yield f"{plural(counts.failed, 'entry', 'entries')} could not be restored, or deleted"
    if counts.deleted:
        yield f"{plural(counts.deleted, 'other entry', 'other entries')} of the target would be deleted"
    yield from _deleted_lines("would delete", counts.deletion)
    yield from _kept_lines(counts.deletion, verbose=True)


def _deletion_json(counts: DeletionCounts) -> dict[str, object]:
    from nearkin.cli.tree_output import PROBLEMS_SHOWN_MAX, problems_json

    return {
        "deleted": counts.deleted,
        "deleted_paths": [os.fsdecode(path) for path in counts.deleted_paths[:PROBLEMS_SHOWN_MAX]],
        "not_deleted": counts.kept,
        "not_deleted_entries": problems_json(counts.kept_entries),
    }


def _deleted_lines(what: str, counts: DeletionCounts) -> Iterator[str]:
    from nearkin.cli.tree_output import PROBLEMS_SHOWN_MAX, show_path

    for path in counts.deleted_paths[:PROBLEMS_SHOWN_MAX]:
        yield f"{what} {show_path(path)}"
    more = counts.deleted - PROBLEMS_SHOWN_MAX
    if more > 0:
        yield f"{what} {more:,} more, which are not listed"


def _kept_lines(counts: DeletionCounts, *, verbose: bool) -> Iterator[str]:
    """Yield a line for each entry that `--delete` keeps, or for each reason."""
    from nearkin.cli.tree_output import path_lines, show_path
    from nearkin_shared.savings_table import plural

    if verbose:
        yield from path_lines("not deleted", counts.kept_entries, counts.kept)
        return
    reasons = Counter(entry.reason for entry in counts.kept_entries)
    for reason, number in sorted(reasons.items()):
        first = next(entry for entry in counts.kept_entries if entry.reason == reason)
        yield f"{plural(number, 'entry', 'entries')} not deleted: {reason}; the first: {show_path(first.path)}"


def _location_json(found: ResolvedLocation, target: Path) -> dict[str, object]:
    path = "/" if not found.path else f"/{os.fsdecode(found.path)}"
    return {"key": found.key, "version": found.version, "path": path, "target": str(target)}


def _report(
    session: Session,
    found: ResolvedLocation,
    target: Path,
    counts: RestoreCounts,
    seconds: float,
    unmatched: Sequence[PatternSource],
    *,
    verbose: bool,
) -> int:
    """Print the result of a restore; return the exit code."""
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.output import print_json, print_line, report, warn
    from nearkin.cli.tree_output import patterns_json, problems_json
    from nearkin_shared.savings_table import human_bytes, plural
    from nearkin_shared.utils.terminal import printable

    code = ExitCode.DONE if counts.is_complete else ExitCode.DAMAGED if counts.damaged else ExitCode.INCOMPLETE
    failures = [problem for problem in counts.problems if not problem.is_attribute]
    if session.as_json:
        print_json(
            {
                "dry_run": False,
                **_location_json(found, target),
                "files": counts.files,
                "folders": counts.folders,
                "others": counts.others,
                "kept_files": counts.kept_files,
                **_deletion_json(counts.deletion),
                "written_bytes": counts.written_bytes,
                "failed": counts.failed,
                "damaged": counts.damaged,
                "unset": dict(sorted(counts.unset.items())),
                "problems": _failures_json(failures),
                "unset_entries": problems_json([problem for problem in counts.problems if problem.is_attribute]),
                "unmatched_patterns": patterns_json(unmatched),
                "seconds": seconds,
            }
        )
        return code
    _print_unmatched(unmatched)
    for line in _failure_lines(failures, counts.failed):
        warn(line)
    for line in (*_unset_lines(counts), *_kept_lines(counts.deletion, verbose=verbose)):
        warn(line)
    for line in _deleted_lines("deleted", counts.deletion) if verbose else ():
        print_line(line)
    others = f", {plural(counts.others, 'other')}" if counts.others else ""
    kept = f", {counts.kept_files:,} kept" if counts.kept_files else ""
    deleted = f", {counts.deleted:,} deleted" if counts.deleted else ""
    report(
        f"restored {printable(found.label)} to {printable(str(target))}: {plural(counts.files, 'file')}, "
        f"{plural(counts.folders, 'folder')}{others}, {human_bytes(counts.written_bytes)} in {seconds:.2f} s"
        f"{kept}{deleted}"
    )
    return code


def _failures_json(failures: Sequence[RestoreProblem]) -> list[dict[str, object]]:
    """Convert problems to JSON; those of folders have the number of entries below them."""
    from nearkin.cli.tree_output import problems_json

    return [
        {**shown, "entries_below": one.below} if one.below else dict(shown)
        for shown, one in zip(problems_json(failures), failures, strict=False)
    ]


def _failure_lines(failures: Sequence[RestoreProblem], failed: int) -> Iterator[str]:
    """Yield a line for each entry that is not restored, one for a folder with those below it."""
    from nearkin.cli.tree_output import PROBLEMS_SHOWN_MAX, path_lines

    shown = [
        one._replace(reason=f"{one.reason}; {_below_text(one)}") if one.below else one
        for one in failures[:PROBLEMS_SHOWN_MAX]
    ]
    unlisted = failed - sum(one.entries for one in shown)
    yield from path_lines("", shown, len(shown) + max(unlisted, 0))


def _below_text(problem: RestoreProblem) -> str:
    """Return how many entries below a folder a problem reports."""
    from nearkin_shared.savings_table import plural

    return (
        f"{plural(problem.below, 'entry', 'entries')} below it not {'deleted' if problem.is_deletion else 'restored'}"
    )


def _unset_lines(counts: RestoreCounts) -> Iterator[str]:
    """Yield a line for each kind of attribute that could not be set, with one example."""
    from nearkin.cli.tree_output import show_path
    from nearkin_shared.savings_table import plural
    from nearkin_shared.utils.terminal import printable

    for name, count in sorted(counts.unset.items()):
        what = "not made" if name == "device" else "not set"
        start = "is a device" if name == "device" else f"{name} cannot be set"
        first = next((one for one in counts.problems if one.is_attribute and one.reason.startswith(start)), None)
        example = "" if first is None else f", the first /{show_path(first.path)}: {first.reason}"
        yield f"{printable(name)} {what} on {plural(count, 'entry', 'entries')}{example}"
