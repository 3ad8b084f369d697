"""Damage that a reader found: the next put stores the broken chunks again."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

import nearkin
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin.local.damage_notes import NAME, NOTED_MAX, DamageNotes, suspect_containers
from nearkin.store import Store, open_store
from nearkin.trees.backup import RECENT_NS
from nearkin_shared.errors import Corrupt, KeysLost, NearkinError
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.storage.containers import id_of
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.types import Locations
from tests.support.data.stores import SMALL, containers, flip, settings
from tests.support.servers.gateways import embedded, running

CHOSEN = settings(SMALL)
DATA = random_bytes(1_200_000, 7)


def break_blocks(root: Path, number: int = 0) -> None:
    """Flip bits in the blocks of a container; its directory stays intact."""
    path = containers(root)[number]
    path.chmod(0o600)
    for at in range(path.stat().st_size // 10, path.stat().st_size * 8 // 10, 5000):
        flip(path, at)


def noted(root: Path) -> frozenset[int]:
    with open_store(root, settings=CHOSEN) as store:
        return store.damage_notes.read()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Return a store with one version, of which a container is broken."""
    root = tmp_path / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("data", DATA)
    break_blocks(root)
    return root


def read_fails(store: Store, key: str) -> bool:
    try:
        return store.get(key).read() != DATA
    except Corrupt:
        return True


@pytest.mark.parametrize("kind", ["exact", "tablets", "sampled"])
@pytest.mark.parametrize("read_only", [True, False])
def test_put_after_a_failed_read_is_complete(broken: Path, kind: str, read_only: bool) -> None:
    """Chunks that a read found broken are stored again, in every version that has them."""
    chosen = settings(CHOSEN, {"index": {"kind": kind}})
    with open_store(broken, settings=chosen, read_only=read_only) as store:
        assert read_fails(store, "data")
    with open_store(broken, settings=chosen) as store:
        store.put("data", DATA)
        assert store.get("data", 2).read() == DATA
        assert store.get("data", 1).read() == DATA  # repaired with the new chunks
        assert not store.verify().damage
        assert not store.damage_notes.read()


def test_put_after_a_salvage_is_complete(broken: Path) -> None:
    """A salvage that meets the damage first has it noted, too."""
    with open_store(broken, settings=CHOSEN, read_only=True) as store:
        salvaged = store.salvage("data")
        assert b"".join(salvaged) != DATA
        assert salvaged.holes
    with open_store(broken, settings=CHOSEN) as store:
        store.put("data", DATA)
        assert store.get("data", 2).read() == DATA
        assert not store.verify().damage


def test_put_after_damage_of_a_base_is_complete(tmp_path: Path) -> None:
    """A read that fails at a base notes the base too: its own content is stored again."""
    root = tmp_path / "store"
    changed = mutate(DATA, 5, 60)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("base", DATA)
        deltas = len(containers(root))
        store.put("changed", changed)
    for number in range(deltas):
        break_blocks(root, number)
    with open_store(root, settings=CHOSEN) as store:
        with pytest.raises(Corrupt):
            store.get("changed").read()
        store.put("base", DATA)
        store.put("changed", changed)
        assert store.get("base").read() == DATA
        assert store.get("changed").read() == changed
        assert not any(("base", 2) in one.versions or ("changed", 2) in one.versions for one in store.verify().damage)


def test_damaged_block_in_memory_is_no_base(tmp_path: Path) -> None:
    """A block that is intact in memory and was found broken on disk is no base of new chunks."""
    root = tmp_path / "store"
    changed = mutate(DATA, 5, 60)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("data", DATA)
        assert store.get("data").read() == DATA
        for number in range(len(containers(root))):
            break_blocks(root, number)
        assert store.verify().damage
        store.put("data", changed)
    with open_store(root, settings=CHOSEN) as store:
        assert store.get("data").read() == changed


def test_verify_beside_a_writer_has_effect_at_its_next_put(tmp_path: Path) -> None:
    """Damage found while another process has the index is verified by its next put."""
    root = tmp_path / "store"
    with open_store(root, settings=CHOSEN, create=True) as writer:
        writer.put("data", DATA)
        break_blocks(root)
        with open_store(root, settings=CHOSEN) as other:
            report = other.verify()
            assert report.damage
            assert report.forgotten is False
        writer.put("copy", DATA)
    with open_store(root, settings=CHOSEN) as store:
        assert store.get("copy").read() == DATA
        assert not store.verify().damage


def test_backup_after_a_failed_restore_is_complete(tmp_path: Path) -> None:
    """Unchanged files with broken chunks are read again, and the newest version restores."""
    root, folder = tmp_path / "store", tmp_path / "source"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}").write_bytes(random_bytes(100_000, number))
        os.utime(folder / f"{number}", (1e9, 1e9))
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.backup("home", [folder])
    break_blocks(root)
    with open_store(root, settings=CHOSEN, read_only=True) as store:
        assert not store.restore("home", tmp_path / "partial").is_complete
    with open_store(root, settings=CHOSEN) as store:
        store.backup("home", [folder])
        assert store.restore("home", tmp_path / "target").is_complete
        assert not store.verify().damage
    subprocess.run(["diff", "-r", folder, tmp_path / "target"], check=True)


