"""Define the stores that Nearkin is compared with.

Invariant: each runs with its defaults, and with the settings of a user who wants small repositories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from nearkin.lab.measure import CommandFailed, Cost
from nearkin.lab.tools.base_tool import Peer
from nearkin.lab.tools.nearkin_tool import OURS, with_profile
from nearkin.lab.tools.solid_zstd import ZstdLong, ZstdLong9
from nearkin_shared.errors import BadInput

_SECRET = "benchmark"
_FROM_SOURCE = "or build it with Go from its source at a tag (benchmarks/README.md)"


class Restic(Peer):
    """restic: 512 KiB to 8 MiB chunks (1 MiB on average, not to be changed), encrypted always."""

    name = "restic"
    program = "restic"
    install = f"Debian and Ubuntu: apt install restic, macOS: brew install restic, {_FROM_SOURCE}"
    settings = "default (compression auto)"
    version_words: ClassVar[tuple[str, ...]] = ("version",)
    compression: ClassVar[str] = "auto"

    @override
    def create(self) -> None:
        self.environment.update(
            {
                "RESTIC_REPOSITORY": str(self.repository),
                "RESTIC_PASSWORD": _SECRET,
                "RESTIC_COMPRESSION": self.compression,
                "RESTIC_CACHE_DIR": str(self.folder / "cache"),
            }
        )
        self._run("init")

    @override
    def put(self, version: int, source: Path) -> Cost:
        words = ("backup", "--quiet", "--stdin", "--stdin-filename", "blob", "--tag", f"v{version}")
        return self._run(*words, stdin=source, sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._run("dump", "--tag", f"v{version}", "latest", "blob", stdout=target)

    @override
    def upkeep(self) -> Cost:
        return self._run("prune", "--quiet", sync=True)


class ResticMax(Restic):
    """restic, compressing as hard as it can."""

    name = "restic-max"
    settings = "compression max"
    compression = "max"


class Borg(Peer):
    """borg: 512 KiB to 8 MiB chunks (2 MiB on average), lz4."""

    name = "borg"
    program = "borg"
    install = "Debian and Ubuntu: apt install borgbackup; macOS: brew install borgbackup"
    settings = "default (lz4), no encryption"
    options: ClassVar[tuple[str, ...]] = ()

    @override
    def create(self) -> None:
        self.environment.update(
            {
                "BORG_BASE_DIR": str(self.folder / "base"),
                "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
                "BORG_REPO": str(self.repository),
            }
        )
        self._run("init", "--encryption", "none")

    @override
    def put(self, version: int, source: Path) -> Cost:
        words = ("create", *self.options, "--stdin-name", "blob", f"::v{version}", "-")
        return self._run(*words, stdin=source, sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._run("extract", "--stdout", f"::v{version}", "blob", stdout=target)

    @override
    def upkeep(self) -> Cost:
        return self._run("compact", sync=True)


class BorgZstd(Borg):
    """borg with its own chunker and zstd."""

    name = "borg-zstd"
    settings = "zstd 3, no encryption"
    options: ClassVar[tuple[str, ...]] = ("--compression", "zstd,3")


class BorgFine(Borg):
    """borg with chunks of 8 KiB on average, as Nearkin's."""

    name = "borg-fine"
    settings = "zstd 3, chunks 4 to 64 KiB, 8 KiB on average, no encryption"
    options: ClassVar[tuple[str, ...]] = ("--compression", "zstd,3", "--chunker-params", "buzhash,12,16,13,4095")


VERSIONS_KEPT = 1_000_000
"""By itself kopia forgets all but the newest ten of versions that were put within an hour."""


class Kopia(Peer):
    """kopia: chunks of 4 MiB on average, no compression, encrypted always."""

    name = "kopia"
    program = "kopia"
    install = f"macOS: brew install kopia, {_FROM_SOURCE}; packages for Linux: kopia.io"
    settings = "default (no compression)"
    creation: ClassVar[tuple[str, ...]] = ()
    policy: ClassVar[tuple[str, ...]] = ()

    @override
    def create(self) -> None:
        self.environment.update(
            {
                "KOPIA_PASSWORD": _SECRET,
                "KOPIA_CONFIG_PATH": str(self.folder / "kopia.config"),
                "KOPIA_CACHE_DIRECTORY": str(self.folder / "cache"),
                "KOPIA_LOG_DIR": str(self.folder / "log"),
                "KOPIA_CHECK_FOR_UPDATES": "false",
            }
        )
        self.repository.mkdir()
        self._run("repository", "create", "filesystem", "--path", str(self.repository), *self.creation)
        self._run("policy", "set", "--global", "--keep-latest", str(VERSIONS_KEPT), *self.policy)

    @override
    def put(self, version: int, source: Path) -> Cost:
        words = (
            "snapshot",
            "create",
            "--stdin-file",
            "blob",
            "--tags",
            f"version:{version}",
            str(self.folder / "source"),
        )
        return self._run(*words, stdin=source, sync=True)

    @override
    def upkeep(self) -> Cost:
        return self._run("maintenance", "run", "--full", sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        listed = self.folder / "list.json"
        self._run("snapshot", "list", "--all", "--json", "--tags", f"version:{version}", stdout=listed)
        snapshots = json.loads(listed.read_text())
        if not snapshots:
            raise CommandFailed(f"{self.name}: does not list version {version}")
        root = snapshots[-1]["rootEntry"]["obj"]
        return self._run("show", f"{root}/blob", stdout=target)  # looking the version up is not timed


class KopiaFine(Kopia):
    """kopia with its smallest usual chunks and zstd."""

    name = "kopia-fine"
    settings = "zstd, chunks of 128 KiB on average"
    creation: ClassVar[tuple[str, ...]] = ("--object-splitter", "DYNAMIC-128K-BUZHASH")
    policy: ClassVar[tuple[str, ...]] = ("--compression", "zstd")


PEERS: Mapping[str, Sequence[type[Peer]]] = {
    "restic": (Restic, ResticMax),
    "borg": (Borg, BorgZstd, BorgFine),
    "kopia": (Kopia, KopiaFine),
    "zstd-long": (ZstdLong, ZstdLong9),
}
"""Every tool by name, each with its settings; a setting's own name chooses it alone."""


def choose_peers(names: Sequence[str]) -> list[type[Peer]]:
    """Return the tools of `names` in their order, Nearkin first; `borg-fine` is one setting.

    Nearkin is always included, as `nearkin`, `nearkin-embedded` and `nearkin-embedded@archive`, unless one of them is
    named, plain or with a profile (`nearkin@finesse-paper`): then those alone. Raises BadInput with every known name.
    """
    ours: list[type[Peer]] = []
    others: list[type[Peer]] = []
    alone = {peer.name: peer for peers in PEERS.values() for peer in peers}
    mine = {peer.name: peer for peer in OURS}
    for name in dict.fromkeys(names):
        plain, at, profile = name.partition("@")
        if plain in mine:
            ours.append(with_profile(mine[plain], profile) if at else mine[plain])
        elif name in PEERS:
            others += PEERS[name]
        elif name in alone:
            others.append(alone[name])
        else:
            known = dict.fromkeys([*PEERS, *alone, *mine])
            raise BadInput(f'peer "{name}": choose among {", ".join(known)} (or nearkin@PROFILE)')
    if not ours:
        ours = [*OURS, with_profile(mine["nearkin-embedded"], "archive")]
    return list(dict.fromkeys([*ours, *others]))
