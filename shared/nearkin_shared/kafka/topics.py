"""Create topics.

`python -m nearkin_shared.kafka.topics [--config FILE]`, before services start.

Invariant: an existing topic keeps its partitions, which determine the partition of each key: a blob with frames in
flight would be split. A number that differs from the settings is an error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import click
from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, ConfigError, NearkinError, StoreUnavailable
from nearkin_shared.kafka.clients import (
    ADMIN_SECONDS_MAX,
    COMPACTED,
    TOPICS,
    connection,
    create_topics,
    is_stricter,
    topic,
    topic_config,
    unavailable,
)
from nearkin_shared.kafka.consumer_loop import patiently


def prepare_topics(settings: Settings) -> tuple[list[str], list[str]]:
    """Create missing topics and update the settings of others; return (created, changed).

    Raises ConfigError if a topic has another number of partitions, StoreUnavailable, PermanentError.
    """
    made = create_topics(settings)
    admin = AdminClient(connection(settings, "nearkin-topics"))
    try:
        there = admin.list_topics(timeout=ADMIN_SECONDS_MAX).topics
        ours = [topic(settings, name) for name in TOPICS if name not in COMPACTED]
        for name in ours:
            found = len(there[name].partitions) if name in there else settings.kafka.partitions
            if found != settings.kafka.partitions:
                raise ConfigError(
                    f'kafka.partitions "{settings.kafka.partitions}": topic {name} has {found}; want that number, or '
                    "let all that is under way end, then change every topic of Nearkin alike"
                )
        wanted = {topic(settings, name): topic_config(settings, name) for name in TOPICS}
        return made, _with_settings(admin, {name: of for name, of in wanted.items() if name in there})
    except KafkaException as err:
        raise unavailable(settings, err) from err
    except TimeoutError as err:
        raise StoreUnavailable(
            f"kafka {settings.kafka.bootstrap_servers}: no answer within {ADMIN_SECONDS_MAX:.0f} s"
        ) from err


def _with_settings(admin: AdminClient, wanted: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Set what a topic has otherwise than wanted; return the topics that were changed."""
    if not wanted:
        return []
    asked = admin.describe_configs([ConfigResource(ResourceType.TOPIC, name) for name in wanted])
    resources = []
    for resource, answer in asked.items():
        held = answer.result(ADMIN_SECONDS_MAX)
        changes = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in wanted[resource.name].items()
            if held[name].value != value and not is_stricter(name, held[name].value, value)
        ]
        if changes:
            resources.append(ConfigResource(ResourceType.TOPIC, resource.name, incremental_configs=changes))
    for done in admin.incremental_alter_configs(resources).values() if resources else ():
        done.result(ADMIN_SECONDS_MAX)
    return sorted(resource.name for resource in resources)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file of settings.")
def main(config_file: Path | None) -> None:
    """Create missing topics; set durability, retention, compaction and codec of the others."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        settings = load(config_file)[0]
        made, changed = patiently(lambda: prepare_topics(settings))
    except NearkinError as err:
        click.echo(f"nearkin: {err}", err=True)
        sys.exit(2 if isinstance(err, BadInput) else 1)
    click.echo(f"made {', '.join(made) or 'none'}; settings changed of {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    main()
