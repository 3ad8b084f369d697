"""`nearkin find`: find entries of trees by name or path."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from nearkin.cli.session import AsWritten, current_session, shared_options
from nearkin_shared.errors import BadInput, Corrupt

if TYPE_CHECKING:
    from nearkin.cli.tree_location import ResolvedLocation
    from nearkin.store_copy import AnyStore
    from nearkin_shared.formats.tree_entry_group import TreeEntry
    from nearkin_shared.formats.tree_layout import TreeSummary

PATTERN_CHARACTERS_MAX = 4096


class _Match(NamedTuple):
    location: ResolvedLocation
    entry: TreeEntry
    summary: TreeSummary


@click.command(cls=AsWritten)
@click.argument("pattern", metavar="PATTERN")
@click.argument("locations", metavar="[KEY[@VERSION][:/PATH]]...", nargs=-1)
@click.option("--versions", is_flag=True, help="Search every version, not the newest of each key alone.")
@click.option("-i", "--ignore-case", is_flag=True, help="Take upper and lower case for the same.")
@click.option("-l", "--long", "is_long", is_flag=True, help="Mode, owner, group, size and mtime too, as `ls -l`.")
@shared_options
def find(pattern: str, locations: tuple[str, ...], versions: bool, ignore_case: bool, is_long: bool) -> int:
    """Find files and folders in trees by a glob.

    PATTERN has * (any characters, / too), ? (one character) and [abc] (one of these). It is compared with names, or
    with whole paths if it contains a /. Without KEY all trees are searched. A line is KEY@VERSION:/PATH, as dump, get
    and restore take it. Trees that cannot be read are reported on stderr: exit code 5.

    nearkin find fstab
    nearkin find '*.tex' home                      # in quotes, or the shell expands it
    nearkin find '/mail/*/2026-11*' home@3:/
    nearkin find thesis.odt home --versions -l     # which versions have it, and its size in each
    nearkin --json find '*.key' | jq -r '.[].path'
    """
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.output import print_line, warn
    from nearkin.cli.tree_location import parse_location
    from nearkin.cli.tree_output import entry_json, entry_line, print_json_lines, show_path
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    matches = _compile(pattern, ignore_case=ignore_case)
    for text in locations:
        parse_location(text)
    failures: list[str] = []
    with session.open() as store:
        found = _search(store, _trees(store, locations, versions=versions), matches, failures)
        if session.as_json:
            print_json_lines(
                {
                    "key": one.location.key,
                    "version": one.location.version,
                    **entry_json(one.entry, one.summary),
                }
                for one in found
            )
        else:
            for one in found:
                name = f"{printable(one.location.label)}:/{show_path(one.entry.path)}"
                print_line(entry_line(one.entry, one.summary, name) if is_long else name)
    if failures and session.as_json:
        raise Corrupt("; ".join(failures))
    for failure in failures:
        warn(printable(failure))
    return ExitCode.DAMAGED if failures else ExitCode.DONE


def _compile(pattern: str, *, ignore_case: bool) -> Callable[[TreeEntry], bool]:
    """Return whether an entry matches. Raises BadInput."""
    from nearkin.cli.key_patterns import check_glob

    if not pattern or len(pattern) > PATTERN_CHARACTERS_MAX:
        raise BadInput(f"pattern {pattern[:40]!r}: want 1 to {PATTERN_CHARACTERS_MAX:,} characters")
    check_glob(pattern)
    match = re.compile(fnmatch.translate(pattern), re.IGNORECASE if ignore_case else 0).match
    if "/" in pattern:
        return lambda entry: match(f"/{os.fsdecode(entry.path)}") is not None
    return lambda entry: match(os.fsdecode(entry.name)) is not None


def _trees(store: AnyStore, texts: Sequence[str], *, versions: bool) -> Iterator[ResolvedLocation]:
    """Yield the versions to search. Raises BadInput, NotFound."""
    from nearkin.cli.tree_location import ResolvedLocation, parse_location, resolve_location

    if not texts:
        for info in store.versions(all_versions=versions):
            if info.is_tree:
                yield ResolvedLocation(info.key, info.version, None)
    for text in texts:
        found = resolve_location(store, text)
        if not versions:
            yield found
            continue
        if any(one.key == found.key and one.version is not None for one in parse_location(text)):
            raise BadInput(f"{text!r}: names one version, and --versions searches all; leave out one of them")
        for info in store.versions(found.key, all_versions=True):
            if info.key == found.key and info.is_tree:
                yield found._replace(version=info.version)


def _search(
    store: AnyStore,
    locations: Iterator[ResolvedLocation],
    matches: Callable[[TreeEntry], bool],
    failures: list[str],
) -> Iterator[_Match]:
    """Yield the entries that match; a tree that cannot be read is added to `failures`."""
    from nearkin.cli.tree_location import open_tree

    for location in locations:
        try:
            tree = open_tree(store, location)
            for placed in tree.below(location.path or b""):
                if placed.entry.name and matches(placed.entry):
                    yield _Match(location, placed.entry, tree.summary)
        except Corrupt as err:
            failures.append(str(err))
