"""Patterns that begin with a path of the source, in `nearkin backup` and `nearkin restore`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nearkin import open_store
from tests.support.checks.commands import InProcess, new_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return new_store(tmp_path / "store")


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """Return a folder with `perl/unicore/x`, `perl/x`, `vim/x` and a symlink `link` to `perl`."""
    folder = tmp_path / "sh[a]re"
    for name in ("perl/unicore", "vim"):
        (folder / name).mkdir(parents=True)
    for name in ("perl/unicore/x", "perl/x", "vim/x"):
        (folder / name).write_bytes(name.encode())
    (folder / "link").symlink_to("perl")
    return folder


def files_of(store: Path, key: str = "k") -> set[str]:
    with open_store(store, read_only=True) as opened:
        return {os.fsdecode(one.entry.path) for one in opened.tree(key).entries() if one.entry.kind != 1}


def back_up(call: InProcess, store: Path, *words: str | Path) -> set[str]:
    """Return the files of a backup whose patterns all match."""
    done = call("--store", store, "backup", "k", *words)
    assert (done.returncode, b"matched nothing" in done.stderr) == (0, False)
    return files_of(store)


def test_pattern_with_the_path_of_the_root_excludes(share: Path, store: Path, call: InProcess) -> None:
    perl = share / "perl"
    assert back_up(call, store, perl, "-e", f"{perl}/unicore") == {"x"}
    assert back_up(call, store, perl, "-e", f"{perl}/*", "-e", f"!{perl}/x") == {"x"}
    escaped = str(perl).replace("[", "\\[")
    assert back_up(call, store, perl, "-e", f"{escaped}/unicore/") == {"x"}
    assert back_up(call, store, share / "link", "-e", f"{share}/link/unicore") == {"x"}
    assert back_up(call, store, share / "link", "-e", f"{perl}/unicore") == {"x"}


def test_pattern_with_one_of_several_paths_excludes(share: Path, store: Path, call: InProcess) -> None:
    paths = (share / "perl", share / "vim")
    done = call("--store", store, "backup", "k", *paths, "-e", f"{share}/vim")
    assert (done.returncode, files_of(store)) == (0, {"perl/x", "perl/unicore/x"})
    assert b"vim: is given, and matches an exclude pattern" in done.stderr
    assert back_up(call, store, *paths, "-e", f"{share}/perl/x") == {"perl/unicore/x", "vim/x"}
    assert back_up(call, store, *paths, "-e", f"{share}/*/x") == {"perl/unicore/x"}
    assert back_up(call, store, f"{share}/link/", share / "vim", "-e", f"{share}/link/x") == {"link/unicore/x", "vim/x"}


def test_pattern_with_the_path_as_given_excludes(
    share: Path, store: Path, call: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(share)
    assert back_up(call, store, "perl", "-e", "perl/unicore") == {"x"}
    assert back_up(call, store, "./perl/", "-e", "./perl/unicore") == {"x"}
    assert back_up(call, store, "perl", "vim", "-e", "perl/x") == {"perl/unicore/x", "vim/x"}
    monkeypatch.chdir(share / "perl")
    assert back_up(call, store, ".", "-e", "./unicore") == {"x"}


def test_pattern_of_an_exclude_file_is_translated(share: Path, store: Path, tmp_path: Path, call: InProcess) -> None:
    patterns = tmp_path / "patterns"
    patterns.write_text(f"# none\n\n{share}/perl/unicore\n{share}/perl/absent\n")
    answer = call.answer("--store", store, "backup", "k", share / "perl", "--exclude-file", patterns)
    assert files_of(store) == {"x"}
    assert answer["unmatched_patterns"] == [
        {"pattern": f"{share}/perl/absent", "file": str(patterns), "line": 4},
    ]


def test_pattern_of_an_entry_of_the_tree_stays(share: Path, store: Path, call: InProcess) -> None:
    """A tree that has the path of its own source below its root: the pattern counts from the root, as any."""
    perl = share / "perl"
    inner = perl / str(perl)[1:]
    inner.mkdir(parents=True)
    (inner / "x").touch()
    escaped = str(perl).replace("[", "\\[")
    assert back_up(call, store, perl, "-e", f"{escaped}/x") == {"x", "unicore/x"}
    assert back_up(call, store, perl, "-e", "perl/", "-e", "unicore") == {"x"}, "a name matches anywhere"


def test_pattern_of_the_whole_root_is_named(share: Path, store: Path, call: InProcess) -> None:
    perl = share / "perl"
    done = call("--store", store, "backup", "k", perl, "-e", f"{perl}/", "-e", f"{share}/vim")
    assert done.returncode == 0
    assert done.stderr.decode() == (
        f"nearkin: 2 patterns matched nothing: {perl}/, {share}/vim; those with / inside count from the root of the "
        "tree\n"
    )


def test_restore_patterns_with_source_paths_select(share: Path, store: Path, tmp_path: Path, call: InProcess) -> None:
    def restore(*words: str) -> set[str]:
        target = tmp_path / f"target{len(list(tmp_path.iterdir()))}"
        done = call("--store", store, "restore", "k", "-o", target, *words)
        assert (done.returncode, done.stderr) == (0, b"")
        return {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}

    back_up(call, store, share / "link", "--tag", "t")
    assert restore("--include", f"{share}/perl/unicore/") == {"unicore/x"}
    assert restore("--include", f"{share}/link/x") == {"x"}
    assert restore("--exclude", f"{share}/perl/unicore") == {"x"}
    back_up(call, store, share / "perl", share / "vim")
    assert restore("--include", f"{share}/vim") == {"vim/x"}
    assert restore("--exclude", f"{share}/perl") == {"vim/x"}
