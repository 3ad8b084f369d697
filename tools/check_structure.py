"""Check sizes and names of modules, classes and functions in app/, services/ and shared/ (CODE_STYLE.md).

    python tools/check_structure.py                     the three floors
    python tools/check_structure.py FOLDER ...          offenders in these folders; names are compared with all floors
    python tools/check_structure.py --summary           count offenders of each kind; exit 0

A module outside the limits of lines is accepted when its first line is a comment `# size: REASON`.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

ROOT = Path(__file__).parents[1]
FLOORS = ("app", "services", "shared")
MODULE_LINES_MIN, MODULE_LINES_MAX = 60, 600
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 8
SUMMARY_CHARACTERS_MAX = 88
SUMMARY_CHARACTERS_MEDIAN_MAX = 80
REASON = "# size: "
REFERENCES = "/kernels/reference/"
"""Functions there have the parameters of the compiled ones: arrays, which a class would only hide."""
BASENAMES_SHARED = frozenset({"__init__.py", "__main__.py", "handler.py", "stage.py"})
"""Modules that each service has under the same name."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Offender(NamedTuple):
    """One breach: the kind of rule, where, and what to change."""

    rule: str
    file: str
    line: int
    text: str


class Module(NamedTuple):
    """A parsed module: its path from the root of the repository, its source and its syntax tree."""

    file: str
    source: str
    tree: ast.Module


def read_modules() -> list[Module]:
    """Parse every Python module of the three floors."""
    paths = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
    sources = [(path, path.read_text(encoding="utf-8")) for path in paths]
    return [Module(path.relative_to(ROOT).as_posix(), source, ast.parse(source)) for path, source in sources]


def check_module_lines(module: Module) -> Iterator[Offender]:
    """Yield a module that is too short or too long and gives no reason on its first line."""
    lines = module.source.count("\n")
    name = Path(module.file).name
    if module.source.startswith(REASON) or (name in {"__init__.py", "__main__.py"} and lines < MODULE_LINES_MIN):
        return
    if lines < MODULE_LINES_MIN:
        text = f"{lines} lines; merge it with the module that uses it, or begin it with `{REASON}REASON`"
        yield Offender("module lines", module.file, 1, text)
    elif lines > MODULE_LINES_MAX:
        text = f"{lines} lines, at most {MODULE_LINES_MAX}; split it by reason to change"
        yield Offender("module lines", module.file, 1, text)


def check_functions(module: Module) -> Iterator[Offender]:
    """Yield functions with too many lines or parameters."""
    for node in ast.walk(module.tree):
        if not isinstance(node, Function):
            continue
        first = node.body[0].lineno if _is_entry_point(node) else node.lineno
        lines = (node.end_lineno or node.lineno) - first + 1
        if lines > FUNCTION_LINES_MAX:
            text = f"{node.name}: {lines} lines, at most {FUNCTION_LINES_MAX}; split it"
            yield Offender("function lines", module.file, node.lineno, text)
        if _is_entry_point(node):
            continue
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in {"self", "cls"}])
        if count > PARAMETERS_MAX and REFERENCES not in module.file:
            text = f"{node.name}: {count} parameters, at most {PARAMETERS_MAX}; group them in a class"
            yield Offender("parameters", module.file, node.lineno, text)


def _is_entry_point(node: Function) -> bool:
    """Return whether decorators of click or FastAPI give the function its parameters: one for each option or field."""
    names = {ast.unparse(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list}
    return any(name.startswith(("click.", "router.", "app.")) or name.endswith(".command") for name in names)


def check_summaries(module: Module) -> Iterator[Offender]:
    """Yield docstrings of public objects whose first line is longer than the limit."""
    for line, text in list_summaries(module):
        if len(text) > SUMMARY_CHARACTERS_MAX:
            message = f"{len(text)} characters, at most {SUMMARY_CHARACTERS_MAX}; end the summary at one sentence"
            yield Offender("docstring summary", module.file, line, message)


def list_summaries(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the first line of every docstring of a module, class or function."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text.split("\n", 1)[0]


def check_unique_classes(modules: Sequence[Module]) -> Iterator[Offender]:
    """Yield each public class whose name another module of the floors uses too."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append((module.file, node.lineno))
    for name, found in places.items():
        if len({file for file, _ in found}) > 1:
            for file, line in found:
                others = ", ".join(other for other, _ in found if other != file)
                yield Offender("class name", file, line, f"{name} is a class of {others} too; rename one")


def check_unique_basenames(modules: Sequence[Module]) -> Iterator[Offender]:
    """Yield each module whose file name another folder of the floors uses too."""
    counts = Counter(Path(module.file).name for module in modules)
    for module in modules:
        name = Path(module.file).name
        if counts[name] > 1 and name not in BASENAMES_SHARED:
            yield Offender("file name", module.file, 1, f"{name} is used {counts[name]} times; rename one")


def find_offenders(modules: Sequence[Module]) -> list[Offender]:
    """Return all breaches, ordered by file and line."""
    found = [*check_unique_classes(modules), *check_unique_basenames(modules)]
    for module in modules:
        found += [*check_module_lines(module), *check_functions(module), *check_summaries(module)]
    return sorted(found, key=lambda offender: (offender.file, offender.line))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folders", nargs=-1)
@click.option("--summary", is_flag=True, help="count offenders of each kind; exit 0")
def main(folders: tuple[str, ...], *, summary: bool) -> None:
    """Report modules, classes and functions outside the limits of CODE_STYLE.md; exit 1 if there are any."""
    modules = read_modules()
    offenders = find_offenders(modules)
    median = statistics.median(len(text) for module in modules for _, text in list_summaries(module))
    if summary:
        for rule, count in Counter(offender.rule for offender in offenders).most_common():
            click.echo(f"{count:5}  {rule}")
        click.echo(f"{median:5.0f}  characters of the median docstring summary")
        return
    shown = [one for one in offenders if not folders or one.file.startswith(tuple(folders))]
    for offender in shown:
        click.echo(f"{offender.file}:{offender.line}: {offender.rule}: {offender.text}")
    if median > SUMMARY_CHARACTERS_MEDIAN_MAX:
        click.echo(f"median docstring summary: {median:.0f} characters, at most {SUMMARY_CHARACTERS_MEDIAN_MAX}")
    if shown or median > SUMMARY_CHARACTERS_MEDIAN_MAX:
        sys.exit(1)


if __name__ == "__main__":
    main()
