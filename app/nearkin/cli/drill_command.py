"""`nearkin drill`: restore a sample of a version, compare it, and print a signed report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nearkin.cli.session import AsWritten, complete_file, complete_folder, current_session, shared_options
from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.drill import DrillOptions

SEED_BITS = 32
_FILE = click.Path(path_type=Path)


@click.command(cls=AsWritten, options_metavar="[OPTIONS]")
@click.argument("location", metavar="KEY[@VERSION]", required=False)
@click.option("--sample", metavar="SHARE", help="Restore this share of the files, such as 5% [5%].")
@click.option("--files", metavar="N", type=click.IntRange(1, 1_000_000), help="Restore N files.")
@click.option("--all", "everything", is_flag=True, help="Restore everything.")
@click.option("--seed", metavar="N", type=click.IntRange(0), help="Draw the same sample again.")
@click.option(
    "--compare", metavar="DIR", type=_FILE, shell_complete=complete_folder, help="Compare with the source as well."
)
@click.option(
    "--temporary", metavar="DIR", type=_FILE, shell_complete=complete_folder, help="Restore below this folder [TMPDIR]."
)
@click.option("--sign-key", metavar="FILE", type=_FILE, shell_complete=complete_file, help="Sign with this key.")
@click.option("-o", "--output", metavar="FILE", shell_complete=complete_file, help="Write the report here.")
@click.option("--create-key", metavar="FILE", type=_FILE, help="Create a key, and FILE.pub; restore nothing.")
@click.option("--check", metavar="REPORT", type=_FILE, shell_complete=complete_file, help="Check a signed report.")
@click.option("--public-key", metavar="FILE", type=_FILE, shell_complete=complete_file, help="Key that --check trusts.")
@shared_options
def drill(
    location: str | None,
    sample: str | None,
    files: int | None,
    everything: bool,
    seed: int | None,
    compare: Path | None,
    temporary: Path | None,
    sign_key: Path | None,
    output: str | None,
    create_key: Path | None,
    check: Path | None,
    public_key: Path | None,
) -> int:
    """Restore a sample of a version, and compare it.

    nearkin drill --create-key drill.key                       # once; give drill.key.pub to the readers of reports
    nearkin drill home --sign-key drill.key -o report.json     # 5 % of the files of the newest version
    nearkin drill home@3 --files 100 --compare /home/ana
    nearkin drill db/dump --all --sign-key drill.key
    nearkin drill --check report.json --public-key drill.key.pub

    Files of a tree, or pieces of 1 MiB of a version of put, are restored below a temporary folder, which is removed
    afterwards, read again, and compared with the digests that the store holds. With --compare they are compared with
    the source, too: files with another size or mtime there are counted as changed since.

    The report is JSON: version, sample with its seed, files, bytes, seconds, digest of the tree, and each mismatch with
    its path. --sign-key adds an Ed25519 signature. --check prints the report and its result.

    The exit code is 5 if a mismatch was found, and of --check if the report has one, was changed, or is not signed by
    the key.
    """
    from nearkin.drill_report import create_key as create

    _check_usage(location, sample, files, everything, create_key, check)
    if create_key is not None:
        from nearkin.cli.output import print_json, print_line

        public = create(create_key)
        if current_session().as_json:
            print_json({"private_key": str(create_key), "public_key": str(public)})
        else:
            print_line(f"{create_key}: signs reports, keep it secret; {public}: checks them, give it to readers")
        return 0
    if check is not None:
        return _check(check, public_key)
    import secrets  # 5 ms of a start, and `nearkin --help` draws nothing

    from nearkin.cli.arguments import parse_sample
    from nearkin.drill import DEFAULT_SHARE, DrillOptions

    share = None if everything or files is not None else DEFAULT_SHARE if sample is None else parse_sample(sample)
    chosen = secrets.randbits(SEED_BITS) if seed is None else seed
    assert location is not None
    return _run(location, DrillOptions(share, files, chosen, compare, temporary), sign_key, output)


def _check_usage(
    location: str | None,
    sample: str | None,
    files: int | None,
    everything: bool,
    create_key: Path | None,
    check: Path | None,
) -> None:
    """Refuse a wrong combination. Raises BadInput."""
    if (location is not None) + (create_key is not None) + (check is not None) != 1:
        raise BadInput("drill: name a KEY, --create-key FILE or --check REPORT, one of them")
    if (sample is not None) + (files is not None) + everything > 1:
        raise BadInput("--sample, --files and --all: name one of them")


def _check(path: Path, public_key: Path | None) -> int:
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.output import print_json
    from nearkin.drill_report import check

    if public_key is None:
        raise BadInput("--check: name the key that you trust with --public-key; the one in a report proves nothing")
    report = check(path, public_key)
    print_json({"signature": "valid", **report})
    return ExitCode.DONE if report.get("passed") is True else ExitCode.DAMAGED


def _run(location: str, options: DrillOptions, sign_key: Path | None, output: str | None) -> int:
    import json

    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.output import notice, report, warn
    from nearkin.cli.output_file import OutputFile
    from nearkin.cli.progress import EntriesDone, entries_bar
    from nearkin.cli.tree_location import parse_location, resolve_location
    from nearkin.drill import DrillCounts, run_drill
    from nearkin.drill_report import read_private_key, sign
    from nearkin_shared.savings_table import human_bytes, plural
    from nearkin_shared.utils.terminal import printable

    session, counts = current_session(), DrillCounts()
    parse_location(location)
    key = None if sign_key is None else read_private_key(sign_key)
    if options.compare is not None and not options.compare.exists():
        raise BadInput(f'--compare "{options.compare}": no such file or folder')

    def read_progress() -> EntriesDone:
        return EntriesDone(counts.files, counts.restored_bytes, counts.mismatch_count, None)

    with session.open() as store, entries_bar("drill", read_progress, shown=not session.as_json):
        found = resolve_location(store, location)
        if found.path:
            raise BadInput(f"drill {printable(location)}: samples a whole version; leave out :/PATH")
        made: dict[str, Any] = run_drill(store, found.key, found.version, options, counts)
    document = json.dumps(sign(made, key), indent=2).encode() + b"\n"
    with OutputFile(output) as file:
        file.write(document)
    if key is None:
        notice("the report is not signed; name a key with --sign-key")
    for mismatch in counts.mismatches[:10]:
        warn(f"{printable(mismatch['path']) or printable(found.label)}: {printable(mismatch['reason'])}")
    if output not in (None, "-"):
        report(
            f"{printable(found.label)}: restored {plural(counts.files, 'file')}, {human_bytes(counts.restored_bytes)}, "
            f"{plural(counts.mismatch_count, 'mismatch', 'mismatches')}, in {made['seconds']:.2f} s"
        )
    return ExitCode.DONE if made["passed"] else ExitCode.DAMAGED
