"""Commands that store: a path or a version as KEY is refused, keys of older stores are not."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from nearkin import open_store
from tests.support.checks.commands import InProcess, assert_refused, new_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return an empty store next to two folders, each with one file."""
    for name in ("mail", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    return new_store(tmp_path / "store")


@pytest.mark.parametrize("form", ["absolute", "./mail", "../mail", "~/mail", ".", "mail/"])
def test_backup_path_as_key_is_refused(
    store: Path, tmp_path: Path, call: InProcess, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Two folders without KEY: nothing is stored, and the error is a command that can be run."""
    monkeypatch.chdir(tmp_path)
    key = str(tmp_path / "mail") if form == "absolute" else form
    for options in ((), ("--dry-run",)):
        done = call("--store", store, "backup", key, "notes", *options)
        assert_refused(done, 2, "KEY is a name of your choice")
    if form in ("absolute", "./mail", "mail/"):
        assert done.stderr.decode().endswith(f": nearkin backup mail {key} notes\n")
    assert call("--store", store, "ls").stdout == b""


def test_backup_key_of_an_old_store_is_continued(store: Path, tmp_path: Path, call: InProcess) -> None:
    """A key that has the form of a path already gets further versions, and every command reads them."""
    key = str(tmp_path / "mail")
    with open_store(store) as opened:
        opened.put(key, b"of an earlier Nearkin")
    assert call("--store", store, "backup", key, tmp_path / "notes").returncode == 0
    assert call.answer("--store", store, "info", key)["version"] == 2
    assert call("--store", store, "restore", key, "-o", tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "file").read_text() == "notes"
    assert call("--store", store, "rm", key).returncode == 0


def test_backup_key_equal_to_its_path_is_stored(
    store: Path, tmp_path: Path, call: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that names its one path is meant so; a bare name is a key even if a folder has it."""
    monkeypatch.chdir(tmp_path)
    assert call("--store", store, "backup", str(tmp_path / "mail"), tmp_path / "mail").returncode == 0
    assert call("--store", store, "backup", "mail", "notes").returncode == 0


def test_put_of_two_files_is_refused(store: Path, tmp_path: Path, call: InProcess) -> None:
    """The path of another file is no KEY; that of the source, of no file, or of what stdin has, is one."""
    mail, notes = str(tmp_path / "mail" / "file"), str(tmp_path / "notes" / "file")
    assert_refused(call("--store", store, "put", mail, notes), 2, f"nearkin put file {notes}")
    for arguments in ((mail, mail), ("/no/such/file", notes)):
        assert call("--store", store, "put", *arguments).returncode == 0
    assert call("--store", store, "put", notes, "-", stdin=b"piped").returncode == 0
    assert call("--store", store, "put", notes, mail).returncode == 0, "the store has this key"


def test_import_tar_of_two_archives_is_refused(store: Path, tmp_path: Path, call: InProcess) -> None:
    first, second = tmp_path / "1.tar", tmp_path / "2.tar"
    for path in (first, second):
        with tarfile.open(path, "w") as archive:
            archive.add(tmp_path / "mail", "mail")
    assert_refused(call("--store", store, "import-tar", first, second), 2, f"nearkin import-tar 2.tar {second}")
    assert call("--store", store, "import-tar", str(second), second).returncode == 0


@pytest.mark.parametrize("key", ["mail@3", "mail@36h", "mail@3:/file", "mail@1:file", "mail:/file", "mail:"])
def test_version_of_a_key_as_key_is_refused(store: Path, tmp_path: Path, call: InProcess, key: str) -> None:
    """A key `mail@3` would hide version 3 of `mail` from the commands that read: none makes it."""
    notes, archive = tmp_path / "notes", tmp_path / "1.tar"
    with tarfile.open(archive, "w") as opened:
        opened.add(notes, "notes")
    assert call("--store", store, "backup", "mail", tmp_path / "mail").returncode == 0
    for words in (
        ("backup", key, notes),
        ("backup", key, notes, "--dry-run"),
        ("put", key, notes / "file"),
        ("import-tar", key, archive),
    ):
        done = call("--store", store, *words)
        assert_refused(done, 2, f"is stored by `nearkin {words[0]} mail {words[2]}`")
    assert_refused(
        call("--store", store, "put", key, "--from-command", "--", "echo"), 2, "the store has the key 'mail'"
    )
    assert call.answer("--store", store, "ls", "--versions")[0]["version"] == 1


def test_key_with_a_version_of_no_key_is_stored(store: Path, tmp_path: Path, call: InProcess) -> None:
    """No key is hidden: without `mail`, and where the store has the key `mail@3` already, it is one like any other."""
    notes = tmp_path / "notes"
    assert call("--store", store, "backup", "mail@3", notes).returncode == 0
    assert call("--store", store, "backup", "mail", notes).returncode == 0
    for words in (("backup", "mail@3", notes), ("put", "mail@host", notes / "file"), ("put", "a@3", notes / "file")):
        assert call("--store", store, *words).returncode == 0
    assert call.answer("--store", store, "info", "mail@3")["version"] == 2


def test_entry_of_no_key_as_key_of_a_backup_is_refused(store: Path, tmp_path: Path, call: InProcess) -> None:
    """`backup REPO:/ARCHIVE PATH`, as other programs name a version; URLs and keys of older stores are keys."""
    notes = tmp_path / "notes"
    refused = call("--store", store, "backup", "big:/r1", notes)
    assert_refused(refused, 2, f"another key has another name: nearkin backup big-r1 {notes}")
    with open_store(store) as opened:
        opened.backup("old:/r1", [notes])
    for words in (("backup", "old:/r1"), ("backup", "https://host/notes"), ("put", "s3://bucket/x")):
        assert call("--store", store, *words, notes if words[0] == "backup" else notes / "file").returncode == 0
    assert call("--store", store, "rm", "old:/r1").returncode == 0


def test_version_of_another_kind_is_said(store: Path, tmp_path: Path, call: InProcess) -> None:
    """A blob on a key of trees, or a tree on a key of blobs, is stored and named in one line."""
    file, folder = tmp_path / "notes" / "file", tmp_path / "notes"
    archive = tmp_path / "1.tar"
    with tarfile.open(archive, "w") as opened:
        opened.add(folder, "notes")
    for words, is_other in (
        (("backup", "k", folder), False),
        (("put", "k", file), True),
        (("put", "k", file), False),
        (("import-tar", "k", archive), True),
        (("put", "k", file), True),
        (("backup", "k", folder, "--dry-run"), True),
        (("backup", "k", folder), True),
    ):
        done = call("--store", store, *words)
        assert (done.returncode, b"key 'k': its newest version, " in done.stderr) == (0, is_other), words
    assert call("--store", store, "-q", "put", "k", file).stderr == b""
