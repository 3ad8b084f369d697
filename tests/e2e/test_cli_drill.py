"""`nearkin drill`: samples, comparisons, damage, signatures and exit codes."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from nearkin import drill, open_store
from nearkin_shared.errors import BadInput
from tests.support.checks.commands import InProcess, assert_refused
from tests.support.data.archives import archive_of, member
from tests.support.data.stores import SMALL, settings


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with 40 files, one with holes, a symlink and a hard link."""
    root = tmp_path / "source"
    for number in range(40):
        path = root / f"{number % 4}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(20_000))
    with (root / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(os.urandom(8192))
        file.truncate(5 << 20)
    (root / "link").symlink_to("0/0")
    os.link(root / "0" / "0", root / "zz")
    (root / "3").chmod(0o500)
    return root


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Path:
    with open_store(tmp_path / "store", create=True) as opened:
        opened.backup("home", [source])
        opened.put("blob", os.urandom(5_500_000))
    return tmp_path / "store"


def report_of(done: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.stdout)
    report: dict[str, Any] = document["report"]
    return report


def damage(store: Path, content: bytes) -> None:
    """Change a byte of content that is stored without compression."""
    for path in (store / "containers").rglob("*.nkc"):
        data = bytearray(path.read_bytes())
        at = data.find(content[:64])
        if at >= 0:
            data[at + 1000] ^= 1
            path.chmod(0o600)
            path.write_bytes(data)
            return
    raise AssertionError("no container has the content")


def test_everything_is_restored_and_compared(store: Path, source: Path, tmp_path: Path, call: InProcess) -> None:
    (tmp_path / "tmp").mkdir()
    done = call("--store", store, "drill", "home", "--all", "--compare", source, "--temporary", tmp_path / "tmp")
    report = report_of(done)
    assert done.returncode == 0
    assert b"not signed" in done.stderr
    assert (report["files"], report["bytes"], report["passed"]) == (41, 808_192, True)
    assert (report["version"], report["kind"], report["mismatches"], report["changed_since"]) == (1, "tree", [], 0)
    with open_store(store) as opened:
        assert report["tree_digest"] == f"blake3:{opened.tree('home').digest.hex()}"
    assert os.listdir(tmp_path / "tmp") == []


def test_sample_is_drawn_by_its_seed(store: Path, call: InProcess) -> None:
    first, again, other = (
        report_of(call("--store", store, "drill", "home", "--sample", "25%", "--seed", str(seed))) for seed in (1, 1, 2)
    )
    assert 0 < first["files"] < 30
    assert (first["files"], first["bytes"], first["sample"]) == (again["files"], again["bytes"], again["sample"])
    assert first["sample"] == {"share": 0.25, "files": None, "seed": 1}
    assert other["passed"]
    assert report_of(call("--store", store, "drill", "home@1", "--files", "7"))["files"] == 7
    assert report_of(call("--store", store, "drill", "home", "--sample", "0.000001"))["files"] == 1


def test_blob_is_restored_whole_or_by_pieces(store: Path, tmp_path: Path, call: InProcess) -> None:
    with open_store(store) as opened:
        (tmp_path / "blob").write_bytes(opened.get("blob").read())
    whole = report_of(call("--store", store, "drill", "blob", "--all", "--compare", tmp_path / "blob"))
    assert (whole["kind"], whole["bytes"], whole["passed"]) == ("blob", 5_500_000, True)
    part = report_of(call("--store", store, "drill", "blob", "--files", "2", "--compare", tmp_path / "blob"))
    assert part["passed"]
    assert part["bytes"] in (2 << 20, (1 << 20) + 5_500_000 % (1 << 20))
    (tmp_path / "blob").write_bytes(bytes(5_500_000))
    done = call("--store", store, "drill", "blob", "--compare", tmp_path / "blob")
    assert done.returncode == 5
    assert "differ from the source" in report_of(done)["mismatches"][0]["reason"]


def test_changed_source_is_counted_and_a_forged_one_is_named(store: Path, source: Path, call: InProcess) -> None:
    (source / "0" / "4").write_bytes(b"changed")
    (source / "0" / "8").unlink()
    status = (source / "1" / "1").stat()
    (source / "1" / "1").write_bytes(os.urandom(20_000))
    os.utime(source / "1" / "1", ns=(status.st_atime_ns, status.st_mtime_ns))
    done = call("--store", store, "drill", "home", "--all", "--compare", source)
    report = report_of(done)
    assert (done.returncode, report["changed_since"], report["passed"]) == (5, 2, False)
    assert [one["path"] for one in report["mismatches"]] == ["1/1"]


def test_drill_that_compares_nothing_does_not_pass(store: Path, source: Path, tmp_path: Path, call: InProcess) -> None:
    done = call("--store", store, "drill", "home", "--all", "--compare", source)
    report = report_of(done)
    assert (report["passed"], report["compared"], report["missing"]) == (True, report["files"], 0)
    (tmp_path / "elsewhere").mkdir()
    done = call("--store", store, "drill", "home", "--all", "--compare", tmp_path / "elsewhere")
    report = report_of(done)
    assert (done.returncode, report["passed"], report["compared"]) == (5, False, 0)
    assert report["missing"] == report["files"] > 0
    assert "nothing was compared" in report["mismatches"][0]["reason"]


def test_damage_is_named(tmp_path: Path, call: InProcess) -> None:
    """Name the files of the damaged block, and restore all others."""
    source, store = tmp_path / "large", tmp_path / "damaged"
    for number in range(24):
        path = source / f"{number % 4}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(500_000))
    with open_store(store, settings=settings(SMALL), create=True) as opened:
        opened.backup("home", [source])
    damage(store, (source / "2" / "10").read_bytes())
    done = call("--store", store, "drill", "home", "--all")
    report = report_of(done)
    assert (done.returncode, report["passed"]) == (5, False)
    assert "2/10" in [one["path"] for one in report["mismatches"]], report["mismatches"]
    assert report["files"] + report["mismatch_count"] == 24
    assert report["files"] > 12
    assert b"2/10: " in done.stderr


def test_damage_of_a_blob_is_named(store: Path, call: InProcess) -> None:
    with open_store(store) as opened:
        content = opened.get("blob").read()
    damage(store, content[2_000_000:2_010_000])
    done = call("--store", store, "drill", "blob", "--all")
    assert (done.returncode, report_of(done)["passed"]) == (5, False)


def test_signed_report_is_checked(store: Path, tmp_path: Path, call: InProcess) -> None:
    key, path = tmp_path / "drill.key", tmp_path / "report.json"
    assert call("drill", "--create-key", key).returncode == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert_refused(call("drill", "--create-key", key), 2, "file exists")
    assert call("--store", store, "drill", "home", "--sign-key", key, "-o", path).returncode == 0
    checking = ("drill", "--check", path, "--public-key", f"{key}.pub")
    done = call(*checking)
    assert (done.returncode, json.loads(done.stdout)["signature"], json.loads(done.stdout)["passed"]) == (
        0,
        "valid",
        True,
    )
    document = json.loads(path.read_text())
    for name, value in (("files", 41), ("passed", False), ("seconds", 0.1), ("extra", 1)):
        changed = {**document, "report": {**document["report"], name: value}}
        path.write_text(json.dumps(changed))
        assert_refused(call(*checking), 5, "was changed after it was signed")
    path.write_text(json.dumps({**document, "signature": None}))
    assert_refused(call(*checking), 5, "has no signature")
    path.write_text(json.dumps(document).replace('"key": "home"', '"key": "home", "key": "home"'))
    assert_refused(call(*checking), 2, "a name occurs twice")
    path.write_text(json.dumps(document))
    assert call("drill", "--create-key", tmp_path / "other").returncode == 0
    other = call("drill", "--check", path, "--public-key", tmp_path / "other.pub")
    assert_refused(other, 5, "another key signed it")
    assert_refused(call("drill", "--check", path), 2, "--public-key")


def test_signed_report_of_damage_is_a_failure(store: Path, source: Path, tmp_path: Path, call: InProcess) -> None:
    key, path = tmp_path / "drill.key", tmp_path / "report.json"
    assert call("drill", "--create-key", key).returncode == 0
    damage(store, (source / "2" / "10").read_bytes())
    assert call("--store", store, "drill", "home", "--all", "--sign-key", key, "-o", path).returncode == 5
    done = call("drill", "--check", path, "--public-key", f"{key}.pub")
    assert (done.returncode, json.loads(done.stdout)["passed"]) == (5, False)


def test_wrong_usage_is_refused(store: Path, tmp_path: Path, call: InProcess) -> None:
    (tmp_path / "text").write_bytes(b"text")
    for arguments, code, reason in (
        ((), 2, "name a KEY"),
        (("home", "--all", "--files", "1"), 2, "name one of them"),
        (("home", "--compare", tmp_path / "missing"), 2, "no such file or folder"),
        (("home", "--sign-key", tmp_path / "text"), 2, "is no private key"),
        (("home", "--temporary", tmp_path / "missing"), 2, "temporary folder"),
        (("home:/0",), 2, "leave out :/PATH"),
        (("nothing",), 4, "nothing"),
        (("home@9",), 4, "version 9"),
    ):
        assert_refused(call("--store", store, "drill", *arguments), code, reason)


def test_drill_of_deep_folders_leaves_nothing_behind(store: Path, tmp_path: Path, call: InProcess) -> None:
    """1,500 levels, which `shutil.rmtree` cannot remove, and paths longer than the kernel takes."""
    archive = archive_of([("d/" * 1500 + "file", b"deep"), (member("d/d/no entry", type=tarfile.DIRTYPE, mode=0), b"")])
    with open_store(store) as opened:
        opened.import_tar("deep", io.BytesIO(archive))
    (tmp_path / "tmp").mkdir()
    done = call("--store", store, "drill", "deep", "--all", "--temporary", tmp_path / "tmp")
    assert (done.returncode, report_of(done)["files"], report_of(done)["passed"]) == (0, 1, True)
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("fails", [True, False])
def test_drill_error_is_kept_if_its_folder_stays(
    fails: bool, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A temporary folder that cannot be removed replaces no error of the drill; a warning names it."""
    removed = os.rmdir

    def rmdir(path: bytes | str, *, dir_fd: int | None = None) -> None:
        if os.path.basename(os.fsencode(path)).startswith(b"nearkin-drill-"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        removed(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir)
    monkeypatch.setattr(drill, "CHOSEN_MAX", 1 if fails else 100)
    options = drill.DrillOptions(share=0.999, temporary=tmp_path)
    wanted = "sample: has more than 1 files" if fails else "cannot be removed: Device or resource busy"
    with open_store(store) as opened, pytest.raises(BadInput, match=wanted):
        drill.run_drill(opened, "home", 1, options, drill.DrillCounts())
    assert ("temporary folder not removed" in caplog.text) == fails
