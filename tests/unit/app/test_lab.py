"""Test the parts of the lab.

Figures, names of peers and corpora, pairs, rows of kernels, generated corpora.
"""

from __future__ import annotations

import os
import shutil
import warnings
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest

from nearkin.lab import corpora, disk_images, similar_chunks
from nearkin.lab.corpus_cache import MissingTool
from nearkin.lab.measure import OUTPUT_BYTES_MAX, CommandFailed, choose_core, first_line, pin_to_core, run, run_short
from nearkin.lab.measurement_record import Corpus, LeftOut, MeasurementRecord, Row, Spread, cell, spread
from nearkin.lab.mutated_files import mutated_files
from nearkin.lab.suites import kernel_cases, store_suite
from nearkin.lab.suites.pairs_suite import sample_pairs
from nearkin.lab.tools import nearkin_tool, peer_tools, rust_fastcdc
from nearkin.lab.tools.base_tool import MissingPeer
from nearkin.lab.tools.solid_zstd import ZstdLong
from nearkin_shared.errors import BadInput, ConfigError, RetryableError
from nearkin_shared.kernels import chunking
from tests.support.checks.waiting import until

# ------------------------------------------------------------------ figures


def test_figure_shows_median_and_half_its_range() -> None:
    assert Spread((90.0, 100.0, 120.0)).text() == "100 ±15 %"
    assert Spread((4.0,)).text(2) == "4.00"
    assert Spread((0.0, 0.0)).text() == "0"


def test_figure_that_a_tool_lacks_is_none_and_not_zero() -> None:
    assert spread([None, None]) is None
    assert cell(spread([None])) == "-"
    assert spread([1, None, 3]) == Spread((1.0, 3.0))


# ------------------------------------------------------------------ measuring


def test_pinned_block_uses_one_core_and_restores_the_mask() -> None:
    before = os.sched_getaffinity(0)
    with pin_to_core(choose_core(None)):
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before


