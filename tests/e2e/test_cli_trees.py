"""`nearkin ls`, `find`, `diff`, `dump` and `get` on trees."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from nearkin import open_store
from tests.support.checks.commands import InProcess, assert_refused

SECOND = 1_700_000_000
IS_ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of version 2."""
    return tmp_path_factory.mktemp("trees") / "home"


@pytest.fixture(scope="module")
def store(home: Path) -> Path:
    """Return a store with two versions of the tree `home`, the tree `me@3:/x`, and the blob `blob`."""
    (home / "etc" / "deep").mkdir(parents=True)
    for name, content in (("a.txt", b"first"), ("etc/fstab", b"f" * 3000), ("etc/old", b"old"), ("etc/deep/x", b"x")):
        (home / name).write_bytes(content)
    (home / "etc" / "link").symlink_to("fstab")
    os.link(home / "a.txt", home / "etc" / "hard")
    (home / "kind").write_bytes(b"a file")
    Path(os.fsdecode(os.fsencode(home) + b"/etc/caf\xe9\x1b")).write_bytes(b"bytes")
    with (home / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"data" * 1000)
        file.truncate(3 << 20)
    os.setxattr(home / "etc" / "fstab", "user.note", b"\xff\x00=1")
    _settle(home)
    path = home.parent / "store"
    with open_store(path, create=True) as opened:
        opened.backup("home", [home])
        (home / "a.txt").write_bytes(b"second version")
        (home / "etc" / "old").unlink()
        (home / "etc" / "new").write_bytes(b"new")
        (home / "etc" / "fstab").chmod(0o600)
        (home / "kind").unlink()
        (home / "kind").mkdir()
        _settle(home)
        opened.backup("home", [home])
        opened.backup("me@3:/x", [home / "etc" / "deep"])
        opened.put("blob", b"blob")
        opened.put("blob", b"second")
    return path


