"""Run `nearkin docs`.

Invariant: its documents equal those that a gateway of the same version serves.
"""

from __future__ import annotations

from pathlib import Path

import click

from nearkin.cli.session import AsWrittenGroup, current_session, services_extra, shared_options


@click.group(cls=AsWrittenGroup)
@shared_options
def docs() -> None:
    """Print interface documents and manual pages.

    nearkin docs openapi > openapi.json       # HTTP: as served at /openapi.json
    nearkin docs asyncapi > asyncapi.json     # Kafka: every topic and message, as at /asyncapi.json
    nearkin docs man ~/.local/share/man/man1  # then: man nearkin-put
    """


@docs.command()
@shared_options
def openapi() -> None:
    """Print the OpenAPI document of the gateway.

    nearkin docs openapi > openapi.json
    """
    from nearkin.cli.output import print_json

    with services_extra("docs"):
        from nearkin_gateway.app import openapi_document
    print_json(openapi_document())


@docs.command()
@shared_options
def asyncapi() -> None:
    """Print the AsyncAPI document of the topics, by the names that the settings give them.

    NEARKIN_KAFKA__TOPIC_PREFIX=shop. nearkin docs asyncapi > asyncapi.json
    """
    from nearkin.cli.output import print_json

    with services_extra("docs"):
        from nearkin_shared.kafka.asyncapi import document
    print_json(document(current_session().load()[0]))


@docs.command()
@click.argument("folder", metavar="[FOLDER]", required=False, type=click.Path(path_type=Path, file_okay=False))
@shared_options
def man(folder: Path | None) -> None:
    """Write the manual pages of all commands to FOLDER, or print nearkin(1).

    nearkin docs man ~/.local/share/man/man1     # then: man nearkin, man nearkin-put
    nearkin docs man | man -l -
    """
    from nearkin.cli.commands import nearkin
    from nearkin.cli.man_pages import generate_pages
    from nearkin.cli.output import print_json, print_line, report
    from nearkin_shared.savings_table import plural

    pages = dict(generate_pages(nearkin))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (folder / name).write_text(text, encoding="utf-8")
    if current_session().as_json:
        print_json({"folder": None if folder is None else str(folder), "pages": sorted(pages)})
    elif folder is None:
        print_line(pages["nearkin.1"].rstrip())
    else:
        report(f"{plural(len(pages), 'manual page')} written to {folder}")
