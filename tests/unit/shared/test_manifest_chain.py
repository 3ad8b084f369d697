"""Test manifest format 4.

The chain to the previous manifest, retention, and the flag of a changed source.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from blake3 import blake3

import nearkin
from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.manifest import NO_PREVIOUS, Previous, decode_manifest, encode_manifest, tenant_of_manifest
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.results_json import info_from, info_json
from nearkin_shared.storage.manifests import ManifestStore, object_name
from tests.support.data import samples

CHAINED = samples.manifest_with_chain()


def with_changed(start: int, value: bytes) -> bytes:
    """Return the sample with other bytes at `start` and a valid checksum."""
    body = bytearray(encode_manifest(CHAINED)[: -columns.CHECK_BYTES])
    body[start : start + len(value)] = value
    return bytes(body) + columns.check_bytes(bytes(body))


@pytest.mark.parametrize(
    "change",
    [
        {"source_changed": True},
        {"retain_until_us": 1},
        {"previous": Previous(2, bytes(range(32)))},
        {"previous": Previous(2)},
    ],
)
@pytest.mark.parametrize("lengths", [True, False])
def test_manifest_with_chain_field_round_trips(change: dict[str, object], *, lengths: bool) -> None:
    """F.25: each field of format 4 is kept, with and without lengths."""
    made = replace(samples.measured_manifest() if lengths else samples.small_manifest(), **change)  # type: ignore[arg-type]
    data = encode_manifest(made)
    found = decode_manifest(data, "m")
    assert data[4] == 4
    assert (found.previous, found.retain_until_us, found.source_changed) == (
        made.previous,
        made.retain_until_us,
        made.source_changed,
    )
    assert (found.lengths is None) is not lengths
    assert tenant_of_manifest(data) == made.tenant


@pytest.mark.parametrize(
    ("start", "value"),
    [
        (188, (3).to_bytes(8, "little")),
        (188, (0).to_bytes(8, "little")),
        (228, (-1).to_bytes(8, "little", signed=True)),
        (228, b"\xff" * 7 + b"\x7f"),
    ],
)
def test_manifest_chain_out_of_bounds_is_corrupt(start: int, value: bytes) -> None:
    """F.25: chain fields that no writer makes are refused.

    A previous version that is not lower, a digest without a version, and an invalid time.
    """
    with pytest.raises(Corrupt, match=r"m: (previous version|digest|retained until)"):
        decode_manifest(with_changed(start, value), "m")


@pytest.mark.parametrize(("version", "flag"), [(2, 2), (3, 2), (3, 4), (3, 8), (4, 16)])
def test_manifest_flag_of_later_format_is_too_new(version: int, flag: int) -> None:
    """F.25: a flag that its format version does not have is refused, not ignored."""
    with pytest.raises(FormatTooNew):
        decode_manifest(with_changed(4, bytes([version, 0, flag, 0])), "m")


def test_manifest_encode_refuses_previous_not_lower() -> None:
    """F.25: a manifest that a reader would refuse is not written."""
    with pytest.raises(BadInput, match="want a lower one"):
        encode_manifest(replace(CHAINED, previous=Previous(3, bytes(range(32)))))


def test_info_json_carries_retention_and_source_flag() -> None:
    """F.25: results and JSON carry both fields, and JSON of an older Nearkin is still read."""
    info = replace(CHAINED, created_us=CHAINED.created_us // 1000 * 1000).info  # JSON has milliseconds
    assert (info.retain_until, info.source_changed) == (datetime(2026, 1, 1, tzinfo=UTC), True)
    assert info_from(info_json(info)) == info
    for wrong in ({"retain_until": "x"}, {"retain_until": 5}, {"source_changed": 1}, {"source_changed": None}):
        with pytest.raises(ValueError, match=r"."):
            info_from({**info_json(info), **wrong})
    older = {k: v for k, v in info_json(info).items() if k not in ("retain_until", "source_changed")}
    assert info_from(older) == replace(info, retain_until=None, source_changed=False)


def test_put_links_to_digest_of_previous_manifest(tmp_path: Path) -> None:
    """F.25: each version names the previous manifest, also a deleted one."""
    with nearkin.open_store(tmp_path, create=True) as store:
        for number in range(3):
            store.put("a", b"%d" % number)
            if number == 1:
                store.delete("a", 2)
    objects = LocalObjectStore(tmp_path)
    manifests = ManifestStore(objects)
    assert manifests.get("default", "a", 1).previous == NO_PREVIOUS
    for version in (2, 3):
        stored = objects.get(object_name("default", "a", version - 1))
        assert manifests.get("default", "a", version).previous == Previous(version - 1, blake3(stored).digest())


def test_put_after_damaged_manifest_links_without_digest(tmp_path: Path) -> None:
    """F.25: a damaged previous manifest is named without a digest and does not stop the put."""
    with nearkin.open_store(tmp_path, create=True) as store:
        store.put("a", b"one")
        path = tmp_path / object_name("default", "a", 1)
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        store.put("a", b"two")
    assert ManifestStore(LocalObjectStore(tmp_path)).get("default", "a", 2).previous == Previous(1)
