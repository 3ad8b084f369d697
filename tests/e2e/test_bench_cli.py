"""`nearkin bench`: every room runs for real over a tiny folder."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from nearkin.lab.measurement_record import RECORD_FORMAT
from nearkin.lab.report import KINDS
from tests.support.checks.lab_suites import VERSIONS, command, environment, run_and_read_record
from tests.support.checks.waiting import until

SPREAD = {"median", "low", "high", "values"}


def rows_of(record: dict[str, Any], group: str) -> dict[str, dict[str, Any]]:
    return {row["tool"]: row["figures"] for row in record["rows"] if row["group"] == group}


def check_common(record: dict[str, Any], room: str, corpus: Path, runs: int) -> None:
    assert record["format"] == RECORD_FORMAT
    assert (record["room"], record["runs"]) == (room, runs)
    assert record["command"].startswith("nearkin bench ")
    assert record["machine"]["cpu"]
    total_bytes = sum(path.stat().st_size for path in corpus.iterdir())
    assert record["corpora"] == [
        {"name": "tiny", "files": [f"{number}.bin" for number in range(VERSIONS)], "logical_bytes": total_bytes}
    ]
    assert set(record["sha1_8k_mbps"]) == SPREAD
    assert len(record["sha1_8k_mbps"]["values"]) == runs
    for row in record["rows"]:
        for name, figure in row["figures"].items():
            if figure is not None:
                assert set(figure) == SPREAD, name
                assert figure["low"] <= figure["median"] <= figure["high"]
                assert figure["low"] >= 0


def check_pictures(out: Path, room: str, names: list[str]) -> None:
    """Check that both charts are pictures.

    The SVG names every tool; the PNG decodes to its last pixel and is not blank.
    """
    from PIL import Image

    text = "".join(ElementTree.parse(out / f"{room}.svg").getroot().itertext())
    assert [name for name in names if name not in text] == []
    with Image.open(io.BytesIO((out / f"{room}.png").read_bytes())) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10


def installed_peer_setting() -> str | None:
    """One setting of one other store that is installed."""
    settings = {"borg": "borg-fine", "restic": "restic-max", "kopia": "kopia-fine"}
    return next((setting for program, setting in settings.items() if shutil.which(program)), None)


# ------------------------------------------------------------------ the rooms


@pytest.mark.soak
def test_store_measures_ours_and_every_peer_that_is_installed(corpus: Path, tmp_path: Path) -> None:
    peer_setting = installed_peer_setting()
    solid = shutil.which("zstd") is not None
    peers = ",".join([*([peer_setting] if peer_setting else ["borg-fine"]), "zstd-long"])
    record = run_and_read_record(tmp_path, "store", "--corpus", corpus, "--runs", "1", "--peers", peers)
    check_common(record, "store", corpus, 1)
    rows = rows_of(record, "store")
    ran = [
        "nearkin",
        "nearkin-embedded",
        "nearkin-embedded@archive",
        *([peer_setting] if peer_setting else []),
        *(["zstd-long", "zstd-long-9"] if solid else []),
    ]
    assert list(rows) == ran
    logical_bytes = record["corpora"][0]["logical_bytes"]
    for name, figures in rows.items():
        assert figures["reduction"]["median"] == pytest.approx(logical_bytes / figures["stored_bytes"]["median"]), name
        assert figures["put_mbps"]["low"] > 0
        assert figures["get_oldest_mbps"]["low"] > 0
        assert 0 < figures["put_mbps"]["median"] <= 1.1 * figures["put_cpu_mbps"]["median"]  # one core: never less time
        assert (figures["put_again_mbps"] is None) == name.startswith("zstd-long")
        assert figures["upkeep_seconds"] is None
    assert rows["nearkin"]["reduction"]["median"] > 2
    if solid:
        assert rows["zstd-long"]["reduction"]["median"] > 2
    text = (tmp_path / "store.md").read_text()
    assert [name for name in ran if f"| {name} |" not in text and f"| **{name}** |" not in text] == []
    check_pictures(tmp_path, "store", ran)


@pytest.mark.soak
def test_store_suite_upkeep_is_timed_apart(corpus: Path, tmp_path: Path) -> None:
    """Do upkeep after every few versions and count it in no speed."""
    peer_setting = [found] if (found := installed_peer_setting()) else []
    peers = ",".join(["nearkin", "nearkin-embedded", *peer_setting, "zstd-long"])
    words = ("--corpus", corpus, "--runs", "1", "--upkeep-every", "2", "--peers", peers)
    rows = rows_of(run_and_read_record(tmp_path, "store", *words), "store")
    for name in ("nearkin", "nearkin-embedded", *peer_setting):
        assert rows[name]["upkeep_seconds"]["low"] > 0, name
    assert all(figures["upkeep_seconds"] is None for name, figures in rows.items() if name.startswith("zstd"))
    assert "Seconds of all upkeep, which is in no speed: nearkin " in (tmp_path / "store.md").read_text()


@pytest.mark.soak
def test_pairs_measures_algorithms_and_codecs(corpus: Path, tmp_path: Path) -> None:
    record = run_and_read_record(tmp_path, "pairs", "--corpus", corpus, "--runs", "1", "--warmups", "0", "--pairs", "4")
    check_common(record, "pairs", corpus, 1)
    efficiency = rows_of(record, "efficiency")
    assert set(efficiency) == {"ntransform", "finesse", "odess"}
    assert all(figures["dcr"]["median"] > 1 for figures in efficiency.values())
    assert all(0.5 < figures["dce"]["median"] < 1 for figures in efficiency.values())
    assert {"finesse, scalar", "finesse, vector", "odess, vector"} <= set(rows_of(record, "features"))
    codecs = rows_of(record, "codecs")
    own = {"xdelta3", "xdelta3-9", "zstd-prefix", "zstd-alone"}
    programs = {"xdelta3-command": "xdelta3", "zstd-patch-from": "zstd"}
    assert set(codecs) == own | {name for name, program in programs.items() if shutil.which(program)}
    assert {one["tool"] for one in record["left_out"]} == {*programs} - {*codecs}
    assert all(figures["pairs"]["median"] == 4 for figures in codecs.values())
    assert codecs["xdelta3"]["reduction"]["median"] > codecs["zstd-alone"]["reduction"]["median"]
    if "xdelta3-command" in codecs:  # the same code with the same settings: its header differs by a few bytes at most
        ours, theirs = (codecs[name]["delta_bytes"]["median"] for name in ("xdelta3", "xdelta3-command"))
        assert abs(ours - theirs) <= 4 * 16
    assert "| tiny | xdelta3 | finesse |" in (tmp_path / "pairs.md").read_text()
    check_pictures(tmp_path, "pairs", list(codecs))


@pytest.mark.soak
def test_kernels_measures_every_kernel_by_openssls_sha1(corpus: Path, tmp_path: Path) -> None:
    words = ("--runs", "2", "--warmups", "0", "--peers", "hashlib,zstd-prefix")
    record = run_and_read_record(tmp_path, "kernels", "--corpus", corpus, *words)
    check_common(record, "kernels", corpus, 2)
    chunkers = rows_of(record, "chunking")
    assert {"fastcdc", "leastcdc", "rabin", "inck"} <= set(chunkers)
    assert all(len(figures["mbps"]["values"]) == 2 for figures in chunkers.values())
    assert all(figures["reduction"]["median"] > 1.2 for figures in chunkers.values())
    assert all(2048 < figures["mean_chunk_bytes"]["median"] < 65536 for figures in chunkers.values())
    assert {"sha1", "sha1 + tags", "hashlib"} <= set(rows_of(record, "hashes"))
    assert {"finesse", "odess", "ntransform"} <= set(rows_of(record, "features"))
    assert {"xdelta3 encode", "xdelta3 decode", "zstd-prefix"} <= set(rows_of(record, "deltas"))
    names = [row["tool"] for row in record["rows"]]
    assert all(row["figures"]["by_sha1"]["low"] > 0 for row in record["rows"])
    text = (tmp_path / "kernels.md").read_text()
    assert [name for name in names if f" {name} |" not in text and f"**{name}**" not in text] == []
    check_pictures(tmp_path, "kernels", names)


def test_kernels_other_build_runs_next_to_ours(corpus: Path, tmp_path: Path) -> None:
    """Measure the kernels of another build next to this one's."""
    from nearkin_shared.kernels.native import _features

    built = Path(_features.__file__).parent
    words = ("--runs", "1", "--warmups", "0", "--peers", "none", "--chart", "none", "--against", built)
    record = run_and_read_record(tmp_path, "kernels", "--corpus", corpus, *words)
    figures = {row["tool"]: row["figures"] for row in record["rows"]}
    for name in ("sha1", "finesse", "odess", "ntransform", "fastcdc", "rabin", "inck"):
        ours, theirs = (figures[one]["bytes_handled"]["median"] for one in (name, f"{name} (against)"))
        assert ours == theirs


