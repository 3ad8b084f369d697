"""`nearkin dlq`: list, show, replay and drop dead letters, in Kafka or through a gateway.

Invariant: `list` and `show` change nothing, and a letter is replayed or dropped once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from nearkin.cli.session import AsWrittenGroup, current_session, services_extra, shared_options
from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.client.sync import RemoteStore
    from nearkin_shared.config.settings import Settings

SHOWN_BYTES = 4096
SHOWN_BYTES_MAX = 1024 * 1024
LISTED_MAX = 10_000

_Command = TypeVar("_Command", bound=Callable[..., Any])
Letter = Mapping[str, Any]
"""A letter as `nearkin_shared.kafka.dead_letter_json` describes it."""


class LetterSource(Protocol):
    """Where dead letters are read from: Kafka, or a gateway in front of it."""

    def list_newest(self, limit: int, topic: str | None, *, settled: bool) -> Sequence[Letter]:
        """Return the newest letters, oldest first; replayed or dropped ones only if `settled`."""

    def show(self, name: str, value_bytes_max: int) -> Letter:
        """Return a letter with its headers and value."""

    def replay_or_drop(self, action: str, names: Sequence[str]) -> Sequence[Letter]:
        """`replay` or `drop` letters, each once; return them."""


class KafkaLetters:
    """Dead letters read from Kafka itself."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def list_newest(self, limit: int, topic: str | None, *, settled: bool) -> Sequence[Letter]:
        """Return the newest letters, oldest first. Raises StoreUnavailable."""
        from nearkin_shared.kafka.dead_letter_json import letter_json, preview_json
        from nearkin_shared.kafka.dead_letter_replay import list_letters

        letters = list_letters(self._settings, limit, topic, replayed=settled, dropped=settled)
        return [{**letter_json(letter), "key": preview_json(letter.key)} for letter in letters]

    def show(self, name: str, value_bytes_max: int) -> Letter:
        """Return a letter with its headers and value. Raises BadInput, NotFound, StoreUnavailable."""
        from nearkin_shared.kafka.dead_letter_json import content_json
        from nearkin_shared.kafka.dead_letter_replay import parse_place, read_letter

        return content_json(read_letter(self._settings, parse_place(name)), value_bytes_max)

    def replay_or_drop(self, action: str, names: Sequence[str]) -> Sequence[Letter]:
        """`replay` or `drop` letters. Raises BadInput, NotFound, PermanentError, StoreUnavailable."""
        from nearkin_shared.kafka import dead_letter_replay
        from nearkin_shared.kafka.dead_letter_json import letter_json
        from nearkin_shared.storage.deletions import user_and_host

        places = [dead_letter_replay.parse_place(name) for name in names]
        if action == "replay":
            letters = dead_letter_replay.replay(self._settings, places)
        else:
            letters = dead_letter_replay.drop(self._settings, places, user_and_host())
        return [letter_json(letter) for letter in letters]


class GatewayLetters:
    """Dead letters read through a gateway: the newest 200."""

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote

    def list_newest(self, limit: int, topic: str | None, *, settled: bool) -> Sequence[Letter]:
        """Return the newest letters, oldest first. Raises AccessDenied, StoreUnavailable."""
        letters = [
            letter
            for letter in reversed(self._remote.dead_letters())
            if (topic is None or letter.get("topic") == topic) and (settled or not letter.get("replayed"))
        ]
        return letters[-limit:]

    def show(self, name: str, value_bytes_max: int) -> Letter:
        """Return a letter with its headers and value.

        Raises BadInput, AccessDenied, NotFound, StoreUnavailable.
        """
        return self._remote.dead_letter(name, value_bytes_max)

    def replay_or_drop(self, action: str, names: Sequence[str]) -> Sequence[Letter]:
        """`replay` or `drop` letters.

        Raises BadInput, AccessDenied, NotFound, PermanentError, StoreUnavailable.
        """
        known = {letter.get("letter"): letter for letter in self._remote.dead_letters()}
        settled = self._remote.settle_dead_letters(action, names)
        return [known.get(name, {"letter": name, "topic": None}) for name in settled]


@contextmanager
def _open_letters(bootstrap: str | None) -> Iterator[LetterSource]:
    """Open Kafka if --bootstrap is given or no server is named, else the gateway.

    Raises BadInput for both.
    """
    session = current_session()
    if bootstrap is not None and session.server is not None:
        raise BadInput("dlq: --bootstrap reads Kafka itself, --server asks a gateway: give one of them")
    # librdkafka logs every attempt to connect, ten a second: the error that ends a command reports it once.
    logging.getLogger("nearkin.kafka").setLevel(logging.CRITICAL + 1)
    settings, origins = session.load({} if bootstrap is None else {"kafka": {"bootstrap_servers": bootstrap}})
    has_kafka = bootstrap is not None or origins["kafka.bootstrap_servers"].source != "default"
    if settings.server is not None and (session.server is not None or not has_kafka):
        with session.connect(settings.server, settings) as remote:
            yield GatewayLetters(remote)
        return
    if not has_kafka:
        raise BadInput("dlq: name the gateway with --server URL, or Kafka with --bootstrap HOST:PORT")
    with services_extra("dlq"):
        import nearkin_shared.kafka.dead_letter_replay  # noqa: F401 - reports here which package is not installed
    yield KafkaLetters(settings)


@click.group(cls=AsWrittenGroup)
def dlq() -> None:
    """List, show, replay and drop dead letters.

    nearkin dlq list --bootstrap kafka:9092
    nearkin dlq show 0:17
    nearkin dlq replay 0:17 0:18       # back to the topic each came from, once
    nearkin dlq drop 0:19              # neither listed nor replayed from then on
    nearkin --server https://nearkin.example dlq list

    Dead letters are records that could not be processed. A letter's name is its partition and offset in their topic.
    Through a gateway (a token with the scope operator) the newest 200 are listed.
    """


