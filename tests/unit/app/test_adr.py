"""Check the form of decision records: parts, length, numbers, and the list in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ADR = ROOT / "docs" / "adr"
RECORDS = sorted(ADR.glob("[0-9]*.md"))
PARTS = ["Context", "Decision", "Consequences", "Alternatives"]
WORDS_MAX = 400
HEADER = re.compile(
    r"# ADR (?P<number>\d+): (?P<title>\S.*)\n\n"
    r"- Status: (?P<status>(?:accepted|proposed|superseded by \[\d{4}\]\(\S+\.md\)).*)\n"
    r"- Date: \d{4}-\d{2}-\d{2}\n\n## Context\n"
)


def _header(record: Path) -> re.Match[str]:
    found = HEADER.match(record.read_text())
    assert found, f"{record.name}: want title, Status, Date and Context as in the template of docs/adr/README.md"
    return found


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_adr_record_has_the_five_parts(record: Path) -> None:
    """Check a record's header, its four sections in order, and its number."""
    assert int(_header(record)["number"]) == int(record.name[:4])
    assert re.findall(r"(?m)^## (.*)$", record.read_text()) == PARTS


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_adr_record_has_at_most_400_words(record: Path) -> None:
    """Check the length, header, tables and code included.

    Figures belong in docs/benchmarks/history.md.
    """
    assert len(record.read_text().split()) <= WORDS_MAX


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_adr_record_names_existing_files(record: Path) -> None:
    """Check that each repository path in a record in force exists."""
    text = record.read_text()
    named = re.findall(r"`((?:shared|services|tests|bench|docs|deploy)/[^` ]+)`", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing or _header(record)["status"].startswith("superseded")


def test_adr_numbers_are_unique() -> None:
    """Check that no two records share a number."""
    numbers = [record.name[:4] for record in RECORDS]
    assert len(numbers) == len(set(numbers))


def test_adr_readme_lists_title_and_status() -> None:
    """Check that the README lists each record once, in order, with its title and status."""
    listed = re.findall(r"(?m)^\| \[(\d{4})\]\((\S+)\) \| (.*) \| (.*) \|$", (ADR / "README.md").read_text())
    headers = [_header(record) for record in RECORDS]
    assert listed == [
        (record.name[:4], record.name, header["title"], header["status"])
        for record, header in zip(RECORDS, headers, strict=True)
    ]
