"""`ls GLOB` and `verify KEY`: which keys and containers a command reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from tests.support.checks.commands import InProcess, assert_refused
from tests.support.data.stores import SMALL, containers, flip, settings
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway

CHOSEN = settings(SMALL)
KEYS = ("db/shop.sql", "db/web.sql", "db/web.rdb", "db/old/web.sql", "notes[1]", "notes1")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    """A store with KEYS, and a gateway that serves it."""
    with ScriptedGateway(tmp_path_factory.mktemp("keys") / "store") as gateway:
        for key in KEYS:
            gateway.read().put(key, key.encode())
        yield gateway


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["db/*.sql"], ["db/old/web.sql", "db/shop.sql", "db/web.sql"]),
        (["*web.???"], ["db/old/web.sql", "db/web.rdb", "db/web.sql"]),
        (["db/[!o]*.sql"], ["db/shop.sql", "db/web.sql"]),
        (["notes[[]1]"], ["notes[1]"]),
        (["notes[1]"], ["notes1"]),
        (["--literal", "notes["], ["notes[1]"]),
        (["db/w"], ["db/web.rdb", "db/web.sql"]),
        (["*.zip"], []),
    ],
)
def test_ls_glob_local_and_server_list_the_same(
    keys: ScriptedGateway, call: InProcess, arguments: list[str], expected: list[str]
) -> None:
    """`ls GLOB` lists the matching keys, of a local store and through a server."""
    local = call.answer("--store", keys.read().root, "ls", *arguments)
    served = call.answer("--server", keys.url, "ls", *arguments, env={"NEARKIN_TOKEN": TOKEN})
    assert [info["key"] for info in local] == [info["key"] for info in served] == expected


def test_ls_deleted_takes_a_glob(tmp_path: Path, call: InProcess) -> None:
    """A glob selects deleted versions too."""
    with open_store(tmp_path / "store", settings=CHOSEN, create=True) as store:
        for key in KEYS:
            store.put(key, b"x")
            store.delete(key)
    deleted = call.answer("--store", tmp_path / "store", "ls", "--deleted", "*.rdb")
    assert [entry["key"] for entry in deleted] == ["db/web.rdb"]


def test_ls_glob_ignores_damage_of_other_keys(tmp_path: Path, call: InProcess) -> None:
    """A version that does not match is not reported as unreadable."""
    root = tmp_path / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("db/a.sql", b"1")
        before = set((root / "manifests").rglob("*.nkm"))
        store.put("db/b.rdb", b"2")
    (manifest,) = set((root / "manifests").rglob("*.nkm")) - before
    manifest.write_bytes(manifest.read_bytes()[:60])
    assert call("--store", root, "ls", "db/*.sql").returncode == 0
    assert call("--store", root, "ls", "db/*").returncode != 0


# --- verify KEY ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_keys(tmp_path: Path) -> tuple[Path, list[Path], list[Path]]:
    """A store with two keys that share nothing; (root, containers of `a`, containers of `b`)."""
    root = tmp_path / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("a", random_bytes(900_000, 1))
        store.put("a", random_bytes(300_000, 2))
    first = containers(root)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("b", random_bytes(900_000, 3))
    return root, first, [path for path in containers(root) if path not in first]


def test_verify_key_reads_only_its_containers(two_keys: tuple[Path, list[Path], list[Path]], call: InProcess) -> None:
    """`verify KEY` reads what the key's versions reach and nothing else."""
    root, of_a, of_b = two_keys
    report = call.answer("--store", root, "verify", "a")
    assert (report["ok"], report["versions"], report["containers"]) == (True, 2, len(of_a))
    assert report["bytes_read"] == sum(path.stat().st_size for path in of_a)
    flip(of_b[0], 200)
    assert call("--store", root, "verify", "a").returncode == 0
    broken = call("--store", root, "--json", "verify", "b")
    assert broken.returncode != 0
    (damage,) = json.loads(broken.stdout)["damage"]
    assert damage["object_name"] == str(of_b[0].relative_to(root))
    assert damage["versions"] == [{"key": "b", "version": 1, "deleted": False}]


def test_verify_version_skips_other_versions(two_keys: tuple[Path, list[Path], list[Path]], call: InProcess) -> None:
    """`verify KEY --version V` ignores damage that only other versions reach."""
    root, of_a, _ = two_keys
    flip(of_a[0], 200)
    reports = [json.loads(call("--store", root, "--json", "verify", "a", "--version", n).stdout) for n in "12"]
    assert [report["ok"] for report in reports] == [False, True]
    assert [report["versions"] for report in reports] == [1, 1]


def test_verify_key_finds_damage_in_a_base(tmp_path: Path) -> None:
    """A base container that only deltas of the version need is read too."""
    root, first = tmp_path / "store", text_like(400_000, 4)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("base", first)
    bases = containers(root)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("delta", mutate(first, 5, edits=400, edit_bytes_max=20))
        assert store.stats().ledger.delta_chunks
        for path in bases:
            flip(path, 200)
        damage = store.verify_key("delta").damage
    assert {one.object_name for one in damage} & {str(path.relative_to(root)) for path in bases}
    assert all(one.versions == (("delta", 1),) for one in damage)


def test_verify_key_names_a_lost_manifest(two_keys: tuple[Path, list[Path], list[Path]]) -> None:
    """Report a version as damaged if the index lists it and its manifest is missing."""
    root, _, _ = two_keys
    with open_store(root, settings=CHOSEN, create=True) as store:
        name = next((root / "manifests").rglob("*.nkm"))
        name.unlink()
        found = [damage for key in ("a", "b") for damage in store.verify_key(key).damage]
    assert [damage.object_name for damage in found] == [str(name.relative_to(root))]


def test_verify_key_through_a_server_downloads_it(keys: ScriptedGateway, call: InProcess) -> None:
    """`verify KEY` works with --server: every version is compared with its BLAKE3."""
    report = call.answer("--server", keys.url, "verify", "db/web.sql", env={"NEARKIN_TOKEN": TOKEN})
    assert (report["ok"], report["versions"], report["bytes_read"]) == (True, 1, len("db/web.sql"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nothing"], "nothing"),
        (["a", "--version", "9"], "version 9"),
        (["a", "--sample", "1%"], "--sample"),
        (["a", "--since", "2d"], "--since"),
        (["--version", "1"], "--version"),
    ],
)
def test_verify_key_refuses_missing_and_mixed(
    two_keys: tuple[Path, list[Path], list[Path]], call: InProcess, arguments: list[str], problem: str
) -> None:
    """Refuse an unknown key or version, and options that apply to a full verification only."""
    done = call("--store", two_keys[0], "verify", *arguments)
    assert done.returncode != 0
    assert problem in done.stderr.decode()


@pytest.mark.parametrize("command", [["ls"], ["forget", "--keep-last", "1"], ["copy", "--from", "other"]])
def test_invalid_globs_of_keys_are_refused(tmp_path: Path, call: InProcess, command: list[str]) -> None:
    """They would match keys with [ in their names, or none; no store is opened."""
    for glob, problem in (("db/[a", "a [ has no ]; write [[] for"), ("[z-a]", "the range z-a ends before it starts")):
        done = call("--store", tmp_path / "none", *command, glob)
        assert_refused(done, 2, f"nearkin: pattern {glob!r}: {problem}")
        assert b"--literal takes the text as it is" in done.stderr
