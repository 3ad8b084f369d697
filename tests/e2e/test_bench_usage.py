"""Test `nearkin bench`: errors are one line before any measurement, help has examples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from nearkin.cli import main
from nearkin.lab.corpora import KNOWN, find_corpora
from nearkin.lab.generated_data import text_like
from nearkin_shared.errors import BadInput
from tests.support.checks.lab_suites import environment, run, run_and_read_record


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
def test_unknown_corpus_names_known_ones(capfd: pytest.CaptureFixture[str], tmp_path: Path, room: str) -> None:
    message = refused(capfd, room, "--corpus", "botocor", "--out", tmp_path / "out")
    for name in ("botocor", "botocore", "rdb", "vm-debian", "vm-synthetic", "mutated", "folder"):
        assert name in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("room", "known"),
    [
        ("store", ("restic", "borg", "borg-fine", "kopia", "zstd-long", "zstd-long-9", "nearkin@PROFILE")),
        ("pairs", ("xdelta3-command", "zstd-patch-from")),
        ("kernels", ("openssl", "hashlib", "zstd-prefix")),
    ],
)
def test_unknown_peer_names_known_ones(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, room: str, known: tuple[str, ...]
) -> None:
    message = refused(capfd, room, "--peers", "tarsnap", "--out", tmp_path / "out")
    assert 'peer "tarsnap"' in message
    assert [name for name in known if name not in message] == []


def test_unknown_profile_names_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert "finesse-paper" in refused(capfd, "store", "--peers", "nearkin@fast")


def test_empty_folder_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.bin").touch()
    message = refused(capfd, "store", "--corpus", tmp_path / "empty", "--out", tmp_path / "out")
    assert "holds no file with anything in it" in message


def test_unwritable_output_is_refused_at_start(capfd: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path) -> None:
    """Refuse an output that cannot be written before anything is measured."""
    (tmp_path / "file").write_bytes(b"in the way")
    for option in ("--out", "--work"):
        words = ("--corpus", corpus, "--out", tmp_path / "out", option, tmp_path / "file")
        assert f'{option} "{tmp_path / "file"}"' in refused(capfd, "store", *words)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_unwritable_report_is_still_printed(corpus: Path, tmp_path: Path, options: list[str]) -> None:
    """Print the results although the report file cannot be written."""
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


def test_two_folders_of_one_name_are_refused(capfd: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(corpus, tmp_path / "tiny"))
    message = refused(capfd, "kernels", "-c", corpus, "-c", other, "--out", tmp_path / "out")
    assert 'corpus "tiny": two' in message


@pytest.mark.parametrize(
    ("arguments", "problem"),
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
def test_wrong_usage_is_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], problem: str
) -> None:
    out = ["--out", str(tmp_path / "out")] if len(arguments) > 1 else []
    assert problem in refused(capfd, *arguments, *out)
    assert not (tmp_path / "out").exists()


def test_empty_corpus_is_refused_at_start(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Refuse a corpus without content before a folder is made."""
    (tmp_path / "empty").mkdir()
    message = refused(capfd, "store", "-c", tmp_path / "empty", "--peers", "none", "--out", tmp_path / "out")
    assert "holds no file with anything in it" in message
    assert not (tmp_path / "out").exists()


def test_bench_makes_its_own_stores(capfd: pytest.CaptureFixture[str], tmp_path: Path, corpus: Path) -> None:
    code = main(["--store", str(tmp_path), "bench", "kernels", "--corpus", str(corpus)])
    assert code == 2
    assert "leave out --store" in capfd.readouterr().err


@pytest.mark.parametrize("peers", ["none", "nearkin-embedded@archive"])
def test_bad_setting_is_refused_at_start(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path, peers: str
) -> None:
    """Refuse an invalid setting before anything is measured."""
    monkeypatch.setenv("NEARKIN_DELTA__MAX_DEPTH", "99")
    message = refused(capfd, "store", "--corpus", corpus, "--peers", peers, "--out", tmp_path / "out")
    assert 'delta.max_depth "99"' in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("room", ["store", "pairs", "kernels"])
