"""Test how commands parse their arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin.cli.arguments import parse_range, parse_sample, parse_size, store_folder
from nearkin_shared.errors import BadInput, ConfigError
from nearkin_shared.savings_table import human_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes", "expected"),
    [
        ("0-0", 10, (0, 1)),
        ("2-5", 10, (2, 6)),
        ("2-", 10, (2, 10)),
        ("2-99", 10, (2, 10)),
        ("-3", 10, (7, 10)),
        ("-99", 10, (0, 10)),
        ("-5", 0, (0, 0)),
    ],
)
def test_range_includes_both_ends(text: str, size_bytes: int, expected: tuple[int, int]) -> None:
    assert parse_range(text).resolve(size_bytes) == expected


@pytest.mark.parametrize("text", ["", "-", "-0", "a-b", "1-2,4-5", "1 - 2", "٣-٤", "+1-2", "1-0", "9" * 20 + "-"])
def test_range_malformed_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_range(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("1%", 0.01), ("0.01", 0.01), ("100%", 1.0), ("1", 1.0), (".5", 0.5), ("2.5%", 0.025)]
)
def test_sample_is_a_share_or_a_percentage(text: str, expected: float) -> None:
    assert parse_sample(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "%", ".", "0", "0%", "-1%", "1.01", "nan", "inf", "1e-2", "five"])
def test_sample_malformed_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_sample(text)


def test_store_is_a_path_or_a_file_url() -> None:
    assert store_folder("some/where") == Path("some/where")
    assert store_folder("file:///with%20space") == Path("/with space")
    assert store_folder("file://localhost/there") == Path("/there")
    for refused in (None, "", "s3://bucket", "http://host", "file://host/there", "file:///nul%00"):
        with pytest.raises(ConfigError):
            store_folder(refused)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("100MB", 10**8),
        ("100m", 10**8),
        ("1.5GiB", 3 << 29),
        ("2 KiB", 2048),
        ("1Ti", 1 << 40),
    ],
)
def test_size_with_unit_is_bytes(text: str, expected: int) -> None:
    assert parse_size("size", text) == expected


@pytest.mark.parametrize("text", ["", "-1", "MB", "1i", "1e3", "1 000", "1parsec", "٣"])
def test_size_malformed_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="want a size such as"):
        parse_size("size", text)


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [
        (0, "0 B"),
        (9999, "9,999 B"),
        (10_000, "10.0 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (-2_500_000, "-2.50 MB"),
    ],
)
def test_bytes_are_shown_with_three_digits(count_bytes: int, text: str) -> None:
    assert human_bytes(count_bytes) == text
