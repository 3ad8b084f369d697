"""`nearkin restore`: versions, paths, policies, patterns, reports and exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin_shared.errors import Corrupt
from tests.support.checks.commands import InProcess, assert_refused, drawn_on_terminal, environment


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with two versions of the tree `home`, and the blob `blob`."""
    folder = tmp_path_factory.mktemp("trees")
    home = folder / "home"
    (home / "etc" / "empty").mkdir(parents=True)
    (home / "a.txt").write_bytes(b"first")
    (home / "etc" / "fstab").write_bytes(b"f" * 3000)
    (home / "etc" / "link").symlink_to("fstab")
    for path in (home / "a.txt", home / "etc" / "fstab"):
        os.utime(path, ns=(10**18, 10**18))
    with open_store(folder / "store", create=True) as opened:
        opened.backup("home", [home])
        (home / "a.txt").write_bytes(b"second version")
        opened.backup("home", [home])
        opened.put("blob", b"blob")
    return folder / "store"


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_restore_writes_the_newest_version(store: Path, tmp_path: Path, call: InProcess) -> None:
    target = tmp_path / "target"
    done = call("--store", store, "restore", "home", "-o", target)
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.fullmatch(
        rf"restored home@2 to {target}: 2 files, 2 folders, 1 other, 3,014 B in \d\.\d\d s\n", done.stdout.decode()
    )
    assert names(target) == ["a.txt", "etc", "etc/empty", "etc/fstab", "etc/link"]
    assert (target / "a.txt").read_bytes() == b"second version"
    assert (target / "etc" / "fstab").stat().st_mtime_ns == 10**18


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("home@1", ["a.txt", "etc", "etc/empty", "etc/fstab", "etc/link"]),
        ("home@1:/a.txt", ["a.txt"]),
        ("home:/etc", ["empty", "fstab", "link"]),
        ("home@1s:/etc/fstab", None),
    ],
)
def test_restore_of_a_part(
    store: Path, tmp_path: Path, call: InProcess, location: str, expected: list[str] | None
) -> None:
    if expected is None:  # the version of a second ago, or none yet
        assert call("--store", store, "restore", location, "-o", tmp_path / "t").returncode in (0, 4)
        return
    found = call.answer("--store", store, "restore", location, "-o", tmp_path / "t")
    assert names(tmp_path / "t") == expected
    assert (found["key"], found["failed"], found["unset"], found["problems"]) == ("home", 0, {}, [])
    assert found["path"] == "/" + location.partition(":/")[2]


def test_restore_patterns_select_entries(store: Path, tmp_path: Path, call: InProcess) -> None:
    call("--store", store, "restore", "home", "-t", tmp_path / "some", "-i", "/etc/", "-e", "link")
    assert names(tmp_path / "some") == ["etc", "etc/empty", "etc/fstab"]


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_restore_refuses_a_pattern_without_effect(store: Path, tmp_path: Path, call: InProcess, option: str) -> None:
    for pattern, problem in (("!", "can match nothing"), ("[a", "a [ has no ]"), ("", "is empty")):
        done = call("--store", store, "restore", "home", "-o", tmp_path, option, pattern)
        assert_refused(done, 2, f"nearkin: {option} {pattern!r}: {problem}")


@pytest.mark.parametrize(
    ("policy", "content", "kept"),
    [("always", b"second version", 0), ("if-changed", b"second version", 1), ("never", b"local", 2)],
)
def test_restore_overwrite_policy(
    store: Path, tmp_path: Path, call: InProcess, policy: str, content: bytes, kept: int
) -> None:
    """A dry run predicts what the restore does."""
    (tmp_path / "a.txt").write_bytes(b"local")
    (tmp_path / "etc" / "empty").mkdir(parents=True)
    (tmp_path / "etc" / "empty" / "other").touch()
    (tmp_path / "etc" / "fstab").write_bytes(b"F" * 3000)
    os.utime(tmp_path / "etc" / "fstab", ns=(10**18, 10**18))
    words = ("--store", store, "restore", "home", "-o", tmp_path, "--overwrite", policy, "--delete")
    planned = call.answer(*words, "--dry-run")
    assert (tmp_path / "a.txt").read_bytes() == b"local"
    assert (tmp_path / "etc" / "empty" / "other").exists()
    done = call.answer(*words)
    assert (tmp_path / "a.txt").read_bytes() == content
    assert not (tmp_path / "etc" / "empty" / "other").exists()
    assert (planned["dry_run"], done["dry_run"], done["kept_files"], done["deleted"]) == (True, False, kept, 1)
    for name in ("files", "folders", "others", "kept_files", "deleted", "written_bytes"):
        assert planned[name] == done[name], name
    text = call(*words, "-n").stdout.decode().splitlines()
    assert text[0].startswith("would restore ")
    assert text[1].startswith("of those that exist ")


