"""Check links between pages, the list of decision records, and references to records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.docs_links import on_page_markdown

ROOT = Path(__file__).parents[3]
ADR = ROOT / "docs" / "adr"
_PATTERNS = "*.md", "docs/**/*.md", "benchmarks/*.md", "services/*/*.md", "deploy/**/*.md"
PAGES = sorted(page for pattern in _PATTERNS for page in ROOT.glob(pattern))


def anchors(page: Path) -> Iterator[str]:
    """Yield the link fragments that GitHub derives from the headings of a page."""
    for heading in re.findall(r"(?m)^#+ +(.*)$", page.read_text()):
        yield re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_lead_to_existing_files(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_adr_readme_lists_each_record_once_in_order() -> None:
    listed = re.findall(r"(?m)^\| \[\d{4}\]\(([^)]+)\)", (ADR / "README.md").read_text())
    assert listed == sorted(page.name for page in ADR.glob("0*.md"))
    assert [name[:4] for name in listed] == re.findall(r"(?m)^\| \[(\d{4})\]", (ADR / "README.md").read_text())


def test_adr_named_in_code_exists() -> None:
    numbers = {page.name[:4] for page in ADR.glob("0*.md")}
    for folder in ("app", "shared", "services", "benchmarks", "deploy", "tests", "docs"):
        for page in (ROOT / folder).rglob("*"):
            if page.suffix in (".py", ".pyx", ".h", ".c", ".md", ".yaml", ".html"):
                named = set(re.findall(r"adr/(\d{4})", page.read_text(errors="replace")))
                assert named <= numbers, page


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](../README.md#use)", "[a](https://example.org/nearkin/blob/main/README.md#use)"),
        ("[a](internals/glossary.md)", "[a](internals/glossary.md)"),
        ("[a](../absent.md)", "[a](../absent.md)"),
    ],
)
def test_site_link_out_of_docs_names_the_repository(link: str, expected: str) -> None:
    """G.7: site links to files outside docs/ lead to the repository.

    Mkdocs reports absent files.
    """
    page = SimpleNamespace(file=SimpleNamespace(src_uri="README.md"))
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"), repo_url=None)
    assert on_page_markdown(link, page=page, config=config) == expected
