"""`nearkin bench`: every room runs for real over a tiny folder, and what is wrong is told in one line."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import psutil
import pytest

from nearkin.cli import main
from nearkin.errors import BadInput
from nearkin.lab.corpora import KNOWN, find_corpora
from nearkin.lab.record import RECORD_FORMAT
from nearkin.lab.report import KINDS
from nearkin.testing.generated import mutated, random_bytes, records_like, text_like
from nearkin.testing.waiting import until

VERSIONS = 3
SPREAD = {"median", "low", "high", "values"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions") / "tiny"
    folder.mkdir()
    data = text_like(150_000, 1) + records_like(100_000, 2) + random_bytes(50_000, 3)
    for number in range(VERSIONS):
        (folder / f"{number}.bin").write_bytes(data)
        data = mutated(data, number, edits=8)
    return folder


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "nearkin.cli", "bench", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_")}
    kernels = {name: os.environ[name] for name in ("NEARKIN_KERNELS", "NEARKIN_CPU") if name in os.environ}
    return {**kept, **kernels, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    words = command(*arguments)
    return subprocess.run(words, capture_output=True, text=True, env=environment(**more), timeout=240, check=False)


def recorded(out: Path, room: str, *arguments: str | Path, **more: str) -> dict[str, Any]:
    """Run a room, and return its record: the one of --json is the one in the file."""
    done = run(room, "--out", out, "--json", *arguments, **more)
    assert (done.returncode, done.stderr) == (0, "")
    record: dict[str, Any] = json.loads(done.stdout)
    in_file = json.loads((out / f"{room}.json").read_text())
    assert {**in_file, "time": None} == {**record, "time": None}
    return record


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
    """Both charts are pictures: the SVG names every tool, the PNG decodes to its last pixel and is not blank."""
    from PIL import Image

    text = "".join(ElementTree.parse(out / f"{room}.svg").getroot().itertext())
    assert [name for name in names if name not in text] == []
    with Image.open(io.BytesIO((out / f"{room}.png").read_bytes())) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10


def a_store_beside_us() -> str | None:
    """One setting of one other store that is installed."""
    settings = {"borg": "borg-fine", "restic": "restic-max", "kopia": "kopia-fine"}
    return next((setting for program, setting in settings.items() if shutil.which(program)), None)


# ------------------------------------------------------------------ the rooms


def test_store_measures_ours_and_every_peer_that_is_installed(corpus: Path, tmp_path: Path) -> None:
    beside = a_store_beside_us()
    solid = shutil.which("zstd") is not None
    peers = ",".join([*([beside] if beside else ["borg-fine"]), "zstd-long"])
    record = recorded(tmp_path, "store", "--corpus", corpus, "--runs", "1", "--peers", peers)
    check_common(record, "store", corpus, 1)
    rows = rows_of(record, "store")
    ran = [
        "nearkin",
        "nearkin-embedded",
        "nearkin-embedded@archive",
        *([beside] if beside else []),
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


def test_upkeep_is_done_after_every_few_versions_and_is_in_no_speed(corpus: Path, tmp_path: Path) -> None:
    beside = [found] if (found := a_store_beside_us()) else []
    peers = ",".join(["nearkin", "nearkin-embedded", *beside, "zstd-long"])
    words = ("--corpus", corpus, "--runs", "1", "--upkeep-every", "2", "--peers", peers)
    rows = rows_of(recorded(tmp_path, "store", *words), "store")
    for name in ("nearkin", "nearkin-embedded", *beside):
        assert rows[name]["upkeep_seconds"]["low"] > 0, name
    assert all(figures["upkeep_seconds"] is None for name, figures in rows.items() if name.startswith("zstd"))
    assert "Seconds of all upkeep, which is in no speed: nearkin " in (tmp_path / "store.md").read_text()


def test_pairs_measures_algorithms_and_codecs(corpus: Path, tmp_path: Path) -> None:
    record = recorded(tmp_path, "pairs", "--corpus", corpus, "--runs", "1", "--warmups", "0", "--pairs", "4")
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


def test_kernels_measures_every_kernel_by_openssls_sha1(corpus: Path, tmp_path: Path) -> None:
    words = ("--runs", "2", "--warmups", "0", "--peers", "hashlib,zstd-prefix")
    record = recorded(tmp_path, "kernels", "--corpus", corpus, *words)
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


def test_kernels_of_another_build_run_beside_ours(corpus: Path, tmp_path: Path) -> None:
    from nearkin.kernels import _features

    built = Path(_features.__file__).parent
    words = ("--runs", "1", "--warmups", "0", "--peers", "none", "--chart", "none", "--against", built)
    record = recorded(tmp_path, "kernels", "--corpus", corpus, *words)
    figures = {row["tool"]: row["figures"] for row in record["rows"]}
    for name in ("sha1", "finesse", "odess", "ntransform", "fastcdc", "rabin", "inck"):
        ours, theirs = (figures[one]["bytes_handled"]["median"] for one in (name, f"{name} (against)"))
        assert ours == theirs


def test_a_peer_that_is_not_installed_is_left_out_and_the_answer_says_how_to_get_it(
    corpus: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("cat", "sync"):
        (programs / name).symlink_to(str(shutil.which(name)))
    words = ("--versions", "1", "--runs", "1", "--peers", "nearkin,restic,borg-fine", "--chart", "none")
    record = recorded(tmp_path, "store", "--corpus", corpus, *words, PATH=str(programs))
    assert [row["tool"] for row in record["rows"]] == ["nearkin"]
    left_out = {one["tool"]: one for one in record["left_out"]}
    assert set(left_out) == {"restic", "restic-max", "borg-fine"}
    assert left_out["borg-fine"]["why"] == "borg is not installed"
    assert "apt install borgbackup" in left_out["borg-fine"]["remedy"]
    assert "apt install restic" in (tmp_path / "store.md").read_text()
    assert not (tmp_path / "store.svg").exists()


def test_a_peer_that_gives_other_bytes_back_is_not_in_the_table(corpus: Path, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "zstd"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\ncase "$1" in --version) echo 1;; -d) printf wrong;; *) cat;; esac\n')
    fake.chmod(0o755)
    path = os.pathsep.join([str(fake.parent), os.environ["PATH"]])
    words = ("--versions", "1", "--runs", "1", "--peers", "nearkin,zstd-long", "--chart", "none")
    record = recorded(tmp_path, "store", "--corpus", corpus, *words, PATH=path)
    assert [row["tool"] for row in record["rows"]] == ["nearkin"]
    assert [one["why"] for one in record["left_out"]] == [
        f"tiny: {name}: version 1 came back changed" for name in ("zstd-long", "zstd-long-9")
    ]


BROKEN = {
    "cannot be run": b"no program",
    "says no text": b"#!/bin/sh\nprintf '\\377\\n'\nexit 1\n",
    "writes nothing": b"#!/bin/sh\nexit 0\n",
}


@pytest.mark.parametrize(("room", "program"), [("store", "borg"), ("pairs", "xdelta3")])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_peer_that_is_broken_is_left_out(
    corpus: Path, tmp_path: Path, room: str, program: str, content: bytes
) -> None:
    fake = tmp_path / "bin" / program
    fake.parent.mkdir()
    fake.write_bytes(content)
    fake.chmod(0o755)
    path = os.pathsep.join([str(fake.parent), os.environ["PATH"]])
    peers = {"store": "nearkin-embedded,borg-fine", "pairs": "xdelta3-command"}[room]
    words = ("--versions", "2", "--runs", "1", "--warmups", "0", "--peers", peers, "--chart", "none")
    record = recorded(tmp_path, room, "--corpus", corpus, *words, PATH=path)
    (left_out,) = record["left_out"]
    assert left_out["tool"] == peers.rpartition(",")[2]
    assert record["rows"]


def test_a_profile_is_a_row_of_its_own(corpus: Path, tmp_path: Path) -> None:
    words = ("--versions", "1", "--runs", "1", "--peers", "nearkin@finesse-paper", "--chart", "none")
    record = recorded(tmp_path, "store", "--corpus", corpus, *words)
    assert [(row["tool"], row["settings"]) for row in record["rows"]] == [
        ("nearkin@finesse-paper", "profile finesse-paper")
    ]


def test_a_row_tells_which_settings_were_changed(corpus: Path, tmp_path: Path) -> None:
    words = ("--versions", "1", "--runs", "1", "--peers", "nearkin,nearkin-embedded@archive", "--chart", "none")
    changed = {"NEARKIN_DELTA__CODEC": "none", "NEARKIN_STORE": "elsewhere"}
    record = recorded(tmp_path, "store", "--corpus", corpus, *words, **changed)
    told = ["default; delta.codec=none", "profile archive, one process; delta.codec=none"]
    assert [row["settings"] for row in record["rows"]] == told
    text = (tmp_path / "store.md").read_text()
    assert [one for one in told if one not in text] == []


def test_a_terminal_gets_the_table_and_a_bar(corpus: Path, tmp_path: Path) -> None:
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


def test_a_terminated_run_leaves_its_finished_rounds_and_no_store_and_no_process(corpus: Path, tmp_path: Path) -> None:
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
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, b"nearkin: terminated\n")
    assert list(work.iterdir()) == []
    rows = json.loads((tmp_path / "store.json").read_text())["rows"]
    assert [row["tool"] for row in rows] == ["nearkin"]

    def left() -> list[int]:
        return [one.pid for one in psutil.process_iter(["cmdline"]) if str(work) in str(one.info["cmdline"])]

    until(lambda: not left(), left)  # one that was killed is there for a moment


@pytest.mark.parametrize(("chart", "left"), [("none", set()), ("svg", {"svg"})])
def test_charts_of_an_earlier_run_are_replaced_or_removed(
    corpus: Path, tmp_path: Path, chart: str, left: set[str]
) -> None:
    for name in ("pairs.svg", "pairs.png", "kernels.svg"):
        (tmp_path / name).write_bytes(b"old")
    words = ("--versions", "2", "--runs", "1", "--warmups", "0", "--peers", "none", "--chart", chart)
    recorded(tmp_path, "pairs", "--corpus", corpus, *words)
    charts = {path.suffix[1:]: path.read_bytes() for path in tmp_path.glob("pairs.*") if path.suffix[1:] in KINDS}
    assert set(charts) == left
    assert b"old" not in charts.values()
    assert (tmp_path / "kernels.svg").read_bytes() == b"old"


# ------------------------------------------------------------------ wrong usage


def refused(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run in this process; return the one line that says why not."""
    code = main(["bench", *map(str, arguments)])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("nearkin: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEARKIN_STORE", "NEARKIN_SERVER", "NEARKIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("room", ["store", "pairs", "kernels"])
def test_an_unknown_corpus_is_answered_with_the_known_ones(capfd, tmp_path: Path, room: str) -> None:
    said = refused(capfd, room, "--corpus", "botocor", "--out", tmp_path / "out")
    for name in ("botocor", "botocore", "rdb", "vm-debian", "vm-synthetic", "mutated", "folder"):
        assert name in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("room", "known"),
    [
        ("store", ("restic", "borg", "borg-fine", "kopia", "zstd-long", "zstd-long-9", "nearkin@PROFILE")),
        ("pairs", ("xdelta3-command", "zstd-patch-from")),
        ("kernels", ("openssl", "hashlib", "zstd-prefix")),
    ],
)
def test_an_unknown_peer_is_answered_with_the_known_ones(capfd, tmp_path: Path, room: str, known) -> None:
    said = refused(capfd, room, "--peers", "tarsnap", "--out", tmp_path / "out")
    assert 'peer "tarsnap"' in said
    assert [name for name in known if name not in said] == []