def _kafka_options(command: _Command) -> _Command:
    bootstrap = click.option("--bootstrap", metavar="HOST:PORT", help="Kafka [NEARKIN_KAFKA__BOOTSTRAP_SERVERS].")
    return bootstrap(shared_options(command))


def _letters_options(command: _Command) -> _Command:
    letters = click.argument("letters", metavar="[LETTER]...", nargs=-1)
    everything = click.option("--all", "everything", is_flag=True, help="Every letter that is listed.")
    topic = click.option("--topic", metavar="TOPIC", help="With --all: only those that came from this topic.")
    return letters(everything(topic(_kafka_options(command))))


@dlq.command("list")
@click.option("--topic", metavar="TOPIC", help="Only those that came from this topic.")
@click.option("--limit", metavar="N", type=click.IntRange(1, 10_000), default=100, help="The newest N [100].")
@click.option("--all", "settled", is_flag=True, help="Those that were sent back or dropped too.")
@_kafka_options
def list_(topic: str | None, limit: int, settled: bool, bootstrap: str | None) -> None:
    """List dead letters, oldest first.

    nearkin dlq list --topic orders --limit 10
    nearkin dlq list --json | jq '.[].message'
    """
    from nearkin.cli.output import print_json, print_table
    from nearkin_shared.utils.terminal import printable

    with _open_letters(bootstrap) as source:
        letters = source.list_newest(limit, topic, settled=settled)
    if current_session().as_json:
        print_json(list(letters))
        return
    lines = []
    for letter in letters:
        error = str(letter["error"]).rpartition(".")[2] + _state(letter)
        cells = (letter["letter"], letter["time"], _from(letter), letter["stage"], error, letter["message"])
        lines.append([printable(str(cell)) for cell in cells])
    names = ("letter", "time", "from", "stage", "error", "message")
    print_table(names, lines, whole=("letter", "time", "from", "stage"))


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
    from nearkin.cli.output import print_json, print_line
    from nearkin_shared.utils.terminal import printable

    with _open_letters(bootstrap) as source:
        found = source.show(letter, shown_bytes)
    if current_session().as_json:
        print_json(dict(found))
        return
    print_line(f"letter    {printable(str(found['letter']))}{_state(found)}")
    print_line(f"from      {printable(_from(found))}")
    error = f"{found['stage']}: {found['error']}: {found['message']}"
    print_line(f"error     {printable(error)}")
    print_line(f"key       {printable(_printable_content(found['key']))}")
    for header in found["headers"]:
        print_line(f"header    {printable(header['name'])}: {printable(_printable_content(header['value']))}")
    left_out = "" if found["is_untruncated"] else ", left out: too large to be kept"
    print_line(f"value     {found['value_bytes']:,} bytes{left_out}")
    if found["value_bytes"]:
        print_line(printable(_printable_content(found["value"])))


@dlq.command()
@_letters_options
def replay(letters: tuple[str, ...], everything: bool, topic: str | None, bootstrap: str | None) -> None:
    """Send letters back, each once.

    nearkin dlq replay 0:17 2:4
    nearkin dlq replay --all --topic orders

    A record goes to the topic and partition it came from, with a header __nearkin.replayed.from; a second replay of a
    letter is refused.
    """
    _replay_or_drop("replay", letters, topic, bootstrap, everything=everything)


@dlq.command()
@_letters_options
def drop(letters: tuple[str, ...], everything: bool, topic: str | None, bootstrap: str | None) -> None:
    """Drop letters: they are neither listed nor replayed from then on.

    nearkin dlq drop 0:17 2:4
    nearkin dlq drop --all --topic orders

    `list --all` and `show` still show a dropped letter until the topic's retention removes it.
    """
    _replay_or_drop("drop", letters, topic, bootstrap, everything=everything)


def _replay_or_drop(
    action: str, names: Sequence[str], topic: str | None, bootstrap: str | None, *, everything: bool
) -> None:
    """Replay or drop letters and print which. Raises BadInput."""
    from nearkin.cli.output import notice, print_json, print_line
    from nearkin_shared.utils.terminal import printable

    if everything == bool(names) or (topic is not None and not everything):
        raise BadInput(f"dlq {action}: name letters, such as 0:17, or --all, with --topic if need be")
    with _open_letters(bootstrap) as source:
        if everything:
            names = [str(letter["letter"]) for letter in source.list_newest(LISTED_MAX, topic, settled=False)]
        settled = source.replay_or_drop(action, names) if names else ()
    result = {"replay": "replayed", "drop": "dropped"}[action]
    if current_session().as_json:
        print_json({result: list(settled)})
        return
    for letter in settled:
        target = f" -> {_from(letter).partition('@')[0]}" if action == "replay" else ""
        print_line(printable(f"{letter['letter']}{target}"))
    notice(f"{len(settled):,} {'sent back' if action == 'replay' else 'dropped'}")


def _state(letter: Letter) -> str:
    return " (dropped)" if letter.get("dropped") else " (sent back)" if letter.get("replayed") else ""


def _printable_content(content: Mapping[str, Any] | None) -> str:
    if content is None:
        return "-"
    ending = " ..." if content["cut"] else ""
    return f"{content['data']}{ending}" if content["encoding"] == "utf-8" else f"base64:{content['data']}{ending}"


def _from(letter: Letter) -> str:
    if letter["topic"] is None:
        return "-"
    if letter["partition"] is None:  # passed in memory, between stages of one process
        return str(letter["topic"])
    return f"{letter['topic']}[{letter['partition']}]@{letter['offset']}"
