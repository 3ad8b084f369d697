"""`nearkin get`: write a version, or a file of a tree, to stdout or a file."""

from __future__ import annotations

import shlex
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import AsWritten, Session, complete_file, current_session, shared_options
from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.blob import Blob
    from nearkin.cli.arguments import ByteRange
    from nearkin.client.sync import RemoteBlob
    from nearkin.store_copy import AnyStore
    from nearkin_shared.results import VersionInfo


@click.command(cls=AsWritten)
@click.argument("location", metavar="KEY[@VERSION][:/PATH]")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=complete_file,
    help="Write here instead of stdout; replaced only once all is verified.",
)
@click.option("--version", metavar="V", type=click.IntRange(min=1), help="This version instead of the newest.")
@click.option("--range", "range_text", metavar="A-B", help="Bytes A to B, both included; A- from A on; -N the last N.")
@click.option("--explain", "explained", is_flag=True, help="Report on stderr the objects read (local store only).")
@click.option("--at", metavar="TIME", help="The version of that time: 2026-11-20, 2026-11-20T18:00Z, 36h (ago).")
@click.option("--raw", is_flag=True, help="Write the bytes of a tree as they are stored; `restore` restores it.")
@click.option("--salvage", is_flag=True, help="Write zeros where a damaged version is lost, and list these holes.")
@shared_options
def get(
    location: str,
    output: str | None,
    version: int | None,
    range_text: str | None,
    explained: bool,
    at: str | None,
    raw: bool,
    salvage: bool,
) -> int | None:
    """Write a version's bytes to stdout or a file.

    nearkin get db/dump -o dump.rdb
    nearkin get db/dump --version 2 | head -c 100
    nearkin get disk.img --range 0-511 -o boot.sector
    nearkin get app.log --range -4096              # the last 4096 bytes
    nearkin get disk.img --range 0-1048575 --explain -o start
    nearkin get db/dump --at 2026-11-20T18:00Z -o before-the-mistake
    nearkin get db/dump --at 36h | head -c 100
    nearkin get db/dump@2 -o second
    nearkin get home@3:/etc/fstab -o fstab         # a file of a tree; `nearkin restore` restores folders
    nearkin get disk.img --salvage -o what-is-left --json | jq .holes

    Every chunk is verified before it is written. With -o a failed get leaves FILE as it was. Long runs of zeros
    become holes of FILE, which take no space. A file of a tree gets at most the mode of its entry.

    If the version that --at selects was deleted later, the command fails and names it; it never writes another one.
    --salvage (local store only) ends with the exit code of damage if bytes are lost; all other bytes are verified.
    """
    from nearkin.cli.arguments import parse_range
    from nearkin.cli.dump import check_json_output, write_tree_file
    from nearkin.cli.output import print_json
    from nearkin.cli.tree_location import ResolvedLocation, parse_location

    session = current_session()
    parse_location(location)
    byte_range = None if range_text is None else parse_range(range_text)
    check_json_output("get", session, output)
    if at is not None and version is not None:
        raise BadInput("--at, --version: give one of them")
    if salvage:
        from nearkin.cli.get_salvage import salvage as salvage_version

        if byte_range is not None or explained:
            raise BadInput("--salvage writes a whole version: not with --range or --explain")
        choose = partial(_choose_blob, text=location, version=version, at=at)
        return salvage_version(session, output, choose, is_raw=raw)
    started = time.perf_counter()
    with session.open() as store:
        key, number, path = _resolve(store, location, version, at)
        if path is not None:
            if byte_range is not None or explained or raw:
                raise BadInput("--range, --explain, --raw: not for a file of a tree; pipe `nearkin dump` instead")
            found = ResolvedLocation(key, store.info(key, number).version, path)
            result = write_tree_file(session, store, found, output)
        else:
            result = _write_version(session, _open_version(store, key, number, byte_range), output, explained, raw)
    if session.as_json:
        print_json({**result, "seconds": time.perf_counter() - started})
    return None


def _resolve(store: AnyStore, text: str, version: int | None, at: str | None) -> tuple[str, int | None, bytes | None]:
    """Return key, version (None: the newest) and path of a location.

    Raises BadInput, NotFound, Corrupt.
    """
    from nearkin.cli.tree_location import find_location, resolve_version

    location = find_location(store, text) if "@" in text or ":" in text else None
    if location is None or (location.version is None and location.path is None):
        return text, _choose_version(store, key=text, version=version, at=at), None
    if location.version is not None:
        if version is not None or at is not None:
            raise BadInput(f"{text!r} names a version: not with --version or --at")
        named = resolve_version(store, location)
        return named.key, named.version, named.path
    found = resolve_version(store, location)
    chosen = _choose_version(store, key=location.key, version=version, at=at)
    return location.key, chosen or found.version, found.path


def _choose_blob(store: AnyStore, *, text: str, version: int | None, at: str | None) -> tuple[str, int | None]:
    """Return key and version of a location without a path. Raises as `_resolve`."""
    key, number, path = _resolve(store, text, version, at)
    if path is not None:
        raise BadInput(f"--salvage {text!r}: writes a whole version; leave out :/PATH")
    return key, number


def _write_version(
    session: Session, blob: Blob | RemoteBlob, output: str | None, explained: bool, is_raw: bool
) -> dict[str, object]:
    """Write a version or a range of one; return a description for JSON.

    Raises BadInput, Corrupt.
    """
    from nearkin.blob import Blob
    from nearkin.cli.output import costs_json, costs_line, to_stderr
    from nearkin.cli.output_file import OutputFile
    from nearkin.cli.progress import bytes_bar
    from nearkin_shared.results_json import info_json

    if not is_raw:
        refuse_tree(blob.info)
    if explained and not isinstance(blob, Blob):
        raise BadInput("get --explain: a gateway does not report the objects it read; run the command at the store")
    quiet = session.as_json or (output in (None, "-") and sys.stdout is not None and sys.stdout.isatty())
    with OutputFile(output) as file, bytes_bar("get", blob.size_bytes, shown=not quiet) as progress:
        blob.write_to(file, progress=progress)
    costs = blob.costs if explained and isinstance(blob, Blob) else None
    if costs is not None and not session.as_json:
        to_stderr(costs_line(costs))
    more = {} if costs is None else {"reads": costs_json(costs)}
    return {**info_json(blob.info), "written_bytes": blob.size_bytes, **more}


def refuse_tree(info: VersionInfo) -> None:
    """Raise BadInput, with the commands that read it, if a version is a tree."""
    if info.is_tree:
        tree = shlex.quote(f"{info.key}@{info.version}")
        raise BadInput(
            f"key {info.key!r} version {info.version}: is a tree; `nearkin restore {tree} -o DIR` restores it, "
            f"`nearkin dump {tree}:/PATH` writes one file; --raw writes its stored bytes"
        )


def _choose_version(store: AnyStore, *, key: str, version: int | None, at: str | None) -> int | None:
    if at is None:
        return version
    from nearkin.cli.version_at import find_version_at

    return find_version_at(store, key, at)


def _open_version(store: AnyStore, key: str, version: int | None, byte_range: ByteRange | None) -> Blob | RemoteBlob:
    if byte_range is None:
        return store.get(key, version)
    info = store.info(key, version)
    start, stop = byte_range.resolve(info.size_bytes)
    return store.get(key, info.version, start=start, stop=stop)
