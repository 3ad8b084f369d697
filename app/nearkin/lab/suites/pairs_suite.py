"""Compare feature algorithms and delta codecs over pairs of similar chunks.

    DCR  bytes of fresh chunks / (bytes of chunks kept whole + bytes of deltas)
    DCE  1 - bytes of deltas / bytes of the chunks they stand for

Three tables: how well each feature algorithm finds pairs (the Finesse paper's Table 3), how fast its super-features
are computed (Figure 4), and the results of each delta codec on a sample of the pairs that any of them found.

Invariant: algorithms are compared over the same fresh chunks, codecs over the same pairs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nearkin.lab.delta_codecs import OWN, PEERS, Codec, Xdelta3, ZstdPrefix
from nearkin.lab.measure import CommandFailed, RunPlan, Steps, pin_to_core, sha1_mbps
from nearkin.lab.measurement_record import Corpus, LeftOut, MeasurementRecord, Row, cell, speed, spread, table_cell_name
from nearkin.lab.similar_chunks import APPROACHES, SPEEDS, ChunkPairs, Chunks, find_pairs, fresh_chunks
from nearkin.lab.tools.base_tool import MissingPeer
from nearkin_shared.errors import BadInput, PermanentError
from nearkin_shared.kernels import features

SPEED_BYTES_MAX = 64 << 20  # of fresh chunks; far beyond any cache, and a run of all five takes seconds
EFFICIENCY, FEATURES, CODECS = "efficiency", "features", "codecs"
_TABLE_3_CODECS: tuple[type[Codec], ...] = (Xdelta3, ZstdPrefix)


def choose_codecs(names: Sequence[str]) -> list[type[Codec]]:
    """Return the codecs to run: those of this process, and the commands in `names`.

    Raises BadInput.
    """
    known: dict[str, type[Codec]] = {codec.name: codec for codec in PEERS}
    for name in names:
        if name not in known:
            raise BadInput(f'peer "{name}": choose {", ".join(known)}')
    return [*OWN, *(known[name] for name in dict.fromkeys(names))]


def run(
    corpora: Sequence[Corpus],
    codecs: Sequence[type[Codec]],
    plan: RunPlan,
    *,
    pairs_max: int,
    work: Path | None,
) -> MeasurementRecord:
    """Measure the feature algorithms and every codec that is installed over every corpus.

    pairs_max: how many pairs the codecs are compared over, taken evenly from all that were found.
    Raises PermanentError when a corpus has too few versions to hold a fresh chunk.
    """
    record = MeasurementRecord("pairs", plan.command, plan.core, plan.runs, plan.warmups, corpora)
    record.details = {"features_cpu_path": features.cpu_path(), "pairs_max": pairs_max, "chunks": {}}
    steps_each = len(APPROACHES) * len(_TABLE_3_CODECS) + len(SPEEDS) + len(codecs)
    with pin_to_core(plan.core):
        for number, corpus in enumerate(corpora):
            meter = _Meter(plan.steps, number * steps_each, len(corpora) * steps_each, corpus.name)
            _measure_corpus(record, corpus, codecs, pairs_max, work, meter)
    return record


class _Meter:
    """Counts the steps of all corpora together."""

    def __init__(self, steps: Steps | None, done: int, total: int, corpus: str) -> None:
        self._steps, self._done, self._total, self._corpus = steps, done, total, corpus

    def __call__(self, what: str) -> None:
        if self._steps:
            self._steps(self._done, self._total, f"{self._corpus}: {what}")
        self._done += 1


def _measure_corpus(
    record: MeasurementRecord,
    corpus: Corpus,
    codecs: Sequence[type[Codec]],
    pairs_max: int,
    work: Path | None,
    meter: _Meter,
) -> None:
    fresh = fresh_chunks(corpus.paths)
    if not len(fresh):
        raise PermanentError(f"{corpus.name}: no chunk in it")
    chunks = record.details["chunks"]
    assert isinstance(chunks, dict)
    chunks[corpus.name] = {"fresh_chunks": len(fresh), "fresh_bytes": fresh.total_bytes}
    found: dict[str, ChunkPairs] = {}
    for approach in APPROACHES:
        meter(f"pairs of {approach}")
        found[approach] = find_pairs(fresh, approach)
        with tempfile.TemporaryDirectory(dir=work, prefix="nearkin-bench-") as folder:
            for codec in _TABLE_3_CODECS:
                meter(f"{approach}, {codec.name}")
                record.rows.append(_efficiency(corpus, approach, fresh, found[approach], codec, Path(folder)))
    record.rows += _feature_speeds(record, corpus, fresh, meter)
    sample = sample_pairs(found, pairs_max)
    if not len(sample):
        record.left_out.append(LeftOut("codecs", f"{corpus.name}: no two similar chunks in it", "take more versions"))
        return
    for codec in codecs:
        meter(codec.name)
        try:
            with tempfile.TemporaryDirectory(dir=work, prefix="nearkin-bench-") as folder:
                row = _codec_row(record, corpus, codec, sample, Path(folder))
        except MissingPeer as missing:
            record.left_out.append(LeftOut(codec.name, str(missing), codec.install))
        except (CommandFailed, OSError) as error:  # OSError: it wrote no file
            record.left_out.append(LeftOut(codec.name, f"{corpus.name}: {error}"))
        else:
            record.rows.append(row)


def sample_pairs(found: dict[str, ChunkPairs], pairs_max: int) -> ChunkPairs:
    """Return at most `pairs_max` different pairs, taken evenly from those of all algorithms."""
    tables = [
        np.stack([pairs.targets.offsets, pairs.targets.lengths, pairs.bases.offsets, pairs.bases.lengths], axis=1)
        for pairs in found.values()
    ]
    table = np.unique(np.concatenate(tables).astype(np.uint64), axis=0)  # in the order of their targets
    if len(table) > pairs_max:
        table = table[np.linspace(0, len(table) - 1, num=pairs_max).astype(np.int64)]
    payload = next(iter(found.values())).targets.payload
    lengths = table[:, 1].astype(np.uint32), table[:, 3].astype(np.uint32)
    starts = table[:, 0].copy(), table[:, 2].copy()
    return ChunkPairs(Chunks(payload, starts[0], lengths[0]), Chunks(payload, starts[1], lengths[1]))


def _efficiency(
    corpus: Corpus, approach: str, fresh: Chunks, pairs: ChunkPairs, codec_class: type[Codec], folder: Path
) -> Row:
    lengths = codec_class(pairs, folder).encode()
    delta_bytes = int(lengths.sum(dtype=np.int64))
    before_bytes = pairs.targets.take(np.flatnonzero(lengths)).total_bytes
    fresh_bytes = fresh.total_bytes
    figures = {
        "dcr": spread([fresh_bytes / (fresh_bytes - before_bytes + delta_bytes)]),
        "dce": spread([1 - delta_bytes / before_bytes if before_bytes else 0.0]),
        "paired_chunks": spread([len(pairs)]),
        "refused_chunks": spread([len(pairs) - int(np.count_nonzero(lengths))]),
    }
    return Row(corpus.name, EFFICIENCY, approach, codec_class.name, "in this process", True, figures)


def _feature_speeds(record: MeasurementRecord, corpus: Corpus, fresh: Chunks, meter: _Meter) -> list[Row]:
    some = fresh.up_to(SPEED_BYTES_MAX)
    total_bytes = some.total_bytes
    speeds: dict[str, list[float]] = {name: [] for name in SPEEDS}
    by_sha1: dict[str, list[float]] = {name: [] for name in SPEEDS}
    for name in SPEEDS:
        meter(f"speed of {name}")
    for number in range(-record.warmups, record.runs):
        sha1 = sha1_mbps(clock=time.thread_time)
        if number >= 0:
            record.sha1_8k_mbps.append(sha1)
        for name, sketch in SPEEDS.items():
            started = time.thread_time()
            sketch(some.payload, some.offsets, some.lengths)
            mbps = total_bytes / (time.thread_time() - started) / 1e6
            if number >= 0:
                speeds[name].append(mbps)
                by_sha1[name].append(mbps / sha1)
    return [
        Row(
            corpus.name,
            FEATURES,
            name,
            "12 features, 3 super-features",
            "in this process",
            True,
            {"mbps": spread(speeds[name]), "by_sha1": spread(by_sha1[name])},
        )
        for name in SPEEDS
    ]


def _codec_row(
    record: MeasurementRecord, corpus: Corpus, codec_class: type[Codec], sample: ChunkPairs, folder: Path
) -> Row:
    codec = codec_class(sample, folder)
    target_bytes = sample.targets.total_bytes
    encodes, decodes, starts = [], [], []
    lengths = np.zeros(0, dtype=np.uint32)
    for number in range(-record.warmups, record.runs):
        start_seconds = codec.start_seconds()
        started = codec.clock()
        lengths = codec.encode()
        encoded = codec.clock()
        codec.decode()
        decoded = codec.clock()
        if number >= 0:
            encodes.append(encoded - started)
            decodes.append(decoded - encoded)
            starts.append(start_seconds)
    if wrong := codec.wrong():
        raise CommandFailed(f"{wrong} of {len(sample)} chunks were decoded to other bytes")
    kept = np.flatnonzero(lengths)
    kept_bytes = sample.targets.take(kept).total_bytes
    delta_bytes = int(lengths.sum(dtype=np.int64))
    figures = {
        "reduction": spread([target_bytes / (target_bytes - kept_bytes + delta_bytes)]),
        "dce": spread([1 - delta_bytes / kept_bytes if kept_bytes else 0.0]),
        "encode_mbps": spread(target_bytes / seconds / 1e6 for seconds in encodes),
        "decode_mbps": spread(kept_bytes / seconds / 1e6 for seconds in decodes) if len(kept) else None,
        "start_ms": spread(seconds * 1e3 for seconds in starts),
        "pairs": spread([len(sample)]),
        "refused": spread([len(sample) - len(kept)]),
        "target_bytes": spread([target_bytes]),
        "delta_bytes": spread([delta_bytes]),
    }
    return Row(corpus.name, CODECS, codec.name, codec.settings, codec.version(), codec.ours, figures)


def markdown(record: MeasurementRecord) -> list[str]:
    """Return the three tables."""
    chunks = record.details["chunks"]
    assert isinstance(chunks, dict)
    lines = [
        f"- {corpus.name}: {len(corpus.paths)} versions, {corpus.logical_bytes / 1e6:.1f} MB, of them"
        f" {chunks[corpus.name]['fresh_bytes'] / 1e6:.1f} MB fresh in {chunks[corpus.name]['fresh_chunks']} chunks"
        for corpus in record.corpora
        if corpus.name in chunks
    ]
    return [*lines, "", *_table_3(record), "", *_figure_4(record), "", *_codec_table(record), ""]


def _rows(record: MeasurementRecord, group: str) -> list[Row]:
    return [row for row in record.rows if row.group == group]


def _median(row: Row, name: str) -> float:
    figure = row.figures[name]
    assert figure is not None
    return figure.median


def _table_3(record: MeasurementRecord) -> list[str]:
    lines = [
        "## Pairs found (the Finesse paper's Table 3); percentages are against N-transform, as there",
        "",
        "| corpus | codec | approach | DCR | DCE | chunks with a base | of them refused |",
        f"|{'---|' * 7}",
    ]
    rows = _rows(record, EFFICIENCY)
    for row in rows:
        yard = next(one for one in rows if (one.corpus, one.settings) == (row.corpus, row.settings))
        dcr, dce = f"{_median(row, 'dcr'):.2f}", f"{_median(row, 'dce'):.4f}"
        if row is not yard and _median(yard, "dce"):
            dcr += f" ({_median(row, 'dcr') / _median(yard, 'dcr') - 1:+.2%})"
            dce += f" ({_median(row, 'dce') / _median(yard, 'dce') - 1:+.2%})"
        counts = f"{cell(row.figures['paired_chunks'])} | {cell(row.figures['refused_chunks'])}"
        lines.append(f"| {table_cell_name(row.corpus)} | {row.settings} | {row.tool} | {dcr} | {dce} | {counts} |")
    return lines


def _figure_4(record: MeasurementRecord) -> list[str]:
    rows = _rows(record, FEATURES)
    corpora = list(dict.fromkeys(row.corpus for row in rows))
    found = {(row.corpus, row.tool): row for row in rows}
    lines = [
        "## Speed of super-features, MB/s of fresh chunks (Figure 4), and by OpenSSL's SHA-1 at 8 KiB; processor time;"
        f" vector code is {record.details['features_cpu_path']}",
        "",
        f"| approach | {' | '.join(f'{table_cell_name(corpus)} | by SHA-1' for corpus in corpora)} |",
        f"|---|{'---|---|' * len(corpora)}",
    ]
    for name in SPEEDS:
        cells = (
            f"{speed(found[corpus, name].figures['mbps'])} | {cell(found[corpus, name].figures['by_sha1'], 2)}"
            for corpus in corpora
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for code in ("scalar", "vector"):
        ratios = (
            _median(found[corpus, f"finesse, {code}"], "mbps") / _median(found[corpus, f"ntransform, {code}"], "mbps")
            for corpus in corpora
        )
        lines.append(f"| finesse / ntransform, {code} | {' | '.join(f'{ratio:.2f} | ' for ratio in ratios)} |")
    return lines


def _codec_table(record: MeasurementRecord) -> list[str]:
    lines = [
        "## Delta codecs over a sample of those pairs; MB/s of targets",
        "",
        "By processor time. A command pays for a process a pair: `start` is what one of a byte each costs.",
        "Reduction counts refused chunks (their delta is no smaller) whole; DCE is over the others.",
        "",
        "| corpus | codec | pairs | refused | reduction | DCE | encode | decode | start, ms |",
        f"|{'---|' * 9}",
    ]
    rows = _rows(record, CODECS)
    for row in rows:
        counts = f"{cell(row.figures['pairs'])} | {cell(row.figures['refused'])}"
        ratios = f"{cell(row.figures['reduction'], 2)} | {cell(row.figures['dce'], 4)}"
        speeds = f"{speed(row.figures['encode_mbps'])} | {speed(row.figures['decode_mbps'])}"
        start = cell(row.figures["start_ms"], 1) if _median(row, "start_ms") else "-"
        name = f"**{row.tool}**" if row.ours else row.tool
        lines.append(f"| {table_cell_name(row.corpus)} | {name} | {counts} | {ratios} | {speeds} | {start} |")
    tool_lines = dict.fromkeys(f"- {row.tool}: {row.version}; {row.settings}" for row in rows)
    return [*lines, "", *tool_lines]
