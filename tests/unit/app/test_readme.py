"""Check the README, CONTRIBUTING and how-to pages.

Length, chart, commands, files and names.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from benchmarks.summary_chart import CHART, SUMMARY, draw, read_tools
from nearkin.cli.commands import nearkin

ROOT = Path(__file__).parents[3]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
WORDS_MAX = 400
PAGES = [README, CONTRIBUTING, *sorted((ROOT / "docs" / "how-to").glob("*.md"))]


def shown_commands(text: str) -> set[tuple[str, ...]]:
    """Return the words of each `nearkin` command in code, from its subcommand to the end."""
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"(?m)^    (\S.*)$", text))
    lines = re.findall(r"(?m)(?:^|/|[;&|(] |-- |\w=\S+ )nearkin ([^#|\n]+)", code.replace("--store backups ", ""))
    return {tuple(line.split()) for line in lines if line[0].isalpha()}


def options_of(command: click.Command) -> set[str]:
    """Return the options of a command."""
    return {text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)}


def test_readme_is_at_most_400_words() -> None:
    """G.8: the README stays short; figures stay in the summary."""
    text = README.read_text()
    assert len(text.split()) <= WORDS_MAX
    assert len(re.findall(r"!\[", text)) == 1


def test_summary_chart_shows_the_figures_of_the_table() -> None:
    """G.8: docs/benchmarks/summary.md is the source of the chart.

    `python -m benchmarks.summary_chart` draws it.
    """
    assert CHART.read_text() == draw(SUMMARY.read_text())
    names = {tool.name.split(" ")[0].rstrip(",") for tool in read_tools(SUMMARY.read_text())}
    assert names == {"nearkin", "borg", "kopia", "restic"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_shown_in_pages_exist(page: Path) -> None:
    """G.7: each `nearkin` command shown in pages exists and has the options shown."""
    for words in shown_commands(page.read_text()):
        command: click.Command = nearkin
        known, rest = options_of(nearkin), list(words)
        while rest and isinstance(command, click.Group):
            found = command.get_command(click.Context(command), rest.pop(0))
            assert found is not None, words
            command = found
            known |= options_of(command)
        assert {word for word in rest if word.startswith("--")} <= known, words


def test_readme_shows_commands() -> None:
    """G.8: the pattern of the test above finds the commands of the README."""
    names = {words[0] for words in shown_commands(README.read_text())}
    assert {"init", "put", "get", "forget", "serve"} <= names


def test_contributing_names_files_that_exist() -> None:
    """G.7: the walks of CONTRIBUTING.md name existing files and functions of these."""
    text = CONTRIBUTING.read_text()
    paths = [path for path in re.findall(r"`((?:app|services|shared|tests)/[\w/.]+)`", text) if "test_<" not in path]
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
    rows = re.findall(r"(?m)^\| \d\. `([^`]+)` \|.*\| `(\w+)\.(\w+)`(.*) \|$", text)
    assert len(rows) == 4
    for path, name, method, rest in rows:
        source = (ROOT / path).read_text()
        functions = [method, *re.findall(r"`(_\w+)`", rest)]
        assert re.search(rf"(?m)^class {name}\b", source), (path, name)
        assert [each for each in functions if not re.search(rf"(?m)^    def {each}\(", source)] == [], path


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("shared/nearkin_shared/results.py", ["class GcReport"]),
        ("shared/nearkin_shared/results_json.py", ["def gc_json"]),
        ("services/maintenance/nearkin_maintenance/gc/gc_run.py", ["def _report"]),
        ("services/maintenance/nearkin_maintenance/gc/sweep.py", ["class GcTotals"]),
        ("app/nearkin/cli/gc.py", ["def gc_lines"]),
        ("shared/nearkin_shared/objectstore/base.py", ["class ObjectStore(Protocol)", "class AlreadyExists"]),
        ("shared/nearkin_shared/objectstore/factory.py", ["def open_objects"]),
        ("shared/nearkin_shared/config/storage.py", ["class ObjectStoreSettings"]),
        ("shared/nearkin_shared/config/reduction.py", ["FEATURES = "]),
        (
            "services/resemblance/nearkin_resemblance/feature_algorithms.py",
            ["ALGORITHMS", "_PARAMETERS", "def sketcher"],
        ),
        ("app/nearkin/lab/similar_chunks.py", ["APPROACHES"]),
        ("tests/support/conformance/object_contract.py", ["class ObjectStoreContract"]),
        ("tests/equivalence/test_features.py", ["ALGORITHMS = "]),
    ],
)
def test_contributing_names_definitions_that_exist(path: str, names: list[str]) -> None:
    """G.7: other names in the walks are defined in the files that the walks name.

    Correct both if this fails.
    """
    assert [name for name in names if name not in (ROOT / path).read_text()] == []