def test_restore_help_and_page_name_the_default_policy(store: Path, tmp_path: Path, call: InProcess) -> None:
    """Help and reference name the policy that applies without --overwrite, which is the one that replaces files."""
    target = tmp_path / "t"
    assert call("--store", store, "restore", "home", "-o", target).returncode == 0
    (target / "a.txt").write_bytes(b"local")
    assert call.answer("--store", store, "restore", "home", "-o", target)["kept_files"] == 0
    assert (target / "a.txt").read_bytes() != b"local"
    assert b"Policy for files that exist [always]." in b" ".join(call("restore", "--help").stdout.split())
    page = Path(__file__).parents[2] / "docs" / "reference" / "trees.md"
    assert "| `always` (default) |" in page.read_text()


def test_restore_delete_lists_deleted_and_kept_entries(tmp_path: Path, call: InProcess) -> None:
    """A dry run, and `--verbose`, name each entry; excluded ones are deleted with --delete-excluded only."""
    source, target, store = tmp_path / "source", tmp_path / "target", tmp_path / "store"
    (source / "kept").mkdir(parents=True)
    (source / "kept" / "a.o").touch()
    assert call("--store", store, "init").returncode == 0
    assert call("--store", store, "backup", "home", source, "-e", "*.o").returncode == 0
    (target / "kept").mkdir(parents=True)
    for name in ("besides", "kept/b.o"):
        (target / name).touch()
    words = ("--store", store, "restore", "home", "-o", target, "--delete")
    planned = call.answer(*words, "--dry-run")
    assert (planned["deleted_paths"], planned["not_deleted"]) == (["besides"], 1)
    text = call(*words, "--dry-run").stdout.decode()
    assert "would delete besides" in text
    assert "not deleted: kept/b.o: the backup left out entries of its folder" in text
    done = call(*words, "--verbose")
    assert done.returncode == 0
    assert "deleted besides" in done.stdout.decode()
    assert "not deleted: kept/b.o" in done.stderr.decode()
    assert names(target) == ["kept", "kept/b.o"]
    assert_refused(call(*words[:-1], "--delete-excluded"), 2, "--delete-excluded: ")
    assert call.answer(*words, "--delete-excluded")["deleted_paths"] == ["kept/b.o"]


def test_restore_of_unknown_locations_is_refused(store: Path, tmp_path: Path, call: InProcess) -> None:
    for location, code, text in (
        ("hom:/etc", 4, "key 'hom:/etc': the store has none, nor 'hom'"),
        ("home:/nothing", 4, "has no entry 'nothing'"),
        ("home@7", 4, "version 7"),
        ("home:/../x", 2, "has .."),
        ("blob", 2, "is a blob of `nearkin put`, not a tree; `nearkin get` writes it"),
    ):
        assert_refused(call("--store", store, "restore", location, "-o", tmp_path / "t"), code, text)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_restore_into_a_file_is_refused(store: Path, tmp_path: Path, call: InProcess, options: tuple[str, ...]) -> None:
    """The error states what the target, or a part of its path, is; that of a dry run too."""
    file = tmp_path / "file"
    file.touch()
    for target, text in (
        (file, 'file": is a file; name a new or existing folder'),
        (file / "below", f'"{file}" is a file; name'),
        (Path("/dev/null"), "is a special file; name"),
    ):
        assert_refused(call("--store", store, "restore", "home", "-o", target, *options), 2, text)


