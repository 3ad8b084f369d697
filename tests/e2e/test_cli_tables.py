"""Tables of the command in a terminal of 80 columns: names stay whole, no text is cut."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from nearkin.cli import config, dlq, output
from nearkin.cli.session import Session
from nearkin_shared.config.reference import describe_settings

MESSAGE = "key of 3,211 bytes: want at most 1,024 (ingest.key_header names the header that holds it)"
LETTER = {
    "letter": "0:17",
    "time": "2026-11-28T09:30:07.123Z",
    "topic": "backups-of-the-database",
    "partition": 3,
    "offset": 1041,
    "stage": "ingest",
    "error": "nearkin_shared.errors.BadInput",
    "message": MESSAGE,
}


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """Return a terminal of 80 columns to which tables are printed."""
    made = Console(file=io.StringIO(), width=80, markup=False, highlight=False, emoji=False)
    monkeypatch.setattr(output, "console", lambda: made)
    return made


def lines_of(screen: Console) -> list[str]:
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return lines


@pytest.mark.parametrize("source", ["default", "environment NEARKIN_REDIS__URL"])
def test_config_names_all_settings_whole(screen: Console, source: str) -> None:
    """No name and no value of `nearkin config` is cut in 80 columns."""
    url = "redis://nearkin@redis-master.storage.svc.cluster.local:6379/0"
    names = [each.name for each in describe_settings()]
    config.print_settings(Session(), dict.fromkeys(names, (url, source)))
    lines = lines_of(screen)
    assert set(names) <= {word for line in lines for word in line.split()}
    assert url[-20:] in "".join("".join(lines).split())


def test_config_describes_a_setting_in_full(screen: Console) -> None:
    """`nearkin config NAME` prints a line per field where its table would be too narrow to read."""
    described = [max(describe_settings(), key=lambda each: len(each.name))]
    config.print_described_settings(Session(), {}, described)
    text = " ".join(" ".join(lines_of(screen)).split())
    assert f"effect {described[0].meaning.replace('`', '')}" in text


@pytest.mark.parametrize("width", [80, 200])
def test_dead_letters_are_listed_in_full(screen: Console, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """`nearkin dlq list` shows the location and the whole message of a letter."""

    class Letters:
        def list_newest(self, *_: object, **__: object) -> list[dlq.Letter]:
            return [LETTER]

    @contextmanager
    def open_letters(_: object) -> Iterator[Letters]:
        yield Letters()

    screen.width = width
    monkeypatch.setattr(dlq, "_open_letters", open_letters)
    monkeypatch.setattr(dlq, "current_session", Session)
    assert dlq.list_.callback is not None
    dlq.list_.callback(topic=None, limit=1, settled=False, bootstrap=None)
    assert isinstance(screen.file, io.StringIO)
    text = " ".join(screen.file.getvalue().split())
    assert "backups-of-the-database[3]@1041" in text
    assert MESSAGE in text
