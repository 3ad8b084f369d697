"""Verify: its coverage is the reported one, and an index that differs from its containers is named."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lmdb
import numpy as np
import pytest
from click.testing import CliRunner

from nearkin import open_store
from nearkin.cli.commands import nearkin
from nearkin.cli.verify import parse_since
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin_shared.errors import BadInput, IndexDamaged
from nearkin_shared.index.lmdb.entry_tables import SHAPES, ExactTables
from nearkin_shared.index.lmdb.sorted_run_table import PACKED_LOCATION, pack_locations
from nearkin_shared.kernels.sorted_runs import CHILDREN_BYTES, HEAD_BYTES
from tests.support.data.stores import SMALL, containers, flip, settings

CHOSEN = settings(SMALL)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        for number in range(8):
            store.put(f"k{number}", random_bytes(300_000, number))
    assert len(containers(root)) >= 8
    return root


def test_verify_sample_reads_its_share_by_seed(root: Path) -> None:
    """A sample reads its share, and the same seed reads the same containers."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        whole = store.verify()
        half = store.verify(0.5, seed=7)
        assert (half.containers, half.containers_total) == (round(whole.containers / 2), whole.containers)
        assert whole.containers == whole.containers_total == len(containers(root))
        assert whole.bytes_read == whole.container_bytes == sum(path.stat().st_size for path in containers(root))
        assert half.bytes_read == store.verify(0.5, seed=7).bytes_read < whole.bytes_read
        assert (half.seed, whole.seed) == (7, None)


def test_verify_samples_find_a_flipped_bit_by_their_share(root: Path) -> None:
    """Samples of many seeds find a flipped bit as often as they read its container."""
    flip(containers(root)[2], 200)
    with open_store(root, settings=CHOSEN, create=True) as store:
        found = [bool(store.verify(0.5, seed=seed).damage) for seed in range(24)]
    assert 4 <= sum(found) <= 20


def test_verify_since_reads_newer_objects_only(root: Path) -> None:
    """`since` reads the objects written since and no older ones."""
    victim = containers(root)[0]
    born = datetime.fromtimestamp((int(victim.stem[:16], 16) >> 20) / 1000, UTC)
    flip(victim, 200)
    with open_store(root, settings=CHOSEN, create=True) as store:
        later = datetime.now(UTC)
        assert store.verify(since=later).containers == 0
        store.put("c", random_bytes(400_000, 9))
        assert 1 <= store.verify(since=later).containers <= 3
        assert store.verify(since=later).damage == ()
        assert len(store.verify(since=born).damage) == 1


