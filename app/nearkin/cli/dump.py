"""`nearkin dump`: write a file of a tree, or a folder as an archive, to stdout or a file."""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import AsWritten, Session, complete_file, current_session, shared_options
from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.cli.tree_location import ResolvedLocation
    from nearkin.store_copy import AnyStore
    from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader


@click.command(cls=AsWritten)
@click.argument("location", metavar="KEY[@VERSION]:/PATH")
@click.option("-o", "--output", metavar="FILE", shell_complete=complete_file, help="Write here instead of stdout.")
@click.option("-a", "--archive", type=click.Choice(["tar"]), help="Write a folder, or a file, as an archive.")
@shared_options
def dump(location: str, output: str | None, archive: str | None) -> None:
    """Write a file of a tree, or a folder as a tar archive.

    nearkin dump home:/notes.txt | less
    nearkin dump home@3:/etc/fstab -o fstab.old
    nearkin dump home@36h:/mail --archive tar | tar -x -C /tmp/mail
    nearkin dump home --archive tar | zstd > home.tar.zst

    The content is compared with its digest before its last bytes are written; with -o a failed dump leaves FILE as it
    was. FILE gets at most the mode of the entry, so that a private file stays one; an archive gets that of the umask.
    Names in an archive are relative to the folder. Its headers are PAX headers: names of any bytes, times in
    nanoseconds, extended attributes (SCHILY.xattr, for tar --xattrs), holes (GNU sparse 1.0).
    """
    from nearkin.cli.output import print_json
    from nearkin.cli.tree_location import parse_location, resolve_location

    session = current_session()
    parse_location(location)
    check_json_output("dump", session, output)
    started = time.perf_counter()
    with session.open() as store:
        found = resolve_location(store, location)
        if archive is not None:
            result = write_archive(session, store, found, output)
        else:
            result = write_tree_file(session, store, found, output)
    if session.as_json:
        print_json({**result, "seconds": time.perf_counter() - started})


def check_json_output(command: str, session: Session, output: str | None) -> None:
    """Refuse --json if stdout gets the content. Raises BadInput."""
    if session.as_json and output in (None, "-"):
        raise BadInput(f"{command} --json describes what was written: name a file with -o")


def write_tree_file(
    session: Session, store: AnyStore, found: ResolvedLocation, output: str | None
) -> dict[str, object]:
    """Write a file of a tree; return a description for JSON.

    Raises BadInput, NotFound, Corrupt.
    """
    from nearkin.cli.output_file import OutputFile
    from nearkin.cli.progress import bytes_bar
    from nearkin.cli.tree_location import open_tree
    from nearkin.trees.stored_content import read_file
    from nearkin_shared.validation import write_pieces

    tree = open_tree(store, found)
    placed = _find_file(tree, found)
    with (
        closing(store.get(found.key, found.version, stop=placed.stop)) as contents,
        OutputFile(output, mode_max=placed.entry.mode) as file,
        bytes_bar("dump", placed.entry.size, shown=_is_bar_shown(session, output)) as progress,
    ):
        write_pieces((memoryview(piece) for piece in read_file(contents, placed)), file, progress)
    return {**_location_json(found), "kind": "file", "written_bytes": placed.entry.size}


def _find_file(tree: TreeReader, found: ResolvedLocation) -> PlacedEntry:
    """Return the entry that has the content of a file. Raises NotFound, BadInput."""
    from nearkin.cli.tree_output import KIND_NAMES, show_path
    from nearkin_shared.formats.tree_entry_group import EntryKind
    from nearkin_shared.utils.terminal import printable

    name = f"{printable(found.label)}:/{show_path(found.path or b'')}"
    quoted = shlex.quote(name)
    placed = None if not found.path else tree.content_of(tree.find_named(found.path))
    if placed is None or placed.entry.kind == EntryKind.FOLDER:
        raise BadInput(
            f"{name}: is a folder; `nearkin ls {quoted}` lists it, `nearkin restore {quoted} -o DIR` restores it, "
            f"`nearkin dump {quoted} --archive tar` writes it as an archive"
        )
    if placed.entry.kind != EntryKind.FILE:
        target = f" to {show_path(placed.entry.target)}" if placed.entry.target else ""
        raise BadInput(f"{name}: is a {KIND_NAMES[EntryKind(placed.entry.kind)]}{target}, which has no content")
    return placed


def write_archive(session: Session, store: AnyStore, found: ResolvedLocation, output: str | None) -> dict[str, object]:
    """Write a folder or file of a tree as a tar archive; return a description for JSON.

    Raises BadInput, NotFound, Corrupt.
    """
    from nearkin.cli.output_file import OutputFile
    from nearkin.cli.progress import bytes_bar
    from nearkin.cli.tree_location import open_tree
    from nearkin.trees.tar_writer import TarWriter

    tree = open_tree(store, found)
    if output in (None, "-") and sys.stdout is not None and sys.stdout.isatty():
        raise BadInput("stdout is a terminal: redirect it, or name a file with -o")
    total = None if found.path else tree.content_bytes
    with (
        closing(store.get(found.key, found.version, stop=tree.content_bytes)) as contents,
        OutputFile(output) as file,
        bytes_bar("dump", total, shown=_is_bar_shown(session, output)) as progress,
    ):
        writer = TarWriter(tree, contents, progress)
        writer.write(found.path or b"", file)
    return {**_location_json(found), "kind": "tar", "entries": writer.entries}


def _is_bar_shown(session: Session, output: str | None) -> bool:
    is_screen = output in (None, "-") and sys.stdout is not None and sys.stdout.isatty()
    return not session.as_json and not is_screen


def _location_json(found: ResolvedLocation) -> dict[str, object]:
    return {"key": found.key, "version": found.version, "path": f"/{os.fsdecode(found.path or b'')}"}
