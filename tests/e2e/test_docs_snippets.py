"""Run the code blocks of all pages, page by page, in a temporary folder.

A block is Python (fenced as such), TOML (a file of settings), YAML (values of the chart), or shell: indented, and its
first line is a command. Diagrams, layouts and other texts are not code. The comment `<!-- not run: REASON -->` before a
block leaves it out.

Invariant: a command or a setting on a page that does not work fails a test, unless the page states why it is not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from markdown_it import MarkdownIt

from nearkin_shared.config.loader import load
from tests.support.checks.commands import environment
from tests.support.data.samples import noise

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = (
    "nearkin",
    ".venv/bin/nearkin",
    "export",
    "make",
    "curl",
    "helm",
    "kubectl",
    "python",
    "pip",
    "docker",
    "#!/bin/sh",
)
MARK = re.compile(r"<!-- not run: (?P<reason>\S[^\n]*) -->\s*")
ROOTED = re.compile(r"(?<![\w./:~])/(?=(?:backup|home|mnt|tmp|var)(?:/|\s|$))")
"""Absolute paths of a reader's machine: below the temporary folder here."""
ENDLESS = re.compile(r"(?m)^nearkin serve\b.*$")
"""The server runs until it is stopped: test_serve.py runs it."""
PREPARE = {
    "docs/how-to/operate-services.md": (
        "mkdir -p ~/.local/share/bash-completion/completions",
        "nearkin init /backup",
        "nearkin init /var/lib/nearkin",
        "export NEARKIN_STORE=/var/lib/nearkin",
        "nearkin put db/dump db.dump",
    ),
}
"""Commands before the first block of a page: the stores that its text takes for granted."""
RUN_WITH_TABLES = {"docs/how-to/free-a-full-disk.md", "docs/how-to/use-the-command.md"}
"""Pages whose blocks test_docs_commands.py runs, together with the commands of their tables."""


class Snippet(NamedTuple):
    """One code block: its language ("" for a text), its content, its line, and why it is not run."""

    language: str
    content: str
    line: int
    not_run: str | None


def snippets_of(page: Path) -> Iterator[Snippet]:
    """Yield the code blocks of a page."""
    reason = None
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language = token.info if token.type == "fence" else "sh" if is_shell(token.content) else ""
            assert token.map is not None
            yield Snippet(language, token.content, token.map[0] + 1, reason)
            reason = None
        elif token.type == "html_block":
            found = MARK.fullmatch(token.content)
            reason = found["reason"] if found else None
        elif token.nesting == 0:
            reason = None


def is_shell(content: str) -> bool:
    """Return whether an indented block has commands: its first word is one, after assignments."""
    words = re.sub(r"^(?:[A-Z_]+=\S+ +)*", "", content).split()
    return bool(words) and words[0] in COMMANDS


def to_run(page: Path, *languages: str) -> list[Snippet]:
    """Return the blocks of a page that tests run."""
    return [each for each in snippets_of(page) if each.language in languages and each.not_run is None]


def pages_with(*languages: str) -> list[str]:
    """Return the pages with blocks to run, relative to the repository."""
    return [str(page.relative_to(ROOT)) for page in PAGES if to_run(page, *languages)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the pages name."""
    for name in ("db.dump", "var/backups/db.dump", "home/ana/one.jpg", "home/ana/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(noise(50_000, name).tobytes())
    for name in ("mnt/backups", "tmp", "var/lib"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def run_shell(folder: Path, script: str) -> None:
    """Run a script, which must succeed, with absolute paths below `folder`."""
    script = ROOTED.sub(f"{folder}/", script).replace(".venv/bin/nearkin", "nearkin")
    script = ENDLESS.sub("", script)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=environment({"PATH": path, "HOME": str(folder)}),
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.mark.parametrize("name", sorted({*pages_with("sh")} - RUN_WITH_TABLES))
def test_shell_blocks_of_a_page_run_in_their_order(name: str, folder: Path) -> None:
    """G.7: all commands of a page run in one shell, as a reader types them."""
    blocks = [block.content for block in to_run(ROOT / name, "sh")]
    run_shell(folder, "\n".join([*PREPARE.get(name, ()), *blocks]))


@pytest.mark.parametrize("name", pages_with("python"))
def test_python_blocks_of_a_page_run(name: str, folder: Path) -> None:
    """G.7: each block is a program of its own; all of a page use one folder."""
    for block in to_run(ROOT / name, "python"):
        done = subprocess.run(
            [sys.executable, "-c", block.content],
            cwd=folder,
            env=environment(),
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{name}:{block.line}: {done.stderr.decode()[-2000:]}"


@pytest.mark.parametrize("name", pages_with("toml", "yaml"))
def test_settings_of_a_page_are_accepted(name: str) -> None:
    """G.7: TOML is a file of settings, the `config` of YAML is one for services; none names an unknown setting."""
    for block in to_run(ROOT / name, "toml", "yaml"):
        values = tomllib.loads(block.content) if block.language == "toml" else yaml.safe_load(block.content)["config"]
        assert values, f"{name}:{block.line}"
        load(None, values, use_environment=False)


def test_blocks_are_run_or_marked() -> None:
    """Most blocks run; each mark precedes a block that would run, and gives a reason."""
    found = [(page, block) for page in PAGES for block in snippets_of(page)]
    code = [block for _, block in found if block.language in ("sh", "python", "toml", "yaml")]
    assert sum(block.not_run is None for block in code) >= 18
    marks = sum(len(MARK.findall(page.read_text(encoding="utf-8"))) for page in PAGES)
    assert marks == sum(block.not_run is not None for block in code)
    assert {block.language for _, block in found} == {"", "mermaid", "python", "sh", "toml", "yaml"}
    texts = [
        f"{page.relative_to(ROOT)}:{block.line}"
        for page, block in found
        if block.language == "" and re.search(r"(?m)^(?:\.venv/bin/)?nearkin [a-z]", block.content)
    ]
    assert texts == []
