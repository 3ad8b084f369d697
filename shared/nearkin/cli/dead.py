"""`nearkin dlq`. Invariant: looking changes nothing, and a letter goes back once."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nearkin.cli.session import AsWrittenGroup, current_session, services_extra, shared_options
from nearkin.errors import BadInput

if TYPE_CHECKING:
    from nearkin.config import Settings
    from nearkin.runners.kafka.dead_replay import DeadLetter

SHOWN_BYTES = 4096
SHOWN_BYTES_MAX = 1024 * 1024

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group(cls=AsWrittenGroup)
def dlq() -> None:
    """List, show and send back dead letters.

    nearkin dlq list --bootstrap kafka:9092
    nearkin dlq show 0:17
    nearkin dlq replay 0:17 0:18       # back to the topic each came from, once

    Dead letters are records that could not be processed. A letter's name is its partition and offset in their topic.
    """


def _kafka_options(command: _Command) -> _Command:
    bootstrap = click.option("--bootstrap", metavar="HOST:PORT", help="Kafka [NEARKIN_KAFKA__BOOTSTRAP_SERVERS].")
    return bootstrap(shared_options(command))


def _settings(bootstrap: str | None) -> Settings:
    # librdkafka tells of every attempt to connect, ten a second: the error that ends a command says it once.
    logging.getLogger("nearkin.kafka").setLevel(logging.CRITICAL + 1)
    return current_session().load({} if bootstrap is None else {"kafka": {"bootstrap_servers": bootstrap}})[0]


@dlq.command("list")
@click.option("--topic", metavar="TOPIC", help="Only those that came from this topic.")
@click.option("--limit", metavar="N", type=click.IntRange(1, 10_000), default=100, help="The newest N [100].")
@click.option("--all", "replayed", is_flag=True, help="Those that were sent back too.")
@_kafka_options
def list_(topic: str | None, limit: int, replayed: bool, bootstrap: str | None) -> None:
    """List dead letters, oldest first.

    nearkin dlq list --topic orders --limit 10
    nearkin dlq list --json | jq '.[].message'
    """
    from nearkin.cli.output import console, print_json
    from nearkin.printing import printable

    settings = _settings(bootstrap)
    with services_extra("dlq"):
        from nearkin.runners.kafka.dead_replay import list_letters
    letters = list_letters(settings, limit, topic, replayed=replayed)
    if current_session().as_json:
        print_json([_letter_json(letter) for letter in letters])
        return
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table("letter", "time", "from", "stage", "error", "message", box=SIMPLE, pad_edge=False)
    for letter in letters:
        told = _letter_json(letter)
        error = letter.error.rpartition(".")[2] + (" (sent back)" if letter.replayed else "")
        cells = (told["letter"], told["time"], _from(letter), letter.stage, error, letter.message)
        table.add_row(*(printable(str(cell)) for cell in cells))
    console().print(table)


@dlq.command()
@click.argument("letter", metavar="LETTER")
@click.option(
    "--bytes",
    "shown_bytes",
    metavar="N",
    type=click.IntRange(0, SHOWN_BYTES_MAX),
    default=SHOWN_BYTES,
    help="At most N bytes of the value [4096].",
)
@_kafka_options
def show(letter: str, shown_bytes: int, bootstrap: str | None) -> None:
    """Show a letter's headers and value.

    nearkin dlq show 0:17 --bytes 200
    """
    from nearkin.cli.output import print_json, say
    from nearkin.printing import printable

    settings = _settings(bootstrap)
    with services_extra("dlq"):
        from nearkin.runners.kafka.dead_replay import parse_place, read_letter
    found = read_letter(settings, parse_place(letter))
    headers = [{"name": name, "value": _content(value, SHOWN_BYTES)} for name, value in found.headers]
    value = _content(found.value, shown_bytes)
    if current_session().as_json:
        print_json({**_letter_json(found), "headers": headers, "value": value})
        return
    say(f"letter    {found.partition}:{found.offset}{' (sent back)' if found.replayed else ''}")
    say(f"from      {printable(_from(found))}")
    say(f"error     {printable(f'{found.stage}: {found.error}: {found.message}')}")
    say(f"key       {printable(_shown(_content(found.key, SHOWN_BYTES)))}")
    for name, text in found.headers:
        say(f"header    {printable(name)}: {printable(_shown(_content(text, SHOWN_BYTES)))}")
    say(f"value     {found.value_bytes:,} bytes{', left out: too large to be kept' if found.omitted else ''}")
    if found.value:
        say(printable(_shown(value)))


@dlq.command()
@click.argument("letters", metavar="[LETTER]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every letter that was not sent back yet.")
@click.option("--topic", metavar="TOPIC", help="With --all: only those that came from this topic.")
@_kafka_options
def replay(letters: tuple[str, ...], everything: bool, topic: str | None, bootstrap: str | None) -> None:
    """Send letters back, each once.

    nearkin dlq replay 0:17 2:4
    nearkin dlq replay --all --topic orders

    A record goes to the topic and partition it came from, with a header __nearkin.replayed.from; a second replay of a
    letter is refused.
    """
    from nearkin.cli.output import notice, print_json, say
    from nearkin.printing import printable

    if everything == bool(letters) or (topic is not None and not everything):
        raise BadInput("dlq replay: name letters, such as 0:17, or --all, with --topic if need be")
    settings = _settings(bootstrap)
    with services_extra("dlq"):
        from nearkin.runners.kafka import dead_replay
    places = [dead_replay.parse_place(letter) for letter in letters]
    if everything:
        places = [found.place for found in dead_replay.list_letters(settings, dead_replay.LISTED_MAX, topic)]
    sent = dead_replay.replay(settings, places)
    if current_session().as_json:
        print_json({"replayed": [_letter_json(letter) for letter in sent]})
        return
    for found in sent:
        say(f"{found.partition}:{found.offset} -> {printable(_from(found).partition('@')[0])}")
    notice(f"{len(sent):,} sent back")


def _letter_json(letter: DeadLetter) -> dict[str, object]:
    topic, partition, offset = letter.source or (None, None, None)
    time = datetime.fromtimestamp(max(0, letter.timestamp_ms) / 1000, UTC)
    return {
        "letter": f"{letter.partition}:{letter.offset}",
        "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "topic": topic,
        "partition": partition,
        "offset": offset,
        "stage": letter.stage,
        "error": letter.error,
        "message": letter.message,
        "key": _content(letter.key, SHOWN_BYTES),
        "value_bytes": letter.value_bytes,
        "kept_whole": not letter.omitted,
        "replayed": letter.replayed,
    }


def _content(value: bytes | None, most_bytes: int) -> dict[str, object] | None:
    """Return bytes for JSON: as text where they are UTF-8, as base64 where they are not; null stays null."""
    if value is None:
        return None
    part = value[:most_bytes]
    cut = len(part) < len(value)
    try:
        return {"encoding": "utf-8", "data": part.decode(), "cut": cut}
    except UnicodeDecodeError as err:
        if cut and err.start > len(part) - 4 and err.end == len(part):  # cut within a character
            return {"encoding": "utf-8", "data": part[: err.start].decode(), "cut": True}
        return {"encoding": "base64", "data": base64.b64encode(part).decode(), "cut": cut}


def _shown(content: dict[str, object] | None) -> str:
    if content is None:
        return "-"
    ending = " ..." if content["cut"] else ""
    return f"{content['data']}{ending}" if content["encoding"] == "utf-8" else f"base64:{content['data']}{ending}"


def _from(letter: DeadLetter) -> str:
    if letter.source is None:
        return "-"
    topic, partition, offset = letter.source
    return f"{topic}[{partition}]@{offset}"
