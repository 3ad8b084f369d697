# size: the entry point only
"""Run a gateway: `python -m nearkin_gateway`.

A gateway that cannot start prints the reason in one line; exit code 2 is an invalid setting.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nearkin_shared.config.loader import load
from nearkin_shared.errors import BadInput, NearkinError
from nearkin_shared.observability import log_setup
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from nearkin_gateway.backends.source_dedup import ConnectEdge
    from nearkin_gateway.server import EmbeddedFactory


@frozen
class AppFactories:
    """Functions of the app floor for a gateway: open a store, and stages for `gateway.edge`."""

    embedded: EmbeddedFactory
    connect_edge: ConnectEdge


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.pass_obj
def main(factories: AppFactories | None, config: Path | None) -> None:
    """Run a Nearkin gateway. Settings come from FILE and from NEARKIN_* variables."""
    embedded = None if factories is None else factories.embedded
    connect_edge = None if factories is None else factories.connect_edge
    try:
        from nearkin_gateway.server import serve

        settings = load(config)[0]
        log_setup.start(settings, logging.INFO)
        serve(settings, config, embedded=embedded, connect_edge=connect_edge)
    except NearkinError as err:
        click.echo(f"nearkin: {err}", err=True)
        sys.exit(2 if isinstance(err, BadInput) else 1)
