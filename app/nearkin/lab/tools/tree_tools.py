"""Drive stores of folders, each with one process per command.

Invariant: every tool reads one folder under one path, and recognises unchanged files in its own way.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from nearkin.lab.measure import CommandFailed, Cost
from nearkin.lab.tools.base_tool import Peer
from nearkin.lab.tools.nearkin_tool import Nearkin
from nearkin.lab.tools.peer_tools import Borg, Kopia, Restic
from nearkin_shared.errors import BadInput


class TreeTool(Peer):
    """A store of folders. `put` takes the folder, `get` restores a version into an empty one."""

    def restored(self, target: Path, source: Path) -> Path:
        """Return where `get` restored `source`: by default under its absolute path."""
        return target / source.relative_to("/")

    @abstractmethod
    def get_file(self, version: int, source: Path, path: str, target: Path) -> Cost:
        """Write the file `path` of a version of the folder `source` to the file `target`."""


class NearkinTree(Nearkin, TreeTool):
    """Nearkin, `nearkin backup` and `nearkin restore`."""

    @override
    def put(self, version: int, source: Path) -> Cost:
        return self._run("--json", *self._place(), "backup", "tree", str(source), sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._run("--json", *self._place(), "restore", f"tree@{version}", "-o", str(target), sync=True)

    @override
    def restored(self, target: Path, source: Path) -> Path:
        return target

    @override
    def get_file(self, version: int, source: Path, path: str, target: Path) -> Cost:
        return self._run(*self._place(), "get", f"tree@{version}:/{path}", "-o", str(target))


class ResticTree(Restic, TreeTool):
    """restic, `backup`, `restore` and `dump`."""

    @override
    def put(self, version: int, source: Path) -> Cost:
        return self._run("backup", "--quiet", "--tag", f"v{version}", str(source), sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        words = ("restore", "--quiet", "--tag", f"v{version}", "--target", str(target), "latest")
        return self._run(*words, sync=True)

    @override
    def get_file(self, version: int, source: Path, path: str, target: Path) -> Cost:
        return self._run("dump", "--tag", f"v{version}", "latest", f"{source}/{path}", stdout=target)


class ResticTreeMax(ResticTree):
    """restic, compressing as hard as it can."""

    name = "restic-max"
    settings = "compression max"
    compression = "max"


class BorgTree(Borg, TreeTool):
    """borg, `create` and `extract`."""

    @override
    def put(self, version: int, source: Path) -> Cost:
        return self._run("create", *self.options, f"::v{version}", str(source), sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        plain, self.command = self.command, ("env", "-C", str(target), *self.command)  # it extracts to where it is
        try:
            return self._run("extract", f"::v{version}", sync=True)
        finally:
            self.command = plain

    @override
    def get_file(self, version: int, source: Path, path: str, target: Path) -> Cost:
        name = str(source.relative_to("/") / path)
        return self._run("extract", "--stdout", f"::v{version}", name, stdout=target)


class BorgTreeFine(BorgTree):
    """borg with chunks of 8 KiB on average, as Nearkin's."""

    name = "borg-fine"
    settings = "zstd 3, chunks 4 to 64 KiB, 8 KiB on average, no encryption"
    options: ClassVar[tuple[str, ...]] = ("--compression", "zstd,3", "--chunker-params", "buzhash,12,16,13,4095")


class KopiaTree(Kopia, TreeTool):
    """kopia, `snapshot create`, `restore` and `show`."""

    @override
    def put(self, version: int, source: Path) -> Cost:
        return self._run("snapshot", "create", "--tags", f"version:{version}", str(source), sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._run("restore", self._root(version), str(target), sync=True)

    @override
    def restored(self, target: Path, source: Path) -> Path:
        return target

    @override
    def get_file(self, version: int, source: Path, path: str, target: Path) -> Cost:
        return self._run("show", f"{self._root(version)}/{path}", stdout=target)

    def _root(self, version: int) -> str:
        """Return the object of a snapshot; looking it up is not timed."""
        listed = self.folder / "list.json"
        self._run("snapshot", "list", "--all", "--json", "--tags", f"version:{version}", stdout=listed)
        snapshots = json.loads(listed.read_text())
        if not snapshots:
            raise CommandFailed(f"{self.name}: does not list version {version}")
        return str(snapshots[-1]["rootEntry"]["obj"])


class KopiaTreeFine(KopiaTree):
    """kopia with its smallest usual chunks and zstd."""

    name = "kopia-fine"
    settings = "zstd, chunks of 128 KiB on average"
    creation: ClassVar[tuple[str, ...]] = ("--object-splitter", "DYNAMIC-128K-BUZHASH")
    policy: ClassVar[tuple[str, ...]] = ("--compression", "zstd")


TREE_TOOLS: Mapping[str, Sequence[type[TreeTool]]] = {
    "restic": (ResticTree, ResticTreeMax),
    "borg": (BorgTree, BorgTreeFine),
    "kopia": (KopiaTree, KopiaTreeFine),
}
"""Every tool by name, each with its settings; a setting's own name chooses it alone."""


def choose_tree_tools(names: Sequence[str]) -> list[type[TreeTool]]:
    """Return Nearkin and the tools of `names` in their order.

    Raises BadInput with every known name.
    """
    alone = {tool.name: tool for tools in TREE_TOOLS.values() for tool in tools}
    chosen: list[type[TreeTool]] = [NearkinTree]
    for name in dict.fromkeys(names):
        if name in TREE_TOOLS:
            chosen += TREE_TOOLS[name]
        elif name in alone:
            chosen.append(alone[name])
        elif name != NearkinTree.name:
            raise BadInput(f'peer "{name}": choose among {", ".join(dict.fromkeys([*TREE_TOOLS, *alone]))}')
    return list(dict.fromkeys(chosen))