def test_peer_not_installed_is_skipped_with_hint(corpus: Path, tmp_path: Path) -> None:
    """Leave out a peer that is not installed; the result names how to install it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("cat", "sync"):
        (programs / name).symlink_to(str(shutil.which(name)))
    words = ("--versions", "1", "--runs", "1", "--peers", "nearkin,restic,borg-fine", "--chart", "none")
    record = run_and_read_record(tmp_path, "store", "--corpus", corpus, *words, PATH=str(programs))
    assert [row["tool"] for row in record["rows"]] == ["nearkin"]
    left_out = {one["tool"]: one for one in record["left_out"]}
    assert set(left_out) == {"restic", "restic-max", "borg-fine"}
    assert left_out["borg-fine"]["why"] == "borg is not installed"
    assert "apt install borgbackup" in left_out["borg-fine"]["remedy"]
    assert "apt install restic" in (tmp_path / "store.md").read_text()
    assert not (tmp_path / "store.svg").exists()


def test_peer_with_wrong_bytes_is_not_in_table(corpus: Path, tmp_path: Path) -> None:
    """Leave out a peer that restores other bytes."""
    fake = tmp_path / "bin" / "zstd"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\ncase "$1" in --version) echo 1;; -d) printf wrong;; *) cat;; esac\n')
    fake.chmod(0o755)
    path = os.pathsep.join([str(fake.parent), os.environ["PATH"]])
    words = ("--versions", "1", "--runs", "1", "--peers", "nearkin,zstd-long", "--chart", "none")
    record = run_and_read_record(tmp_path, "store", "--corpus", corpus, *words, PATH=path)
    assert [row["tool"] for row in record["rows"]] == ["nearkin"]
    assert [one["why"] for one in record["left_out"]] == [
        f"tiny: {name}: version 1 differs after the restore" for name in ("zstd-long", "zstd-long-9")
    ]


BROKEN = {
    "cannot be run": b"no program",
    "prints no text": b"#!/bin/sh\nprintf '\\377\\n'\nexit 1\n",
    "writes nothing": b"#!/bin/sh\nexit 0\n",
}


@pytest.mark.parametrize(("room", "program"), [("store", "borg"), ("pairs", "xdelta3")])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_peer_broken_is_left_out(corpus: Path, tmp_path: Path, room: str, program: str, content: bytes) -> None:
    fake = tmp_path / "bin" / program
    fake.parent.mkdir()
    fake.write_bytes(content)
    fake.chmod(0o755)
    path = os.pathsep.join([str(fake.parent), os.environ["PATH"]])
    peers = {"store": "nearkin-embedded,borg-fine", "pairs": "xdelta3-command"}[room]
    words = ("--versions", "2", "--runs", "1", "--warmups", "0", "--peers", peers, "--chart", "none")
    record = run_and_read_record(tmp_path, room, "--corpus", corpus, *words, PATH=path)
    (left_out,) = record["left_out"]
    assert left_out["tool"] == peers.rpartition(",")[2]
    assert record["rows"]


def test_profile_is_a_row_of_its_own(corpus: Path, tmp_path: Path) -> None:
    words = ("--versions", "1", "--runs", "1", "--peers", "nearkin@finesse-paper", "--chart", "none")
    record = run_and_read_record(tmp_path, "store", "--corpus", corpus, *words)
    assert [(row["tool"], row["settings"]) for row in record["rows"]] == [
        ("nearkin@finesse-paper", "profile finesse-paper")
    ]


def test_row_names_changed_settings(corpus: Path, tmp_path: Path) -> None:
    words = ("--versions", "1", "--runs", "1", "--peers", "nearkin,nearkin-embedded@archive", "--chart", "none")
    changed = {"NEARKIN_DELTA__CODEC": "none", "NEARKIN_STORE": "elsewhere"}
    record = run_and_read_record(tmp_path, "store", "--corpus", corpus, *words, **changed)
    labels = ["default; delta.codec=none", "profile archive, one process; delta.codec=none"]
    assert [row["settings"] for row in record["rows"]] == labels
    text = (tmp_path / "store.md").read_text()
    assert [one for one in labels if one not in text] == []


def test_terminal_shows_table_and_progress_bar(corpus: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 4096):
                seen.append(part)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    words = command(
        "kernels",
        "--corpus",
        corpus,
        "--runs",
        "1",
        "--warmups",
        "0",
        "--peers",
        "none",
        "--chart",
        "svg",
        "--out",
        tmp_path,
    )
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=theirs, env=environment(TERM="xterm"), timeout=240)
    os.close(theirs)
    reader.join(60)
    os.close(ours)
    assert done.returncode == 0
    assert b"| **fastcdc** |" in done.stdout
    shown = b"".join(seen).decode()
    assert "bench kernels" in shown
    assert "━" in shown
    assert f"written: {tmp_path / 'kernels.md'}" in "".join(shown.split("\r\n"))
    assert not (tmp_path / "kernels.png").exists()


def test_terminated_run_keeps_finished_passes(corpus: Path, tmp_path: Path) -> None:
    """Keep the finished passes of a terminated run; leave no store and no process."""
    work = tmp_path / "work"
    work.mkdir()
    words = command(
        "store", "--corpus", corpus, "--runs", "99", "--peers", "nearkin", "--work", work, "--out", tmp_path
    )
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(
            lambda: (tmp_path / "store.json").exists() and list(work.glob("nearkin-bench-*/repository")),
            poll_seconds=0.02,
        )
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (143, b"nearkin: terminated\n")
    assert list(work.iterdir()) == []
    rows = json.loads((tmp_path / "store.json").read_text())["rows"]
    assert [row["tool"] for row in rows] == ["nearkin"]

    def remaining_pids() -> list[int]:
        return [one.pid for one in psutil.process_iter(["cmdline"]) if str(work) in str(one.info["cmdline"])]

    until(lambda: not remaining_pids(), remaining_pids)  # one that was killed is there for a moment


@pytest.mark.parametrize(("chart", "leftover"), [("none", set()), ("svg", {"svg"})])
def test_charts_of_an_earlier_run_are_replaced_or_removed(
    corpus: Path, tmp_path: Path, chart: str, leftover: set[str]
) -> None:
    for name in ("pairs.svg", "pairs.png", "kernels.svg"):
        (tmp_path / name).write_bytes(b"old")
    words = ("--versions", "2", "--runs", "1", "--warmups", "0", "--peers", "none", "--chart", chart)
    run_and_read_record(tmp_path, "pairs", "--corpus", corpus, *words)
    charts = {path.suffix[1:]: path.read_bytes() for path in tmp_path.glob("pairs.*") if path.suffix[1:] in KINDS}
    assert set(charts) == leftover
    assert b"old" not in charts.values()
    assert (tmp_path / "kernels.svg").read_bytes() == b"old"