def test_restore_counts_attributes_that_cannot_be_set(tmp_path: Path) -> None:
    """As another user: one line for each kind of attribute, exit code 3."""
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to store files of another user")
    home = tmp_path / "home"
    home.mkdir()
    for name in ("a", "b"):
        (home / name).touch()
        os.chown(home / name, 12345, 12345)
    with open_store(tmp_path / "store", create=True) as opened:
        opened.backup("home", [home])
    words = ["setpriv", "--bounding-set=-chown", "--inh-caps=-chown", sys.executable, "-m", "nearkin.cli"]
    words += ["--store", str(tmp_path / "store"), "restore", "home", "-o"]
    done, as_json = (
        subprocess.run([*words, str(tmp_path / f"to{more}"), more], env=environment(), capture_output=True, check=False)
        for more in ("-q", "--json")
    )
    assert (done.returncode, done.stdout, as_json.returncode) == (3, b"", 3)
    assert done.stderr == (
        b"nearkin: group not set on 2 entries, the first /a: group cannot be set: operation not permitted\n"
        b"nearkin: owner not set on 2 entries, the first /a: owner cannot be set: operation not permitted\n"
    )
    answer = json.loads(as_json.stdout)
    assert (answer["unset"], answer["failed"], answer["problems"]) == ({"owner": 2, "group": 2}, 0, [])


def test_restore_reports_entries_that_cannot_be_written(store: Path, tmp_path: Path, call: InProcess) -> None:
    (tmp_path / "a.txt" / "sub").mkdir(parents=True)
    done = call("--store", store, "restore", "home", "-o", tmp_path)
    assert done.returncode == 3
    assert done.stderr == b"nearkin: a.txt: a folder has this name; use --delete to replace it\n"
    assert (tmp_path / "etc" / "fstab").exists()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("refused", ["", "big", "unreadable", "closed"])
def test_restore_reports_a_refused_folder_once(tmp_path: Path, refused: str) -> None:
    """As a user who may not write a folder: one line with the entries below it, in all of them by JSON.

    A dry run before it names the same folder, with the same counts.
    """
    home, target = tmp_path / "home", tmp_path / "target"
    for name in ("big/deep", "unreadable", "closed", "sound"):
        (home / name).mkdir(parents=True)
        for number in range(3):
            (home / name / f"{number}").touch()
    with open_store(tmp_path / "store", create=True) as opened:
        opened.backup("home", [home])
    (target / refused).mkdir(parents=True)
    (target / refused).chmod({"unreadable": 0o711, "closed": 0}.get(refused, 0o755))
    os.chown(target / refused, 12345, 12345)
    rights = "-dac_override,-dac_read_search,-fowner,-chown"
    words = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", sys.executable, "-m", "nearkin.cli"]
    words += ["--store", str(tmp_path / "store"), "restore", "home", "-o", str(target)]
    planned, dry, done, as_json = (
        subprocess.run([*words, *more], env=environment(), capture_output=True, check=False)
        for more in (("-n", "--json"), ("-n",), ("-q",), ("--json",))
    )
    below, failed, line = {
        "": (17, 17, "/: cannot be written: permission denied; 17 entries below it not restored"),
        "big": (4, 4, "big: cannot be written: permission denied; 4 entries below it not restored"),
        "unreadable": (3, 4, "unreadable: cannot be opened: permission denied; 3 entries below it not restored"),
        "closed": (3, 4, "closed: operation not permitted; 3 entries below it not restored"),
    }[refused]
    lines = [text for text in done.stderr.decode().splitlines() if " not set on " not in text]
    assert (done.returncode, lines) == (3, [f"nearkin: {line}"])
    answer = json.loads(as_json.stdout)
    assert (as_json.returncode, answer["failed"]) == (3, failed)
    assert [one["entries_below"] for one in answer["problems"]] == [below]
    assert (planned.returncode, dry.returncode) == (3, 3)
    assert dry.stderr.decode().splitlines() == [f"nearkin: {line}"]
    for name in ("problems", "failed", "files", "folders"):
        assert json.loads(planned.stdout)[name] == answer[name], name
    assert (target / "sound" / "2").exists() == (refused != "")


def test_dry_run_verbose_lists_new_replaced_and_kept(store: Path, tmp_path: Path, call: InProcess) -> None:
    """Each entry is listed as the restore treats it, with its size and its path in the tree."""
    target = tmp_path / "target"
    words = ("--store", store, "restore", "home", "-o", target, "--overwrite", "if-changed")
    assert call(*words).returncode == 0
    (target / "a.txt").write_bytes(b"other")
    (target / "etc" / "link").unlink()
    lines = call(*words, "--dry-run", "--verbose").stdout.decode().splitlines()
    listed = {line.split()[-1]: line.split()[0] for line in lines if not line.startswith(("would", "of those"))}
    assert listed == {"a.txt": "replaced", "etc/fstab": "kept", "etc/link": "new"}
    assert len(lines) == len(call(*words, "--dry-run").stdout.splitlines()) + len(listed)
    assert not (target / "etc" / "link").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("case", ["own", "missing", "unreadable"])
