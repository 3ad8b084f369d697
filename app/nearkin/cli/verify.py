"""Run `nearkin verify` and `nearkin repair`.

The exit code is 5 for damage, 8 if there is none but data of a later format, else 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

from nearkin.cli.exit_codes import ExitCode
from nearkin.cli.output import print_json, print_line
from nearkin.cli.progress import count_bar
from nearkin.cli.session import current_session
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.key_record import ERASED_FOLDER
from nearkin_shared.results import Damage, RepairReport, VerifyReport
from nearkin_shared.savings_table import human_bytes, plural
from nearkin_shared.utils.terminal import printable
from nearkin_shared.validation import is_reserved_key

SEED_BITS = 32


def verify(sample_text: str | None, seed: int | None, since_text: str | None) -> int:
    """Verify the store, print what was found, return the exit code."""
    import secrets

    from nearkin.cli.arguments import parse_sample

    session = current_session()
    sample = None if sample_text is None else parse_sample(sample_text)
    if seed is not None and sample is None:
        raise BadInput("--seed: only with --sample")
    since = None if since_text is None else parse_since(since_text, datetime.now(UTC))
    drawn = secrets.randbits(SEED_BITS) if seed is None else seed
    with session.open_local(read_only=False) as store, count_bar("verify", shown=not session.as_json) as progress:
        report = store.verify(sample, progress, seed=drawn, since=since)
    if session.as_json:
        print_json(verify_json(report, sample, since))
    else:
        for line in verify_lines(report):
            print_line(line)
    return verification_code(report.damage)


def repair(files: Sequence[Path]) -> int:
    """Repair the store, print what was done and what is left, return the exit code."""
    session = current_session()
    with session.open_local(read_only=False) as store, count_bar("repair", shown=not session.as_json) as progress:
        report = store.repair(files, progress)
    if session.as_json:
        print_json(repair_json(report))
    else:
        for line in repair_lines(report):
            print_line(line)
    return verification_code(report.damage)


def verification_code(damage: Sequence[Damage]) -> ExitCode:
    """Return the exit code of a report: damage counts more than data of a later format."""
    if not damage:
        return ExitCode.DONE
    return ExitCode.TOO_NEW if all(one.is_too_new for one in damage) else ExitCode.DAMAGED


def _found(damage: Sequence[Damage]) -> str:
    """Return how many objects are damaged, and how many this program cannot read."""
    too_new = sum(one.is_too_new for one in damage)
    damaged = plural(len(damage) - too_new, "damaged object") if len(damage) > too_new else "no damage"
    return f"{damaged}, {plural(too_new, 'object')} of a later format" if too_new else damaged


def repair_json(report: RepairReport) -> dict[str, object]:
    """Return a repair as JSON has it."""
    return {
        "ok": not report.damage,
        "repaired": [asdict(one) for one in report.repaired],
        "parity_added": report.parity_added,
        "quarantined_chunks": report.quarantined_chunks,
        "damage": damage_json(report.damage),
        "seconds": report.seconds,
    }


def repair_lines(report: RepairReport) -> Iterable[str]:
    """Yield a repair for people."""
    for one in report.repaired:
        chunks = f": {plural(one.chunks, 'chunk')} found" if one.chunks else ""
        lost = f", {one.chunks_lost:,} lost still" if one.chunks_lost else ""
        yield f"repaired: {printable(one.object_name)} from {one.by}{chunks}{lost}"
    if report.parity_added:
        yield f"parity added to {plural(report.parity_added, 'object')}"
    yield from damage_lines(report.damage)
    yield from _remedies(report.damage)
    yield f"{_found(report.damage)} left in {report.seconds:.2f} s"


def damage_json(damage: Sequence[Damage]) -> list[dict[str, object]]:
    """Return damaged objects as JSON has them."""
    return [
        {
            "object_name": one.object_name,
            "problem": one.problem,
            "repairable": one.repairable,
            "too_new": one.is_too_new,
            "versions": [
                {"key": key, "version": version, "deleted": (key, version) in one.deleted}
                for key, version in one.versions
            ],
            "of_other_tenants": [
                {"tenant": tenant, "key": key, "version": version} for tenant, key, version in one.of_other_tenants
            ],
        }
        for one in damage
    ]


def damage_lines(damage: Sequence[Damage]) -> Iterable[str]:
    """Yield each damaged object, with the versions it touches."""
    for one in damage:
        problem = one.problem.removeprefix(one.object_name).removeprefix(":").strip()  # most name their object first
        what = "cannot be read" if one.is_too_new else "damaged"
        yield f"{what}: {printable(one.object_name)}: {printable(problem)}"
        if one.repairable:
            yield "  its parity holds what it was: `nearkin repair` puts it right, and reads go on until then"
        yield from _affected_lines(one)


def _affected_lines(one: Damage) -> Iterable[str]:
    """Yield the versions that damage touches, then the number of checkpoints of each backup."""
    checkpoints = Counter[tuple[str, str]]()
    affected = [*(("", key, version) for key, version in one.versions), *one.of_other_tenants]
    for tenant, key, version in affected:
        if is_reserved_key(key):
            checkpoints[tenant, key] += 1
        else:
            is_deleted = not tenant and (key, version) in one.deleted
            yield f"  touches {printable(key)} version {version}{_of(tenant)}{' (deleted)' if is_deleted else ''}"
    for (tenant, _), count in checkpoints.items():
        yield (
            f"  touches {plural(count, 'checkpoint')} of an unfinished backup{_of(tenant)}, which the next backup of "
            "its key leaves out"
        )


def _of(tenant: str) -> str:
    return f" of tenant {printable(tenant)}" if tenant else ""


def _remedies(damage: Sequence[Damage]) -> Iterable[str]:
    """Yield remedies for damage that is not repaired by itself; the index names its own."""
    refused = f"{ERASED_FOLDER}/"  # their problem names the remedy: an authentic copy may not exist
    folders = {
        one.object_name.partition("/")[0]
        for one in damage
        if not (one.repairable or one.is_too_new or one.object_name.startswith(refused))
    }
    if any(one.is_too_new for one in damage):
        yield "what cannot be read has the format of a later Nearkin, and is not damaged as far as is known: upgrade"
    if "containers" in folders:
        yield (
            "put the same data again, cut the same way (the profile and `chunker.*` that they were put with), and "
            "damaged blocks are stored again, for older versions too; a container that is missing, or whose directory "
            "is broken, needs parity or a copy (`nearkin repair --from`)"
        )
    if folders - {"containers", "index"}:
        yield "what is broken besides blocks needs parity or a copy: `nearkin repair --from COPY`"


def parse_since(text: str, now: datetime) -> datetime:
    """Read a `--since` as `parse_moment` does. Raises BadInput."""
    return parse_moment("since", text, now)


def parse_moment(name: str, text: str, now: datetime) -> datetime:
    """Parse the time of an option: ISO 8601 (UTC by default) or an age. Raises BadInput."""
    from nearkin.cli.forget import parse_duration

    try:
        if "-" not in text:
            return now - timedelta(seconds=parse_duration(name, text))
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except (BadInput, ValueError, OverflowError) as err:
        raise BadInput(f"{name} {text!r}: want a time such as 2026-11-20T18:00Z, or how long ago: 36h, 2d") from err


def verify_json(report: VerifyReport, sample: float | None, since: datetime | None) -> dict[str, object]:
    """Return a verification as JSON has it; `sample` and `since` null: everything was read."""
    return {
        "ok": not report.damage,
        "sample": sample,
        "seed": report.seed,
        "since": None if since is None else since.astimezone(UTC).isoformat(),
        "containers": report.containers,
        "containers_total": report.containers_total,
        "container_bytes": report.container_bytes,
        "chunks": report.chunks,
        "versions": report.versions,
        "deleted_versions": report.deleted_versions,
        "bytes_read": report.bytes_read,
        "index_entries": report.index_entries,
        "untagged_containers": report.untagged_containers,
        "forgotten": report.forgotten,
        "parity_missing": len(report.parity_missing),
        "erased_objects": report.erased_objects,
        "damage": damage_json(report.damage),
        "seconds": report.seconds,
    }


def verify_lines(report: VerifyReport) -> Iterable[str]:
    """Yield a verification as text: damaged objects with the affected versions, then totals."""
    yield from damage_lines(report.damage)
    if report.parity_missing:
        yield f"{plural(len(report.parity_missing), 'object')} without parity: `nearkin repair` adds it"
    if report.erased_objects:
        yield f"{plural(report.erased_objects, 'object')} of erased tenants, no damage: `nearkin gc` removes them"
    if report.untagged_containers:
        yield f"{plural(report.untagged_containers, 'container')} of no version's tenant: compared by SHA-1 alone"
    if report.forgotten is False:
        yield (
            "another process writes to the store, so its index still names what is broken: its next put verifies that "
            "first and stores such data again; run verify again when a put that is running now has ended"
        )
    else:
        yield from _remedies(report.damage)
    deleted = f" ({report.deleted_versions:,} deleted)" if report.deleted_versions else ""
    read = ", ".join(
        (plural(report.containers, "container"), plural(report.chunks, "chunk"), plural(report.versions, "version"))
    )
    read += deleted
    if report.containers < report.containers_total:
        share = report.bytes_read / max(1, report.container_bytes)
        drawn = "" if report.seed is None else f", drawn by --seed {report.seed}"
        yield f"covered {share:.1%} of the containers' bytes, the directories of all {report.containers_total:,}{drawn}"
    yield f"{_found(report.damage)}: read {read}, {human_bytes(report.bytes_read)} in {report.seconds:.2f} s"
