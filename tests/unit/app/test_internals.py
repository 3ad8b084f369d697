"""Compare docs/internals with the code.

Modules, planted mistakes and terms on the pages exist.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.engines.mutation_engine import BUGS

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "internals").glob("*.md"))
INVARIANTS = (ROOT / "docs" / "internals" / "invariants.md").read_text()
MUTANTS = {
    name: row["rule"]
    for table in (ROOT / "tests" / "support" / "mutants").glob("*.toml")
    for name, row in tomllib.loads(table.read_text()).items()
}
SECTIONS = dict(re.findall(r"(?ms)^## (I\d+): [^\n]*\n(.*?)(?=^## |\Z)", INVARIANTS))


def _is_module_or_member(name: str) -> bool:
    """Return whether a dotted name is a module, or a class or method of one."""
    module, _, members = name, "", ""
    while module:
        spec = importlib.util.find_spec(module) if "." not in module or _is_package(module) else None
        if spec is not None and spec.origin is not None:
            source = Path(spec.origin).read_text()
            return all(re.search(rf"\b(?:class|def) {member}\b", source) for member in members.split(".") if member)
        module, _, last = module.rpartition(".")
        members = f"{last}.{members}".rstrip(".")
    return False


def _is_package(module: str) -> bool:
    """Return whether the parent of a module can be imported, as `find_spec` needs."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_names_modules_that_exist(page: Path) -> None:
    """G.1: each dotted name of a page is a module, or a class or function of one."""
    named = set(re.findall(r"`(nearkin(?:_\w+)?(?:\.\w+)+)`", page.read_text())) - {"nearkin.json"}
    assert not sorted(name for name in named if not _is_module_or_member(name))


def test_invariants_are_ten_and_each_has_engine_and_mistake() -> None:
    """G.1: I1 to I10 each link to an engine and name planted mistakes that exist."""
    assert list(SECTIONS) == [f"I{number}" for number in range(1, 11)]
    for number, section in SECTIONS.items():
        (engines,) = re.findall(r"(?m)^- Engines?: (.*)$", section)
        (mistakes,) = re.findall(r"(?m)^- Planted mistakes: (.*)$", section)
        assert "](../../" in engines, number
        named = re.findall(r"`([\w-]+)`", mistakes)
        assert named, number
        assert not [name for name in named if name not in BUGS and name not in MUTANTS], number


def test_invariants_name_every_mistake_planted_against_them() -> None:
    """G.1: each mistake or mutant planted against an invariant is named in its section."""
    rules = [(name, rule) for name, bug in BUGS.items() for rule in bug.breaks.split(", ")] + list(MUTANTS.items())
    assert not [(name, rule) for name, rule in rules if rule in SECTIONS and f"`{name}`" not in SECTIONS[rule]]


def test_glossary_defines_each_term_once() -> None:
    """G.1: a second definition of a term would give it a second meaning."""
    terms: list[str] = []
    for line in (ROOT / "docs" / "internals" / "glossary.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| term "):
            terms += line.split("|")[1].strip().split(", ")
    assert len(terms) > 60
    assert sorted(terms) == sorted(set(terms))