def test_several_files_are_joined_on_standard_input(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one ")
    (tmp_path / "b").write_bytes(b"two")
    cost = run(["cat"], os.environ, stdin=[tmp_path / "a", tmp_path / "b"], stdout=tmp_path / "c", sync=tmp_path)
    assert (tmp_path / "c").read_bytes() == b"one two"
    assert 0 < cost.sync_seconds < cost.seconds
    assert cost.peak_bytes > 0


def test_failed_command_is_reported_with_its_last_line(tmp_path: Path) -> None:
    for sync in (tmp_path, None):
        with pytest.raises(CommandFailed, match="exit 3: no room"):
            run(["sh", "-c", "echo start; echo no room >&2; exit 3"], os.environ, sync=sync)
    with pytest.raises(CommandFailed, match=r"exit 3: x+$") as found:
        run(["sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x >&2; exit 3"], os.environ)
    assert len(str(found.value)) < 2 * OUTPUT_BYTES_MAX


def test_command_over_its_time_limit_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearkin.lab.measure.COMMAND_SECONDS_MAX", 0.2)
    with pytest.raises(CommandFailed, match="exit -9"):
        run(["sleep", "60"], os.environ, sync=tmp_path)


def test_hung_command_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    pid.touch()
    for seconds in (1.0, 5.0, 25.0):  # the shell has started by then, if the machine is not busy
        monkeypatch.setattr("nearkin.lab.measure.ANSWER_SECONDS_MAX", seconds)
        with pytest.raises(CommandFailed, match="did not end within"):
            run_short(["sh", "-c", "sleep 300 & echo $! > pid; wait"], tmp_path)
        if pid.read_text():
            break
    child = int(pid.read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_missing_command_or_binary_output_is_no_error(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"no program")
    program.chmod(0o755)
    with pytest.raises(CommandFailed, match="Exec format error"):
        run_short([str(program)])
    assert first_line(run_short(["printf", r"\n1.2 \377\033[1m\nmore\n"])) == "1.2 \N{REPLACEMENT CHARACTER}\\x1b[1m"


# ------------------------------------------------------------------ peers


def test_version_without_text_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kopia = tmp_path / "kopia"
    kopia.write_text("#!/bin/sh\necho '0.21.1 build: -(unknown_revision) from:'\n")
    kopia.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert peer_tools.Kopia.version() == "0.21.1"


def test_nearkin_is_added_unless_it_is_named() -> None:
    always = ["nearkin", "nearkin-embedded", "nearkin-embedded@archive"]
    assert [peer.name for peer in peer_tools.choose_peers(["borg-fine"])] == [*always, "borg-fine"]
    assert [peer.name for peer in peer_tools.choose_peers(["zstd-long", "nearkin"])] == [
        "nearkin",
        "zstd-long",
        "zstd-long-9",
    ]


def test_profile_adds_row_with_its_environment(tmp_path: Path) -> None:
    (peer,) = peer_tools.choose_peers(["nearkin-embedded@finesse-paper"])
    assert (peer.name, peer.settings) == ("nearkin-embedded@finesse-paper", "profile finesse-paper, one process")
    assert peer(tmp_path).environment["NEARKIN_PROFILE"] == "finesse-paper"
    with pytest.raises(ConfigError, match="finesse-paper"):
        peer_tools.choose_peers(["nearkin@nothing"])


def test_row_of_settings_file_lists_its_settings(tmp_path: Path) -> None:
    """A file that a put would refuse is refused."""
    file = tmp_path / "own.toml"
    file.write_text('[delta]\nmax_depth = 2\n[features]\nalgorithm = "odess"\n')
    peer = nearkin_tool.as_set(nearkin_tool.NearkinEmbedded, file)
    shown = {part.strip() for part in peer.settings.replace(";", ",").split(",")}
    assert shown >= {"settings of own.toml", "one process", "delta.max_depth=2", "features.algorithm=odess"}
    file.write_text("[delta]\nmax_depth = 99\n")
    with pytest.raises(ConfigError, match=r"delta\.max_depth"):
        nearkin_tool.as_set(nearkin_tool.Nearkin, file)


def test_peer_works_in_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stops(nearkin_tool.Nearkin):
        def create(self) -> None:
            assert self.folder.parent == tmp_path / "work"
            raise CommandFailed(f"works in {self.folder}")

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandFailed, match=f"works in {tmp_path}"):
        store_suite.measure(Stops, Corpus("none", []), Path("work"), None)


def test_unreadable_archive_reports_the_reason(tmp_path: Path) -> None:
    if shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    peer = ZstdLong(tmp_path)
    peer.create()
    (tmp_path / "version").write_bytes(b"one")
    peer.put_history([tmp_path / "version"])
    (peer.repository / "archive.zst").write_bytes(b"no archive")
    with pytest.raises(CommandFailed, match=r"exit 1: .*unsupported format"):
        peer.get(1, tmp_path / "target")


def test_peers_have_install_hints_and_unique_names() -> None:
    found = [peer for settings in peer_tools.PEERS.values() for peer in settings]
    assert len({peer.name for peer in found}) == len(found)
    assert all("install" in peer.install for peer in found)


# ------------------------------------------------------------------ corpora


def test_known_name_is_a_corpus_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mutated").mkdir()
    (tmp_path / "own,name").mkdir()
    monkeypatch.chdir(tmp_path)
    assert corpora.check_names(["mutated,rdb", "own,name", "./mutated"]) == ["mutated", "rdb", "own,name", "./mutated"]
    with pytest.raises(BadInput, match="holds no file"):
        corpora.find_corpora(["./mutated"], None)


def test_folder_files_are_versions_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty").touch()
    (tmp_path / "below").mkdir()
    (corpus,) = corpora.find_corpora([str(tmp_path)], None)
    assert [path.name for path in corpus.paths] == ["a", "b", "c"]
    assert corpus.logical_bytes == 3
    (corpus,) = corpora.find_corpora([str(tmp_path)], 2)
    assert len(corpus.paths) == 2


def test_corpus_is_generated_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))
    (corpus,) = corpora.find_corpora(["mutated"], 1)
    assert (corpus.name, [path.name for path in corpus.paths]) == ("mutated", ["0000.bin"])
    assert corpus.paths[0].is_relative_to(tmp_path)


def test_failed_corpus_reports_reason_and_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(RetryableError, match=r"mutated: .*vm-synthetic and mutated"):
        corpora.find_corpora(["mutated"], 1)
    with pytest.raises(RetryableError, match=r"mutated: [A-Z][a-z ]+: .*file.*; NEARKIN_CACHE names the folder"):
        corpora.find_corpora(["mutated"], 1)


