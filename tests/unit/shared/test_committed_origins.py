"""Test the search for a committed version by its origin: manifests read, and origins kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nearkin_shared.errors import NotFound
from nearkin_shared.formats.manifest import NO_ORIGIN, Manifest
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from nearkin_shared.storage import committed_origins
from nearkin_shared.storage.committed_origins import BlobOrigin, CommittedOrigins
from tests.support.data.samples import small_manifest

HOUR_US = 3600 * 1_000_000


def origin_of(version: int) -> bytes:
    return version.to_bytes(16, "big")


class Versions:
    """Manifests of a key: version N was created at N hours; reads are recorded."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.missing: set[int] = set()

    def read(self, tenant: str, key: str, version: int) -> Manifest:
        self.reads.append(version)
        if version in self.missing:
            raise NotFound("collected")
        origin = NO_ORIGIN if version == 1 else origin_of(version)
        return replace(small_manifest(), version=version, created_us=version * HOUR_US, origin=origin)


def find(origins: CommittedOrigins, newest: int, origin_version: int, from_hour: int = 5, key: str = "k") -> int | None:
    origin = BlobOrigin(origin_of(origin_version), from_hour * HOUR_US + CLOCK_SKEW_SECONDS_MAX * 1_000_000)
    found = origins.find("t", key, range(1, newest + 1), origin)
    return None if found is None else found.version


def test_search_reads_each_manifest_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """F.16: a search reads back to the first attempt and a few older versions.

    Later ones read newer versions only.
    """
    monkeypatch.setattr(committed_origins, "OLDER_MAX", 1)
    versions = Versions()
    origins = CommittedOrigins(versions.read)
    assert find(origins, 9, 99) is None
    assert versions.reads == [9, 8, 7, 6, 5, 4, 3]
    versions.reads.clear()
    assert (find(origins, 10, 7), versions.reads) == (7, [10, 7])
    versions.reads.clear()
    assert (find(origins, 10, 99), versions.reads) == (None, [])
    assert (find(origins, 10, 2), find(origins, 10, 2, from_hour=2)) == (None, 2)  # an upload that began earlier


def test_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """F.16: the versions that a search reads, and the origins kept of all keys, are bounded."""
    monkeypatch.setattr(committed_origins, "VERSIONS_MAX", 3)
    monkeypatch.setattr(committed_origins, "ORIGINS_MAX", 4)
    versions = Versions()
    origins = CommittedOrigins(versions.read)
    assert (find(origins, 9, 6), versions.reads) == (None, [9, 8, 7])
    assert find(origins, 9, 9, key="other") == 9
    versions.reads.clear()
    assert (find(origins, 9, 9), versions.reads) == (9, [9, 8, 7, 9])  # origins of the first key were evicted


def test_search_of_a_caller_may_be_bounded_further() -> None:
    """F.16: a caller that reads from a far store bounds the versions that its searches read."""
    versions = Versions()
    origins = CommittedOrigins(versions.read)
    for newest in (9, 10):
        assert origins.find("t", "k", range(1, newest + 1), BlobOrigin(origin_of(3), 0), 2) is None
    assert versions.reads == [9, 8, 10]


def test_single_attempts_and_collected_versions_are_not_found() -> None:
    """F.16: an origin of one attempt reads nothing.

    A version that GC deleted meanwhile is not found.
    """
    versions = Versions()
    origins = CommittedOrigins(versions.read)
    assert (origins.find("t", "k", [9], BlobOrigin(origin_of(9))), versions.reads) == (None, [])
    assert find(origins, 0, 9) is None
    assert find(origins, 9, 9) == 9
    versions.missing = {9, 10}
    assert (find(origins, 10, 9), find(origins, 10, 10)) == (None, None)