def test_backup_that_finds_damage_is_complete(tmp_path: Path) -> None:
    """The first backup that meets an unreadable container stores its chunks again; the next ones take over files."""
    source, root = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    (source / "a").write_bytes(DATA)
    time.sleep(1.2 * RECENT_NS / 1e9)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.backup("k", [source])
        (source / "a").write_bytes(mutate(DATA, 5, 30))
        (source / "b").write_bytes(random_bytes(200_000, 8))
        time.sleep(1.2 * RECENT_NS / 1e9)
        store.backup("k", [source])
    first = containers(root)[0]
    first.chmod(0o600)
    flip(first, first.stat().st_size - 20)
    with open_store(root, settings=CHOSEN) as store:
        assert store.backup("k", [source]).counts.unchanged_files == 0
        store.restore("k", tmp_path / "target")
        subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)
        assert store.backup("k", [source]).counts.unchanged_files == 2, "only earlier versions need the container"
        assert store.get("k", 4).read()
        assert not any(version in (("k", 3), ("k", 4)) for one in store.verify().damage for version in one.versions)


def test_damage_of_another_key_leaves_a_tree_reusable(tmp_path: Path) -> None:
    """Files are taken over as long as no segment of their own version is quarantined."""
    root, folder = tmp_path / "store", tmp_path / "source"
    folder.mkdir()
    (folder / "file").write_bytes(random_bytes(500_000, 3))
    threading.Event().wait(1.1)  # a file with a recent ctime is read again
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("data", DATA)
    break_blocks(root)
    with open_store(root, settings=CHOSEN) as store:
        store.backup("home", [folder])
        assert store.verify().damage
        assert store.backup("home", [folder]).counts.reused_bytes == 500_000


def test_put_removes_the_note_of_a_sound_container(tmp_path: Path) -> None:
    """A container that was noted and is intact stays in use."""
    root = tmp_path / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("data", DATA)
        container = id_of(str(containers(root)[0].relative_to(root)))
        assert container is not None
        store.damage_notes.add([container])
        assert noted(root) == {container}
        assert store.put("data", DATA).ledger.stored_bytes < 1000
        assert not store.damage_notes.read()
        assert not (root / "quarantine").exists()


def test_known_damage_is_not_noted_again(broken: Path) -> None:
    """Reads of a version whose damage is quarantined cause no further verification."""
    with open_store(broken, settings=CHOSEN) as store:
        assert store.verify().damage
        assert read_fails(store, "data")
        assert not store.damage_notes.read()


def test_gateway_put_after_a_failed_get_is_complete(tmp_path: Path) -> None:
    """A server stores broken chunks again after a GET that failed, or a verify in another process."""
    root = tmp_path / "store"
    with running(embedded(root, SMALL)) as gateway, nearkin.connect(gateway.url) as server:
        server.put("data", DATA)
        break_blocks(root)
        with pytest.raises((NearkinError, httpx.HTTPError)):
            server.get("data").read()
        server.put("data", DATA)
        assert server.get("data").read() == DATA
        break_blocks(root, -1)
        with open_store(root, settings=CHOSEN) as store:
            assert store.verify().damage
        server.put("data", DATA)
    with open_store(root, settings=CHOSEN) as store:
        assert store.get("data").read() == DATA
        assert not store.verify().damage


def test_damage_notes_hold_a_bounded_number(tmp_path: Path) -> None:
    """Notes are a set, have a bound, and ignore lines that are none (I10)."""
    with open_store(tmp_path / "store", settings=CHOSEN, create=True) as store:
        notes = DamageNotes(store.root, Quarantine(store._covered, lambda: 0.0))
        notes.add([3, 1])
        notes.add([1, 2])
        assert (store.root / NAME).read_bytes() == b"".join(b"%016x\n" % one for one in (1, 3, 2))
        notes.remove([1, 7])
        assert notes.read() == {2, 3}
        notes.add(range(NOTED_MAX + 10))
        assert len(notes.read()) == NOTED_MAX
        (store.root / NAME).write_bytes(b"nonsense\n" + b"%016x\n" % 5 + b"12")
        assert notes.read() == {5}
        lost = KeysLost("keys")
        lost.container = 9
        notes.note(lost, Locations.empty(), store._containers)
        assert notes.read() == {5}, "no damage: the keys may be restored"


def test_suspects_are_the_one_that_an_error_names() -> None:
    """Of an unreadable directory its container alone is suspected, of no chunks none."""
    named = Corrupt("directory")
    named.container = 9

    def no_directory(_container: int) -> None:
        raise AssertionError("no directory is read")

    assert suspect_containers(named, Locations.empty(), {}, no_directory) == {9}  # type: ignore[arg-type]
    assert suspect_containers(Corrupt("other"), Locations.empty(), {}, no_directory) == frozenset()  # type: ignore[arg-type]


@pytest.mark.parametrize("is_known", [False, True])
def test_suspects_go_beyond_an_unreadable_directory(is_known: bool) -> None:
    """The broken block may be in another container than a base whose directory is broken, quarantined or not."""
    bases: dict[int, list[int]] = {11: [], 12: [13]}

    def directory_of(container: int) -> SimpleNamespace:
        if container not in bases:
            err = Corrupt("directory")
            err.container = container
            raise err
        return SimpleNamespace(base_containers=lambda: bases[container])

    none = np.zeros(0, np.uint32)
    known = {13: PendingDelete(1, none, none, whole=True)} if is_known else {}
    chunks = Locations(np.array([11, 12], np.uint64), np.array([0, 5], np.uint32))
    suspects = suspect_containers(Corrupt("block 0"), chunks, known, directory_of)  # type: ignore[arg-type]
    assert suspects == ({11, 12} if is_known else {11, 12, 13})
