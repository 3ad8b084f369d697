"""Pytest plugin that plants one mutant: a source-level change of one product module in this process.

The environment variable PLANTED_MUTANT holds the mutant as JSON: `module`, `old`, `new`. The module is compiled from
its source with `old` replaced by `new`; the file on disk is not changed. The run ends with `NOT_PLANTED_EXIT_CODE` if
no test imported the module or if `old` is not exactly once in its source, so a stale mutant is never counted as
caught.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import pytest

NOT_PLANTED_EXIT_CODE = 86


class StaleMutantError(ImportError):
    """The text that the mutant replaces does not occur exactly once in the source of the module."""


class MutantLoader(SourceFileLoader):
    """Load one module from its source with one text replaced."""

    def __init__(self, fullname: str, path: str, old: str, new: str) -> None:
        super().__init__(fullname, path)
        self._old, self._new = old, new

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed source. Raises StaleMutantError."""
        source = self.get_source(fullname) or ""
        occurrences = source.count(self._old)
        if occurrences != 1:
            raise StaleMutantError(f"mutant of {fullname}: {occurrences} occurrences of {self._old!r}, expected 1")
        return compile(source.replace(self._old, self._new), self.path, "exec", dont_inherit=True)


class MutantFinder(MetaPathFinder):
    """Find one module and give it the mutant loader."""

    def __init__(self, module: str, old: str, new: str) -> None:
        self.module = module
        self._old, self._new = old, new
        self.is_planted = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the mutated module, None for all others."""
        if fullname != self.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        spec.loader = MutantLoader(fullname, spec.origin, self._old, self._new)
        self.is_planted = True
        return spec


FINDER = MutantFinder(**json.loads(os.environ["PLANTED_MUTANT"]))
if FINDER.module in sys.modules:
    raise RuntimeError(f"{FINDER.module} was imported before its mutant was planted")
sys.meta_path.insert(0, FINDER)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace the exit code if the mutant was never planted."""
    if not FINDER.is_planted:
        session.exitstatus = NOT_PLANTED_EXIT_CODE