def test_mutated_versions_are_reproducible(tmp_path: Path) -> None:
    first = mutated_files(3, tmp_path / "one", mebibytes=1, edits=3)
    again = mutated_files(3, tmp_path / "two", mebibytes=1, edits=3)
    contents = [path.read_bytes() for path in first]
    assert contents == [path.read_bytes() for path in again]
    assert len(set(contents)) == 3
    assert all(abs(len(content) - (1 << 20)) <= 3 * 64 * 2 for content in contents)
    assert mutated_files(4, tmp_path / "one", mebibytes=1, edits=3)[:3] == first
    assert [path.read_bytes() for path in first] == contents


def test_debian_image_without_root_names_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingTool, match=r"only root.*vm-synthetic"):
        disk_images.debian_images(1, tmp_path)
    with pytest.raises(BadInput, match="count 4"):
        disk_images.debian_images(4, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ pairs


def test_first_fit_takes_the_first_chunk_without_a_base() -> None:
    sketches = np.array([[1, 9, 5], [1, 2, 3], [7, 2, 5], [0, 0, 0], [0, 0, 0], [8, 2, 6]], dtype=np.uint64)
    # 1 shares with 0; 2 shares with 1, which has a base, and with 0; 5 shares with 1 and 2 alone, both have one
    assert similar_chunks.first_fit(sketches).tolist() == [-1, 0, 0, -1, -1, -1]


def test_sample_of_pairs_is_even_and_unique() -> None:
    payload = np.arange(100, dtype=np.uint8)
    offsets = np.arange(0, 100, 10, dtype=np.uint64)
    chunks = similar_chunks.Chunks(payload, offsets, np.full(10, 10, dtype=np.uint32))
    numbers = np.arange(1, 10)
    pairs = similar_chunks.ChunkPairs(chunks.take(numbers), chunks.take(np.zeros(9, dtype=np.int64)))
    sample = sample_pairs({"one": pairs, "other": pairs}, 3)
    assert sample.targets.offsets.tolist() == [10, 50, 90]
    assert len(sample_pairs({"one": pairs, "other": pairs}, 100)) == 9
    assert sample.bases.slices() == [bytes(range(10))] * 3


# ------------------------------------------------------------------ kernels


def test_kernel_row_measures_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "KERNELS", dict(kernel_cases.KERNELS))
    (tmp_path / "version").write_bytes(bytes(100_000))

    @kernel_cases.kernel("crc32", group="hashes", settings="zlib")
    def _crc32(material: kernel_cases.Material) -> kernel_cases.PreparedRow:
        return kernel_cases.timed_row(lambda: zlib.crc32(material.data), len(material.data))

    row = kernel_cases.KERNELS["crc32"]
    prepared = row.prepare(kernel_cases.Material(Corpus("zeros", [tmp_path / "version"])))
    assert prepared.bytes_handled == 100_000
    assert prepared.once() > 0
    with pytest.raises(AssertionError, match="crc32"):
        kernel_cases.kernel("crc32", group="hashes")(_crc32)


def test_rust_crate_cuts_equal_bytes_by_its_own_clock(tmp_path: Path) -> None:
    (tmp_path / "version").write_bytes(np.random.default_rng(2).bytes(3_000_000))
    material = kernel_cases.Material(Corpus("random", [tmp_path / "version"]))
    try:
        prepared = kernel_cases.KERNELS[rust_fastcdc.NAME].prepare(material)
    except (MissingPeer, CommandFailed) as missing:  # no cargo, or no network
        pytest.skip(str(missing))
    assert prepared.bytes_handled == 3_000_000
    assert prepared.mean_chunk_bytes is not None
    assert 4096 < prepared.mean_chunk_bytes < 16384
    assert 1e-5 < prepared.once() < 10


def test_rust_crate_without_cargo_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingPeer, match="cargo is not installed"):
        rust_fastcdc.built()