def test_verify_compares_all_entries_of_a_sound_index(root: Path) -> None:
    """All entries of a sound index are compared."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        tables = store._index.readable().entries()
        report = store.verify()
        assert report.damage == ()
        assert report.index_entries == sum(len(tables[name]) for name in ("chunks", "segments", "features"))
        assert store.verify(0.5).index_entries is None


@pytest.mark.parametrize("table", ["chunks", "segments", "features"])
@pytest.mark.parametrize("elsewhere", ["in its container", "in no container"])
def test_entry_with_wrong_location_is_named_and_rebuilt(root: Path, table: str, elsewhere: str) -> None:
    """An entry with a wrong location is named, and a rebuild corrects it."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        index = store._index.writable()
        keys, locations = next(index.rows(table))
        row = slice(len(keys) // 2, len(keys) // 2 + 1)
        key, container, ordinal = keys[row], locations.containers[row], int(locations.ordinals[row][0])
        if elsewhere == "in no container":
            container = container ^ np.uint64(1)
        else:
            ordinal = 1 << 20 if table == "features" else ordinal ^ 1
        runs = ExactTables(index._databases).runs[table]
        with index._writing(buffers=True) as txn:
            runs.drop(txn, lambda locations: np.ones(len(locations), np.bool_), key)
            runs.add(txn, key, pack_locations(container, np.array([ordinal])))
        (damage,) = store.verify().damage
        assert (damage.object_name, damage.versions) == ("index", ())
        assert key.tobytes().hex() in damage.problem
        assert "rebuild-index" in damage.problem
        store.rebuild_index()
        assert store.verify().damage == ()


@pytest.mark.parametrize("table", ["chunks", "segments", "features"])
def test_flipped_bit_of_a_location_is_named_and_not_used(root: Path, table: str) -> None:
    """A flipped bit of a location is named, and no put depends on it."""
    with lmdb.open(str(root / "index"), max_dbs=16, map_size=1 << 28) as env:
        database = env.open_db(table.encode())
        with env.begin(write=True, db=database) as txn:
            run = bytearray(txn.get(bytes(9)) or b"")
            width = SHAPES[table].entry_bytes - HEAD_BYTES
            rows = len(run) - (len(run) - CHILDREN_BYTES) // (width + HEAD_BYTES) * width
            for number, end in enumerate(range(rows + width, len(run) + 1, width)):
                run[end - 1 - number % PACKED_LOCATION.itemsize] ^= 1 << number % 8
            txn.put(bytes(9), bytes(run))
    with open_store(root, settings=CHOSEN, create=True) as store:
        (damage,) = store.verify().damage
        assert (damage.object_name, damage.versions) == ("index", ())
        assert "rebuild-index" in damage.problem
        before = [(info.key, info.version) for info in store.versions(all_versions=True)]
        for key, _ in before:
            if table == "features":
                content = mutate(store.get(key, 1).read(), 1, edits=40, edit_bytes_max=9)
            else:
                content = store.get(key, 1).read() + (b"" if table == "segments" else b"longer")
            with pytest.raises(IndexDamaged, match="rebuild-index"):
                store.put(key, content)
        assert [(info.key, info.version) for info in store.versions(all_versions=True)] == before


def test_version_missing_in_the_index_is_named(root: Path) -> None:
    """A version that the index does not list is named."""
    with lmdb.open(str(root / "index"), max_dbs=16, map_size=1 << 28) as env:
        database = env.open_db(b"versions")
        with env.begin(write=True, db=database) as txn:
            txn.delete(next(bytes(key) for key, value in txn.cursor() if b'"key": "k3"' in bytes(value)))
    with open_store(root, settings=CHOSEN, create=True) as store:
        (damage,) = store.verify().damage
        assert "does not list 'k3' version 1" in damage.problem


def test_verify_command_prints_coverage_and_seed(root: Path) -> None:
    """The command prints its coverage and its seed."""

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(nearkin, ["--store", str(root), "verify", *arguments])
        return done.exit_code, done.output

    code, text = run("--sample", "25%", "--seed", "3")
    assert code == 0
    assert "drawn by --seed 3" in text
    code, text = run("--sample", "25%", "--json")
    outcome = json.loads(text)
    assert (outcome["ok"], outcome["sample"], outcome["containers_total"]) == (True, 0.25, len(containers(root)))
    assert outcome["containers"] == round(outcome["containers_total"] / 4)
    assert outcome["seed"] is not None
    flip(containers(root)[1], 300)
    _, text = run("--since", "1h", "--json")
    outcome = json.loads(text)
    assert outcome["ok"] is False
    object_name = outcome["damage"][0]["object_name"]
    assert run("--since", "1h")[1].count(object_name) == 1  # named once, and not again in its problem
    assert outcome["damage"][0]["versions"][0]["key"] == "k1"
    assert outcome["since"] is not None


@pytest.mark.parametrize("text", ["", "1", "yesterday", "2026-13-40", "-1h"])
def test_invalid_time_is_refused(text: str) -> None:
    """An invalid time is refused."""
    with pytest.raises(BadInput, match=r"want a time such as 2026-11-20T18:00Z, or how long ago: 36h, 2d"):
        parse_since(text, datetime.now(UTC))


def test_times_without_a_zone_are_utc() -> None:
    """Times are UTC unless they name another zone."""
    now = datetime(2026, 11, 20, tzinfo=UTC)
    assert parse_since("36h", now) == now - timedelta(hours=36)
    assert parse_since("2026-11-20T18:00", now) == datetime(2026, 11, 20, 18, tzinfo=UTC)
    assert parse_since("2026-11-20T18:00+02:00", now) == datetime(2026, 11, 20, 16, tzinfo=UTC)
