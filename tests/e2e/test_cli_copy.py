"""`nearkin copy`: incremental, in order, verified and resumable copies between stores."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import cast

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin.store_copy import CopiedVersion, Copier, plan_key
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.results import VersionInfo
from tests.support.checks.commands import InProcess
from tests.support.data.stores import SMALL, containers, flip, settings
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway

CHOSEN = settings(SMALL)
BIG = random_bytes(1_500_000, 1)
CONTENTS = {
    "big": [BIG, mutate(BIG, 2, edits=20)],  # above SMALL_BYTES: streamed
    "db/a": [b"one", b"two", b"two"],
    "db/b": [b""],
    "notes": [b"hello"],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    with open_store(root, settings=CHOSEN, create=True) as store:
        for key, contents in CONTENTS.items():
            for number, content in enumerate(contents):
                store.put(key, content, metadata={"number": str(number)})
    return root


@pytest.fixture
def target(tmp_path: Path) -> Path:
    open_store(tmp_path / "target", settings=CHOSEN, create=True).close()
    return tmp_path / "target"


def listed(root: Path) -> list[VersionInfo]:
    with open_store(root, settings=CHOSEN, read_only=True) as store:
        return store.versions(all_versions=True)


def facts(infos: list[VersionInfo]) -> list[tuple[object, ...]]:
    return [(i.key, i.version, i.digest, i.created, dict(i.metadata), i.size_bytes) for i in infos]


def test_copy_keeps_content_times_and_metadata(source: Path, target: Path, call: InProcess) -> None:
    """Copy versions, bytes, creation times and metadata; a second run copies nothing."""
    first = call.answer("--store", target, "copy", "--from", source)
    assert (len(first["versions"]), first["present"], first["failures"]) == (7, 0, [])
    assert facts(listed(target)) == facts(listed(source))
    with open_store(target, settings=CHOSEN, read_only=True) as store:
        for key, contents in CONTENTS.items():
            assert [store.get(key, number).read() for number in range(1, len(contents) + 1)] == contents
        assert store.verify().damage == ()
    again = call.answer("--store", target, "copy", "--from", source)
    assert (again["versions"], again["present"], again["bytes"]) == ([], 7, 0)


def test_copy_is_incremental_and_keeps_deletions(source: Path, target: Path, call: InProcess) -> None:
    """Only newer versions are copied; an older one that the target deleted does not return."""
    call.answer("--store", target, "copy", "--from", source)
    with open_store(target, settings=CHOSEN, create=True) as store:
        store.delete("db/a", 1)
    with open_store(source, settings=CHOSEN, create=True) as store:
        store.put("db/a", b"three")
    report = call.answer("--store", target, "copy", "--from", source)
    assert [(one["key"], one["source_version"], one["version"]) for one in report["versions"]] == [("db/a", 4, 4)]
    assert [info.version for info in listed(target) if info.key == "db/a"] == [2, 3, 4]


def test_copy_selects_keys_by_name_and_glob(source: Path, target: Path, call: InProcess) -> None:
    """Select with KEY that key alone, with GLOB all matches; --prefix renames.

    An unknown key is an error.
    """
    call.answer("--store", target, "copy", "--from", source, "notes", "db/*", "--prefix", "old/")
    assert sorted({info.key for info in listed(target)}) == ["old/db/a", "old/db/b", "old/notes"]
    assert b"nothing" in call("--store", target, "copy", "--from", source, "nothing").stderr


def test_copy_dry_run_changes_nothing(source: Path, target: Path, call: InProcess) -> None:
    """--dry-run lists what would be copied."""
    plan = call.answer("--store", target, "copy", "--from", source, "--dry-run")
    assert [(one["key"], one["version"]) for one in plan["versions"]][:2] == [("big", 1), ("big", 2)]
    assert plan["bytes"] == sum(len(content) for contents in CONTENTS.values() for content in contents)
    assert listed(target) == []
    output = call("--store", target, "copy", "--from", source, "--dry-run").stdout.decode()
    assert "would copy 7 versions" in output


def test_copy_resumes_after_an_interruption(source: Path, target: Path, call: InProcess) -> None:
    """A copy that was cut off leaves whole versions; the next run copies exactly the rest."""
    with (
        open_store(source, settings=CHOSEN, create=True) as origin,
        open_store(target, settings=CHOSEN, create=True) as store,
    ):
        infos = [info for info in origin.versions(all_versions=True) if info.key == "big"]
        copied = cast("Generator[CopiedVersion]", Copier(origin, store).run([plan_key("big", "big", infos, [], {})]))
        next(copied)
        copied.close()
    assert [(info.key, info.version) for info in listed(target)] == [("big", 1)]
    report = call.answer("--store", target, "copy", "--from", source)
    assert (len(report["versions"]), report["present"]) == (6, 1)
    assert facts(listed(target)) == facts(listed(source))


def test_copy_stops_a_key_at_damage(source: Path, target: Path, call: InProcess) -> None:
    """Copy nothing damaged but all other keys; the key continues once its source is repaired."""
    sound = {path: path.read_bytes() for path in containers(source)}
    with open_store(source, settings=CHOSEN, read_only=True) as store:
        broken = max(containers(source), key=lambda path: path.stat().st_size)
        flip(broken, 300)
        bad = {name for damage in store.verify().damage for name in damage.versions}
    assert ("big", 1) in bad
    done = call("--store", target, "--json", "copy", "--from", source)
    report = json.loads(done.stdout)
    assert done.returncode != 0
    assert {one["key"] for one in report["failures"]} == {key for key, _ in bad}
    assert not {(info.key, info.version) for info in listed(target)} & bad
    broken.write_bytes(sound[broken])
    assert call("--store", target, "copy", "--from", source).returncode == 0
    assert facts(listed(target)) == facts(listed(source))


def test_copy_never_hides_a_newer_version(source: Path, target: Path, call: InProcess) -> None:
    """Where the target's own newest version is later, the key is not copied, and named."""
    with open_store(target, settings=CHOSEN, create=True) as store:
        store.put("notes", b"written here, later")
    done = call("--store", target, "copy", "--from", source)
    assert done.returncode != 0
    assert b"notes from version 1 on" in done.stderr
    with open_store(target, settings=CHOSEN, read_only=True) as store:
        assert store.get("notes").read() == b"written here, later"
        assert store.get("db/a").read() == b"two"


