"""Test patch blocks: bounded memory of deep chains, mixed formats, counted finders."""

from __future__ import annotations

import random
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_delta.gap_alignment import OWN_BYTES
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.manifest import decode_manifest, encode_manifest
from nearkin_shared.limits import MIB
from nearkin_shared.reading.chunk_reader import ChunkReader
from tests.support.data.stores import SMALL, containers, manifests, settings

FROZEN = Path(__file__).parent.parent / "golden" / "store_v2.tar"


def history(versions: int, size: int = 250_000, edits: int = 25) -> list[bytes]:
    found = [text_like(size, 1)]
    for version in range(1, versions):
        found.append(mutate(found[-1], version, edits=edits, edit_bytes_max=60))
    return found


CODECS = ("patch", "xdelta3")
POLICIES = ("first-fit", "locality", "locality+first-fit")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("policy", POLICIES)
def test_codecs_and_policies_restore_without_index(tmp_path: Path, codec: str, policy: str) -> None:
    """Restore every codec with every policy after index loss."""
    chosen = settings(SMALL, {"base": {"policy": policy}, "delta": {"codec": codec, "max_depth": 3}})
    versions = history(5)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        for content in versions:
            store.put("k", content)
        live = store._index.writable().entries()
        assert store.rebuild_index().skipped == ()
        assert store._index.writable().entries() == live
        stats = store.stats()
        assert stats.ledger.delta_chunks > 50
        assert max(stats.depths) <= 3
        assert sum(stats.found_by.values()) == stats.ledger.delta_chunks
        found = {name.rstrip("0123456789") for name in stats.found_by}
        assert found <= {"first-fit": {"SF"}, "locality": {"locality"}}.get(policy, {"SF", "locality"})
        assert ("locality" in found) == (policy != "first-fit")
        explanation = store.explain("k", 3)
        assert sum(explanation.found_by.values()) == explanation.delta_chunks > 0
        assert any(name == "locality" for name in explanation.found_by) == (policy != "first-fit")
        for number, content in enumerate(versions, 1):
            assert store.get("k", number).read() == content
        assert store.verify().damage == ()


def test_blob_that_is_a_history_is_reduced(tmp_path: Path) -> None:
    chosen = settings(Settings(), {"runner": {"batch_bytes": 2 * MIB}})
    first = random_bytes(OWN_BYTES + 2 * chosen.runner.batch_bytes)
    whole = first + mutate(first, 1, edits=4000)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        stored = store.put("k", whole).ledger
        assert stored.stored_bytes < len(first) * 1.02
        assert store.stats().found_by["locality"] > stored.delta_chunks * 0.9 > 1000
        assert store.get("k").read() == whole


