"""Test `nearkin completion` and `nearkin docs man` with a real shell and man(1)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from nearkin.cli.commands import nearkin
from nearkin.cli.man_pages import escape, generate_pages
from tests.support.checks.commands import InProcess, environment, run
from tests.support.servers.servers import MissingTool


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_with_an_install_hint(call: InProcess, shell: str) -> None:
    """A script for each shell, with the line that installs it."""
    script = call("completion", shell).stdout.decode()
    assert f"_NEARKIN_COMPLETE={shell}_complete" in script
    assert f"# install: nearkin completion {shell} > " in script
    assert script.startswith("#compdef nearkin") == (shell == "zsh")
    assert call.answer("completion", shell)["script"] in script


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nearkin ver", {"verify", "version"}),
        ("nearkin keys ro", {"rotate"}),
        ("nearkin get --ra", {"--range", "--raw"}),
        ("nearkin --version completion f", {"fish"}),
    ],
)
def test_bash_completes_commands_and_options(tmp_path: Path, line: str, expected: set[str]) -> None:
    """Bash with the script offers what fits."""
    script = tmp_path / "nearkin.bash"
    script.write_bytes(run("completion", "bash").stdout)
    program = tmp_path / "nearkin"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nearkin.cli "$@"\n')
    program.chmod(0o755)
    words = line.split(" ")
    asked = (
        f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _nearkin_completion "{program}"; echo "${{COMPREPLY[@]}}"'
    )
    bash = ["bash", "-c", f'source "{script}" 2>/dev/null; {asked}']
    done = subprocess.run(bash, capture_output=True, env=environment(), timeout=60, check=True, text=True)
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize(("line", "kind"), [("nearkin put key fi", "file"), ("nearkin --store fo", "dir")])
def test_completion_leaves_paths_to_the_shell(line: str, kind: str) -> None:
    """Files and folders are completed by the shell itself."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_NEARKIN_COMPLETE": "bash_complete"}
    assert run(env=words).stdout.decode().split(",")[0].strip() == kind


# --- manual pages ----------------------------------------------------------------------------------------------------


def test_man_has_a_page_for_every_command(tmp_path: Path, call: InProcess) -> None:
    """Write one page per command, also of groups, that names all its options."""
    call("docs", "man", tmp_path / "man1")
    pages = {path.name: path.read_text() for path in (tmp_path / "man1").iterdir()}
    assert {"nearkin.1", "nearkin-put.1", "nearkin-copy.1", "nearkin-keys-rotate.1", "nearkin-docs-man.1"} <= set(pages)
    context = click.Context(nearkin, info_name="nearkin")
    for name in nearkin.list_commands(context):
        command = nearkin.get_command(context, name)
        assert command is not None
        page = pages[f"nearkin-{name}.1"]
        assert f"nearkin\\-{escape(name)}" in pages["nearkin.1"]
        for option in command.params:
            for flag in option.opts if isinstance(option, click.Option) and not option.hidden else ():
                assert escape(flag) in page, (name, flag)
    assert call("docs", "man").stdout.decode().rstrip() == pages["nearkin.1"].rstrip()


def test_man_pages_format_without_warnings(need: Callable[[Callable[[], Any]], Any]) -> None:
    """Groff formats every page without a warning, examples line by line and unchanged."""

    def groff() -> str:
        found = shutil.which("groff")
        if found is None:
            raise MissingTool("groff is not installed: apt-get install groff-base")
        return found

    program = need(groff)
    pages = dict(generate_pages(nearkin))
    everything = "".join(pages.values()).encode()
    done = subprocess.run(
        [program, "-man", "-ww", "-z", "-Kutf8"], input=everything, capture_output=True, timeout=60, check=True
    )
    assert done.stderr == b""
    shown = subprocess.run(
        [program, "-man", "-Tascii", "-P-cbou", "-rLL=130n"],
        input=pages["nearkin-put.1"].encode(), capture_output=True, timeout=60, check=True,
    ).stdout.decode()  # fmt: skip
    assert re.search(r"(?m)^ +nearkin put db/dump dump\.rdb --meta host=db1$", shown)
    assert re.search(r"(?m)^ +pg_dump shop \| nearkin put db/shop -$", shown)


def test_man_escapes_control_lines_and_backslashes() -> None:
    """No text of a help becomes a roff request."""

    @click.command()
    def odd() -> None:
        """Do odd things.

        .so /etc/passwd
        'quoted' with a \\n and a - and ~/x
        """

    ((_, page),) = generate_pages(odd, "odd")
    assert "\n\\&.so /etc/passwd\n" in page
    assert "\\(aqquoted\\(aq with a \\en and a \\- and \\(ti/x" in page