def test_copy_to_a_server_and_back_keeps_times(source: Path, target: Path, tmp_path: Path, call: InProcess) -> None:
    """Copy incrementally from local to server and back, with the original creation times."""
    with ScriptedGateway(tmp_path / "served") as gateway:
        token = {"NEARKIN_TOKEN": TOKEN}
        up = call.answer("--server", gateway.url, "copy", "--from", source, env=token)
        assert (len(up["versions"]), up["failures"]) == (7, [])
        again = call.answer("--server", gateway.url, "copy", "--from", source, env=token)
        assert (again["versions"], again["present"]) == ([], 7)
        down = call.answer("--store", target, "copy", "--from", gateway.url, env=token)
        assert len(down["versions"]) == 7
        assert facts(listed(target)) == facts(listed(source))
        assert call.answer("--store", target, "copy", "--from", gateway.url, env=token)["versions"] == []


def test_copy_onto_itself_is_refused(source: Path, call: InProcess) -> None:
    """A store is not copied into itself; a missing source is named."""
    same = call("--store", source, "copy", "--from", f"file://{source}")
    assert same.returncode == 2
    assert b"is the target too" in same.stderr
    missing = call("--store", source, "copy", "--from", source.parent / "none")
    assert missing.returncode not in (0, 2)
    assert b"none" in missing.stderr


def test_from_config_holds_over_the_environment(
    source: Path, tmp_path: Path, call: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configure SRC by the file of --from-config alone, whatever the environment sets."""
    plain = tmp_path / "plain.toml"
    plain.write_text('[storage]\nencryption = "none"\n')
    generate(tmp_path / "kek")
    monkeypatch.setenv("NEARKIN_STORAGE__ENCRYPTION", "aes-256-gcm")
    monkeypatch.setenv("NEARKIN_STORAGE__KEY_FILE", str(tmp_path / "kek"))
    assert call("--store", tmp_path / "sealed", "init").returncode == 0
    done = call("--store", tmp_path / "sealed", "copy", "--from", source, "--from-config", plain)
    assert done.returncode == 0, done.stderr
    assert b"notes" in call("--store", tmp_path / "sealed", "ls").stdout