def _settle(folder: Path) -> None:
    """Give every entry the same mtime."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*folders, *files):
            os.utime(os.path.join(parent, name), ns=(SECOND * 10**9, SECOND * 10**9), follow_symlinks=False)
    os.utime(folder, (SECOND, SECOND))


def lines(call: InProcess, store: Path, *words: str) -> list[str]:
    done = call("--store", store, *words)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


# --- ls --------------------------------------------------------------------------------------------------------------


def test_ls_of_a_folder_lists_its_names(store: Path, call: InProcess) -> None:
    assert lines(call, store, "ls", "home:/") == ["a.txt", "etc/", "kind/", "sparse"]
    assert lines(call, store, "ls", "home@1:/etc") == [r"caf\xe9\x1b", "deep/", "fstab", "hard", "link", "old"]
    assert lines(call, store, "ls", "home:/etc/fstab") == ["fstab"]
    assert lines(call, store, "ls", "-R", "home:/etc")[-1] == "deep/x"
    assert lines(call, store, "ls", "home@2") == lines(call, store, "ls", "home:")


def test_ls_long_lists_attributes(store: Path, call: InProcess) -> None:
    listed = lines(call, store, "ls", "-l", "home:/etc")
    _, folder, fstab, hard, link, _ = listed
    assert re.fullmatch(r"-rw------- \w+ +\w+ +3000 2023-11-14T22:13:20Z fstab", fstab)
    assert re.fullmatch(r"lrwxrwxrwx .* 2023-11-14T22:13:20Z link -> fstab", link)
    assert hard.endswith(" hard link to /a.txt")
    assert folder.startswith("drwx")
    assert folder.endswith(" deep/")


def test_ls_json_has_every_attribute(store: Path, call: InProcess) -> None:
    entries = {one["path"]: one for one in call.answer("--store", store, "ls", "-R", "home:/")}
    fstab = entries["/etc/fstab"]
    assert (fstab["kind"], fstab["mode"], fstab["size_bytes"], fstab["uid"]) == ("file", "0600", 3000, os.getuid())
    assert (fstab["mtime"], fstab["mtime_ns"]) == ("2023-11-14T22:13:20.000000000Z", SECOND * 10**9)
    assert fstab["xattrs"] == {"user.note": "ff003d31"}
    assert fstab["digest"].startswith("blake3-128:")
    assert (entries["/sparse"]["size_bytes"], entries["/sparse"]["data_bytes"] < 1 << 20) == (3 << 20, True)
    assert (entries["/etc/link"]["kind"], entries["/etc/link"]["target"]) == ("symlink", "fstab")
    assert (entries["/etc/hard"]["kind"], entries["/etc/hard"]["target"]) == ("hard link", "/a.txt")
    other = next(entry for path, entry in entries.items() if "caf" in path)
    assert (other["path"], bytes.fromhex(other["path_hex"])) == ("/etc/caf\\xe9\x1b", b"/etc/caf\xe9\x1b")
    assert "path_hex" not in fstab
    assert call.answer("--store", store, "ls", "home:/kind") == []


def test_ls_still_lists_keys(store: Path, call: InProcess) -> None:
    keys = [one["key"] for one in call.answer("--store", store, "ls")]
    assert keys == ["blob", "home", "me@3:/x"]
    assert [one["key"] for one in call.answer("--store", store, "ls", "me@")] == ["me@3:/x"]
    assert [one["key"] for one in call.answer("--store", store, "ls", "me@3:/x")] == ["me@3:/x"]
    assert lines(call, store, "ls", "me@3:/x:/") == ["x"]
    for arguments, code, text in (
        (["ls", "hom:/etc"], 4, "key 'hom:/etc': the store has none, nor 'hom'"),
        (["ls", "home@newest:/etc"], 4, "VERSION of 'home' is a number, `latest` or a time, such as 3, 36h"),
        (["ls", "hom@newest:/etc"], 4, "nor 'hom@newest'; `nearkin ls` lists the keys"),
        (["ls", "home:/nothing"], 4, "has no entry 'nothing'; `nearkin ls home@2:/` lists"),
        (["ls", "home:/etc/a b/x"], 4, "`nearkin ls home@2:/etc` lists"),
        (["ls", "-l", "blob"], 2, "is a blob of `nearkin put`"),
        (["ls", "-l"], 2, "name it, as in `nearkin ls -l home:/`"),
        (["ls", "-R", "home:/", "--versions"], 2, "not with --literal"),
    ):
        assert_refused(call("--store", store, *arguments), code, text)


# --- find ------------------------------------------------------------------------------------------------------------


def test_find_names_paths_of_every_tree(store: Path, call: InProcess) -> None:
    assert lines(call, store, "find", "x") == ["home@2:/etc/deep/x", "me@3:/x@1:/x"]
    assert lines(call, store, "find", "OLD", "home", "--versions", "-i") == ["home@1:/etc/old"]
    assert lines(call, store, "find", "/etc/*s*b", "home@1") == ["home@1:/etc/fstab"]
    assert lines(call, store, "find", "f*", "home:/etc/deep") == []
    assert lines(call, store, "find", "fstab", "home", "-l")[0].endswith("home@2:/etc/fstab")
    found = call.answer("--store", store, "find", "[ah]*", "home")
    assert [(one["key"], one["version"], one["path"]) for one in found] == [
        ("home", 2, "/a.txt"),
        ("home", 2, "/etc/hard"),
    ]
    assert call.answer("--store", store, "find", "nothing*") == []
    assert_refused(call("--store", store, "find", "x", "hom"), 4, "key 'hom'")
    assert_refused(call("--store", store, "find", "x", "home@1", "--versions"), 2, "'home@1': names one version")
    assert lines(call, store, "find", "x", "me@3:/x", "--versions") == ["me@3:/x@1:/x"]  # the key has the @
    assert_refused(call("--store", store, "find", "[a"), 2, "pattern '[a': a [ has no ]; write [[] for the character")
    assert_refused(call("--store", store, "find", "[!z-a]"), 2, "pattern '[!z-a]': the range z-a ends before it starts")


# --- diff ------------------------------------------------------------------------------------------------------------


def test_diff_lists_each_kind_of_change(store: Path, call: InProcess) -> None:
    *changes, total = lines(call, store, "diff", "home@1", "home")
    assert changes == ["M  /a.txt", "T  /kind", "U  /etc/fstab", "+  /etc/new", "-  /etc/old"]
    assert total == (
        "1 added, 1 removed, 1 with other content, 1 of another kind, 1 with other attributes; +17 B, -14 B"
    )
    assert lines(call, store, "diff", "home@1:/etc", "home@2:/etc", "--no-metadata")[:2] == ["+  /new", "-  /old"]
    assert lines(call, store, "diff", "home:/etc/deep", "me@3:/x") == [
        "0 added, 0 removed, 0 with other content, 0 of another kind, 0 with other attributes; +0 B, -0 B"
    ]


def test_diff_json_has_both_entries(store: Path, call: InProcess) -> None:
    found = call.answer("--store", store, "diff", "home@2", "home@1")
    assert (found["before"], found["after"]) == ("home@2", "home@1")
    assert found["counts"] == {"added": 1, "removed": 1, "content": 1, "holes": 0, "metadata": 1, "type": 1}
    changes = {one["path"]: one for one in found["changes"]}
    assert changes["/etc/new"]["change"] == "removed"
    assert changes["/etc/new"]["after"] is None
    fstab = changes["/etc/fstab"]
    assert (fstab["change"], fstab["before"]["mode"], fstab["after"]["mode"]) == ("metadata", "0600", "0644")
    assert call.answer("--store", store, "diff", "home", "home@2")["changes"] == []


def test_diff_tells_other_holes_from_other_content(tmp_path: Path, call: InProcess) -> None:
    """The digest of a file with holes is of its data alone: the contents are compared."""
    block, size = 64 << 10, 6 << 20
    same = {0: b"start" * 100, 3 * block: b"\1" * block, 50 * block: b"end"}

    def write(name: str, parts: dict[int, bytes], *, punched: bool = False) -> None:
        with (tmp_path / "home" / name).open("wb") as file:
            file.truncate(size)
            if not punched:
                file.write(bytes(size))
            for offset, data in parts.items():
                os.pwrite(file.fileno(), data, offset)

    store, home = tmp_path / "store", tmp_path / "home"
    home.mkdir()
    write("filled", same)
    write("punched", same, punched=True)
    write("moved", same, punched=True)
    write("zeros", {}, punched=True)
    write("changed", same, punched=True)
    with open_store(store, create=True) as opened:
        opened.backup("home", [home])
        write("filled", same, punched=True)
        write("punched", {**same, 10 * block: bytes(block)}, punched=True)
        write("moved", {block: same[0], 3 * block: same[3 * block], 50 * block: b"end"}, punched=True)
        write("zeros", {size - 5: bytes(5)}, punched=True)
        write("changed", {**same, 90 * block: b"x"})
        opened.backup("home", [home])
    *changes, total = lines(call, store, "diff", "home@1", "home@2", "--no-metadata")
    assert changes == ["M  /changed", "H  /filled", "M  /moved", "H  /punched", "H  /zeros"]
    assert "2 with other content, 3 with other holes" in total
    found = call.answer("--store", store, "diff", "home@1", "home@2", "--no-metadata")
    assert (found["counts"]["holes"], found["changes"][1]["change"]) == (3, "holes")
    assert lines(call, store, "diff", "home@2", "home@2") == [
        "0 added, 0 removed, 0 with other content, 0 of another kind, 0 with other attributes; +0 B, -0 B"
    ]


# --- dump and get ----------------------------------------------------------------------------------------------------


def test_dump_and_get_write_a_file(store: Path, home: Path, tmp_path: Path, call: InProcess) -> None:
    assert call("--store", store, "dump", "home@1:/a.txt").stdout == b"first"
    assert call("--store", store, "get", "home:/a.txt").stdout == b"second version"
    assert call("--store", store, "get", "home:/a.txt", "--version", "1").stdout == b"first"
    assert call("--store", store, "dump", "home:/etc/hard").stdout == b"second version"
    assert call("--store", store, "get", "me@3:/x:/x").stdout == b"x"
    assert call("--store", store, "get", "blob@1").stdout == b"blob"
    assert call("--store", store, "dump", "home:/sparse").stdout == (home / "sparse").read_bytes()
    for command in ("dump", "get"):
        answer = call.answer("--store", store, command, "home:/sparse", "-o", tmp_path / command)
        assert (answer["key"], answer["version"], answer["written_bytes"]) == ("home", 2, 3 << 20)
        assert (tmp_path / command).read_bytes() == (home / "sparse").read_bytes()
        assert (tmp_path / command).stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("command", ["dump", "get"])
def test_output_of_a_private_file_is_private(store: Path, tmp_path: Path, call: InProcess, command: str) -> None:
    """The entry has mode 0600, the umask would leave 0644; a blob has no mode."""
    before = os.umask(0o022)
    try:
        assert lines(call, store, command, "home:/etc/fstab", "-o", str(tmp_path / "fstab")) == []
        assert lines(call, store, "get", "blob", "-o", str(tmp_path / "blob")) == []
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "fstab").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "blob").stat().st_mode) == 0o644


REMEDY = "is a tree; `nearkin restore home@{0} -o DIR` restores it, `nearkin dump home@{0}:/PATH` writes one file"


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("home/", "no key starts with it; `nearkin ls home:/` lists the folder of the tree 'home'"),
        ("home/etc/a b", "no key starts with it; `nearkin ls 'home:/etc/a b'` lists the folder of the tree 'home'"),
        ("blob/", "no key starts with it; `nearkin ls` lists all"),
        ("/home", "no key starts with it; `nearkin ls` lists all"),
        ("x*", "no key matches; `nearkin ls` lists all"),
    ],
)
def test_ls_without_a_match_prints_a_notice(store: Path, call: InProcess, pattern: str, line: str) -> None:
    """A prefix of no key is no error: stderr has one line for people, which --json and -q leave out."""
    for options, stdout, stderr in (
        ((), b"", f"nearkin: ls {pattern!r}: {line}\n"),
        (("-q",), b"", ""),
        (("--json",), b"[]\n", ""),
    ):
        done = call("--store", store, "ls", pattern, *options)
        assert (done.returncode, done.stdout, done.stderr.decode()) == (0, stdout, stderr)
    assert call("--store", store, "ls", "hom").stderr == b""


def test_get_of_a_tree_names_restore_and_dump(store: Path, tmp_path: Path, call: InProcess) -> None:
    for arguments in (["get", "home"], ["get", "home@1"], ["get", "home", "--salvage"]):
        refused = call("--store", store, *arguments)
        assert_refused(refused, 2, REMEDY.format(arguments[1].partition("@")[2] or "2"))
    raw = call("--store", store, "get", "home", "--raw").stdout
    assert len(raw) == call.answer("--store", store, "info", "home")["size_bytes"]
    for arguments, text in (
        (["get", "home:/a.txt", "--range", "0-1"], "pipe `nearkin dump` instead"),
        (["get", "home@1:/a.txt", "--version", "2"], "names a version: not with --version or --at"),
        (["get", "home:/etc"], "is a folder; `nearkin ls home@2:/etc` lists it, `nearkin restore home@2:/etc -o DIR`"),
        (["dump", "home"], "is a folder"),
        (["dump", "home:/etc/link"], "is a symlink to fstab, which has no content"),
        (["dump", "blob"], "is a blob of `nearkin put`"),
        (["--json", "dump", "home:/a.txt"], "name a file with -o"),
    ):
        done = call("--store", store, *arguments)
        assert (done.returncode, text in done.stderr.decode()) == (2, True), done.stderr


@pytest.mark.parametrize("command", ["dump", "get", "ls", "restore"])
def test_missing_paths_have_a_remedy(store: Path, home: Path, tmp_path: Path, call: InProcess, command: str) -> None:
    """The nearest folder that exists, the path in the tree of one in the file system, or the missing slash."""
    output = ["-o", str(tmp_path / "t")] if command == "restore" else []
    for location, remedy in (
        ("home:/etc/none/x", "has no entry 'etc/none/x'; `nearkin ls home@2:/etc` lists what is there"),
        ("home:/a.txt/x", "`nearkin ls home@2:/` lists what is there"),
        (f"home:{home}/etc/fstab", f"paths count from the folder that was stored, '{home}': it is home@2:/etc/fstab"),
        (f"home:{home}", f"paths count from the folder that was stored, '{home}': it is home@2:/"),
        ("home:etc/fstab", "the store has none; PATH begins with /: home:/etc/fstab"),
        ("home@1:etc/a b", "PATH begins with /: 'home@1:/etc/a b'"),
    ):
        if command in ("ls", "get") and ":/" not in location:
            continue  # a prefix, or a key
        assert_refused(call("--store", store, command, location, *output), 4, remedy)


def test_dump_of_a_folder_names_commands(tmp_path: Path, call: InProcess) -> None:
    """They can be run as they are, also with a space in the path."""
    (tmp_path / "home" / "c d").mkdir(parents=True)
    with open_store(tmp_path / "store", create=True) as opened:
        opened.backup("home", [tmp_path / "home"])
    for command in ("dump", "get"):
        done = call("--store", tmp_path / "store", command, "home:/c d")
        assert_refused(
            done, 2, "is a folder; `nearkin ls 'home@1:/c d'` lists it, `nearkin restore 'home@1:/c d' -o DIR`"
        )


def test_latest_names_the_newest_version(store: Path, tmp_path: Path, call: InProcess) -> None:
    """As in restic, in every command that takes a location."""
    assert lines(call, store, "ls", "home@latest") == lines(call, store, "ls", "home@2")
    assert call("--store", store, "dump", "home@latest:/a.txt").stdout == b"second version"
    assert call("--store", store, "get", "home@latest:/a.txt").stdout == b"second version"
    assert call("--store", store, "get", "blob@latest").stdout == b"second"
    assert call("--store", store, "get", "blob@latest", "--salvage").stdout == b"second"
    assert call("--store", store, "get", "blob@1", "--salvage").stdout == b"blob"
    assert call.answer("--store", store, "diff", "home@1", "home@latest")["counts"]["added"] >= 1
    assert call.answer("--store", store, "restore", "home@latest", "-o", tmp_path / "t")["version"] == 2
    assert lines(call, store, "find", "fstab", "home@latest") == ["home@2:/etc/fstab"]
    done = call("--store", store, "restore", "home@newest", "-o", tmp_path / "t")
    assert_refused(done, 4, "VERSION of 'home' is a number, `latest` or a time, such as 3, 36h")
    assert_refused(call("--store", store, "get", "home:/a.txt", "--salvage"), 2, "leave out :/PATH")


def test_commands_of_versions_take_them_by_key(store: Path, call: InProcess) -> None:
    """KEY@VERSION names a version where --version does; an existing key always wins."""
    assert call.answer("--store", store, "info", "home@1") == call.answer(
        "--store", store, "info", "home", "--version", "1"
    )
    assert call.answer("--store", store, "info", "blob@latest")["version"] == 2
    assert call.answer("--store", store, "info", "me@3:/x")["key"] == "me@3:/x"
    assert call.answer("--store", store, "info", "me@3:/x@1")["key"] == "me@3:/x"
    assert call.answer("--store", store, "explain", "blob@1")["version"] == 1
    assert call.answer("--store", store, "explain", "home@1", "--kinds")["kinds"]
    assert call.answer("--store", store, "verify", "blob@1")["version"] == 1
    for words, code, message in (
        (("info", "home@9"), 4, "key 'home' version 9"),
        (("info", "hom@1"), 4, "key 'hom@1'"),
        (("info", "home@1:/etc"), 2, "info 'home@1:/etc': names an entry of a tree, and info takes a version, here"),
        (("info", "home@1", "--version", "1"), 2, "info 'home@1': names a version: not with --version"),
        (("forget", "home@1", "--keep-last", "1"), 2, "`nearkin rm home@1` deletes it"),
        (("forget", "hom@1", "--keep-last", "1"), 4, "forget 'hom@1': no such key"),
    ):
        assert_refused(call("--store", store, *words), code, message)


def test_dump_archive_extracts_to_the_same_folder(store: Path, home: Path, tmp_path: Path, call: InProcess) -> None:
    done = call("--store", store, "dump", "home:/", "--archive", "tar")
    assert (done.returncode, done.stderr) == (0, b"")
    with tarfile.open(fileobj=io.BytesIO(done.stdout), errors="surrogateescape") as archive:
        members = {member.name: member for member in archive}
    fstab, hard = members["etc/fstab"], members["etc/hard"]
    assert (fstab.mode, fstab.uid, fstab.size, fstab.mtime) == (0o600, os.getuid(), 3000, SECOND)
    assert os.fsencode(fstab.pax_headers["SCHILY.xattr.user.note"]) == b"\xff\x00=1"
    assert (hard.type, hard.linkname) == (tarfile.LNKTYPE, "a.txt")
    assert (members["sparse"].size, members["sparse"].issparse()) == (3 << 20, True)
    target = tmp_path / "target"
    target.mkdir()
    extract = ["tar", "-x", "--xattrs", "--xattrs-include=*", "-C", str(target)]
    subprocess.run(extract, input=done.stdout, check=True)
    compare = ["rsync", "-naHAXS", "--itemize-changes", "--delete", f"{home}/", f"{target}/"]
    assert subprocess.run(compare, check=True, capture_output=True).stdout == b""
    assert (target / "sparse").stat().st_blocks * 512 < 1 << 20


def test_dump_archive_of_a_part(store: Path, tmp_path: Path, call: InProcess) -> None:
    answer = call.answer("--store", store, "dump", "home@1:/etc", "-a", "tar", "-o", tmp_path / "t.tar")
    assert (answer["kind"], answer["path"], answer["entries"]) == ("tar", "/etc", 8)
    with tarfile.open(tmp_path / "t.tar", errors="surrogateescape") as archive:
        hard = archive.getmember("hard")
        found = archive.extractfile(hard)
        assert found is not None
        assert (hard.type, found.read()) == (tarfile.REGTYPE, b"first")
    done = call("--store", store, "dump", "home:/a.txt", "-a", "tar")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        assert archive.getnames() == ["a.txt"]


def test_export_writes_the_archive_of_dump(store: Path, tmp_path: Path, call: InProcess) -> None:
    archive = call("--store", store, "dump", "home@1", "-a", "tar").stdout
    done = call("--store", store, "export", "home@1", "-o", tmp_path / "t.tar")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().startswith(f"home version 1 written to {tmp_path}/t.tar in ")
    assert (tmp_path / "t.tar").read_bytes() == archive
    assert call("--store", store, "export", "home@1", "-o", "-").stdout == archive
    answer = call.answer("--store", store, "export", "home@1:/etc", "-o", tmp_path / "t.tar")
    assert (answer["version"], answer["path"], answer["entries"]) == (1, "/etc", 8)


@pytest.mark.skipif(not IS_ROOT, reason="devices need root")
def test_dump_archive_keeps_other_kinds_and_times(tmp_path: Path, call: InProcess) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    os.mknod(folder / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    for name, nanoseconds in (("early", -1_000_000_001), ("exact", 10**18 + 1)):
        (folder / name).touch()
        os.utime(folder / name, ns=(nanoseconds, nanoseconds))
    with open_store(tmp_path / "store", create=True) as opened:
        opened.backup("other", [folder])
    done = call("--store", tmp_path / "store", "dump", "other", "-a", "tar")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        null = archive.getmember("null")
        assert (null.type, null.devmajor, null.devminor) == (tarfile.CHRTYPE, 1, 3)
        assert archive.getmember("fifo").isfifo()
        assert archive.getmember("early").pax_headers["mtime"] == "-1.000000001"
        assert archive.getmember("exact").pax_headers["mtime"] == "1000000000.000000001"
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=done.stdout, check=True)
    assert (tmp_path / "early").stat().st_mtime_ns == -1_000_000_001


def test_json_of_a_failed_listing_is_an_error(store: Path, call: InProcess) -> None:
    done = call("--store", store, "--json", "ls", "home:/nothing")
    assert done.returncode == 4
    assert json.loads(done.stderr)["error"]["kind"] == "NotFound"
