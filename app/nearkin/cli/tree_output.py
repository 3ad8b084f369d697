r"""Print entries of trees, and problems with them.

Paths are bytes. For people everything that a terminal might act on is escaped; `to_json` keeps all bytes of a path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from nearkin_shared.formats.tree_entry_group import EntryFlag, EntryKind, TreeEntry
from nearkin_shared.utils.terminal import printable, to_json

if TYPE_CHECKING:
    from nearkin.trees.unmatched_patterns import PatternSource
    from nearkin_shared.formats.tree_layout import TreeSummary

PROBLEMS_SHOWN_MAX = 1000
"""Lines on stderr, and elements of a JSON list; all are counted."""
PATTERNS_SHOWN_MAX = 10
KIND_NAMES = {
    EntryKind.FILE: "file",
    EntryKind.FOLDER: "folder",
    EntryKind.SYMLINK: "symlink",
    EntryKind.HARD_LINK: "hard link",
    EntryKind.FIFO: "fifo",
    EntryKind.CHARACTER_DEVICE: "character device",
    EntryKind.BLOCK_DEVICE: "block device",
}
MODE_TYPES = {
    EntryKind.FILE: stat.S_IFREG,
    EntryKind.FOLDER: stat.S_IFDIR,
    EntryKind.SYMLINK: stat.S_IFLNK,
    EntryKind.HARD_LINK: stat.S_IFREG,
    EntryKind.FIFO: stat.S_IFIFO,
    EntryKind.CHARACTER_DEVICE: stat.S_IFCHR,
    EntryKind.BLOCK_DEVICE: stat.S_IFBLK,
}
"""Type bits of a mode; a hard link shows those of a file."""
_DEVICES = (EntryKind.CHARACTER_DEVICE, EntryKind.BLOCK_DEVICE)
_FLAG_NAMES = {EntryFlag.CHANGED: "changed", EntryFlag.INCOMPLETE: "incomplete"}
_SECOND_NS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Problem(Protocol):
    @property
    def path(self) -> bytes: ...

    @property
    def reason(self) -> str: ...


def show_path(path: bytes) -> str:
    """Return a path for people."""
    return printable(os.fsdecode(path))


def path_lines(what: str, problems: Sequence[_Problem], total: int) -> Iterator[str]:
    """Yield a line for each problem, up to PROBLEMS_SHOWN_MAX, then how many are not listed."""
    prefix = f"{what}: " if what else ""
    for problem in problems[:PROBLEMS_SHOWN_MAX]:
        yield f"{prefix}{show_path(problem.path)}: {problem.reason}"
    more = total - min(len(problems), PROBLEMS_SHOWN_MAX)
    if more > 0:
        yield f"{prefix}{more:,} more are not listed"


def problems_json(problems: Sequence[_Problem]) -> list[dict[str, str]]:
    """Convert problems to JSON, PROBLEMS_SHOWN_MAX at most."""
    return [{"path": os.fsdecode(one.path), "reason": one.reason} for one in problems[:PROBLEMS_SHOWN_MAX]]


def unmatched_line(patterns: Sequence[PatternSource]) -> str:
    """Return a line that names patterns that matched nothing.

    The first PATTERNS_SHOWN_MAX.
    """
    shown = [
        f"{printable(one.shown)}" + (f" ({printable(one.file)}, line {one.line})" if one.file else "")
        for one in patterns[:PATTERNS_SHOWN_MAX]
    ]
    more = len(patterns) - len(shown)
    what = "1 pattern" if len(patterns) == 1 else f"{len(patterns):,} patterns"
    is_bound = any("/" in one.text.rstrip("/") for one in patterns)
    hint = "; those with / inside count from the root of the tree" if is_bound else ""
    return f"{what} matched nothing: {', '.join(shown)}{f', and {more:,} more' if more else ''}{hint}"


def patterns_json(patterns: Sequence[PatternSource]) -> list[dict[str, object]]:
    """Convert patterns to JSON, PROBLEMS_SHOWN_MAX at most.

    `file` and `line` are null for those of options.
    """
    return [
        {"pattern": one.shown, "file": one.file or None, "line": one.line or None}
        for one in patterns[:PROBLEMS_SHOWN_MAX]
    ]


def format_mtime(nanoseconds: int, *, fraction: bool = False) -> str:
    """Format a time in UTC; years that `datetime` lacks are seconds since 1970."""
    seconds, rest = divmod(nanoseconds, _SECOND_NS)
    try:
        from datetime import timedelta

        moment = _EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        return f"@{seconds}.{rest:09}" if fraction else f"@{seconds}"
    return f"{moment:%Y-%m-%dT%H:%M:%S}{f'.{rest:09}' if fraction else ''}Z"


def entry_json(entry: TreeEntry, summary: TreeSummary) -> dict[str, object]:
    """Convert an entry to JSON.

    `path` counts from the root of the tree; values of extended attributes are hexadecimal.
    """
    found: dict[str, object] = {
        "path": os.fsdecode(b"/" + entry.path),
        "kind": KIND_NAMES[EntryKind(entry.kind)],
        "mode": f"{entry.mode:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "user": summary.users.get(entry.uid) or None,
        "group": summary.groups.get(entry.gid) or None,
        "mtime": format_mtime(entry.mtime_ns, fraction=True),
        "mtime_ns": entry.mtime_ns,
    }
    if entry.kind == EntryKind.FILE:
        found["size_bytes"] = entry.size
        found["digest"] = f"blake3-128:{entry.digest.hex()}" if entry.digest else None
        if entry.extents is not None:
            found["data_bytes"] = entry.content_bytes
    if entry.kind in _DEVICES:
        found["device"] = [os.major(entry.size), os.minor(entry.size)]
    if entry.kind == EntryKind.SYMLINK:
        found["target"] = os.fsdecode(entry.target)
    if entry.kind == EntryKind.HARD_LINK:
        found["target"] = os.fsdecode(b"/" + entry.target)
    if entry.xattrs:
        found["xattrs"] = {os.fsdecode(name): value.hex() for name, value in entry.xattrs}
    flags = [name for bit, name in _FLAG_NAMES.items() if entry.flags & bit]
    return {**found, "flags": flags} if flags else found


def entry_line(entry: TreeEntry, summary: TreeSummary, name: str) -> str:
    """Format an entry as `ls -l` does: mode, owner, group, size, mtime (UTC), name."""
    size = f"{os.major(entry.size)}, {os.minor(entry.size)}" if entry.kind in _DEVICES else str(entry.size)
    owner = printable(summary.users.get(entry.uid) or str(entry.uid))
    group = printable(summary.groups.get(entry.gid) or str(entry.gid))
    mode = stat.filemode(MODE_TYPES[EntryKind(entry.kind)] | entry.mode)
    arrow = ""
    if entry.kind == EntryKind.SYMLINK:
        arrow = f" -> {show_path(entry.target)}"
    elif entry.kind == EntryKind.HARD_LINK:
        arrow = f" link to /{show_path(entry.target)}"
    return f"{mode} {owner:<8} {group:<8} {size:>12} {format_mtime(entry.mtime_ns)} {name}{arrow}"


def print_json_lines(
    values: Iterable[object], *, name: str | None = None, end: Callable[[], Mapping[str, object]] | None = None
) -> None:
    """Print a JSON list one element at a time, so that a long list is never in memory.

    With `name` the list is that field of an object, whose other fields `end` returns once the list is printed.
    """
    from nearkin.cli.output import print_line

    lead = "[" if name is None else f'{{"{name}": ['
    before = None
    for value in values:
        print_line(lead if before is None else f"{before},")
        before = f"  {to_json(value)}"
    print_line(lead if before is None else before)
    if name is None:
        print_line("]")
        return
    fields = to_json({} if end is None else dict(end()))[1:]
    print_line(f"], {fields}" if fields != "}" else "]}")
