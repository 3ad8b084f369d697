"""Check that tools/check_structure.py finds what it should, on modules made for that."""

from __future__ import annotations

import ast

import pytest

from tools import check_structure as check


def module(source: str, file: str = "app/nearkin/sample.py") -> check.Module:
    """Return a parsed module."""
    return check.Module(file, source, ast.parse(source))


LINES = "x = 1\n" * check.MODULE_LINES_MIN


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        (LINES, []),
        ("x = 1\n", ["module lines"]),
        ("# size: shared by two modules\nx = 1\n", []),
        ("x = 1\n" * (check.MODULE_LINES_MAX + 1), ["module lines"]),
        (LINES + "def f():\n" + "    x = 1\n" * check.FUNCTION_LINES_MAX, ["function lines"]),
        (LINES + "def f(a, b, c, d, e, f, g, h, i): ...\n", ["parameters"]),
        (LINES + "class C:\n    def f(self, a, b, c, d, e, f, g, h): ...\n", []),
        (LINES + "@click.command()\ndef f(a, b, c, d, e, f, g, h, i): ...\n", []),
        (LINES + f'def f():\n    """{"x" * 89}"""\n', ["docstring summary"]),
    ],
)
def test_offenders_of_one_module_are_named(source: str, rules: list[str]) -> None:
    """G.1: sizes, parameters and summaries are limited.

    A reason excuses the lines of a module.
    """
    assert [offender.rule for offender in check.find_offenders([module(source)])] == rules


def test_class_in_two_modules_is_named_in_both() -> None:
    """G.1: a public class name is unique over the floors; a private one need not be."""
    modules = [module(LINES + "class A: ...\nclass _B: ...\n", f"app/{name}.py") for name in ("one", "two")]
    assert [(one.rule, one.file) for one in check.find_offenders(modules)] == [
        ("class name", "app/one.py"),
        ("class name", "app/two.py"),
    ]