def test_dedup_of_chunker_is_corpus_by_unique_chunks(tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(200_000)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(data)
    material = kernel_cases.Material(Corpus("same", sorted(tmp_path.iterdir())))
    ratio, mean_bytes = material.dedup(chunking.fastcdc_cut)
    assert ratio == pytest.approx(3)
    assert mean_bytes == material.mean_chunk_bytes(chunking.fastcdc_cut)
    assert 2048 <= mean_bytes <= 65536


def test_leastcdc_is_compared_at_the_mean_chunk_of_fastcdc(tmp_path: Path) -> None:
    (tmp_path / "version").write_bytes(np.random.default_rng(3).bytes(4_000_000))
    material = kernel_cases.Material(Corpus("random", [tmp_path / "version"]))
    prepared = kernel_cases.KERNELS["leastcdc, fastcdc's mean"].prepare(material)
    wanted_bytes = material.mean_chunk_bytes(chunking.fastcdc_cut)
    assert prepared.mean_chunk_bytes == pytest.approx(wanted_bytes, rel=0.02)
    assert prepared.version.startswith("target ")


def test_ratio_is_shown_with_its_range_over_runs() -> None:
    def row(tool: str, ours: bool, *values: float) -> Row:
        figures: dict[str, Spread | None] = dict.fromkeys([*store_suite.MEASURED, "first_put_mbps"], Spread((1.0,)))
        return Row("c", "store", tool, "", "1", ours, figures | {"put_mbps": Spread(values)})

    peer = row("slow", False, 10, 10, 10), row("fast", False, 100, 80, 50)
    assert "| put all, MB/s | 80.0 (fast) | 120.0 | 1.50 (1.00 to 3.00) |" in store_suite._by_best(
        [row("mine", True, 100, 120, 150), *peer]
    )
    assert "| put all, MB/s | 80.0 (fast) | 110.0 | 1.38 |" in store_suite._by_best(
        [row("mine", True, 100, 120), *peer]
    )


def test_skipped_tool_is_reported_once() -> None:
    absent = LeftOut("kopia", "kopia is not installed", "build it")
    record = MeasurementRecord(
        "store", "nearkin bench store", 0, 3, 0, [], left_out=[absent, LeftOut("borg", "ended with 2"), absent]
    )
    shown = record.as_json()["left_out"]
    assert isinstance(shown, list)
    assert [one["tool"] for one in shown] == ["kopia", "borg"]


def test_chart_labels_stay_in_their_panel_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tools have one reduction and speed.

    One tool far below moves the others to the upper edge.
    """
    chart = pytest.importorskip("nearkin.lab.report_charts")
    pytest.importorskip("matplotlib")
    path = tmp_path / "1"
    path.write_bytes(b"x")
    tools = {"zstd-long": (128, 6.0), "zstd-9": (122, 6.0), "nearkin": (120, 5.9), "borg": (124, 5.9), "far": (9, 1)}
    rows = []
    for tool, (mbps, reduction) in tools.items():
        figures = {"put_mbps": spread([mbps]), "get_newest_mbps": spread([mbps]), "reduction": spread([reduction])}
        rows.append(Row("c", "store", tool, "default", "1", tool == "nearkin", figures))
    from matplotlib.text import Text

    panels, spread_labels = [], chart._spread_labels
    monkeypatch.setattr(chart, "_spread_labels", lambda place: (spread_labels(place), panels.append(place)))
    chart.draw(MeasurementRecord("store", "nearkin bench store", 0, 1, 0, [Corpus("c", [path])], rows=rows), ("png",))
    assert len(panels) == 2
    for panel in panels:
        for text in panel.texts:
            text.update_positions(panel.figure.canvas.get_renderer())
        frame = panel.get_window_extent()
        boxes = [Text.get_window_extent(text) for text in panel.texts]  # an annotation's own box includes its line
        assert [box for box in boxes if box.y0 < frame.y0 or box.y1 > frame.y1] == []
        assert not [(a, b) for number, a in enumerate(boxes) for b in boxes[:number] if a.overlaps(b)]


def test_file_names_are_standard_json(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.bin"))
    path.write_bytes(b"x")
    assert Corpus("c", [path]).as_json()["files"] == ["a\\xff.bin"]


def test_corpus_name_without_glyphs_is_drawn_silently(tmp_path: Path) -> None:
    """Letters that the font lacks cause no warning."""
    chart = pytest.importorskip("nearkin.lab.report_charts")
    pytest.importorskip("matplotlib")
    path = tmp_path / "1"
    path.write_bytes(b"x")
    figures = {name: spread([2.0]) for name in ("put_mbps", "get_newest_mbps", "reduction")}
    rows = [Row("コーパス 🎉", "store", "nearkin", "default", "1", True, figures)]
    record = MeasurementRecord("store", "nearkin bench store", 0, 1, 0, [Corpus("コーパス 🎉", [path])], rows=rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = chart.draw(record, ("svg", "png"))
    assert "コーパス 🎉" in drawn["svg"].decode()
