"""Test the engine's metrics on an embedded gateway's /metrics.

The gateway is a process of its own, so all counters start at 0.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.checks.commands import new_store
from tests.support.checks.waiting import until
from tests.support.data.samples import noise

LEVELS = ("fresh", "segment", "chunk", "batch", "zero")
POLICIES = ("none", "first-fit", "locality")
Metric = Callable[[str], float]
DATA = noise(3_000_000, "engine metrics").tobytes()
NEXT = bytes(DATA[place] ^ (place % 4099 == 0) for place in range(len(DATA)))
"""A byte every 4,099 is another: no chunk is known, each is similar."""


@pytest.fixture(scope="module")
def served_metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Metric]]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "nearkin.toml").write_text("[monitor]\nport = 0\n[gc]\ninterval_seconds = 60\ngrace_seconds = 60\n")
    new_store(folder / "store")
    log = folder / "log"
    command = [sys.executable, "-m", "nearkin.cli", "serve", str(folder / "store"), "--port", "0", "--no-token"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--config", str(folder / "nearkin.toml")], stdout=out, stderr=out)
    try:

        def find_urls() -> tuple[set[str], set[str]] | None:
            assert process.poll() is None, log.read_text()
            text = log.read_text()
            urls = set(re.findall(r"http://127\.0\.0\.1:\d+\b(?!/metrics)", text))
            monitors = set(re.findall(r"(http://127\.0\.0\.1:\d+)/metrics", text))
            return (urls - monitors, monitors) if monitors and urls - monitors else None

        listening = until(find_urls, log.read_text)
        assert listening is not None
        (url,), (monitor,) = listening

        def metric(line: str) -> float:
            shown = httpx.get(f"{monitor}/metrics", timeout=10).text
            at = re.search(rf"^{re.escape(line)} (\S+)$", shown, re.MULTILINE)
            assert at is not None, f"{line} is not shown"
            return float(at[1])

        with httpx.Client(base_url=url, timeout=60) as client:
            for name, body in (("a", DATA), ("a", DATA), ("b", NEXT), ("zero", bytes(1_000_000))):
                assert client.put(f"/v1/blobs/{name}", content=body).status_code == 201
            yield client, metric
    finally:
        process.terminate()
        process.wait(60)


def test_bytes_are_shown_after_each_step(served_metrics: tuple[httpx.Client, Metric]) -> None:
    _, metric = served_metrics
    sent = 3 * len(DATA) + 1_000_000
    assert metric('nearkin_bytes_total{after="in"}') == sent
    after = [metric(f'nearkin_bytes_total{{after="{name}"}}') for name in ("in", "dedup", "delta", "stored")]
    assert after[0] > after[1] > after[2]
    assert after[2] < after[3] < 1.02 * after[2]  # noise is not compressed; directories and manifests come on top
    assert after[1] == 2 * len(DATA)
    assert after[2] < 1.2 * len(DATA)


def test_each_byte_is_shown_at_the_level_that_dropped_it(served_metrics: tuple[httpx.Client, Metric]) -> None:
    _, metric = served_metrics
    shown = {name: metric(f'nearkin_dedup_bytes_total{{level="{name}"}}') for name in LEVELS}
    assert shown["segment"] == len(DATA)  # the second `a`
    assert shown["fresh"] == 2 * len(DATA)
    assert shown["zero"] == 1_000_000
    assert metric('nearkin_dedup_segments_total{level="segment"}') > 0
    assert sum(metric(f'nearkin_dedup_chunks_total{{level="{name}"}}') for name in LEVELS) == sum(
        metric(f'nearkin_chunks_total{{kind="{kind}"}}') for kind in ("duplicate", "delta", "raw")
    )


def test_base_sources_and_depths_are_shown(served_metrics: tuple[httpx.Client, Metric]) -> None:
    """Show the sources of bases and the depths of chunks."""
    _, metric = served_metrics
    bases = {name: metric(f'nearkin_base_chunks_total{{policy="{name}"}}') for name in POLICIES}
    deltas = metric('nearkin_chunks_total{kind="delta"}')
    assert bases["locality"] + bases["first-fit"] == deltas > 0
    assert bases["none"] == metric('nearkin_chunks_total{kind="raw"}') == metric('nearkin_chunk_depth_bucket{le="0"}')
    assert metric('nearkin_chunk_depth_bucket{le="1"}') == metric("nearkin_chunk_depth_count") == bases["none"] + deltas
    assert metric("nearkin_chunk_depth_sum") == deltas
    assert sum(metric(f'nearkin_base_bytes_total{{policy="{name}"}}') for name in POLICIES) == 2 * len(DATA)


def test_stages_queues_index_and_caches_are_shown(served_metrics: tuple[httpx.Client, Metric]) -> None:
    _, metric = served_metrics
    for stage in ("chunker", "dedup", "resemblance", "delta", "commit"):
        assert metric(f'nearkin_stage_seconds_count{{stage="{stage}"}}') > 0
        assert 0 < metric(f'nearkin_stage_seconds_sum{{stage="{stage}"}}') < 600
    for queue in ("reduce", "commit"):
        assert metric(f'nearkin_queue_items{{queue="{queue}"}}') == 0
    assert metric('nearkin_uploads_waiting{queue="writer"}') == 0
    assert metric('nearkin_index_lookups_total{found="yes",table="segments"}') > 0
    assert metric('nearkin_index_lookups_total{found="no",table="chunks"}') > 100
    assert metric('nearkin_index_lookups_total{found="no",table="features"}') > 100
    assert metric('nearkin_index_bytes{index="lmdb"}') >= 32 * 1024
    for cache in ("blocks", "directories"):
        assert metric(f'nearkin_cache_entries{{cache="{cache}"}}') > 0
        assert metric(f'nearkin_cache_bytes{{cache="{cache}"}}') > 1000
    assert metric('nearkin_cache_lookups_total{cache="blocks",found="no"}') > 0
    assert metric('nearkin_cache_lookups_total{cache="directories",found="yes"}') > 0


def test_damage_and_garbage_are_counted_from_nothing(served_metrics: tuple[httpx.Client, Metric]) -> None:
    _, metric = served_metrics
    assert metric('nearkin_corrupt_total{where="restore"}') == 0
    assert metric("nearkin_scrub_damaged_total") == 0
    assert metric("nearkin_gc_freed_bytes_total") == 0
