"""`nearkin docs`. Invariant: what it writes is what a gateway of the same version serves."""

from __future__ import annotations

import click

from nearkin.cli.session import AsWrittenGroup, current_session, services_extra, shared_options


@click.group(cls=AsWrittenGroup)
@shared_options
def docs() -> None:
    """Print the documents of the interfaces, as JSON.

    nearkin docs openapi > openapi.json       # HTTP: what a gateway serves at /openapi.json
    nearkin docs asyncapi > asyncapi.json     # Kafka: every topic and message, as at /asyncapi.json
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
        from nearkin.runners.kafka.asyncapi import document
    print_json(document(current_session().load()[0]))