def test_dry_run_of_targets_ends_as_the_restore(store: Path, tmp_path: Path, case: str) -> None:
    """Folders of the user's own are made writable; a target that cannot be made or opened is refused."""
    target = tmp_path / "above" / "target"
    (target / "etc").mkdir(parents=True)
    if case == "own":
        (target / "etc").chmod(0o500)
    elif case == "missing":
        shutil.rmtree(target)
        os.chown(target.parent, 12345, 12345)
    else:
        os.chown(target, 12345, 12345)
        target.chmod(0o711)
    rights = "-dac_override,-dac_read_search,-fowner,-chown"
    words = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", sys.executable, "-m", "nearkin.cli"]
    words += ["--json", "--store", str(store), "restore", "home", "-o", str(target)]
    planned, done = (
        subprocess.run([*words, *more], env=environment(), capture_output=True, check=False) for more in (("-n",), ())
    )
    if case == "own":
        answers = [json.loads(one.stdout) for one in (planned, done)]
        assert [(one["failed"], one["problems"]) for one in answers] == [(0, []), (0, [])]
        assert answers[0]["files"] == answers[1]["files"]
        return
    assert (planned.returncode, planned.stderr) == (done.returncode, done.stderr) == (2, done.stderr)
    remedy = {"missing": b"Permission denied; name a new or existing folder", "unreadable": b"is not readable"}
    assert remedy[case] in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("location", ["home", "home:/a.txt"])
def test_restore_into_an_own_target_without_w(store: Path, tmp_path: Path, location: str) -> None:
    """It is written at once, as own folders in it are, and keeps its mode unless the tree has one for it."""
    target = tmp_path / "target"
    target.mkdir(mode=0o555)
    rights = "-dac_override,-dac_read_search,-fowner,-chown"
    words = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", sys.executable, "-m", "nearkin.cli"]
    words += ["--json", "--store", str(store), "restore", location, "-o", str(target)]
    planned, done = (
        json.loads(subprocess.run([*words, *more], env=environment(), capture_output=True, check=False).stdout)
        for more in (("-n",), ())
    )
    assert (planned["failed"], planned["problems"], done["failed"], done["problems"]) == (0, [], 0, [])
    assert planned["files"] == done["files"] > 0
    with open_store(store, read_only=True) as opened:
        root = opened.tree("home").find(b"").entry
    assert stat.S_IMODE(target.stat().st_mode) == (root.mode if location == "home" else 0o555)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_dry_run_counts_a_store_once(tmp_path: Path) -> None:
    """Nothing below a store of the target is restored, so that no folder in it is examined, as in the restore."""
    home, target = tmp_path / "home", tmp_path / "target"
    (home / "etc" / "deep").mkdir(parents=True)
    (home / "etc" / "deep" / "x").touch()
    with open_store(tmp_path / "store", create=True) as opened:
        opened.backup("home", [home])
    open_store(target / "etc", create=True).close()
    (target / "etc" / "deep").mkdir()
    os.chown(target / "etc" / "deep", 12345, 12345)
    (target / "etc" / "deep").chmod(0o700)
    rights = "-dac_override,-dac_read_search,-fowner,-chown"
    words = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", sys.executable, "-m", "nearkin.cli"]
    words += ["--json", "--store", str(tmp_path / "store"), "restore", "home", "-o", str(target)]
    planned, done = (
        json.loads(subprocess.run([*words, *more], env=environment(), capture_output=True, check=False).stdout)
        for more in (("-n",), ())
    )
    assert planned["problems"] == done["problems"] != []
    assert (planned["failed"], done["failed"]) == (1, 1)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_restore_summarises_undeletable_entries(tmp_path: Path) -> None:
    """One line for each folder of the tree and reason, with the number; all are counted, in a dry run too."""
    home, target = tmp_path / "home", tmp_path / "target"
    (home / "big").mkdir(parents=True)
    (home / "sound").mkdir()
    with open_store(tmp_path / "store", create=True) as opened:
        opened.backup("home", [home])
    for name in ("big/deep", "sound/own/closed", "sound/own/sound"):
        (target / name).mkdir(parents=True)
        for number in range(20):
            (target / name / f"{number:02}").touch()
    for name in ("big/deep", "big", "sound/own/closed"):
        os.chown(target / name, 12345, 12345)
    rights = "-dac_override,-dac_read_search,-fowner,-chown"
    words = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", sys.executable, "-m", "nearkin.cli"]
    words += ["--store", str(tmp_path / "store"), "restore", "home", "-o", str(target), "--delete"]
    dry, planned, done = (
        subprocess.run([*words, *more], env=environment(), capture_output=True, check=False)
        for more in (("-n",), ("-n", "--json"), ("--json",))
    )
    lines = [
        "nearkin: big: entries cannot be deleted: permission denied, the first: big/deep/",
        "nearkin: sound: entries cannot be deleted: permission denied, the first: sound/own/closed/",
    ]
    found = dry.stderr.decode().splitlines()
    assert [line[: len(start)] for line, start in zip(found, lines, strict=True)] == lines
    assert all(line.endswith("; 20 entries below it not deleted") for line in found)
    answers = [json.loads(one.stdout) for one in (planned, done)]
    assert (dry.returncode, planned.returncode, done.returncode) == (3, 3, 3)
    for answer in answers:
        assert (answer["failed"], answer["deleted"]) == (40, 1)
        found_json = sorted((one["path"], one["entries_below"]) for one in answer["problems"])
        assert found_json == [("big", 20), ("sound", 20)]
    assert not (target / "sound" / "own" / "sound").exists()


