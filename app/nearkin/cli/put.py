"""Run `nearkin put`.

Invariant: a name that can be refused is refused before the first byte is stored.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from nearkin.cli.session import Session
    from nearkin_shared.results import PutResult

DESCRIPTOR_PATHS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Paths of an open descriptor: empty content may be the output of a failed command."""


class PutOptions(NamedTuple):
    """The options of `Store.put` that the command line sets."""

    metadata: dict[str, str]
    sha256: bytes | None
    if_match: str | None
    if_none_match: str | None


def put_one(
    session: Session,
    key: str,
    source: str,
    options: PutOptions,
    *,
    command: Sequence[str] = (),
    allow_empty: bool = False,
) -> None:
    """Put one file, stdin or the output of `command`, and print its cost.

    Raises BadInput, SourceFailed.
    """
    from nearkin.cli.arguments import check_key
    from nearkin.cli.input_sources import run_command
    from nearkin.cli.output import notice, print_json, print_ledger
    from nearkin.cli.path_keys import check_new_key_of_file, check_no_version, describe_other_kind
    from nearkin.cli.progress import bytes_bar
    from nearkin_shared.results import CONTENT_TYPE_TREE
    from nearkin_shared.results_json import put_json
    from nearkin_shared.savings_table import human_bytes
    from nearkin_shared.utils.terminal import printable
    from nearkin_shared.validation import CONTENT_TYPE

    check_key(key)
    with ExitStack() as opened:
        content, total_bytes = (None, None) if command else _open_source(source, opened, allow_empty=allow_empty)
        store = opened.enter_context(session.open(read_only=False))
        if command:
            check_no_version(store, key, "put --from-command", "")
        else:
            check_new_key_of_file(store, key, source, "put")
        other_kind = describe_other_kind(store, key, is_tree=options.metadata.get(CONTENT_TYPE) == CONTENT_TYPE_TREE)
        if other_kind is not None:
            notice(other_kind)
        if content is None:  # a command starts only if there is a store for its output
            running = run_command(command, allow_empty=allow_empty, show_stderr=not session.as_json)
            content = cast("BinaryIO", opened.enter_context(running))
        progress = opened.enter_context(bytes_bar("put", total_bytes, shown=not session.as_json))
        result = store.put(
            key,
            content,
            **options._asdict(),
            progress=progress,
        )
    warn_if_changed(result, source, as_json=session.as_json)
    if session.as_json:
        print_json(put_json(result))
        return
    if session.quiet:
        return
    info = result.info
    title = f"{printable(info.key)} version {info.version}: {human_bytes(info.size_bytes)}, {info.digest}"
    print_ledger(result.ledger, result.seconds, title)


def warn_if_changed(result: PutResult, source: str, *, as_json: bool) -> None:
    """Warn on stderr if the source changed while it was read; JSON has it as `source_changed`."""
    from nearkin.cli.output import warn
    from nearkin_shared.utils.terminal import printable

    if result.source_changed and not as_json:
        name = f"{printable(result.info.key)} version {result.info.version}"
        warn(f"source {printable(source)}: changed while it was read, {name} may mix two states of it; put it again")


def _open_source(source: str, opened: ExitStack, *, allow_empty: bool) -> tuple[Path | BinaryIO, int | None]:
    """Return what `Store.put` takes, and its size where that is known beforehand."""
    from nearkin.cli.arguments import check_source
    from nearkin.cli.input_sources import PipeSource

    if source == "-":
        if sys.stdin is None:
            raise BadInput('source "-": stdin is closed')
        return cast("BinaryIO", PipeSource(sys.stdin.buffer, "standard input", allow_empty=allow_empty)), None
    if not source:
        raise BadInput('source "": must not be empty; "-" is stdin')
    path = Path(source)
    status = check_source(path)
    if stat.S_ISREG(status.st_mode) and (status.st_size or not source.startswith(DESCRIPTOR_PATHS)):
        return path, status.st_size
    file = cast("BinaryIO", opened.enter_context(path.open("rb", buffering=0)))  # read once, as it arrives
    return cast("BinaryIO", PipeSource(file, f'source "{source}"', allow_empty=allow_empty)), None
