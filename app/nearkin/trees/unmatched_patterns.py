"""Find exclude patterns that matched nothing: most are misspelt.

    entry that some pattern matches -> all its patterns are matched
    at the end: names in folders that were not entered -> patterns that match there are not reported

A pattern that may match in a folder that was not entered, and cannot be looked at cheaply, is not reported either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

FOLDERS_MAX = 1000
"""Folders that were not entered and are looked at; beyond, nothing is reported."""
NAMES_MAX = 20_000
"""Names in these folders that are compared, 0.1 s; beyond, nothing is reported."""
_WILDCARDS = frozenset("*?[\\")


class PatternSource(NamedTuple):
    """A pattern as a caller wrote it."""

    text: str
    file: str = ""
    """The file that has it; empty: an option."""
    line: int = 0
    """Its number in the file, from 1."""


class Pattern(Protocol):
    """A compiled pattern."""

    include: bool | None
    """None: a comment or an empty line."""

    def match_file(self, file: str) -> object | None:
        """Return a match of a path, or None."""


class _Pruned(NamedTuple):
    name: str
    """Path in the tree, as patterns match it."""
    file_path: bytes
    """Empty: its names are not looked at, as those of a mount are not."""


class PatternUse:
    """Records which patterns match any entry of a tree."""

    def __init__(self, patterns: Sequence[Pattern], sources: Sequence[PatternSource]) -> None:
        """`sources`: of each pattern, in the same order."""
        self._sources = sources
        self._unmatched = {number: one for number, one in enumerate(patterns) if one.include is not None}
        self._pruned: list[_Pruned] = []
        self._is_exceeded = False

    def note_match(self, number: int, name: str) -> None:
        """Note the pattern that decides about a path.

        Others that match it as well count as matched.
        """
        if self._unmatched:
            self._unmatched.pop(number, None)
            self._note_name(name)

    def note_pruned(self, name: str, file_path: bytes = b"") -> None:
        """Note a folder that is not entered; with `file_path` its names are compared at the end."""
        if not self._unmatched:
            return
        if len(self._pruned) < FOLDERS_MAX:
            self._pruned.append(_Pruned(name, file_path))
        else:
            self._is_exceeded = True

    def unmatched(self) -> list[PatternSource]:
        """Return the patterns that match nothing, as far as is known; for the end of a walk."""
        for pruned in self._pruned:
            if not self._unmatched or self._is_exceeded:
                break
            if pruned.file_path:
                self._note_names_below(pruned)
            else:
                for number in [n for n in self._unmatched if _leads_into(self._sources[n].text, pruned.name)]:
                    del self._unmatched[number]
        return [] if self._is_exceeded else [self._sources[number] for number in sorted(self._unmatched)]

    def _note_name(self, name: str) -> None:
        for number in [number for number, one in self._unmatched.items() if one.match_file(name) is not None]:
            del self._unmatched[number]

    def _note_names_below(self, pruned: _Pruned) -> None:
        for count, name in enumerate(_names_below(pruned)):
            if count >= NAMES_MAX:
                self._is_exceeded = True
            if self._is_exceeded or not self._unmatched:
                return
            self._note_name(name)


def _names_below(pruned: _Pruned) -> Iterator[str]:
    """Yield the paths below a folder, folders with `/`.

    Nothing of a folder that cannot be listed.
    """
    waiting = [(pruned.name, pruned.file_path)]
    while waiting:
        name, path = waiting.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    below = f"{name}/{comparable(entry.name)}" if name else comparable(entry.name)
                    is_folder = entry.is_dir(follow_symlinks=False)
                    yield f"{below}/" if is_folder else below
                    if is_folder:
                        waiting.append((below, entry.path))
        except OSError:
            continue


def _leads_into(text: str, folder: str) -> bool:
    """Return whether a pattern that is bound to a path may match in a folder."""
    parts = text.removeprefix("!").rstrip("/").split("/")
    if len(parts) == 1:
        return False
    fixed = list[str]()
    for part in parts if parts[0] else parts[1:]:
        if _WILDCARDS.intersection(part):
            break
        fixed.append(part)
    start = "/".join(fixed)
    return start == folder or start.startswith(f"{folder}/") or folder.startswith(f"{start}/") or not start


def comparable(name: bytes | str) -> str:
    """Return a path as patterns compare it.

    The regular expressions that the library makes take a newline for an end; no name has a NUL.
    """
    return os.fsdecode(name).replace("\n", "\0")
