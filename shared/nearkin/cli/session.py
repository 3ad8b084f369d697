"""What every command shares. Invariant: --store, --config and --json mean the same on either side of the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from nearkin.api import Store
    from nearkin.config import Origin, Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])


class AsWritten(click.Command):
    """A command whose help is its docstring, line by line: the examples in it must not be re-wrapped."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the docstring, indented."""
        formatter.write_paragraph()
        for line in cleandoc(self.help or "").splitlines():
            formatter.write(f"  {line}".rstrip() + "\n")


class AsWrittenGroup(AsWritten, click.Group):
    """The same for the group and, by default, for the commands in it."""

    command_class = AsWritten


class Session:
    """What the three options say that may stand before or after the command."""

    store: str | None = None
    config: Path | None = None
    as_json: bool = False

    def load(self) -> tuple[Settings, dict[str, Origin]]:
        """Return the settings and where each came from."""
        from nearkin.config import load

        return load(self.config, {"store": self.store})

    def folder(self) -> Path:
        """Return the store's folder. Raises ConfigError."""
        from nearkin.cli.arguments import store_folder

        return store_folder(self.load()[0].store).expanduser()

    @contextmanager
    def open(self, *, create: bool = False, read_only: bool = True) -> Iterator[Store]:
        """Open the store that was named for as long as the block runs."""
        from nearkin.cli.arguments import store_folder

        settings, _ = self.load()
        folder = store_folder(settings.store)
        import logging

        from nearkin.api import open_store

        # with --json stderr is for the one error object; otherwise the store may say that it rebuilds an index
        logging.basicConfig(format="nearkin: %(message)s", level=logging.ERROR if self.as_json else logging.WARNING)
        with open_store(folder, settings=settings, create=create, read_only=read_only) as store:
            yield store


def current_session() -> Session:
    """Return the options of the command that runs."""
    session = click.get_current_context().find_object(Session)
    assert session is not None  # the group below made it
    return session


def _remember(context: click.Context, option: click.Parameter, value: object) -> object:
    session = context.ensure_object(Session)
    if value not in (None, False):
        setattr(session, {"json": "as_json"}.get(str(option.name), str(option.name)), value)
    return value


def shared_options(command: _Command) -> _Command:
    """Let --store, --config and --json stand on either side of the command."""
    settle: dict[str, Any] = {"callback": _remember, "expose_value": False, "is_eager": True}
    for option in (
        click.option("--json", is_flag=True, help="Print one JSON value; errors as JSON too.", **settle),
        click.option(
            "--config",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="TOML file with settings; NEARKIN_* variables win over it.",
            **settle,
        ),
        click.option("--store", metavar="FOLDER", help="Folder or file:// URL of the store [NEARKIN_STORE].", **settle),
    ):
        command = option(command)
    return command
