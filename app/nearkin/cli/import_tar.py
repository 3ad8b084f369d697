"""`nearkin import-tar`: store a tar archive as one version of a key."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import (
    AsWritten,
    Session,
    complete_file,
    complete_folder,
    current_session,
    force_option,
    shared_options,
)
from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.trees.tar_import import ImportCounts, ImportResult


@click.command(cls=AsWritten, options_metavar="[OPTIONS]")
@click.argument("key", metavar="KEY")
@click.argument("archive", metavar="FILE|-", shell_complete=complete_file)
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="Stored with the version; repeatable.")
@click.option("--meta", "--metadata", metavar="NAME=VALUE", multiple=True, help="Metadata of the version; repeatable.")
@click.option(
    "--temporary",
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=complete_folder,
    help="Folder for the unpacked copy of a stream or a compressed archive [TMPDIR].",
)
@force_option
@shared_options
def import_tar(key: str, archive: str, tags: tuple[str, ...], meta: tuple[str, ...], temporary: Path | None) -> int:
    """Store a tar archive as one version of KEY, a tree.

    nearkin import-tar home home-2019.tar
    nearkin import-tar home home-2020.tar.zst --tag archive --meta source=tape7
    ssh db1 tar -c --xattrs --acls -C /etc . | nearkin import-tar etc -
    nearkin export home@3 -o - | NEARKIN_STORE=/mnt/other nearkin import-tar home -

    Then: nearkin ls home:/, nearkin restore home -o DIR, nearkin diff home@1 home@2.

    ustar, PAX and GNU archives are read, also compressed with gzip, bzip2, xz or zstd: names of any bytes, modes,
    owners, times in nanoseconds, symlinks, hard links, FIFOs, devices, holes, extended attributes (SCHILY.xattr) and
    ACLs. The import of an archive of `nearkin export` is equal to the tree.

    Leading slashes of names are removed. A member is left out and named, and the exit code is 3, if its name has a ..,
    a part above 255 bytes or more than 4,096 bytes; if it is below a member that is no folder, such as a symlink; if
    it would replace a folder with content; if it is a hard link to a member that is not before it; or if it has more
    than 16 TiB with its holes. Of several members of one name the last counts.

    An archive that is damaged or cut short is refused with exit code 2, and nothing is stored. A stream and a
    compressed archive are unpacked into a temporary file first.
    """
    from nearkin.cli.arguments import check_key
    from nearkin.cli.backup_command import parse_tags, parse_tree_metadata
    from nearkin.cli.output import notice
    from nearkin.cli.path_keys import check_new_key_of_file, describe_other_kind
    from nearkin.cli.progress import EntriesDone, entries_bar
    from nearkin.trees.tar_import import ImportCounts, ImportOptions

    session = current_session()
    check_key(key)
    options = ImportOptions(parse_tags(tags), parse_tree_metadata(meta), temporary)
    if archive == "-" and sys.stdin is None:
        raise BadInput('archive "-": stdin is closed')
    if archive == "-" and sys.stdin.isatty():
        raise BadInput('archive "-": stdin is a terminal; redirect it, or name a file')
    counts, started = ImportCounts(), time.perf_counter()

    def read_progress() -> EntriesDone:
        return EntriesDone(counts.files, counts.read_bytes, counts.left_out, counts.total_bytes or None)

    with session.open(read_only=False) as store:
        check_new_key_of_file(store, key, archive, "import-tar")
        other_kind = describe_other_kind(store, key, is_tree=True)
        if other_kind is not None:
            notice(other_kind)
        with entries_bar("import", read_progress, shown=not session.as_json):
            source = sys.stdin.buffer if archive == "-" else archive
            result = store.import_tar(key, source, options=options, counts=counts)
    return _report(session, key, result, time.perf_counter() - started)


def _report(session: Session, key: str, result: ImportResult, seconds: float) -> int:
    """Print the result of an import; return the exit code."""
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.output import print_json, report, warn
    from nearkin.cli.tree_output import path_lines
    from nearkin_shared.results_json import put_json
    from nearkin_shared.savings_table import human_bytes, plural
    from nearkin_shared.utils.terminal import printable

    counts, put = result.counts, result.put
    code = ExitCode.DONE if result.is_complete else ExitCode.INCOMPLETE
    if session.as_json:
        print_json({**put_json(put), **_counts_json(counts), "seconds": seconds})
        return code
    for line in path_lines("", counts.problems, counts.left_out + counts.altered):
        warn(line)
    others = f", {plural(counts.others, 'other')}" if counts.others else ""
    report(
        f"{printable(key)} version {put.info.version}: {plural(counts.files, 'file')}, "
        f"{plural(counts.folders, 'folder')}{others}, {human_bytes(counts.read_bytes)} in {seconds:.2f} s, stored "
        f"{human_bytes(put.ledger.stored_bytes)}"
    )
    if code:
        warn(
            f"incomplete: {plural(counts.left_out, 'member')} left out, {plural(counts.altered, 'attribute')} not "
            "stored as they are; all else is stored"
        )
    return code


def _counts_json(counts: ImportCounts) -> dict[str, object]:
    from nearkin.cli.tree_output import problems_json

    return {
        "files": counts.files,
        "folders": counts.folders,
        "others": counts.others,
        "read_bytes": counts.read_bytes,
        "left_out": counts.left_out,
        "altered": counts.altered,
        "problems": problems_json(counts.problems),
    }
