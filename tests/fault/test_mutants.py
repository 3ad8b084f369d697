"""Mutants: a planted mistake makes the test of its rule fail.

`make soak` runs every mutant, this file a sample.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SAMPLE = 3
"""Number of mutants in one run of `make test`: 2 s each, another choice each time."""


def _load_engine() -> ModuleType:
    path = Path(__file__).parents[1] / "support" / "mutation.py"
    spec = importlib.util.spec_from_file_location("mutation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutation = _load_engine()
MUTANTS = mutation.read_mutants()


@pytest.mark.parametrize("number", range(SAMPLE))
def test_mutant_planted_is_caught(number: int) -> None:
    """F.32: A mistake against an invariant or a security rule makes the test of that rule fail."""
    mutant = random.SystemRandom().choice(sorted(MUTANTS.values(), key=lambda one: one.name)[number::SAMPLE])
    run = mutation.run_mutant(mutant)
    assert run.outcome is mutation.Outcome.CAUGHT, f"{mutant.name}: {run.outcome.value}\n{run.output}"


def test_mutant_text_is_exactly_once_in_its_module() -> None:
    """F.32: The text that a mutant replaces is exactly once in its module, so no mutant is stale."""
    for mutant in MUTANTS.values():
        spec = importlib.util.find_spec(mutant.module)
        assert spec is not None, mutant.name
        assert spec.origin is not None, mutant.name
        assert Path(spec.origin).read_text().count(mutant.old) == 1, mutant.name
        for test in mutant.tests:
            assert (mutation.ROOT / test.partition("::")[0]).is_file(), f"{mutant.name}: {test}"


def test_mutation_engine_reports_missed_and_stale() -> None:
    """F.32: A change that breaks no test is reported as missed, and a text that the module lacks as stale."""
    test = "tests/unit/shared/test_retention.py"
    harmless = mutation.Mutant(
        "harmless",
        "none",
        "a docstring differs",
        "nearkin_shared.retention",
        "from __future__",
        "\nfrom __future__",
        (test,),
    )
    stale = replace(harmless, old="no such text")
    assert mutation.run_mutant(harmless).outcome is mutation.Outcome.MISSED
    assert mutation.run_mutant(stale).outcome is mutation.Outcome.STALE
