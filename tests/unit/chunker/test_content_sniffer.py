"""Test the sniffer: each kind by its content, and content that only pretends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes, records_like, text_like
from nearkin_chunker.content_sniffer import HEAD_BYTES, Finding, find_kind, is_dense, needed_bytes
from nearkin_shared.config.reduction import RULED_KINDS
from nearkin_shared.types import U8
from tests.support.data import content_samples as samples

ALL = frozenset(RULED_KINDS)
KIB = 1024


def array(data: bytes) -> U8:
    """Return bytes as an array."""
    return np.frombuffer(data, np.uint8)


def kind_of(data: bytes) -> Finding:
    """Return what the sniffer finds in as many bytes as it asks for."""
    found = array(data)
    return find_kind(found[: needed_bytes(found)], ALL)


SAMPLES = {
    "jpeg": (samples.jpeg(100_000), "media"),
    "small-jpeg": (samples.jpeg(5_000), "media"),
    "mp4": (samples.mp4(100_000, 0), "media"),
    "png": (b"\x89PNG\r\n\x1a\n" + random_bytes(90_000, 1), "media"),
    "webp": (b"RIFF\x10\x20\0\0WEBPVP8 " + random_bytes(90_000, 1), "media"),
    "gzip": (samples.compressed(200_000), "compressed"),
    "zstd": (b"\x28\xb5\x2f\xfd" + random_bytes(90_000, 1), "compressed"),
    "random": (random_bytes(HEAD_BYTES, 7), "encrypted"),
    "tar": (samples.tar_file({"a": text_like(50_000, 1)}), "tar"),
    "postgres": (samples.postgres_file(20), "database"),
    "innodb": (samples.innodb_file(20), "database"),
    "text": (text_like(100_000, 1), "other"),
    "records": (records_like(100_000, 1), "other"),
    "zeros": (bytes(100_000), "other"),
}


@pytest.mark.parametrize("name", list(SAMPLES))
def test_sniffer_kind_is_found_by_content(name: str) -> None:
    data, kind = SAMPLES[name]
    assert kind_of(data).kind == kind


def test_sniffer_without_rule_is_other() -> None:
    """A kind without a rule is cut like all other content."""
    assert find_kind(array(samples.jpeg(100_000)), frozenset({"tar"})).kind == "other"
    assert find_kind(array(samples.jpeg(100_000)), frozenset({"media"})).kind == "media"


@pytest.mark.parametrize(
    ("page_bytes", "cut_bytes"), [(512, 4096), (1024, 4096), (4096, 4096), (16384, 16384), (65536, 65536)]
)
def test_sniffer_sqlite_has_page_size_and_size(tmp_path: Path, page_bytes: int, cut_bytes: int) -> None:
    data = samples.sqlite_file(tmp_path / "db", 5_000, page_bytes)
    assert kind_of(data) == Finding("database", cut_bytes, len(data))


@pytest.mark.parametrize("page_bytes", [4096, 8192, 16384, 32768])
def test_sniffer_innodb_has_page_size_and_size(page_bytes: int) -> None:
    data = samples.innodb_file(20, page_bytes)
    assert kind_of(data) == Finding("database", page_bytes, len(data))


def test_sniffer_safetensors_has_borders() -> None:
    """Small tensors share a stretch with their neighbours; the stretches add up to the file."""
    data = samples.safetensors_file({"a": bytes(200_000), "b": bytes(100), "c": bytes(100), "d": bytes(90_000)})
    found = kind_of(data)
    assert found.kind == "safetensors"
    assert found.borders[1:] == (200_000, 200, 90_000)
    assert sum(found.borders) == len(data)


DAMAGED_WEIGHTS = [
    samples.safetensors_file({"a": bytes(200_000)})[:60],
    (1 << 40).to_bytes(8, "little") + b"{" + bytes(90_000),
    (600 * KIB).to_bytes(8, "little") + b"{" + bytes(700_000),
    (5_000).to_bytes(8, "little") + b'{"a": 1}' + b" " * 90_000,
    (5_000).to_bytes(8, "little") + b"{" * 90_000,
    (5_000).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 9]}, "b": {"data_offsets": [5, 20]}}' + b" " * 90_000,
    (5_000).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, -9]}}' + b" " * 90_000,
    (5_000).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 1e9]}}' + b" " * 90_000,
    (5_000).to_bytes(8, "little") + b'{"a": {"data_offsets": ["x", [1]]}}' + b" " * 90_000,
    (5_000).to_bytes(8, "little") + b"{}" + b" " * 90_000,
]


@pytest.mark.parametrize("number", range(len(DAMAGED_WEIGHTS)))
def test_sniffer_damaged_safetensors_is_other(number: int) -> None:
    assert kind_of(DAMAGED_WEIGHTS[number]) == Finding("other")


def test_sniffer_damaged_sqlite_header_is_other(tmp_path: Path) -> None:
    """A page size that is no power of two, a size of zero, a stale size: cut like other content."""
    data = samples.sqlite_file(tmp_path / "db", 5_000)
    for at, value in ((16, b"\x10\x01"), (28, bytes(4)), (24, b"\x00\x00\x99\x99")):
        assert kind_of(data[:at] + value + data[at + len(value) :]).kind != "database", at
    assert kind_of(data[:4000]).kind == "other"


def test_sniffer_damaged_tar_header_is_other() -> None:
    """A checksum that is wrong, and the magic alone."""
    data = samples.tar_file({"a": text_like(50_000, 1)}, format_=1)
    assert kind_of(data).kind == "tar"
    assert kind_of(b"b" + data[1:]).kind == "other"
    assert kind_of(bytes(257) + b"ustar\0" + b"00" + bytes(90_000)).kind == "other"


@pytest.mark.parametrize("size", [0, 1, 8, 9, 17, 100, 511, 4095])
def test_sniffer_tiny_item_is_other(size: int) -> None:
    for data in (
        samples.jpeg(size),
        random_bytes(size, 1),
        samples.tar_file({"a": b"b"})[:size],
        b"SQLite format 3\0"[:size],
    ):
        assert kind_of(data) == Finding("other")


def test_sniffer_random_pages_are_no_database() -> None:
    """Pages need sound bounds, not only a version; one page alone is none."""
    page = bytes(12) + b"\x00\x00\x00\x00\x00\x00\x04\x20" + bytes(8172)
    assert kind_of(page * 10).kind == "other"
    assert kind_of(samples.postgres_file(1) + text_like(100_000, 1)).kind == "other"


@pytest.mark.parametrize("seed", range(20))
def test_density_of_random_bytes_is_dense(seed: int) -> None:
    assert is_dense(array(random_bytes(HEAD_BYTES, seed)))
    assert is_dense(array(random_bytes(5_000, seed)))


@pytest.mark.parametrize("seed", range(5))
def test_density_of_text_records_and_base64_is_not_dense(seed: int) -> None:
    import base64

    for data in (
        text_like(HEAD_BYTES, seed),
        records_like(HEAD_BYTES, seed),
        base64.b64encode(random_bytes(HEAD_BYTES, seed)),
    ):
        assert not is_dense(array(data))
