"""Manual pages in roff, generated from the tree of commands.

nearkin(1), nearkin-put(1), ..., nearkin-keys-rotate(1): NAME, SYNOPSIS, DESCRIPTION, OPTIONS, COMMANDS, SEE ALSO

Help texts are written line by line and hold examples. A paragraph with an example is set as it is; others are filled.
(click-man fills all of them, does not escape control lines, and misses commands that are imported on demand.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc

import click

from nearkin import __version__

SECTION = 1
_EXAMPLE = re.compile(r"(?m)^(?:.*[|&<] *\(?)?(?:[A-Z_]+=\S+ )*(?:nearkin|export|curl|source) ")


def generate_pages(command: click.Command, name: str = "nearkin") -> Iterator[tuple[str, str]]:
    """Yield (file name, roff) of a command and of all commands below it."""
    yield from _generate(click.Context(command, info_name=name))


def _generate(context: click.Context) -> Iterator[tuple[str, str]]:
    page = context.command_path.replace(" ", "-")
    below = _subcommands(context)
    yield f"{page}.{SECTION}", render_page(context, below)
    for child in below:
        yield from _generate(child)


def _subcommands(context: click.Context) -> list[click.Context]:
    """Return a context for each command of a group, by name; none of a command."""
    group = context.command
    if not isinstance(group, click.Group):
        return []
    found = [(name, group.get_command(context, name)) for name in group.list_commands(context)]
    return [
        click.Context(command, info_name=name, parent=context)
        for name, command in found
        if command is not None and not command.hidden
    ]


def render_page(context: click.Context, below: list[click.Context]) -> str:
    """Return the page of one command."""
    path, command = context.command_path, context.command
    page = path.replace(" ", "-")
    lines = [
        f'.TH "{escape(page.upper())}" {SECTION} "" "nearkin {escape(__version__)}" "Nearkin manual"',
        ".SH NAME",
        rf"{escape(page)} \- {escape(_summary(command))}",
        ".SH SYNOPSIS",
        rf"\fB{escape(path)}\fR {escape(' '.join(command.collect_usage_pieces(context)))}",
        ".SH DESCRIPTION",
        *_paragraphs(cleandoc(command.help or "")),
        ".SH OPTIONS",
    ]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            lines += [".TP", rf"\fB{escape(record[0])}\fR", escape(" ".join(record[1].split()))]
    if below:
        lines.append(".SH COMMANDS")
        for child in below:
            name = child.command_path.replace(" ", "-")
            lines += [".TP", rf"\fB{escape(name)}\fR({SECTION})", escape(_summary(child.command))]
    if context.parent is not None:
        parent = context.parent.command_path.replace(" ", "-")
        lines += [".SH SEE ALSO", rf"\fB{escape(parent)}\fR({SECTION})"]
    return "\n".join(lines) + "\n"


def _summary(command: click.Command) -> str:
    return cleandoc(command.help or "").partition("\n")[0].rstrip(".")


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n{2,}", text)):
        if number:
            yield ".PP"
        lines = [escape(line) for line in paragraph.splitlines()]
        if _EXAMPLE.search(paragraph):
            yield from (".nf", ".RS 4", *lines, ".RE", ".fi")
        else:
            yield from lines


def escape(text: str) -> str:
    r"""Return text as roff shows it: no escapes, no control lines, and - as shells take it."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    escaped = escaped.replace("^", "\\(ha").replace("~", "\\(ti").replace('"', "\\(dq")
    return f"\\&{escaped}" if escaped.startswith(".") else escaped
