"""Damaged pages of an LMDB index, which end the process that reads them: noticed by the next one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import IndexUnsafe
from nearkin_shared.index.lmdb.environments import acquire
from nearkin_shared.index.lmdb.page_check import find_page_damage
from nearkin_shared.index.lmdb.session_notes import CRASHES_MAX, dead_notes, write_note
from tests.support.checks.waiting import until
from tests.support.data.stores import SMALL, process, settings

CHOSEN = settings(SMALL)
PAGE = 4096

LISTING = """
import sys
from nearkin import open_store
from tests.support.data.stores import SMALL, settings
with open_store(sys.argv[1], settings=settings(SMALL)) as store:
    print(len(store.versions(all_versions=True)), flush=True)
"""

USING = """
import sys, lmdb
with lmdb.open(sys.argv[1], max_dbs=16, map_size=1 << 26) as env:
    with env.begin() as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
    tables = {name: env.open_db(name, create=False) for name in names}
    with env.begin(write=True) as txn:
        for table in tables.values():
            for key, value in txn.cursor(db=table):
                txn.get(key, db=table)
        for number in range(200):
            txn.put(b"new%d" % number, bytes(900), db=tables[b"small"])
            txn.put(b"big%d" % number, bytes(9000), db=tables[b"large"])
        for number in range(0, 600, 3):
            txn.delete(b"%05d" % number, db=tables[b"small"])
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("k", random_bytes(1000, 1))
        store.put("k", random_bytes(1000, 2))
    return tmp_path / "s"


def damage_node_offsets(data: Path) -> None:
    """Set the offset of the first node of each page of entries to 64 KiB: beyond the file's end."""
    content = bytearray(data.read_bytes())
    for at in (at for at in range(2 * PAGE, len(content), PAGE) if content[at + 10] == 2):
        content[at + 16 : at + 18] = b"\xfe\xff"
    data.write_bytes(content)


def listing(root: Path) -> tuple[int, str, str]:
    child = process(LISTING, root)
    out, err = child.communicate(timeout=60)
    return child.returncode, out, err


def test_damaged_page_costs_one_process_then_index_is_rebuilt(root: Path) -> None:
    """F.27: A process that a damaged page ended leaves a note; the next one rebuilds the index and reports it."""
    damage_node_offsets(root / "index" / "data.mdb")
    code, _, _ = listing(root)
    assert code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
    code, out, err = listing(root)
    assert (code, out) == (0, "2\n")
    assert "set aside" in err
    assert "rebuilding it" in err
    assert listing(root) == (0, "2\n", "")


