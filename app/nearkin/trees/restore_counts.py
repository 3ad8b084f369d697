"""Options and counts of a restore.

Invariant: an entry that is not restored as it was is counted; the first PROBLEMS_MAX are kept with path and reason.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from nearkin.trees.target_deletion import IS_STORE, DeletionCounts, KeptEntry
from nearkin_shared.formats.tree_entry_group import TreeEntry
from nearkin_shared.utils.terminal import printable

PROBLEMS_MAX = 10_000
HAS_STORE = f"{IS_STORE}, into which nothing is restored; move it away first"
HAS_FILE = "a file has this name, and `never` keeps it: its content is not restored"
HAS_FOLDER = "a folder has this name; use --delete to replace it"


class Overwrite(StrEnum):
    """Policy of a restore for files that exist."""

    ALWAYS = "always"
    IF_CHANGED = "if-changed"
    """Keep the content of a file of the same size and mtime."""
    NEVER = "never"


class RestoreOptions(NamedTuple):
    """Options of a restore."""

    overwrite: Overwrite = Overwrite.ALWAYS
    delete: bool = False
    """Delete what restored folders contain besides, except what the backup left out."""
    delete_excluded: bool = False
    """Delete that as well, and sockets."""
    accepts: Callable[[TreeEntry], bool] | None = None
    """Restores only the entries for which it returns true, and the folders that lead to them, with their attributes."""


class RestoreProblem(NamedTuple):
    """An entry that is not restored as it was."""

    path: bytes
    reason: str
    is_attribute: bool = False
    """Whether the entry is restored, without one of its attributes; `RestoreCounts.unset` counts these."""
    below: int = 0
    """Of a folder: the entries below it that are not restored for the same reason."""
    is_restored: bool = False
    """Whether the entry itself is restored, so that `failed` counts only those below it."""
    is_deletion: bool = False
    """Whether the entries below it are not deleted, rather than not restored."""

    @property
    def entries(self) -> int:
        """Failed entries that this problem reports."""
        return self.below + (not self.is_restored)


@dataclass(slots=True)
class FailureCounts:
    """Entries that a restore does not write as they were, or would not write."""

    problems: list[RestoreProblem] = field(default_factory=list)
    failed: int = 0
    """Entries that are missing or incomplete."""
    refused_folders: dict[bytes, int] = field(default_factory=dict)
    """Folders of the tree that cannot be opened or written: the position of each in `problems`."""
    undeleted: dict[tuple[bytes, str], int] = field(default_factory=dict)
    """Folder and reason of entries that are not deleted: the position of the problem in `problems`."""

    def fail(self, path: bytes, reason: str) -> None:
        """Count an entry that is missing or incomplete."""
        self.failed += 1
        self.note(path, reason)

    def fail_below(self, folder: bytes, reason: str, path: bytes) -> None:
        """Count an entry that a folder of the target refuses; one problem reports all of them."""
        self.failed += 1
        position = self.refused_folders.get(folder)
        if position is None:
            if len(self.problems) >= PROBLEMS_MAX:
                return
            position = self.refused_folders[folder] = len(self.problems)
            self.problems.append(RestoreProblem(folder or b"/", reason, is_restored=True))
        problem = self.problems[position]
        changed = {"is_restored": False} if path == folder else {"below": problem.below + 1}
        self.problems[position] = problem._replace(**changed)

    def fail_deletions(self, folder: bytes, deletion: DeletionCounts, before: int) -> None:
        """Count the failures to delete entries of a folder behind the first `before`.

        One problem reports those with the same reason.
        """
        self.failed += deletion.failed - before
        for path, reason in deletion.failures[before:]:
            position = self.undeleted.get((folder, reason))
            if position is not None:
                problem = self.problems[position]
                self.problems[position] = problem._replace(below=problem.below + 1)
            elif len(self.problems) < PROBLEMS_MAX:
                self.undeleted[folder, reason] = len(self.problems)
                text = f"entries cannot be deleted: {reason}, the first: {printable(os.fsdecode(path))}"
                self.problems.append(RestoreProblem(folder or b"/", text, below=1, is_restored=True, is_deletion=True))

    def fail_folder(self, path: bytes, reason: str) -> None:
        """Count a folder that is not restored; entries below it join its problem."""
        if len(self.problems) < PROBLEMS_MAX:
            self.refused_folders.setdefault(path, len(self.problems))
        self.fail(path, reason)

    def note(self, path: bytes, reason: str, *, is_attribute: bool = False) -> None:
        """Keep a problem with its path."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(RestoreProblem(path, reason, is_attribute))


@dataclass(slots=True)
class RestoreCounts(FailureCounts):
    """Progress of a restore; another thread may read it."""

    files: int = 0
    folders: int = 0
    others: int = 0
    kept_files: int = 0
    """Files that existed and were kept."""
    deletion: DeletionCounts = field(default_factory=DeletionCounts)
    written_bytes: int = 0
    damaged: int = 0
    """Failed entries whose stored content is damaged."""
    unset: Counter[str] = field(default_factory=Counter)
    """Attributes that this user or file system could not set, by kind: owner, mode, time, and names of attributes."""

    @property
    def deleted(self) -> int:
        """Entries of the target that were deleted."""
        return self.deletion.deleted

    @property
    def is_complete(self) -> bool:
        """Whether every entry was restored with its content and attributes."""
        return not self.failed and not self.unset


def kept_folder_reason(failures: Sequence[KeptEntry]) -> str:
    """Return why a folder that has the name of a file cannot be replaced."""
    why = failures[0].reason if failures else "it contains entries that are not deleted"
    return f"a folder has this name, and cannot be replaced: {why}"


def reason_of(err: BaseException) -> str:
    """Return the reason of an error, for a line about one entry."""
    strerror = getattr(err, "strerror", None)
    return strerror.lower() if strerror else str(err) or type(err).__name__
