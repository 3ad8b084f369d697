"""Drive a compared store through its own command, one process per put or get.

Each keeps its repository in `folder/repository`; caches, logs and settings are next to it and are counted apart.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from nearkin.lab.measure import Cost, first_line, run, run_short
from nearkin_shared.errors import PermanentError


class MissingPeer(PermanentError):
    """A store's command is not installed; names it."""


class Peer(ABC):
    """One store with its settings. `put` and `get` name versions 1, 2, 3, ..."""

    name: ClassVar[str]
    program: ClassVar[str]
    settings: ClassVar[str]
    install: ClassVar[str]
    """How to get the command."""
    ours: ClassVar[bool] = False
    version_words: ClassVar[tuple[str, ...]] = ("--version",)
    inside: ClassVar[tuple[str, ...]] = ()
    """Folders below the repository that hold what can be rebuilt; counted apart, as caches are."""
    appends: ClassVar[bool] = True
    """Whether versions are put one by one; else `put_history` takes all of them at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository: Path = folder / "repository"
        self.environment: dict[str, str] = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        self.command: tuple[str, ...] = self.find()

    @classmethod
    def find(cls) -> tuple[str, ...]:
        """Return the words that start the command. Raises MissingPeer."""
        found = shutil.which(cls.program)
        if found is None:
            raise MissingPeer(f"{cls.program} is not installed")
        return (found,)

    @classmethod
    def version(cls) -> str:
        """Return the version that the command reports.

        This starts it once: its code is in memory afterwards. Raises MissingPeer, CommandFailed if it cannot be run
        or hangs.
        """
        answer = first_line(run_short([*cls.find(), *cls.version_words])).partition(", by")[0].strip("* ")
        return answer.partition(" build: ")[0]  # kopia's; empty where Go built it from a module

    def close(self) -> None:  # noqa: B027 - most leave nothing running
        """End what `create` started."""

    @abstractmethod
    def create(self) -> None:
        """Make an empty repository."""

    @abstractmethod
    def put(self, version: int, source: Path) -> Cost:
        """Store `source` as the next version, durably."""

    def put_history(self, sources: Sequence[Path]) -> Cost:
        """Store all versions at once, durably; for those that do not append."""
        raise NotImplementedError(f"{self.name} appends: put its versions one by one")

    def upkeep(self) -> Cost | None:
        """Do the maintenance that keeps a store small; return its cost, None if there is none."""
        return None

    @abstractmethod
    def get(self, version: int, target: Path) -> Cost:
        """Write a version to `target`."""

    def _run(
        self,
        *words: str,
        stdin: Path | Sequence[Path] = (),
        stdout: Path | None = None,
        sync: bool = False,
    ) -> Cost:
        command = [*self.command, *words]
        return run(command, self.environment, stdin=stdin, stdout=stdout, sync=self.folder if sync else None)
