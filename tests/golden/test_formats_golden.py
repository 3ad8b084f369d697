"""Check frozen bytes: old files stay readable, equal input gives equal bytes.

To freeze a new format version add its files next to these; the old ones stay.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backports import zstd

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import decode_block
from nearkin_shared.formats.block_kinds import block_roles, merged_blocks, reference_blocks
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.manifest import decode_manifest, encode_manifest
from nearkin_shared.formats.parity_object import reconstruct
from nearkin_shared.formats.pending_delete_record import QUARANTINED, decode_record
from nearkin_shared.formats.retention_record import decode_retention, encode_retention
from nearkin_shared.formats.tombstone import decode_mark, encode_mark
from tests.support.data import samples

HERE = Path(__file__).parent
ZSTD = "1.5.7"
"""The library that made the frozen bytes: another one may compress differently, and must still read them."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


@pytest.mark.skipif(zstd.zstd_version != ZSTD, reason=f"frozen with zstd {ZSTD}: another one compresses otherwise")
def test_equal_input_gives_frozen_bytes() -> None:
    assert digest(samples.small_container()) == "1ef0a489f23a9ec0c3be26eb4bb434bd"
    assert digest(samples.patch_container()) == "7ee1429884ffcb0f91f15d6da7d32351"
    assert digest(samples.rest_container()) == "d2b2dd8132f65469b36ce943f3654dee"
    assert digest(samples.merged_container()) == "5d2c1b544e3ac6c36615fdaeaf6927f7"
    assert digest(encode_manifest(samples.small_manifest())) == "0ffd61dad6314f92aa140701b03fe6d3"
    assert digest(encode_manifest(samples.measured_manifest())) == "6c7c7326a5cfbd24c98366581b25f5a2"
    assert digest(encode_manifest(samples.manifest_with_chain())) == "0df5fb453e62b45b8c66879f26f8572f"


def test_uncompressed_bytes_are_frozen_for_each_library() -> None:
    data = samples.empty_container() + encode_manifest(samples.small_manifest())[:188]
    assert digest(data) == "930f52d683a2150d63d60f3264476465"


def test_frozen_container_is_read() -> None:
    found, blocks = samples.read_all((HERE / "container_v2.bin").read_bytes())
    made, made_blocks = samples.read_all(samples.small_container())
    assert blocks == made_blocks
    assert digest(b"".join(blocks)) == "c7183e8baa9436f51e31fe9e8a321115"
    assert (found.container, found.domain, found.sketch_names) == (made.container, made.domain, made.sketch_names)
    for name in ("names", "lengths", "blocks", "positions", "encoded", "depths", "ranks"):
        assert np.array_equal(getattr(found.chunks, name), getattr(made.chunks, name)), name
    assert found.chunks.bases.containers.tolist() == [0, 0, samples.CONTAINER, samples.OLDER, 0, 0]
    assert found.chunks.bases.ordinals.tolist() == [0, 0, 1, 77, 0, 0]
    assert found.segments.bounds.tolist() == [0, 5, 10, 12]
    assert found.segments.chunks.containers.tolist() == made.segments.chunks.containers.tolist()
    assert found.segments.chunks.ordinals.tolist() == [0, 1, 5, 6, 7, 65536, 65536, 2, 3, 9, 4, 5]


def test_frozen_patch_blocks_are_read() -> None:
    data = (HERE / "container_v3.bin").read_bytes()
    found, _ = samples.read_all(data)
    made, _ = samples.read_all(samples.patch_container())
    start = int(found.blocks.offsets[1]) - container_layout.BLOCK.size
    record = data[start : start + container_layout.BLOCK.size + int(found.blocks.stored[1])]
    decoded = decode_block(record, "frozen", b"".join(samples.PATCHED_BASES))
    assert digest(decoded.tobytes()) == "fe7bb56e0ca6dc0fba738993617d0180"
    for name in ("names", "lengths", "blocks", "positions", "encoded", "depths", "ranks"):
        assert np.array_equal(getattr(found.chunks, name), getattr(made.chunks, name)), name
    assert found.chunks.bases.containers.tolist() == [0, samples.CONTAINER, samples.OLDER, samples.OLDER]
    assert found.prefixes.bounds.tolist() == [0, 0, 2]
    assert found.prefixes.bases.containers.tolist() == [samples.CONTAINER, samples.OLDER]
    assert found.prefixes.bases.ordinals.tolist() == [0, 77]