def test_deep_chain_restores_without_recursion(tmp_path: Path) -> None:
    """Restore a deep chain without recursion and with an empty cache."""
    changes = {
        "base": {"policy": "first-fit"},
        "delta": {"max_depth": 40},
        "features": {"count": 12, "super_features": 12},
    }
    versions = [text_like(30_000, 1)]
    for number in range(1, 60):  # a byte in every chunk's window: only the newest neighbours stay alike
        versions.append(mutate(versions[-1], number, edits=120, edit_bytes_max=30)[:30_000])
    chosen = settings(SMALL, changes, {"base": {"policy": "locality+first-fit"}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        for content in versions:
            store.put("k", content)
        deepest = max(store.stats().depths)
        assert deepest >= 6
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        store._containers.blocks._bytes_max = 0
        depth = 0
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            depth, frame = depth + 1, frame.f_back
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + 60)
        try:
            for number in (1, 30, 60):
                assert store.get("k", number).read() == versions[number - 1]
        finally:
            sys.setrecursionlimit(limit)


def test_range_reports_reads_of_each_block_once(tmp_path: Path) -> None:
    versions = history(6, 600_000)
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        for content in versions:
            store.put("k", content)
    for number in (1, 6):
        with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
            blob = store.get("k", number, start=200_000, stop=300_000)
            assert blob.read() == versions[number - 1][200_000:300_000]
            costs = blob.costs
            assert costs.block_reads == costs.blocks_decoded
            assert len(costs.containers) <= len(containers(tmp_path / "s"))
            assert 0 < costs.block_reads <= (4 if number == 1 else 80)
            again = store.get("k", number, start=200_000, stop=300_000)
            again.read()
            assert (again.costs.block_reads, again.costs.directory_reads) == (0, 0)


def test_bases_are_looked_up_level_by_level_not_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = ChunkReader.plan

    def record_plan(self: Any, locations: Any) -> Any:
        planned.append(len(locations))
        return plan(self, locations)

    versions = history(6, 400_000, 40)
    chosen = settings(SMALL, {"delta": {"max_depth": 4}, "block": {"delta_bytes": 8192}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        for content in versions:
            store.put("k", content)
        store._containers.evict()
        monkeypatch.setattr(ChunkReader, "plan", record_plan)
        blob = store.get("k")
        assert blob.read() == versions[-1]
        assert blob.costs.blocks_decoded >= 60
        # One a level for each group of 64 blocks, down from each of the levels.
        assert len(planned) <= blob.costs.blocks_decoded / 4


def test_codecs_and_depths_may_change_between_puts(tmp_path: Path) -> None:
    versions = history(8)
    for number, content in enumerate(versions):
        changes = {
            "delta": {"codec": ("patch", "xdelta3")[number % 2], "max_depth": (4, 2, 1, 3)[number % 4]},
            "base": {"policy": POLICIES[number % 3]},
        }
        with open_store(tmp_path / "s", settings=settings(SMALL, changes), create=True) as store:
            store.put("k", content)
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        assert store.verify().damage == ()
        for number, content in enumerate(versions, 1):
            assert store.get("k", number).read() == content


def test_container_format_2_is_read_and_continued(tmp_path: Path) -> None:
    with tarfile.open(FROZEN) as archive:
        archive.extractall(tmp_path / "s", filter="data")
    frozen = [text_like(60_000, 1)]
    for version in range(1, 4):
        frozen.append(mutate(frozen[-1], version, edits=20, edit_bytes_max=40))
    chosen = settings(SMALL, {"features": {"count": 6, "super_features": 6}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        assert [store.get("history", n).read() for n in (1, 2, 3)] == frozen[:3]
        assert store.put("history", frozen[3]).ledger.delta_chunks > 0
        assert store.rebuild_index().skipped == ()
        assert store.verify().damage == ()
        assert [store.get("history", n).read() for n in (1, 2, 3, 4)] == frozen
    formats = {path.read_bytes()[4] for path in containers(tmp_path / "s")}
    assert formats == {2, container_layout.VERSION_WHOLE}


def test_paper_profile_has_no_patch_blocks(tmp_path: Path) -> None:
    from nearkin_shared.config.loader import load

    with open_store(tmp_path / "s", settings=load(None, {"profile": "finesse-paper"})[0], create=True) as store:
        for content in history(3):
            store.put("k", content)
        stats = store.stats()
        assert max(stats.depths) == 1
        assert set(stats.found_by) <= {"SF0", "SF1", "SF2"}
        for container in store._index.readable().container_ids().tolist():
            assert container_layout.PATCH not in store._containers.directory(container).blocks.kinds


@pytest.mark.parametrize("has_lengths", [True, False])
def test_range_reads_needed_directories_only(tmp_path: Path, has_lengths: bool) -> None:
    """Read the directories of the range's segments only, if the manifest has lengths."""
    content = random_bytes(40_000_000, 5)
    small = settings({"runner": {"batch_bytes": "2MiB"}, "container": {"target_bytes": "256KiB"}})
    with open_store(tmp_path / "s", settings=small, create=True) as store:
        store.put("k", content)
    many = len(containers(tmp_path / "s"))
    assert many > 15
    if not has_lengths:
        (path,) = manifests(tmp_path / "s")
        manifest = decode_manifest(path.read_bytes(), "m")
        path.chmod(0o644)
        path.write_bytes(encode_manifest(replace(manifest, lengths=None)))
    for start, stop in ((0, 11), (20_000_000, 20_000_011), (39_999_989, 40_000_000), (7_000_000, 8_048_576)):
        with open_store(tmp_path / "s", settings=small, create=True) as store:
            blob = store.get("k", start=start, stop=stop)
            assert blob.read() == content[start:stop]
            if has_lengths:
                assert blob.costs.directory_reads <= (2 if stop - start == 11 else 4)
            elif start:
                assert blob.costs.directory_reads >= many * start // len(content)
    chance = random.Random(6)
    with open_store(tmp_path / "s", settings=small, create=True) as store:
        for _ in range(60):
            start = chance.randrange(len(content) + 1)
            stop = min(len(content), start + chance.choice([0, 1, 4096, 300_000, 9_000_000]))
            assert store.get("k", start=start, stop=stop).read() == content[start:stop]


def test_segment_of_wrong_length_ends_a_restore(tmp_path: Path) -> None:
    content = random_bytes(900_000, 7)
    with open_store(tmp_path / "s", create=True) as store:
        store.put("k", content)
    (path,) = manifests(tmp_path / "s")
    manifest = decode_manifest(path.read_bytes(), "m")
    assert manifest.lengths is not None
    lengths = manifest.lengths.copy()
    lengths[1] -= 1
    lengths[2] += 1
    path.chmod(0o644)
    path.write_bytes(encode_manifest(replace(manifest, lengths=lengths)))
    with open_store(tmp_path / "s", create=True) as store:
        for bounds in ({}, {"start": int(lengths[0]), "stop": int(lengths[0]) + 5}, {"start": 899_000}):
            reads = store.get("k", **bounds)
            if bounds.get("start") == 899_000:  # behind both: the second segment is at its stated offset
                assert reads.read() == content[899_000:]
            else:
                with pytest.raises(Corrupt, match=f"segment of {lengths[1]} bytes has chunks of {lengths[1] + 1}"):
                    reads.read()
        assert {version for damage in store.verify().damage for version in damage.versions} == {("k", 1)}
