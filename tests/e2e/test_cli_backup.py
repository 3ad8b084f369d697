"""`nearkin backup`: options, reports, exit codes, dry run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.trees import backup, checkpoint_schedule, unmatched_patterns
from nearkin.trees.backup_walk import PathProblem
from nearkin.trees.tree_writer import TreeWriter
from tests.support.checks.commands import (
    InProcess,
    assert_refused,
    drawn_on_terminal,
    environment,
    new_store,
    run,
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder with 3 files, 2 folders, a symlink and a hard link."""
    folder = tmp_path / "home"
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"aaaa")
    (folder / "sub" / "b.o").write_bytes(b"b" * 5000)
    Path(os.fsdecode(os.fsencode(folder) + b"/sub/caf\xe9\n")).write_bytes(b"ccc")
    (folder / "link").symlink_to("a.txt")
    os.link(folder / "a.txt", folder / "sub" / "hard")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return new_store(tmp_path / "store")


def paths_of(store: Path, key: str = "home") -> list[bytes]:
    with open_store(store, read_only=True) as opened:
        return [placed.entry.path for placed in opened.tree(key).entries()]


def as_user_without_override() -> list[str]:
    """Return the words that start a command without root's right to read every file."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root reads all, and setpriv is not there")
    names = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={names}", f"--inh-caps={names}"]


def test_backup_reports_what_was_stored(home: Path, store: Path, call: InProcess) -> None:
    done = call("--store", store, "backup", "home", home, "--tag", "nightly,laptop", "--meta", "note=a b")
    assert (done.returncode, done.stderr) == (0, b"")
    first, second = done.stdout.decode().splitlines()
    found = re.fullmatch(r"home version 1: 3 files, 2 folders, 2 others, 5,007 B of (\S+) in \d+\.\d\d s", first)
    assert found is not None
    assert found[1] == str(home)
    assert re.fullmatch(r"read 5,007 B, took over 0 B of 0 unchanged files, stored [\d,.]+ k?B", second)
    with open_store(store, read_only=True) as opened:
        metadata = opened.info("home").metadata
    assert (metadata["tags"], metadata["note"]) == ("laptop,nightly", "a b")


def test_ls_versions_shows_tags_host_and_paths(home: Path, store: Path, call: InProcess) -> None:
    """A tag selects versions; without --versions the newest of them of each key."""
    host = socket.gethostname()
    call("--store", store, "backup", "home", home, "--tag", "nightly,laptop")
    call("--store", store, "backup", "home", home / "sub", home / "a.txt", "--meta", "host=other")
    call("--store", store, "put", "blob", "-", stdin=b"blob")
    lines = call("--store", store, "ls", "--versions").stdout.decode().splitlines()
    assert lines[0].endswith("  v1     blob")
    assert lines[1].endswith(f"  v1     home  # tags laptop, nightly; host {host}; paths {home}")
    assert lines[2].endswith(f"  v2     home  # host other; paths {home}/sub {home}/a.txt")
    assert call("--store", store, "ls", "home").stdout.decode().endswith("  v2     home\n")
    for words, expected in (
        (("--tag", "nightly"), [1]),
        (("--tag", "nightly,laptop", "--versions"), [1]),
        (("--tag", "none", "--tag", "laptop"), [1]),
        (("--tag", "nightly,none"), []),
        (("--versions",), [1, 2]),
    ):
        found = call.answer("--store", store, "ls", "home", *words)
        assert [one["version"] for one in found] == expected, words
    first = call.answer("--store", store, "ls", "home", "--versions")[0]
    shown = call.answer("--store", store, "info", "home", "--version", "1")
    assert (first["tags"], first["host"], first["paths"]) == (["laptop", "nightly"], host, [str(home)])
    assert shown == {**first, "root": str(home)}
    text = call("--store", store, "info", "home", "--version", "1").stdout.decode()
    assert f"tags        laptop, nightly\nhost        {host}\npaths       {home}\n" in text
    assert text.endswith(f"root        {home}\n")
    blob = call.answer("--store", store, "info", "blob")
    assert (blob["tags"], blob["host"], blob["paths"], blob["root"]) == ([], None, [], None)
    for words, message in (
        (("--tag", ""), "--tag '': want a tag"),
        (("--tag", "a", "--deleted"), "leave out --tag or --deleted"),
        (("--tag", "a", "-l"), "not with --literal, --versions, --deleted or --tag"),
    ):
        assert_refused(call("--store", store, "ls", "home", *words), 2, message)


def test_paths_of_a_version_are_bounded(tmp_path: Path, store: Path, call: InProcess) -> None:
    """Beyond 1,000 characters `...` stands for the rest; bytes that are not UTF-8 are escaped."""
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.touch()
    paths = [odd]
    for number in range(40):
        paths.append(tmp_path / f"{number:050}")
        paths[-1].touch()
    call("--store", store, "backup", "many", *paths)
    found = call.answer("--store", store, "info", "many")
    assert len(found["metadata"]["paths"]) <= 1010
    assert (found["paths"][0], found["paths"][-1]) == (rf"{tmp_path}/caf\xe9", "...")
    large = "x" * 65_400
    call("--store", store, "backup", "large", odd, "--meta", f"note={large}")
    assert call.answer("--store", store, "info", "large")["metadata"]["note"] == large


def test_backup_json_has_counts_and_the_version(home: Path, store: Path, call: InProcess) -> None:
    time.sleep(1.1)  # a file is read again within a second of its ctime
    first = call.answer("--store", store, "backup", "home", home)
    (home / "a.txt").write_bytes(b"other")
    second = call.answer("--store", store, "backup", "home", home)
    third = call.answer("--store", store, "backup", "home", home, "--force-rescan")
    assert (first["key"], first["version"], first["dry_run"]) == ("home", 1, False)
    assert first.keys() >= {"digest", "metadata", "stored_bytes", "seconds", "problems", "skips"}
    names = ("files", "folders", "others", "unchanged_files", "read_bytes", "reused_bytes", "unread", "changed")
    assert [first[name] for name in names] == [3, 2, 2, 0, 5007, 0, 0, 0]
    assert [second[name] for name in names] == [3, 2, 2, 2, 5, 5003, 0, 0]
    assert (third["read_bytes"], third["reused_bytes"]) == (5008, 0)


def test_backup_skip_if_unchanged_stores_nothing(home: Path, store: Path, call: InProcess) -> None:
    time.sleep(1.1)
    call("--store", store, "backup", "home", home)
    done = call("--store", store, "backup", "home", home, "--skip-if-unchanged")
    assert (done.returncode, done.stdout) == (0, b"home: nothing changed, no version was stored\n")
    answer = call.answer("--store", store, "backup", "home", home, "--skip-if-unchanged")
    assert (answer["key"], answer["version"], answer["files"]) == ("home", None, 3)


def test_backup_exclusions_leave_entries_out(home: Path, store: Path, tmp_path: Path, call: InProcess) -> None:
    (tmp_path / "patterns").write_text("# comment\n*.o\n")
    (home / "cache").mkdir()
    (home / "cache" / "CACHEDIR.TAG").write_bytes(b"Signature: 8a477f597d28d172789f06886806bc55")
    (home / "cache" / "data").touch()
    (home / "no").mkdir()
    for name in (".nobackup", "data"):
        (home / "no" / name).touch()
    (home / "large").write_bytes(bytes(3000))
    options = ("--exclude-file", tmp_path / "patterns", "-e", "caf*", "--exclude-caches", "-x")
    more = ("--exclude-if-present", ".nobackup", "--exclude-larger-than", "2kB")
    assert call("--store", store, "backup", "home", home, *options, *more).returncode == 0
    found = b" a.txt cache link no sub cache/CACHEDIR.TAG no/.nobackup sub/empty sub/hard"
    assert paths_of(store) == found.split(b" ")


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("[a", r"a [ has no ] before the next /; write \[ for the character itself"),
        ("x[a/b]", r"a [ has no ] before the next /; write \["),
        ("[z-a]", "a range in [ ] ends before it starts; write the lower character first"),
        ("[[:alpha:]]", "classes such as [:alpha:] are not known; list the characters, as in [a-z]"),
        ("a\\", r"ends with \, which escapes nothing; write \\ for the character itself"),
        ("!", "can match nothing; give the name or path of an entry"),
        ("/", "can match nothing; give the name or path of an entry"),
    ],
)
def test_backup_refuses_a_pattern_without_effect(
    home: Path, tmp_path: Path, call: InProcess, pattern: str, problem: str
) -> None:
    """The library takes some of these for comments, and raises on others; no store is opened."""
    backup = ("--store", tmp_path / "none", "backup", "home", home, "-e", "*.o")
    assert_refused(call(*backup, "-e", pattern), 2, f"nearkin: --exclude {pattern!r}: {problem}")
    listed = tmp_path / "patterns"
    listed.write_text(f"# comment\n\n*.tmp\n{pattern}\n")
    expected = f'nearkin: --exclude-file "{listed}", line 4: {pattern!r}: {problem}'
    assert_refused(call(*backup, "--exclude-file", listed), 2, expected)


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--exclude", "", "is empty; give a pattern, or leave the option out"),
        ("--exclude", "#auto#", r"is a comment in .gitignore files; write \#auto# for such a name"),
        ("--exclude-if-present", "a/b", "want the name of a file, without /"),
        ("--exclude-if-present", "", "want the name of a file, without /"),
    ],
)
def test_backup_refuses_an_option_without_effect(
    home: Path, tmp_path: Path, call: InProcess, option: str, value: str, problem: str
) -> None:
    done = call("--store", tmp_path / "none", "backup", "home", home, option, value)
    assert_refused(done, 2, f"nearkin: {option} {value!r}: {problem}")


def test_patterns_of_special_characters_match(home: Path, store: Path) -> None:
    """They are accepted, without a warning of the library on stderr."""
    for name in ("[x", "#auto#", "]y"):
        (home / name).touch()
    done = run("--store", store, "backup", "home", home, "-e", r"\[x", "-e", r"\#auto#", "-e", "[]]y", "-e", "[[]z")
    assert (done.returncode, done.stderr) == (0, b"nearkin: 1 pattern matched nothing: [[]z\n")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("a b", "-"), "- is stdin, and a backup stores folders and files; `nearkin put 'a b' -` stores stdin"),
        (("--stdin", "db"), "`nearkin put db -` stores stdin"),
        (("db", "--from-command", "--", "pg_dump", "a b"), "`nearkin put db --from-command -- pg_dump 'a b'` stores"),
        (("db", "--stdin-from-command"), "`nearkin put db --from-command -- COMMAND` stores what a command writes"),
    ],
)
def test_backup_of_a_stream_names_put(tmp_path: Path, call: InProcess, words: tuple[str, ...], remedy: str) -> None:
    """As restic takes them; no store is opened."""
    assert_refused(call("--store", tmp_path / "none", "backup", *words), 2, remedy)


@pytest.mark.parametrize("end", [b"\n", b"\0"])
def test_backup_files_from_a_list(home: Path, store: Path, tmp_path: Path, call: InProcess, end: bytes) -> None:
    listed = [os.fsencode(home / "a.txt"), os.fsencode(home / "sub" / "b.o"), b""]
    (tmp_path / "list").write_bytes(end.join(listed))
    assert call("--store", store, "backup", "home", "--files-from", tmp_path / "list").returncode == 0
    assert call("--store", store, "backup", "stdin", "--files-from", "-", stdin=end.join(listed)).returncode == 0
    assert paths_of(store) == paths_of(store, "stdin") == [b"", b"a.txt", b"sub", b"sub/b.o"]
    assert_refused(call("--store", store, "backup", "k", "--files-from", "-", stdin=b""), 2, "lists no path")


def test_backup_of_unreadable_entries_is_incomplete(home: Path, store: Path) -> None:
    """Name each entry on stderr, store all others, exit with 3; with --quiet too."""
    for name in ("secret", "closed"):
        path = home / name
        path.mkdir() if name == "closed" else path.touch()
        path.chmod(0)
    words = [*as_user_without_override(), sys.executable, "-m", "nearkin.cli", "--store", str(store)]
    try:
        done, as_json, dry = (
            subprocess.run(
                [*words, "backup", "home", str(home), more], env=environment(), capture_output=True, check=False
            )
            for more in ("-q", "--json", "--dry-run")
        )
    finally:
        (home / "closed").chmod(0o700)
    assert (done.returncode, as_json.returncode, dry.returncode) == (3, 3, 3)
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert sorted(lines[:2]) == [f"nearkin: {home / name}: permission denied" for name in ("closed", "secret")]
    assert lines[2].startswith("nearkin: incomplete: 2 could not be read, 0 changed while they were read")
    assert lines[2].endswith("; check the named paths and the permissions of this user")
    answer = json.loads(as_json.stdout)
    assert (answer["unread"], answer["files"], as_json.stderr) == (2, 3, b"")
    assert answer["problems"][0] == {"path": str(home / "secret"), "reason": "permission denied"}
    assert f"nearkin: {home / 'secret'}: permission denied" in dry.stderr.decode()
    assert b"secret" not in paths_of(store)


def test_backup_notices_of_skipped_entries(home: Path, store: Path, call: InProcess) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "a\x1bsocket"))
    done = call("--store", store, "backup", "home", home)
    assert done.returncode == 0
    assert done.stderr.decode() == f"nearkin: skipped: {home}/a\\x1bsocket: is a socket\n"
    quiet = call("--store", store, "-q", "backup", "home", home)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"", b"")


def test_backup_dry_run_stores_nothing(home: Path, store: Path, call: InProcess) -> None:
    time.sleep(1.1)
    done = call("--store", store, "backup", "home", home, "--dry-run")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().splitlines() == [
        f"home: would store 3 files, 2 folders, 2 others, 5,007 B of {home}",
        "would read 5,007 B: 3 new files, 0 changed",
        "would take over 0 B: 0 unchanged files",
    ]
    assert call.answer("--store", store, "ls") == []
    call("--store", store, "backup", "home", home)
    (home / "a.txt").write_bytes(b"other")
    (home / "sub" / "b.o").unlink()
    (home / "sub" / "new").write_bytes(b"n")
    before = call.answer("--store", store, "ls", "--versions")
    planned = call.answer("--store", store, "backup", "home", home, "-n")
    stored = call.answer("--store", store, "backup", "home", home)
    assert before == call.answer("--store", store, "ls", "--versions")[:1]
    assert (planned["dry_run"], planned["new_files"], planned["changed_files"], planned["removed"]) == (True, 1, 1, 1)
    for name in ("files", "folders", "others", "unchanged_files", "read_bytes", "reused_bytes", "skipped"):
        assert planned[name] == stored[name], name


def test_backup_verbose_lists_files(home: Path, store: Path, call: InProcess) -> None:
    """A dry run lists each file with its state, a backup those that it reads; JSON has the same."""
    time.sleep(1.1)
    backup: tuple[str | Path, ...] = ("--store", store, "backup", "home", home)
    odd = rf"{home}/sub/caf\xe9\n"
    first = [
        f"new              4 B  {home}/a.txt",
        f"new          5,000 B  {home}/sub/b.o",
        f"new              3 B  {odd}",
    ]
    for words in (("-v", "--dry-run"), ("-v",)):
        done = call(*backup, *words)
        assert (done.returncode, done.stderr, done.stdout.decode().splitlines()[:3]) == (0, b"", first), words
    (home / "a.txt").write_bytes(b"other")
    (home / "sub" / "new").write_bytes(b"n")
    expected = [("changed", 5, f"{home}/a.txt"), ("unchanged", 5000, f"{home}/sub/b.o"), ("unchanged", 3, odd)]
    expected.append(("new", 1, f"{home}/sub/new"))
    text = call(*backup, "-nv").stdout.decode().splitlines()
    assert [tuple(line.split()) for line in text[:4]] == [(a, f"{b:,}", "B", c) for a, b, c in expected]
    states = call.answer(*backup, "-nv")["file_states"]
    assert [(one["state"], one["size_bytes"]) for one in states] == [one[:2] for one in expected]
    assert "file_states" not in call.answer(*backup, "-n")
    stored = call.answer(*backup, "-v")
    assert [(one["state"], one["path"]) for one in stored["file_states"]] == [
        ("changed", f"{home}/a.txt"),
        ("new", f"{home}/sub/new"),
    ]
    assert [stored[name] for name in ("new_files", "changed_files", "unchanged_files")] == [1, 1, 2]
    assert call("-q", *backup, "-fv").stdout == b""


def test_backup_verbose_prints_json_lines(home: Path, store: Path) -> None:
    """Each file is a line of its own, also of a dry run; the summary is the last line."""
    for words, key in ((("-n",), "dry_run"), ((), "version")):
        done = run("--store", store, "--json", "backup", "home", home, "--progress", "-v", *words)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        files = [line for line in lines if line["message_type"] == "verbose_status"]
        assert [(line["action"], line["data_size"]) for line in files] == [("new", 4), ("new", 5000), ("new", 3)]
        assert (files[0]["item"], lines[-1]["message_type"]) == (f"{home}/a.txt", "summary")
        assert lines[-1][key] == 1
        assert "file_states" not in lines[-1]


def test_backup_draws_files_and_bytes_on_a_terminal(store: Path, home: Path) -> None:
    assert b"backup: 3 files" in drawn_on_terminal("--store", store, "backup", "home", home)


def test_backup_help_has_examples(store: Path, home: Path) -> None:
    done = run("backup", "--help")
    assert b"nearkin backup home /home/ana" in done.stdout
    for option in (b"--files-from", b"--exclude-if-present", b"--one-file-system", b"--ignore-ctime", b"--dry-run"):
        assert option in done.stdout


def test_dry_run_counts_what_a_checkpoint_has(tmp_path: Path, call: InProcess) -> None:
    """The dry run after an interrupted backup predicts what the next backup reads."""
    folder = tmp_path / "source"
    for number in range(6):
        (folder / f"{number}").mkdir(parents=True)
        (folder / f"{number}" / "file").write_bytes(os.urandom(300_000))
    (folder / "5" / "vanishes").touch()
    time.sleep(backup.RECENT_NS / 1e9)
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
        patch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1)
        patch.setattr(TreeWriter, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.backup("home", [folder])
    (folder / "5" / "vanishes").unlink()
    planned = json.loads(call("--store", tmp_path / "store", "--json", "backup", "home", folder, "--dry-run").stdout)
    with open_store(tmp_path / "store") as store:
        counts = store.backup("home", [folder]).counts
    assert planned["reused_bytes"] == counts.reused_bytes > 0
    assert planned["read_bytes"] == counts.read_bytes
    assert planned["removed"] == 0, "there is no version yet"


def _interrupt(*_: object) -> bytes:
    raise KeyboardInterrupt


CONTINUES = b"; run the same command again: it continues behind what is stored\n"


@pytest.mark.parametrize(("number", "line"), [(signal.SIGINT, b"interrupted"), (signal.SIGTERM, b"terminated")])
def test_interrupted_backup_names_how_to_continue(
    tmp_path: Path, call: InProcess, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, line: bytes
) -> None:
    """The notice is printed once a checkpoint is durable, not before; the next run reads less."""
    folder, words = tmp_path / "source", ("--store", new_store(tmp_path / "store"), "backup", "home")
    finish = TreeWriter.finish

    def interrupt(tree: TreeWriter, unread: int) -> bytes:
        signal.raise_signal(number)
        return finish(tree, unread)

    for name in range(6):
        (folder / f"{name}").mkdir(parents=True)
        (folder / f"{name}" / "file").write_bytes(os.urandom(300_000))
    time.sleep(backup.RECENT_NS / 1e9)
    monkeypatch.setattr(TreeWriter, "finish", interrupt)
    done = call(*words, folder)
    assert (done.returncode, done.stderr) == (128 + number, b"nearkin: " + line + b"\n")
    for option, more in (((), CONTINUES), (("--force-rescan",), b"\n")):
        monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
        monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1)
        done = call(*words, folder, *option)
        assert (done.returncode, done.stderr) == (128 + number, b"nearkin: " + line + more)
    monkeypatch.setattr(TreeWriter, "finish", finish)
    assert call.answer(*words, folder)["reused_bytes"] > 0


def test_json_progress_is_read_line_by_line(tmp_path: Path) -> None:
    """A program reads status lines while the backup runs; the last line is what `--json` prints."""
    store, folder = tmp_path / "store", tmp_path / "source"
    for number in range(60):
        (folder / f"{number}").mkdir(parents=True)
        (folder / f"{number}" / "file").write_bytes(os.urandom(1_000_000))
    (folder / "far").symlink_to("nowhere")
    open_store(store, create=True).close()
    words = ["--store", str(store), "--json", "backup", "home", str(folder)]
    done = run(*words, "--progress")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    *states, summary = lines
    assert {state["message_type"] for state in states} == {"status"}
    assert [state["bytes_done"] for state in states] == sorted(state["bytes_done"] for state in states)
    last = states[-1]
    assert (last["files_done"], last["bytes_done"], last["total_bytes"]) == (60, 60_000_000, 60_000_000)
    assert (last["percent_done"], last["seconds_remaining"], last["error_count"]) == (1.0, 0.0, 0)
    assert summary.pop("message_type") == "summary"
    assert summary["read_bytes"] == 60_000_000
    assert summary.keys() == json.loads(run(*words).stdout).keys()


def test_json_progress_lists_errors_and_obeys_quiet(tmp_path: Path) -> None:
    """With --quiet only errors and the summary are printed."""
    problems = [PathProblem(b"/a", "permission denied"), PathProblem(b"/b\xff", "changed while it was read")]
    code = (
        "import click; from nearkin.cli import json_progress as j; from nearkin.cli.progress import EntriesDone;"
        "from nearkin.trees.backup_walk import PathProblem;"
        f"j.is_quiet = lambda: True\nwith j.json_lines(lambda: EntriesDone(0, 0, 2, None), {problems!r}): pass"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["message_type"], line["item"]) for line in lines] == [("error", "/a"), ("error", "/b\\xff")]


def test_progress_without_json_is_refused(tmp_path: Path, call: InProcess) -> None:
    open_store(tmp_path / "store", create=True).close()
    done = call("--store", tmp_path / "store", "backup", "home", tmp_path, "--progress")
    assert (done.returncode, b"--progress: prints JSON lines; give --json" in done.stderr) == (2, True)


def test_dry_run_counts_no_holes(home: Path, store: Path, call: InProcess) -> None:
    """The bytes to read of a sparse file are its data, as the backup then counts them."""
    with (home / "sparse").open("wb") as file:
        file.truncate(64 << 20)
        os.pwrite(file.fileno(), b"d" * 8192, 32 << 20)
    planned = call.answer("--store", store, "backup", "home", home, "-n")
    stored = call.answer("--store", store, "backup", "home", home)
    assert planned["read_bytes"] == stored["read_bytes"] == 8192 + 5007


def _unmatched(call: InProcess, store: Path, *words: str | Path) -> list[tuple[str, str | None, int | None]]:
    found = call.answer("--store", store, "backup", "home", *words)["unmatched_patterns"]
    return [(one["pattern"], one["file"], one["line"]) for one in found]


def test_patterns_that_match_nothing_are_named(home: Path, store: Path, tmp_path: Path, call: InProcess) -> None:
    patterns = tmp_path / "patterns"
    patterns.write_bytes(b"\xef\xbb\xbf*.txt\r\n# *.comment\r\n\r\n/buidl/\r\n!*.none\xc2\x85\r\n")
    options = ("-e", "*.tpm", "-e", "b.*", "-e", "*.o", "--exclude-file", patterns)
    done = call("--store", store, "backup", "home", home, *options)
    assert done.returncode == 0
    lines = done.stderr.decode().splitlines()
    assert lines == [
        f"nearkin: 3 patterns matched nothing: *.tpm, /buidl/ ({patterns}, line 4), !*.none\\x85 ({patterns}, line 5)"
        "; those with / inside count from the root of the tree"
    ]
    found = _unmatched(call, store, home, *options)
    assert found == [("*.tpm", None, None), ("/buidl/", str(patterns), 4), ("!*.none\x85", str(patterns), 5)]
    assert call.answer("--store", store, "backup", "home", home, "-n", *options)["unmatched_patterns"]
    assert call("--store", store, "-q", "backup", "home", home, *options).stderr == b""


def test_backup_with_another_root_says_so(home: Path, store: Path, call: InProcess) -> None:
    assert call("--store", store, "backup", "home", home).stderr == b""
    expected = (
        f"nearkin: the root is {home}/sub, and that of the newest version before it {home}: names in the tree differ, "
        "and files of other names are read again\n"
    )
    assert call("--store", store, "backup", "home", home / "sub", "-n").stderr.decode() == expected
    assert call("--store", store, "backup", "home", home / "sub").stderr.decode() == expected
    again = call("--store", store, "backup", "home", home / "sub", home / "nope")
    assert again.returncode == 3
    assert b"the root is" not in again.stderr
    answer = call.answer("--store", store, "backup", "home", home)
    assert (answer["root"], answer["newest_root"]) == (str(home), f"{home}/sub")


def test_patterns_for_pruned_folders_are_not_named(home: Path, store: Path, call: InProcess) -> None:
    """A pattern that matches only what another one, or a rule for folders, left out is not misspelt."""
    (home / "build" / "deep").mkdir(parents=True)
    (home / "build" / "deep" / "x.obj").touch()
    (home / "cache").mkdir()
    (home / "cache" / "CACHEDIR.TAG").write_bytes(b"Signature: 8a477f597d28d172789f06886806bc55")
    (home / "cache" / "page.html").touch()
    options = ("-e", "/build/", "-e", "*.obj", "-e", "/build/deep/*.obj", "-e", "*.html", "-e", "*.tpm")
    assert _unmatched(call, store, home, *options, "--exclude-caches") == [("*.tpm", None, None)]
    assert _unmatched(call, store, home, "-e", "/build", "-e", "/build/deep/*.abc") == [
        ("/build/deep/*.abc", None, None)
    ]


def test_unmatched_patterns_of_unread_folders(
    home: Path, store: Path, call: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where too many names are left out to compare, no pattern is named."""
    (home / "build").mkdir()
    for number in range(5):
        (home / "build" / f"{number}").touch()
    monkeypatch.setattr(unmatched_patterns, "NAMES_MAX", 5)
    assert _unmatched(call, store, home, "-e", "build", "-e", "*.tpm") == [("*.tpm", None, None)]
    monkeypatch.setattr(unmatched_patterns, "NAMES_MAX", 4)
    assert _unmatched(call, store, home, "-e", "build", "-e", "*.tpm") == []


def test_patterns_match_names_with_newlines(home: Path, store: Path, call: InProcess) -> None:
    """A newline in a name is a character as others: it neither hides an entry from a pattern, nor ends a name."""
    (home / "x\ny").mkdir()
    (home / "x\ny" / "z.o").touch()
    (home / "z.o\n").touch()
    assert call("--store", store, "backup", "home", home, "-e", "*.o").returncode == 0
    found = paths_of(store)
    assert (b"x\ny/z.o" in found, b"z.o\n" in found) == (False, True)


@pytest.mark.parametrize(
    ("pair", "message"), [("paths=x", "--meta paths=...: is set by the backup"), ("host= ", "must not be empty")]
)
def test_metadata_that_blanks_a_listing_is_refused(
    home: Path, store: Path, call: InProcess, pair: str, message: str
) -> None:
    assert_refused(call("--store", store, "backup", "home", home, "--meta", pair), 2, message)
    assert call.answer("--store", store, "ls") == []
