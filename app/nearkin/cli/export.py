# size: one command in a module of its own, imported when it is called
"""`nearkin export`: write a version of a tree as a tar archive."""

from __future__ import annotations

import time

import click

from nearkin.cli.session import AsWritten, complete_file, current_session, shared_options


@click.command(cls=AsWritten)
@click.argument("location", metavar="KEY[@VERSION][:/PATH]")
@click.option(
    "-o", "--output", metavar="FILE", required=True, shell_complete=complete_file, help="Write here; - is stdout."
)
@shared_options
def export(location: str, output: str) -> None:
    """Write a tree, or a folder of it, as a tar archive.

    nearkin export home -o home.tar
    nearkin export home@3:/mail -o mail.tar
    nearkin export home -o - | zstd > home.tar.zst

    The archive is that of `nearkin dump --archive tar`; a failed export leaves FILE as it was.
    """
    from nearkin.cli.dump import check_json_output, write_archive
    from nearkin.cli.output import print_json, report
    from nearkin.cli.tree_location import parse_location, resolve_location
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    parse_location(location)
    check_json_output("export", session, output)
    started = time.perf_counter()
    with session.open() as store:
        result = write_archive(session, store, resolve_location(store, location), output)
    seconds = time.perf_counter() - started
    if session.as_json:
        print_json({**result, "seconds": seconds})
    elif output != "-":
        name = f"{printable(str(result['key']))} version {result['version']}"
        report(f"{name} written to {printable(output)} in {seconds:.2f} s")