def test_settings_file_is_never_ignored(
    capfd: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path, room: str
) -> None:
    code = main(
        ["--config", str(tmp_path / "none.toml"), "bench", room, "-c", str(corpus), "-o", str(tmp_path / "out")]
    )
    assert code == 2
    assert "none.toml" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_chart_without_matplotlib_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    """Refuse an explicit chart by name without matplotlib; else leave charts out."""
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    message = refused(capfd, "kernels", "--corpus", corpus, "--chart", "svg", "--out", tmp_path)
    assert "pip install 'nearkin[bench]'" in message
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


@pytest.mark.parametrize("room", ["store", "pairs", "kernels", "trees"])
def test_suite_help_has_an_example(capfd: pytest.CaptureFixture[str], room: str) -> None:
    assert main(["bench", room, "--help"]) == 0
    text = capfd.readouterr().out
    assert f"\n  nearkin bench {room} " in text


def test_help_names_the_default_version_count(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """State in the help how many versions are measured by default."""
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


def test_kernels_write_nothing_and_take_no_folder_for_it(
    capfd: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    words = ("--corpus", corpus, "--out", tmp_path / "out", "--work", tmp_path / "work")
    assert "No such option '--work'" in refused(capfd, "kernels", *words)


def test_lab_is_imported_by_a_suite_only() -> None:
    """Import the lab only when a suite runs."""
    script = (
        "import nearkin.cli.commands, sys; print([name for name in sys.modules if '.lab' in name or name == 'numpy'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == "[]\n"


def test_nearkin_failure_in_process_is_one_line(tmp_path: Path) -> None:
    """Report a failure of Nearkin in this process in one line."""
    (tmp_path / "file").write_bytes(b"no store")
    worker = [sys.executable, "-m", "nearkin.lab.tools.embedded_nearkin", str(tmp_path / "file")]
    done = subprocess.run(worker, capture_output=True, text=True, env=environment(), input="", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"nearkin: store {tmp_path / 'file'}: is a file; name a folder\n"


@pytest.mark.parametrize("peer", ["nearkin", "nearkin-embedded"])
def test_version_may_have_any_name(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["-", "-a", "a\tb", "c\nd", os.fsdecode(b"e\xff")]
    folder = tmp_path / "odd"
    folder.mkdir()
    for number, name in enumerate(names):
        (folder / name).write_bytes(text_like(5_000, number))
    monkeypatch.chdir(folder)
    record = run_and_read_record(
        tmp_path / "out", "store", "-c", ".", "--runs", "1", "--peers", peer, "--chart", "none"
    )
    assert record["left_out"] == []
    assert len(record["corpora"][0]["files"]) == len(names)


@pytest.mark.parametrize("name", ["a$b_$c", "x$\\foo$", os.fsdecode(b"nu\xff"), "a|b\nc"])
def test_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "a").write_bytes(text_like(30_000, 1))
    done = run("pairs", "-c", tmp_path / name, "--runs", "1", "--peers", "none", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for line in (tmp_path / "out" / "pairs.md").read_text().splitlines():
        if line.startswith("|"):  # the three tables have 7, 3 and 9 columns
            assert line.replace("\\|", "").count("|") in (8, 4, 10), line


@pytest.mark.parametrize("words", ["", ",", "mutated,"])
def test_empty_name_is_not_the_current_folder(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"a" * 5_000)
    monkeypatch.chdir(tmp_path)
    done = run("pairs", "-c", words, "--versions", "1", "--runs", "1", "--peers", "none", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert 'corpus ""' in done.stderr


def test_row_named_twice_runs_once() -> None:
    from nearkin.lab.tools.peer_tools import choose_peers

    assert len(choose_peers(["nearkin@archive", "nearkin@archive"])) == 1