@pytest.mark.parametrize("flags", [(), ("--delete",), ("--overwrite", "never")])
def test_dry_run_counts_entries_that_are_refused(
    flags: tuple[str, ...], store: Path, tmp_path: Path, call: InProcess
) -> None:
    """A store, and an entry of another kind, where the tree has an entry: a dry run names them, exit code 3."""
    target = tmp_path / "target"
    with open_store(target / "etc", create=True):
        pass
    if flags == ("--delete",):
        with open_store(target / "a.txt" / "deep", create=True):
            pass
    elif flags:
        shutil.rmtree(target / "etc")
        (target / "etc").touch()
    else:
        (target / "a.txt").mkdir()
    words: tuple[str | Path, ...] = ("--store", store, "restore", "home", "-o", target, *flags)
    text = call(*words, "--dry-run")
    planned = json.loads(call("--json", *words, "--dry-run").stdout)
    done = call("--json", *words)
    answer = json.loads(done.stdout)
    assert (text.returncode, done.returncode) == (3, 3)
    assert planned["problems"] == answer["problems"] != []
    for name in ("failed", "kept_files", "files", "written_bytes"):
        assert planned[name] == answer[name], name
    for problem in planned["problems"]:
        assert f"{problem['path']}: {problem['reason']}" in text.stderr.decode()
    assert " could not be restored, or deleted\n" in text.stdout.decode()


def test_restore_names_patterns_that_match_nothing(store: Path, tmp_path: Path, call: InProcess) -> None:
    """A dry run names them as well, and JSON has them."""
    words = ("--store", store, "restore", "home", "-o", tmp_path / "new", "-i", "fstab", "-e", "*.absent")
    for more in (("--dry-run",), ()):
        text = call(*words, *more)
        assert (text.returncode, text.stderr) == (0, b"nearkin: 1 pattern matched nothing: *.absent\n")
        answer = call.answer(*words, *more)
        assert answer["unmatched_patterns"] == [{"pattern": "*.absent", "file": None, "line": None}]


def test_restore_of_a_damaged_store_is_refused(store: Path, tmp_path: Path, call: InProcess) -> None:
    from tests.support.checks.commands import damage

    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    damage(copy)
    done = call("--store", copy, "restore", "home", "-o", tmp_path / "t")
    assert done.returncode == 5, done.stderr
    with open_store(copy, read_only=True) as opened, pytest.raises(Corrupt):
        opened.restore("home", tmp_path / "t")


def test_restore_draws_a_bar_on_a_terminal(store: Path, tmp_path: Path) -> None:
    assert b"restore: 2 files" in drawn_on_terminal("--store", store, "restore", "home", "-o", tmp_path / "t")