def test_an_unknown_profile_is_answered_with_the_known_ones(capfd) -> None:
    assert "finesse-paper" in refused(capfd, "store", "--peers", "nearkin@fast")


def test_an_empty_folder_is_refused(capfd, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.bin").touch()
    said = refused(capfd, "store", "--corpus", tmp_path / "empty", "--out", tmp_path / "out")
    assert "holds no file with anything in it" in said


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(capfd, corpus, tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    for option in ("--out", "--work"):
        words = ("--corpus", corpus, "--out", tmp_path / "out", option, tmp_path / "file")
        assert f'{option} "{tmp_path / "file"}"' in refused(capfd, "store", *words)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_cannot_be_written_is_printed_all_the_same(corpus: Path, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "store.md").mkdir()
    words = ("--versions", "1", "--runs", "2", "--peers", "nearkin-embedded", "--chart", "none", *options)
    done = run("store", "--corpus", corpus, "--out", tmp_path, *words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].count(f"{tmp_path / 'store.md'}: Is a directory") == 1
    assert done.stderr.count("\n") == (1 if options else 2)  # once while it measures, once in the end
    if options:
        assert len(json.loads(done.stdout)["rows"][0]["figures"]["put_mbps"]["values"]) == 2
    else:
        assert "| **nearkin-embedded** |" in done.stdout


def test_two_folders_of_one_name_are_refused(capfd, corpus: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(corpus, tmp_path / "tiny"))
    said = refused(capfd, "kernels", "-c", corpus, "-c", other, "--out", tmp_path / "out")
    assert 'corpus "tiny": two' in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["store", "--versions", "11"], "botocore has at most 10"),
        (["store", "--versions", "0"], "0 is not in the range"),
        (["store", "--runs", "100"], "100 is not in the range"),
        (["kernels", "--core", "4000"], "--core 4000: choose one of"),
        (["kernels", "--against", "/"], "holds 0 built files of _fingerprint"),
        (["pairs", "--pairs", "0"], "0 is not in the range"),
        (["pairs", "--chart", "gif"], "'svg', 'png', 'none'"),
        (["stores"], "No such command 'stores'"),
    ],
)
def test_wrong_usage_is_one_line(capfd, tmp_path: Path, arguments: list[str], says: str) -> None:
    out = ["--out", str(tmp_path / "out")] if len(arguments) > 1 else []
    assert says in refused(capfd, *arguments, *out)
    assert not (tmp_path / "out").exists()


