"""Measure single kernels.

The kernels are in `kernel_cases`; one thread, one core, processor time. Every repetition runs each kernel for as many
passes as fill 40 ms, since a core needs some 0.1 ms to reach full speed with wide registers after other code.

Invariant: a ratio is taken of two consecutive measurements: OpenSSL's SHA-1, then the kernel.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from nearkin.lab.compare_builds import kernels_against
from nearkin.lab.measure import CommandFailed, RunPlan, Steps, pin_to_core, sha1_mbps
from nearkin.lab.measurement_record import Corpus, LeftOut, MeasurementRecord, Row, Spread, cell, speed, spread
from nearkin.lab.suites.kernel_cases import CHUNKING, IN_THIS_PROCESS, KERNELS, Kernel, Material, PreparedRow
from nearkin.lab.tools import rust_fastcdc
from nearkin.lab.tools.base_tool import MissingPeer
from nearkin_shared.errors import BadInput, PermanentError
from nearkin_shared.kernels import features, fingerprint

_TURN_SECONDS = 0.04
_PASSES_MAX = 1000

PEERS = tuple(row.name for row in KERNELS.values() if not row.ours)


def choose_kernels(names: Sequence[str], against: Path | None = None) -> list[Kernel]:
    """Return our rows and the peers that `names` ask for, then another build's.

    They have the order of the table. against: the folder of the other build's kernels. Raises BadInput.
    """
    for name in names:
        if name not in PEERS:
            raise BadInput(f'peer "{name}": choose {", ".join(PEERS)}')
    others = [] if against is None else kernels_against(against)
    chosen = [*(row for row in KERNELS.values() if row.ours or row.name in names), *others]
    groups = list(dict.fromkeys(row.group for row in chosen))
    return sorted(chosen, key=lambda row: groups.index(row.group))


def run(
    corpora: Sequence[Corpus],
    kernels: Sequence[Kernel],
    plan: RunPlan,
) -> MeasurementRecord:
    """Measure every kernel over every corpus: warm-up passes, then `plan.runs` that count.

    Raises PermanentError when nothing could be measured.
    """
    record = MeasurementRecord("kernels", plan.command, plan.core, plan.runs, plan.warmups, corpora)
    record.details = {
        "features_cpu_path": features.cpu_path(),
        "fingerprint_cpu_path": fingerprint.cpu_path(),
        "sample_bytes": {},
    }
    each = len(kernels) + plan.warmups + plan.runs
    with pin_to_core(plan.core):
        for number, corpus in enumerate(corpora):
            _measure_corpus(record, corpus, kernels, plan.steps, number * each, len(corpora) * each)
    if not record.rows:
        raise PermanentError(f"nothing was measured: {'; '.join(one.text() for one in record.left_out_once())}")
    return record


def _measure_corpus(
    record: MeasurementRecord, corpus: Corpus, kernels: Sequence[Kernel], steps: Steps | None, done: int, total: int
) -> None:
    material = Material(corpus)
    sample = record.details["sample_bytes"]
    assert isinstance(sample, dict)
    sample[corpus.name] = len(material.data)
    ready: dict[str, PreparedRow] = {}
    chosen = {row.name: row for row in kernels}
    for row in kernels:
        if steps:
            steps(done, total, f"{corpus.name}: {row.name}, made ready")
        done += 1
        try:
            ready[row.name] = row.prepare(material)
        except MissingPeer as missing:
            record.left_out.append(LeftOut(row.name, str(missing), row.install))
        except (BadInput, CommandFailed) as error:
            record.left_out.append(LeftOut(row.name, f"{corpus.name}: {error}"))
    speeds: dict[str, list[float]] = {name: [] for name in ready}
    by_sha1: dict[str, list[float]] = {name: [] for name in ready}
    gc.collect()
    passes: dict[str, int] = {}
    for number in range(-record.warmups, record.runs):
        if steps:
            steps(done, total, f"{corpus.name}: {'round' if number >= 0 else 'warm-up'}")
        done += 1
        yards = []
        for name, prepared in list(ready.items()):
            try:
                if name not in passes:
                    passes[name] = _passes(prepared)
                yards.append(sha1_mbps(_TURN_SECONDS / 2, time.thread_time))
                seconds = sum(prepared.once() for _ in range(passes[name]))
            except CommandFailed as error:
                record.left_out.append(LeftOut(name, f"{corpus.name}: {error}"))
                del ready[name]
                continue
            if number >= 0:
                speeds[name].append(passes[name] * prepared.bytes_handled / seconds / 1e6)
                by_sha1[name].append(speeds[name][-1] / yards[-1])
        if number >= 0:
            record.sha1_8k_mbps.append(statistics.median(yards))
    crate_ran = rust_fastcdc.NAME in ready
    for name, prepared in ready.items():
        row = chosen[name]
        figures = {
            "mbps": spread(speeds[name]),
            "by_sha1": spread(by_sha1[name]),
            "bytes_handled": spread([prepared.bytes_handled]),
            "reduction": spread([prepared.reduction]),
            "mean_chunk_bytes": spread([prepared.mean_chunk_bytes]),
            "by_crate": _by_pass(speeds[name], speeds[rust_fastcdc.NAME])
            if crate_ran and row.group == CHUNKING
            else None,
            "aim_by_sha1": spread([row.aim if features.cpu_path() == "avx512" else None]),
        }
        record.rows.append(Row(corpus.name, row.group, name, row.settings, prepared.version, row.ours, figures))


def _by_pass(own: Sequence[float], other: Sequence[float]) -> Spread | None:
    return spread(mine / theirs for mine, theirs in zip(own, other, strict=True))


def _passes(prepared: PreparedRow) -> int:
    """Return how many passes a measurement has; the first, which calibrates, does not count."""
    seconds = prepared.once()
    return max(1, min(_PASSES_MAX, round(_TURN_SECONDS / max(1e-9, seconds)))) if prepared.repeats else 1


def markdown(record: MeasurementRecord) -> list[str]:
    """Return one table a corpus."""
    lines = []
    for corpus in record.corpora:
        rows = [row for row in record.rows if row.corpus == corpus.name]
        lines += [
            f"## {corpus.name}: {len(corpus.paths)} versions, {corpus.logical_bytes / 1e6:.1f} MB",
            "",
            "MB/s of processor time; by OpenSSL's SHA-1 over 8 KiB blocks, run just before, and what is aimed at.",
            "Dedup: the corpus by its different chunks, as this chunker cuts it.",
            "",
            "| kernel | of | MB/s | by SHA-1 | aim | dedup | mean chunk, bytes | settings |",
            f"|{'---|' * 8}",
        ]
        for row in rows:
            name = f"**{row.tool}**" if row.ours else row.tool
            cut = f"{cell(row.figures['reduction'], 3)} | {cell(row.figures['mean_chunk_bytes'])}"
            speeds = f"{speed(row.figures['mbps'])} | {cell(row.figures['by_sha1'], 2)}"
            speeds += f" | {cell(row.figures['aim_by_sha1'], 1)}"
            lines.append(f"| {name} | {row.group} | {speeds} | {cut} | {row.settings} |")
        ratios = [
            f"{row.tool} {cell(figure, 2)}"
            for row in rows
            if row.tool != rust_fastcdc.NAME and (figure := row.figures["by_crate"]) is not None
        ]
        if ratios:
            lines += ["", f"Chunkers by the Rust crate fastcdc, in each repetition: {'; '.join(ratios)}."]
        versions = dict.fromkeys(f"- {row.tool}: {row.version}" for row in rows if row.version != IN_THIS_PROCESS)
        lines += ["", *versions, ""]
    return lines
