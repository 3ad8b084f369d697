"""Test how commands parse their arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin.cli.arguments import parse_range, parse_sample, store_folder, walk_files
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


def test_file_deleted_during_walk_is_reported(tmp_path: Path) -> None:
    """Report and leave out a file that is deleted while its folder is walked."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"x")
    left_out: list[tuple[str, str]] = []

    def never(path: str, why: str) -> None:
        raise AssertionError(f"{path}: {why}")

    files = walk_files(tmp_path, "", None, lambda path, why: left_out.append((path, why)), never)
    assert next(files).key == "a"
    (tmp_path / "b").unlink()
    assert [file.key for file in files] == ["c"]
    assert left_out == [(str(tmp_path / "b"), "gone since it was listed")]


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