def test_a_corpus_with_nothing_in_it_is_refused_before_a_folder_is_made(capfd, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = refused(capfd, "store", "-c", tmp_path / "empty", "--peers", "none", "--out", tmp_path / "out")
    assert "holds no file with anything in it" in said
    assert not (tmp_path / "out").exists()


def test_bench_makes_its_own_stores(capfd, tmp_path: Path, corpus: Path) -> None:
    code = main(["--store", str(tmp_path), "bench", "kernels", "--corpus", str(corpus)])
    assert code == 2
    assert "leave out --store" in capfd.readouterr().err


@pytest.mark.parametrize("peers", ["none", "nearkin-embedded@archive"])
def test_a_setting_that_is_refused_is_refused_before_anything_is_measured(
    capfd, monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path, peers: str
) -> None:
    monkeypatch.setenv("NEARKIN_DELTA__MAX_DEPTH", "99")
    said = refused(capfd, "store", "--corpus", corpus, "--peers", peers, "--out", tmp_path / "out")
    assert 'delta.max_depth "99"' in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("room", ["store", "pairs", "kernels"])
def test_a_settings_file_is_never_ignored(capfd, corpus: Path, tmp_path: Path, room: str) -> None:
    code = main(
        ["--config", str(tmp_path / "none.toml"), "bench", room, "-c", str(corpus), "-o", str(tmp_path / "out")]
    )
    assert code == 2
    assert "none.toml" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_a_chart_is_refused_by_name_and_else_left_out(
    capfd, monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    said = refused(capfd, "kernels", "--corpus", corpus, "--chart", "svg", "--out", tmp_path)
    assert "pip install 'nearkin[bench]'" in said
    words = [
        "kernels",
        "--corpus",
        str(corpus),
        "--runs",
        "1",
        "--warmups",
        "0",
        "--peers",
        "none",
        "--out",
        str(tmp_path),
    ]
    assert main(["bench", *words]) == 0
    assert "pip install 'nearkin[bench]'" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.json", "kernels.md"]


@pytest.mark.parametrize("room", ["store", "pairs", "kernels"])
def test_every_room_teaches_by_example(capfd, room: str) -> None:
    assert main(["bench", room, "--help"]) == 0
    text = capfd.readouterr().out
    assert f"\n  nearkin bench {room} " in text


def test_help_tells_how_many_versions_are_taken_where_nothing_is_said(capfd, tmp_path: Path) -> None:
    assert main(["bench", "store", "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split()).replace("- ", "-")
    assert f"[all of a folder; {', '.join(f'{name} {known.versions}' for name, known in KNOWN.items())}]" in shown
    for number in range(8):
        (tmp_path / f"{number}.bin").write_bytes(b"some bytes")
    for room, at_most in (("pairs", 5), ("kernels", 3)):
        assert main(["bench", room, "--help"]) == 0
        assert f"versions of each [at most {at_most}]." in " ".join(capfd.readouterr().out.split())
        with patch("nearkin.lab.corpora.find_corpora", side_effect=BadInput("seen")) as find:
            assert "seen" in refused(capfd, room, "--corpus", tmp_path, "--out", tmp_path / "out")
        assert [len(corpus.paths) for corpus in find_corpora(*find.call_args.args)] == [at_most]


def test_kernels_write_nothing_and_take_no_folder_for_it(capfd, corpus: Path, tmp_path: Path) -> None:
    words = ("--corpus", corpus, "--out", tmp_path / "out", "--work", tmp_path / "work")
    assert "No such option '--work'" in refused(capfd, "kernels", *words)


def test_the_lab_is_not_imported_until_a_room_runs() -> None:
    script = (
        "import nearkin.cli.commands, sys; print([name for name in sys.modules if '.lab' in name or name == 'numpy'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == "[]\n"


def test_a_failure_of_nearkin_in_one_process_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no store")
    worker = [sys.executable, "-m", "nearkin.lab.embedded", str(tmp_path / "file")]
    done = subprocess.run(worker, capture_output=True, text=True, env=environment(), input="", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"nearkin: store {tmp_path / 'file'}: is a file; name a folder\n"


@pytest.mark.parametrize("peer", ["nearkin", "nearkin-embedded"])
def test_a_version_may_have_any_name(peer: str, tmp_path: Path, monkeypatch) -> None:
    names = ["-", "-a", "a\tb", "c\nd", os.fsdecode(b"e\xff")]
    folder = tmp_path / "odd"
    folder.mkdir()
    for number, name in enumerate(names):
        (folder / name).write_bytes(text_like(5_000, number))
    monkeypatch.chdir(folder)
    record = recorded(tmp_path / "out", "store", "-c", ".", "--runs", "1", "--peers", peer, "--chart", "none")
    assert record["left_out"] == []
    assert len(record["corpora"][0]["files"]) == len(names)


@pytest.mark.parametrize("name", ["a$b_$c", "x$\\foo$", os.fsdecode(b"nu\xff"), "a|b\nc"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "a").write_bytes(text_like(30_000, 1))
    done = run("pairs", "-c", tmp_path / name, "--runs", "1", "--peers", "none", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for line in (tmp_path / "out" / "pairs.md").read_text().splitlines():
        if line.startswith("|"):  # the three tables have 7, 3 and 9 columns
            assert line.replace("\\|", "").count("|") in (8, 4, 10), line


@pytest.mark.parametrize("words", ["", ",", "mutated,"])
def test_an_empty_name_is_not_the_folder_one_stands_in(words: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a").write_bytes(b"a" * 5_000)
    monkeypatch.chdir(tmp_path)
    done = run("pairs", "-c", words, "--versions", "1", "--runs", "1", "--peers", "none", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert 'corpus ""' in done.stderr


def test_a_row_that_is_named_twice_runs_once() -> None:
    from nearkin.lab.peers import choose_peers

    assert len(choose_peers(["nearkin@archive", "nearkin@archive"])) == 1
