"""`python -m nearkin`: the `nearkin` command, where its script is not on the path."""

from nearkin.cli import run

run()