@pytest.mark.parametrize(("version", "roles"), [(4, None), (5, [0] * 5)])
def test_frozen_container_without_some_chunks_is_read(version: int, roles: list[int] | None) -> None:
    data = (HERE / f"container_v{version}.bin").read_bytes()
    assert data[4:6] == bytes([version, 0])
    found, blocks = samples.read_all(data)
    made, made_blocks = samples.read_all(samples.rest_container())
    assert blocks == made_blocks
    for name in ("names", "lengths", "blocks", "positions", "encoded", "depths", "ranks"):
        assert np.array_equal(getattr(found.chunks, name), getattr(made.chunks, name)), name
    assert found.segments.bounds.tolist() == [0, 5, 10, 10]
    assert (None if found.blocks.roles is None else found.blocks.roles.tolist()) == roles
    assert block_roles(found).tolist() == [0] * 5


def test_frozen_roles_of_blocks_are_read() -> None:
    data = (HERE / "container_v5_roles.bin").read_bytes()
    found = decode_container(data, "frozen")
    assert found.blocks.roles is not None
    assert found.blocks.roles.tolist() == [0, container_layout.MERGED, container_layout.REFERENCE]
    assert (merged_blocks(found).tolist(), reference_blocks(found).tolist()) == (
        [False, True, False],
        [False, False, True],
    )
    guessed = replace(found, blocks=replace(found.blocks, roles=None))
    assert block_roles(guessed).tolist() == found.blocks.roles.tolist()


@pytest.mark.parametrize("version", [2, 3, 4])
def test_frozen_manifest_is_read(version: int) -> None:
    data = (HERE / f"manifest_v{version}.bin").read_bytes()
    assert data[4:6] == bytes([version, 0])
    found = decode_manifest(data, "frozen")
    made = {2: samples.small_manifest, 3: samples.measured_manifest, 4: samples.manifest_with_chain}[version]()
    if made.lengths is None:
        assert found.lengths is None
    else:
        assert found.lengths is not None
        assert found.lengths.tolist() == made.lengths.tolist()
    assert (found.tenant, found.key, found.version) == ("default", "backups/täglich.tar", 3)
    assert (found.created_us, found.size_bytes, found.seconds) == (1_764_000_000_123_456, 1_234_567, 1.25)
    assert (found.blake3, found.sha256, found.ledger) == (made.blake3, made.sha256, made.ledger)
    assert found.origin == bytes(range(16))
    assert (found.previous, found.retain_until_us) == (made.previous, made.retain_until_us)
    assert found.source_changed is made.source_changed
    assert found.metadata == {"host": "db-1", "note": 'ein "Zitat"'}
    assert found.segments.containers.tolist() == made.segments.containers.tolist()
    assert found.segments.ordinals.tolist() == [4, 5, 0, 0, 1, 2, 1]
    assert found.known.tolist() == [True, True, True, False, False, True, True]


def test_frozen_retention_record_is_read_and_made() -> None:
    """F.29: The first format of retention records is read, and equal input gives equal bytes."""
    frozen = (HERE / "retention_v1.bin").read_bytes()
    assert decode_retention(frozen, "frozen", bytes(range(32))) == samples.small_retention()
    assert encode_retention(samples.small_retention(), bytes(range(32))) == frozen


def test_frozen_tombstone_is_read_and_made() -> None:
    frozen = (HERE / "mark_v1.bin").read_bytes()
    assert decode_mark(frozen, "frozen") == samples.small_mark()
    assert encode_mark(samples.small_mark()) == frozen
    assert digest(frozen) == "4d37168b5c332351d7b81024b50adbc4"


def test_frozen_parity_repairs_and_is_made() -> None:
    frozen = (HERE / "parity_v1.bin").read_bytes()
    data, made = samples.small_parity()
    assert made == frozen
    damaged = bytearray(data)
    damaged[100:4800] = bytes(4700)
    assert reconstruct(samples.PARITY_OF, bytes(damaged), frozen) == data


def test_frozen_quarantine_record_is_read() -> None:
    sequence, found = decode_record((HERE / "quarantine_v1.bin").read_bytes(), "frozen", QUARANTINED)
    made = samples.small_quarantine()
    assert (sequence, found.keys()) == (7, made.keys())
    for container, entry in made.items():
        assert (found[container].at_us, found[container].whole) == (entry.at_us, entry.whole)
        assert found[container].chunks.tolist() == entry.chunks.tolist()
        assert found[container].segments.tolist() == entry.segments.tolist()
