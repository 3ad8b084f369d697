"""`python -m nearkin_gateway`. Invariant: it serves, or says in one line why it cannot (exit code 2: a setting)."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from nearkin.config_layers import load
from nearkin.errors import BadInput, NearkinError
from nearkin.runners import logs


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="TOML file with settings.")
def main(config: Path | None) -> None:
    """Run a Nearkin gateway. Settings come from FILE and from NEARKIN_* variables."""
    try:
        from nearkin_gateway.server import serve

        settings = load(config)[0]
        logs.start(settings, logging.INFO)
        serve(settings, config)
    except NearkinError as err:
        click.echo(f"nearkin: {err}", err=True)
        sys.exit(2 if isinstance(err, BadInput) else 1)
