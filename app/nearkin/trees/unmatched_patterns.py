"""Find exclude patterns that matched nothing: most are misspelt.

    entry that some pattern matches -> all its patterns are matched
    at the end: names in folders that were not entered -> patterns that match there are not reported

A pattern that may match in a folder that was not entered, and cannot be looked at cheaply, is not reported either. No
file system is entered that the walk left out: a folder of the automounter would be mounted, one of a dead NFS server
would block.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from nearkin_shared.utils.mounts import pseudo_devices

FOLDERS_MAX = 1000
"""Folders that were not entered and are looked at; beyond, nothing is reported."""
NAMES_MAX = 20_000
"""Names in all these folders together that are compared, 0.1 s; beyond, nothing is reported."""
COMPARISONS_MAX = 1_000_000
"""Comparisons of names and folders with patterns, 0.5 s; beyond, nothing is reported."""
SHOWN_CHARACTERS_MAX = 200
"""Of a pattern that an error repeats."""
_WILDCARDS = frozenset("*?[\\")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PatternSource(NamedTuple):
    """A pattern of a caller."""

    text: str
    """As it counts from the root of the tree."""
    file: str = ""
    """The file that has it; empty: an option."""
    line: int = 0
    """Its number in the file, from 1."""
    option: str = "--exclude"
    """The option of a pattern without a file."""
    written: str = ""
    """The pattern as the caller wrote it, if `text` is a translation."""

    @property
    def shown(self) -> str:
        """The pattern as the caller wrote it."""
        return self.written or self.text

    @property
    def label(self) -> str:
        """The text that names the pattern in an error."""
        where = f'--exclude-file "{self.file}", line {self.line}: ' if self.file else f"{self.option} "
        return f"{where}{self.shown[:SHOWN_CHARACTERS_MAX]!r}"


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
        names, comparisons, pseudo = 0, 0, pseudo_devices() if self._pruned else frozenset[int]()
        for pruned in self._pruned:
            for name in _names_below(pruned, pseudo) if pruned.file_path else ("",):
                names += bool(pruned.file_path)
                comparisons += len(self._unmatched)
                if name is None or names > NAMES_MAX or comparisons > COMPARISONS_MAX:
                    self._is_exceeded = True
                if self._is_exceeded or not self._unmatched:
                    return []
                if name:
                    self._note_name(name)
                else:
                    self._note_mount(pruned.name)
        return [] if self._is_exceeded else [self._sources[number] for number in sorted(self._unmatched)]

    def _note_name(self, name: str) -> None:
        for number in [number for number, one in self._unmatched.items() if one.match_file(name) is not None]:
            del self._unmatched[number]

    def _note_mount(self, folder: str) -> None:
        """Note a folder whose names are not looked at.

        The patterns that lead into it may match there.
        """
        for number in [number for number in self._unmatched if _leads_into(self._sources[number].text, folder)]:
            del self._unmatched[number]


def _names_below(pruned: _Pruned, pseudo: Collection[int]) -> Iterator[str | None]:
    """Yield the paths below a folder, folders with `/`; None for one that is not looked at.

    Such are folders that cannot be listed, and those of another file system or one of `pseudo` (device numbers).
    """
    waiting, device = [(pruned.name, pruned.file_path)], -1
    while waiting:
        name, path = waiting.pop()
        try:
            descriptor = os.open(path, _FOLDER_FLAGS)
        except FileNotFoundError:  # deleted meanwhile: nothing matches in it
            continue
        except OSError:
            yield None
            continue
        try:
            found = os.fstat(descriptor).st_dev
            if found in pseudo or device not in (-1, found):
                yield None
                continue
            device = found
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    below = f"{name}/{comparable(entry.name)}" if name else comparable(entry.name)
                    if not entry.is_dir(follow_symlinks=False):
                        yield below
                        continue
                    yield f"{below}/"
                    # the status of a mount point is that of what is mounted, and reading it mounts nothing
                    if entry.stat(follow_symlinks=False).st_dev != device:
                        yield None
                    else:
                        waiting.append((below, os.path.join(path, os.fsencode(entry.name))))
        except OSError:
            yield None
        finally:
            os.close(descriptor)


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
