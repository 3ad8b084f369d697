"""`python -m nearkin.cli` is the `nearkin` command."""

from nearkin.cli import run

run()
