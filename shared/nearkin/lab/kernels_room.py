"""Single kernels. Invariant: in every round each row runs once, next to OpenSSL's SHA-1: ratios are of one minute.

What is measured is in `kernel_rows`; one thread, one core.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

from nearkin.errors import BadInput, Permanent
from nearkin.kernels import features, fingerprint
from nearkin.lab.kernel_rows import KERNELS, Kernel, Material, Prepared
from nearkin.lab.measuring import CommandFailed, Steps, pinned, sha1_mbps
from nearkin.lab.peer import MissingPeer
from nearkin.lab.record import Corpus, LeftOut, Record, Row, cell, spread

PEERS = tuple(row.name for row in KERNELS.values() if not row.ours)


def choose_kernels(names: Sequence[str]) -> list[Kernel]:
    """Return our rows and the peers that `names` ask for, in the table's order. Raises BadInput."""
    for name in names:
        if name not in PEERS:
            raise BadInput(f'peer "{name}": choose {", ".join(PEERS)}')
    return [row for row in KERNELS.values() if row.ours or row.name in names]


def run(
    corpora: Sequence[Corpus],
    kernels: Sequence[Kernel],
    *,
    core: int | None,
    runs: int,
    warmups: int,
    command: str,
    steps: Steps | None,
) -> Record:
    """Measure every kernel over every corpus: `warmups` passes, then `runs` that count.

    Raises Permanent when nothing could be measured.
    """
    record = Record("kernels", command, core, runs, warmups, corpora)
    record.details = {
        "features_cpu_path": features.cpu_path(),
        "fingerprint_cpu_path": fingerprint.cpu_path(),
        "sample_bytes": {},
    }
    each = len(kernels) + warmups + runs
    with pinned(core):
        for number, corpus in enumerate(corpora):
            _measure_corpus(record, corpus, kernels, steps, number * each, len(corpora) * each)
    if not record.rows:
        raise Permanent(f"nothing was measured: {'; '.join(one.text() for one in record.left_out)}")
    return record


def _measure_corpus(
    record: Record, corpus: Corpus, kernels: Sequence[Kernel], steps: Steps | None, done: int, total: int
) -> None:
    material = Material(corpus)
    sample = record.details["sample_bytes"]
    assert isinstance(sample, dict)
    sample[corpus.name] = len(material.data)
    ready: dict[str, Prepared] = {}
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
    for number in range(-record.warmups, record.runs):
        if steps:
            steps(done, total, f"{corpus.name}: {'round' if number >= 0 else 'warm-up'}")
        done += 1
        sha1 = sha1_mbps()
        if number >= 0:
            record.sha1_8k_mbps.append(sha1)
        for name, prepared in list(ready.items()):
            try:
                mbps = prepared.bytes_handled / prepared.once() / 1e6
            except CommandFailed as error:
                record.left_out.append(LeftOut(name, f"{corpus.name}: {error}"))
                del ready[name]
                continue
            if number >= 0:
                speeds[name].append(mbps)
                by_sha1[name].append(mbps / sha1)
    for name, prepared in ready.items():
        row = chosen[name]
        figures = {
            "mbps": spread(speeds[name]),
            "by_sha1": spread(by_sha1[name]),
            "bytes_handled": spread([prepared.bytes_handled]),
            "reduction": spread([prepared.reduction]),
            "mean_chunk_bytes": spread([prepared.mean_chunk_bytes]),
        }
        record.rows.append(Row(corpus.name, row.group, name, row.settings, prepared.version, row.ours, figures))


def markdown(record: Record) -> list[str]:
    """Return one table a corpus."""
    lines = []
    for corpus in record.corpora:
        rows = [row for row in record.rows if row.corpus == corpus.name]
        lines += [
            f"## {corpus.name}: {len(corpus.paths)} versions, {corpus.logical_bytes / 1e6:.1f} MB",
            "",
            "Dedup: the corpus by its different chunks, as this chunker cuts it.",
            "",
            "| kernel | of | MB/s | by SHA-1 at 8 KiB | dedup | mean chunk, bytes | settings |",
            f"|{'---|' * 7}",
        ]
        for row in rows:
            name = f"**{row.tool}**" if row.ours else row.tool
            cut = f"{cell(row.figures['reduction'], 3)} | {cell(row.figures['mean_chunk_bytes'])}"
            speeds = f"{cell(row.figures['mbps'])} | {cell(row.figures['by_sha1'], 2)}"
            lines.append(f"| {name} | {row.group} | {speeds} | {cut} | {row.settings} |")
        versions = dict.fromkeys(f"- {row.tool}: {row.version}" for row in rows if not row.ours)
        lines += ["", *versions, ""]
    return lines
