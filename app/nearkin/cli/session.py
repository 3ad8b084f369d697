"""Share options and sessions among all commands.

A command works on one store: a local one (--store) or one behind a gateway (--server); this module decides which.

Invariant: the shared options mean the same before and after the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nearkin_shared.utils.signals import interrupts_wait

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from nearkin.client.sync import RemoteStore
    from nearkin.store import Store
    from nearkin_shared.config.loader import Origin
    from nearkin_shared.config.settings import Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])


class AsWritten(click.Command):
    """A command whose help is its docstring, line by line, so that examples stay as written.

    An option without its value never takes the next option for it: `forget home --keep-tag --dry-run` would delete.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raises click.UsageError if an option replaces a value."""
        self._check_values(ctx, args)
        return super().parse_args(ctx, args)

    def _check_values(self, ctx: click.Context, args: Sequence[str]) -> None:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        names = {name for one in options for name in (*one.opts, *one.secondary_opts)}
        valued = {name for one in options if not one.is_flag and not one.count for name in one.opts}
        left = iter(args)
        for name in left:
            if name == "--" or not (name.startswith("-") or self.allow_interspersed_args):
                return
            value = next(left, None) if name in valued else None
            if value in names:
                joint = "=" if name.startswith("--") else ""
                raise click.UsageError(
                    f"{name}: its value is missing before {value}; {name}{joint}{value} takes {value} for it", ctx
                )

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the docstring, indented."""
        formatter.write_paragraph()
        for line in cleandoc(self.help or "").splitlines():
            formatter.write(f"  {line}".rstrip() + "\n")


class AsWrittenGroup(AsWritten, click.Group):
    """The same for the group and, by default, for the commands in it."""

    command_class: type[click.Command] | None = AsWritten


class TakesCommand(AsWritten):
    """A command whose option --from-command runs only what follows `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; raises click.UsageError if it names a source and a command."""
        before = args[: args.index("--")] if "--" in args else args
        if "--from-command" in before:
            named, _, _ = self.make_parser(ctx).parse_args(list(before))
            self._check_source(ctx, named, is_ended="--" in args)
        return super().parse_args(ctx, args)

    def _check_source(self, ctx: click.Context, named: Mapping[str, object], *, is_ended: bool) -> None:
        sources = named.get("sources")
        if not named.get("from_command"):
            return
        if not is_ended or not isinstance(named.get("key"), str):
            raise click.UsageError(
                "--from-command: give the command after --, as in: put KEY --from-command -- pg_dump shop", ctx
            )
        if isinstance(sources, Sequence) and sources:
            raise click.UsageError(
                f"--from-command: {sources[0]!r} before -- is a source, and the command after it is another one; "
                "leave out one of them",
                ctx,
            )