def test_kill_of_a_healthy_process_costs_no_rebuild(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F.27: A note of a killed process costs a check of the pages, and is deleted by the next close."""
    waiting = LISTING + "    sys.stdin.readline()\n"
    child = process(waiting, root)
    assert child.stdout is not None
    assert child.stdout.readline() == "2\n"
    child.kill()
    child.communicate()
    assert len(dead_notes(root / "index")) == 1
    with open_store(root, settings=CHOSEN) as store:
        assert len(store.versions(all_versions=True)) == 2
        store.put("k", b"more")
    assert not caplog.records
    assert not list((root / "index").glob("open.*"))


def test_many_deaths_without_a_close_rebuild_the_index(root: Path) -> None:
    """F.27: An index that kills each process is set aside in the end, even if a check of the pages shows nothing."""
    for number in range(CRASHES_MAX + 1):
        (root / "index" / f"open.0123456789abcdef.1.1.{number}").touch()
    with pytest.raises(IndexUnsafe, match="processes died"):
        acquire(root / "index", 1 << 28, ["meta"], writable=False)
    code, out, err = listing(root)
    assert (code, out) == (0, "2\n")
    assert "set aside" in err


def test_killed_processes_that_had_settled_cost_no_rebuild(root: Path) -> None:
    """F.27: The count of dead processes restarts once one has had the checked index open for some time."""
    for number in range(CRASHES_MAX):
        (root / "index" / f"open.0123456789abcdef.1.1.{number}").touch()
    settling = "from nearkin_shared.index.lmdb import environments\nenvironments.SETTLED_SECONDS = 0.1\n"
    child = process(settling + LISTING + "    sys.stdin.readline()\n", root)
    assert child.stdout is not None
    assert child.stdout.readline() == "2\n"
    until(lambda: not dead_notes(root / "index"), lambda: str(dead_notes(root / "index")))
    child.kill()
    child.communicate()
    assert len(dead_notes(root / "index")) == 1
    assert listing(root) == (0, "2\n", "")


def test_process_killed_at_opening_keeps_the_notes(root: Path) -> None:
    """F.27: A process that is killed before it has settled adds its note to those of the processes before it."""
    for number in range(CRASHES_MAX):
        (root / "index" / f"open.0123456789abcdef.1.1.{number}").touch()
    child = process("import os\n" + LISTING + "    os.kill(os.getpid(), 9)\n", root)
    child.communicate()
    assert len(dead_notes(root / "index")) == CRASHES_MAX + 1
    code, out, err = listing(root)
    assert (code, out, "set aside" in err) == (0, "2\n", True)


def test_note_of_a_living_process_counts_as_alive(tmp_path: Path) -> None:
    """F.27: A process is identified by its number, its start and the machine's boot; a number used again is another."""
    note = write_note(tmp_path)
    assert note is not None
    assert dead_notes(tmp_path) == []
    head, boot, number, start, count = note.name.split(".")
    others = [(boot, number, f"{start}1"), (f"{boot}f", number, start), (boot, "4194999", start), (boot, "x", start)]
    for other in others:
        (tmp_path / ".".join((head, *other, count))).touch()
    (tmp_path / "open.junk").touch()
    assert len(dead_notes(tmp_path)) == len(others) + 1


def test_ledger_that_may_crash_is_rebuilt(root: Path) -> None:
    """F.27: The collector's ledger, another LMDB file, is handled the same way."""
    counting = settings(SMALL, {"gc": {"mode": "refcount"}})
    with open_store(root, settings=counting) as store:
        store.gc()
    damage_node_offsets(root / "index" / "gc" / "data.mdb")
    (root / "index" / "gc" / "open.0123456789abcdef.1.1.1").touch()
    with open_store(root, settings=counting) as store:
        store.gc()
        assert store.verify().damage == ()
    assert find_page_damage(root / "index" / "gc" / "data.mdb") is None


def fill_index(folder: Path, seed: int) -> None:
    """Make an LMDB file with trees, large values and free pages, by random writes."""
    drawn = random.Random(seed)
    with lmdb.open(str(folder), max_dbs=16, map_size=1 << 26) as env:
        tables = {name: env.open_db(name) for name in (b"small", b"large", b"empty")}
        for _ in range(12):
            with env.begin(write=True) as txn:
                for _ in range(200):
                    number = b"%05d" % drawn.randrange(900)
                    if drawn.random() < 0.3:
                        txn.delete(number, db=tables[b"small"])
                    else:
                        txn.put(number, bytes(drawn.randrange(1200)), db=tables[b"small"])
                    if drawn.random() < 0.1:
                        txn.put(number, bytes(drawn.randrange(30_000)), db=tables[b"large"])
                    if drawn.random() < 0.05:
                        txn.delete(number, db=tables[b"large"])


@pytest.mark.parametrize("seed", range(3))
def test_page_check_accepts_what_lmdb_writes(tmp_path: Path, seed: int) -> None:
    """F.27: A sound file is not reported as damaged, whatever was written and removed."""
    fill_index(tmp_path, seed)
    assert find_page_damage(tmp_path / "data.mdb") is None


def test_page_check_accepts_indexes_of_stores(root: Path) -> None:
    """F.27: A store's index is sound after puts, deletions and collection."""
    with open_store(root, settings=CHOSEN) as store:
        for number in range(10):
            store.put(f"key {number}", random_bytes(20_000, number))
        store.delete("k")
        store.gc()
    assert find_page_damage(root / "index" / "data.mdb") is None


def test_page_check_finds_an_offset_beyond_the_page(tmp_path: Path) -> None:
    """F.27: Two bytes that would let LMDB read beyond the file are found."""
    fill_index(tmp_path, 1)
    damage_node_offsets(tmp_path / "data.mdb")
    assert "nodes outside its bounds" in str(find_page_damage(tmp_path / "data.mdb"))


@pytest.mark.parametrize("seed", range(2))
def test_accepted_damage_does_not_kill_a_process(tmp_path: Path, seed: int) -> None:
    """F.27: Random damage that the check accepts is read and written in a process, which does not crash."""
    fill_index(tmp_path, seed)
    data = tmp_path / "data.mdb"
    sound, drawn = data.read_bytes(), random.Random(seed)
    heads = [page for page in range(2, len(sound) // PAGE) if sound[page * PAGE + 10] in (1, 2, 4)]
    accepted = 0
    for _ in range(60):
        content = bytearray(sound)
        for _ in range(3):
            at = drawn.choice(heads) * PAGE + drawn.randrange(0, PAGE, 2)
            content[at : at + 2] = drawn.randbytes(2)
        data.write_bytes(content)
        if find_page_damage(data) is None and accepted < 3:
            accepted += 1
            child = subprocess.run(
                [sys.executable, "-c", USING, str(tmp_path)], capture_output=True, timeout=60, check=False
            )
            assert child.returncode >= 0, (child.returncode, child.stderr)
    assert accepted == 3
