"""`nearkin ls`: list keys and versions, or the entries of a folder of a tree."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import AsWritten, Session, current_session, shared_options
from nearkin_shared.errors import BadInput, Corrupt

if TYPE_CHECKING:
    from nearkin.cli.key_patterns import KeyPattern
    from nearkin.cli.tree_location import TreeLocation
    from nearkin.store_copy import AnyStore
    from nearkin_shared.formats.tree_entry_group import TreeEntry
    from nearkin_shared.reading.tree_reader import TreeReader
    from nearkin_shared.results import Damage

KEYS_TRIED_MAX = 8
"""Parts of a prefix without a match that are looked up as keys."""


@click.command(cls=AsWritten)
@click.argument("pattern", metavar="[PREFIX|GLOB|KEY[@VERSION]:/PATH]", default="")
@click.option("--literal", is_flag=True, help="Take * ? [ @ and : in PREFIX as they are.")
@click.option("--versions", is_flag=True, help="Every version instead of the newest of each key.")
@click.option(
    "--deleted", is_flag=True, help="The versions that are deleted and can be brought back, or not yet freed."
)
@click.option("--tag", "tags", metavar="TAG[,TAG]", multiple=True, help="Only versions with this tag (all of them).")
@click.option("-l", "--long", "is_long", is_flag=True, help="Of a tree: mode, owner, group, size, mtime (UTC), name.")
@click.option("-R", "--recursive", is_flag=True, help="Of a tree: all entries below the folder.")
@shared_options
def ls(
    pattern: str, literal: bool, versions: bool, deleted: bool, tags: tuple[str, ...], is_long: bool, recursive: bool
) -> None:
    """List keys by PREFIX or GLOB, or a folder of a tree.

    GLOB has at least one of: * (any characters, / too), ? (one character), [abc] (one of these). It matches whole keys.

    A line is: created (UTC), size, version, key; with --versions then its tags, host and paths, if known. --tag selects
    versions, and without --versions the newest of these of each key; of several --tag one is enough. Versions that
    cannot be read are reported on stderr: exit code 5.
    With --deleted: deleted (UTC), until when it can be brought back, version, by whom, key, reason.

    nearkin ls
    nearkin ls db/ --versions
    nearkin ls home --versions --tag nightly   # what `restic snapshots --tag nightly` lists
    nearkin ls 'db/*.sql'                # in quotes, or the shell expands it
    nearkin ls --literal 'notes[1]'      # a prefix that has such a character
    nearkin ls --deleted
    nearkin --json ls | jq '.[].key'

    KEY[@VERSION]:/PATH lists a folder of a tree, names ascending; folders end with /. VERSION is a number,
    latest, or a time. A key that contains @ or : itself is listed as a key if it exists; of several readings the
    longest key applies.

    nearkin ls home:/
    nearkin ls -l home@3:/etc
    nearkin ls -R home@2026-11-20T18:00Z:/etc
    nearkin --json ls -R home@36h: | jq -r 'map(select(.size_bytes > 1e9)) | .[].path'
    """
    from nearkin.cli.key_patterns import parse_prefix_or_glob
    from nearkin.cli.tree_location import parse_location

    session = current_session()
    is_tree_only = is_long or recursive
    if versions and deleted:
        raise BadInput("ls: --versions lists what is there, --deleted what is not: give one of them")
    if deleted and tags:
        raise BadInput("ls: --tag: deleted versions are listed without tags; leave out --tag or --deleted")
    if not all(tag.strip() for text in tags for tag in text.split(",")):
        raise BadInput(f"--tag {','.join(tags)!r}: want a tag, or several separated by commas")
    lists_keys = literal or versions or deleted or bool(tags)
    if is_tree_only and lists_keys:
        raise BadInput("ls: -l and -R list a tree: not with --literal, --versions, --deleted or --tag")
    has_location = is_tree_only or ((":" in pattern or "@" in pattern) and not lists_keys)
    if is_tree_only and not pattern:
        raise BadInput("ls: -l and -R list a tree: name it, as in `nearkin ls -l home:/`")
    if has_location:
        parse_location(pattern)  # arguments are refused before a store is opened
    else:
        parse_prefix_or_glob(pattern, literal=literal)
    with session.open() as store:
        if has_location:
            location = _find_tree(store, pattern, is_tree_only=is_tree_only)
            if location is not None:
                _list_tree(session, store, location, is_long=is_long, recursive=recursive)
                return
        wanted = parse_prefix_or_glob(pattern, literal=literal)
        if deleted:
            _list_deleted(session, store, wanted)
        else:
            _list_keys(session, store, pattern, wanted, versions=versions, tags=tags)


def _find_tree(store: AnyStore, text: str, *, is_tree_only: bool) -> TreeLocation | None:
    """Return the location that a text names; None if it is a prefix or glob of keys.

    Raises BadInput, and NotFound if a text with a path names no key and starts none.
    """
    from nearkin.cli.key_patterns import parse_prefix_or_glob
    from nearkin.cli.tree_location import find_location, resolve_location

    location = find_location(store, text)
    if location is not None and (is_tree_only or location.path is not None or location.version is not None):
        return location
    if location is None and (is_tree_only or ":/" in text):
        wanted = parse_prefix_or_glob(text)
        if is_tree_only or not any(wanted.matches(info.key) for info in store.versions(wanted.prefix)):
            resolve_location(store, text)
    return None


def _list_tree(session: Session, store: AnyStore, location: TreeLocation, *, is_long: bool, recursive: bool) -> None:
    from nearkin.cli.output import print_line
    from nearkin.cli.tree_location import open_tree, resolve_version
    from nearkin.cli.tree_output import entry_json, entry_line, print_json_lines, show_path
    from nearkin_shared.formats.tree_entry_group import EntryKind

    found = resolve_version(store, location)
    tree = open_tree(store, found)
    entries = _entries(tree, found.path or b"", recursive=recursive)
    if session.as_json:
        print_json_lines(entry_json(entry, tree.summary) for _, entry in entries)
        return
    for path, entry in entries:
        name = show_path(path) + ("/" if entry.kind == EntryKind.FOLDER else "")
        print_line(entry_line(entry, tree.summary, name) if is_long else name)


def _entries(tree: TreeReader, path: bytes, *, recursive: bool) -> Iterator[tuple[bytes, TreeEntry]]:
    """Yield (name to show, entry) of a folder, or of one other entry. Raises NotFound."""
    from nearkin_shared.formats.tree_entry_group import EntryKind

    single = tree.find_named(path).entry if path else None
    if single is not None and single.kind != EntryKind.FOLDER:
        yield single.name, single
    elif recursive:
        start = len(path) + 1 if path else 0
        yield from ((placed.entry.path[start:], placed.entry) for placed in tree.below(path) if placed.entry.name)
    else:
        yield from ((placed.entry.name, placed.entry) for placed in tree.children(path))


def _no_key_line(store: AnyStore, pattern: str, *, is_glob: bool) -> str:
    """Return the notice that no key matches; it has the command for a folder of a tree."""
    from nearkin.cli.tree_location import is_tree_key

    if is_glob:
        return f"ls {pattern!r}: no key matches; `nearkin ls` lists all"
    ends = [at for at, character in enumerate(pattern) if character == "/" and at][-KEYS_TRIED_MAX:]
    end = next((end for end in reversed(ends) if is_tree_key(store, pattern[:end])), None)
    if end is None:
        return f"ls {pattern!r}: no key starts with it; `nearkin ls` lists all"
    place = shlex.quote(f"{pattern[:end]}:{pattern[end:]}")
    return f"ls {pattern!r}: no key starts with it; `nearkin ls {place}` lists the folder of the tree {pattern[:end]!r}"


def _list_deleted(session: Session, store: AnyStore, wanted: KeyPattern) -> None:
    from nearkin.cli.output import deletion_line
    from nearkin_shared.results_json import deletion_json

    broken: list[Damage] = []
    listed = store.list_deleted(wanted.prefix, broken=broken.append)
    deletions = [entry for entry in listed if wanted.matches(entry.key)]
    _print_list(session, store, map(deletion_line, deletions), map(deletion_json, deletions), _of(wanted, broken))


def _list_keys(
    session: Session, store: AnyStore, pattern: str, wanted: KeyPattern, *, versions: bool, tags: Sequence[str]
) -> None:
    from nearkin.cli.output import described_line, notice, version_json, version_line
    from nearkin_shared.retention import has_tags
    from nearkin_shared.utils.terminal import printable

    broken: list[Damage] = []
    found = [
        info
        for info in store.versions(wanted.prefix, all_versions=versions or bool(tags), broken=broken.append)
        if wanted.matches(info.key) and (not tags or any(has_tags(info, text) for text in tags))
    ]
    if tags and not versions:
        found = list({info.key: info for info in found}.values())  # ascending: the newest of a key is the last
    damage = _of(wanted, broken)
    line = described_line if versions else version_line
    is_empty = bool(pattern) and not (found or damage or session.as_json)
    _print_list(session, store, map(line, found), map(version_json, found), damage)
    if is_empty:
        notice(printable(_no_key_line(store, pattern, is_glob=wanted.prefix != pattern)))


def _of(wanted: KeyPattern, broken: Sequence[Damage]) -> list[Damage]:
    """Return the damage of the keys that are listed."""
    return [one for one in broken if any(wanted.matches(key) for key, _ in one.versions) or not one.versions]


def _print_list(
    session: Session, store: AnyStore, lines: Iterable[str], values: Iterable[object], damage: Sequence[Damage]
) -> None:
    """Print the lines, or the values as JSON. Raises Corrupt if a version cannot be read."""
    from nearkin.cli.gc import warn_if_rolled_back
    from nearkin.cli.output import print_json, print_line, unreadable

    warn_if_rolled_back(store)
    if session.as_json:
        print_json(list(values))
    else:
        for line in lines:
            print_line(line)
    if damage:
        raise Corrupt(unreadable(damage))