class Session:
    """The values of the options that are allowed before and after the command."""

    store: str | None = None
    server: str | None = None
    config: Path | None = None
    as_json: bool = False
    quiet: bool = False
    use_environment: bool = True
    """False if the environment sets another store: the source of a copy that has a configuration file of its own."""
    wait: float = 0.0
    force: bool = False
    """Write under other chunker settings than the store is written with."""
    explicit: frozenset[str] = frozenset()
    """Names of the settings that the user set, as `load` found them."""

    def load(self, more: Mapping[str, object] | None = None) -> tuple[Settings, dict[str, Origin]]:
        """Return the settings and the source of each; `more` holds other options of the command."""
        from nearkin_shared.config.loader import explicit_names, load

        given = {"store": self.store, "server": self.server, **(more or {})}
        settings, origins = load(self.config, given, use_environment=self.use_environment)
        self.explicit = explicit_names(origins)
        return settings, origins

    def choose(self) -> tuple[Settings, str | None]:
        """Return the settings, and the server's URL if the store is not local.

        Raises ConfigError if both are named.
        """
        settings, origins = self.load()
        if settings.server is None or (self.store is not None and self.server is None):
            return settings, None
        if settings.store is not None and (self.server is None or self.store is not None):
            from nearkin_shared.errors import ConfigError

            named = f'store "{settings.store}" ({origins["store"].source}), server "{settings.server}"'
            raise ConfigError(f"{named} ({origins['server'].source}): name one of them with --store or --server")
        return settings, settings.server

    def folder(self) -> Path | None:
        """Return the store's folder, None where it is behind a server. Raises ConfigError."""
        from nearkin.cli.arguments import store_folder

        settings, server = self.choose()
        return None if server is not None else store_folder(settings.store).expanduser()

    @contextmanager
    def open(self, *, read_only: bool = True) -> Iterator[Store | RemoteStore]:
        """Open the store that was named for as long as the block runs."""
        settings, server = self.choose()
        if server is None:
            with self._open_folder(settings, read_only) as store:
                yield store
            return
        if self.force:
            from nearkin_shared.errors import BadInput

            raise BadInput("--force: for a local store; services have storage.allow_other_chunking")
        with self.connect(server, settings) as remote:
            yield remote

    @contextmanager
    def open_local(self, *, read_only: bool = True) -> Iterator[Store]:
        """Open a store whose files this command reads itself.

        Raises BadInput for a store behind a server.
        """
        settings, server = self.choose()
        if server is not None:
            from nearkin_shared.errors import BadInput

            command = click.get_current_context().info_name
            raise BadInput(
                f"{command}: reads the files of a local store, name it with --store; the services behind "
                f"{server} look after theirs themselves"
            )
        with self._open_folder(settings, read_only) as store:
            yield store

    @contextmanager
    def connect(self, server: str, settings: Settings, token: str | None = None) -> Iterator[RemoteStore]:
        """Open the store behind a server for a block; `token` replaces the settings' own."""
        self._log_to_stderr()
        with services_extra("--server"):
            from nearkin.client import connect

            remote = connect(server, token or settings.token)
        with remote:
            yield remote

    @contextmanager
    def open_folder(self) -> Iterator[Store]:
        """Open the local store that --store names for reading, even if a server is configured."""
        with self._open_folder(self.load()[0], True) as store:
            yield store

    @contextmanager
    def _open_folder(self, settings: Settings, read_only: bool) -> Iterator[Store]:
        from nearkin.cli.arguments import store_folder

        folder = store_folder(settings.store)
        self._log_to_stderr()
        with interrupts_wait():
            from nearkin.store import open_store

            if not read_only:
                import nearkin.embedded.runner  # noqa: F401 - or the first put imports it

        with open_store(
            folder, settings=settings, read_only=read_only, explicit=self.explicit, force=self.force
        ) as store:
            store.wait_for_lock(self.wait)
            yield store

    def _log_to_stderr(self) -> None:
        """Send logs to stderr, unless --json is given: then stderr is for the one error object."""
        import logging

        logging.basicConfig(
            format="nearkin: %(message)s", level=logging.ERROR if self.as_json or self.quiet else logging.WARNING
        )


@contextmanager
def services_extra(what: str) -> Iterator[None]:
    """Report how to install the extra `services` if an import in the block needs it."""
    try:
        yield
    except ModuleNotFoundError as err:
        from nearkin_shared.errors import ConfigError

        raise ConfigError(f"{what}: {err.name} is not installed; pip install 'nearkin[services]'") from err


def current_session() -> Session:
    """Return the options of the command that runs."""
    session = click.get_current_context().find_object(Session)
    assert session is not None  # the group below made it
    return session


def complete_file(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_folder(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a folder."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def is_quiet() -> bool:
    """Return whether the running command was given --quiet; False outside of a command."""
    context = click.get_current_context(silent=True)
    session = None if context is None else context.find_object(Session)
    return session is not None and session.quiet


def _remember(context: click.Context, option: click.Parameter, value: object) -> object:
    session = context.ensure_object(Session)
    if value not in (None, False):
        setattr(session, {"json": "as_json"}.get(str(option.name), str(option.name)), value)
    return value


_SETTLE: dict[str, Any] = {"callback": _remember, "expose_value": False, "is_eager": True}


def json_option(command: _Command) -> _Command:
    """Allow --json and --quiet after a command that works on no store."""
    quiet = click.option(
        "-q", "--quiet", is_flag=True, help="No progress, notices or report of success; errors remain.", **_SETTLE
    )
    as_json = click.option("--json", is_flag=True, help="Print one JSON value; errors as JSON too.", **_SETTLE)
    return as_json(quiet(command))


def force_option(command: _Command) -> _Command:
    """Let a command that puts take --force."""
    return click.option(
        "--force",
        is_flag=True,
        callback=_remember,
        expose_value=False,
        help="Put under other chunker.* or another profile than the store is written with; a warning says so.",
    )(command)


def shared_options(command: _Command) -> _Command:
    """Allow --store, --server, --config, --json and --quiet before and after the command."""
    for option in (
        json_option,
        click.option(
            "--config",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="TOML file with settings; NEARKIN_* variables win over it.",
            **_SETTLE,
        ),
        click.option(
            "--wait",
            metavar="SECONDS",
            type=click.FloatRange(0, 86_400),
            help="Wait so long for another process that writes to the store.",
            **_SETTLE,
        ),
        click.option(
            "--server",
            metavar="URL",
            help="Use the store behind this gateway [NEARKIN_SERVER, NEARKIN_TOKEN].",
            **_SETTLE,
        ),
        click.option(
            "--store",
            metavar="FOLDER",
            help="Folder or file:// URL of the store [NEARKIN_STORE].",
            shell_complete=complete_folder,
            **_SETTLE,
        ),
    ):
        command = option(command)
    return command
