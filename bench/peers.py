"""The stores that are compared. Invariant: each is driven through its own command, one process a put, one a get.

A store with settings of note comes more than once: as it is out of the box, and as who cares about size sets it. Each
keeps its repository in `folder/repository`; caches, logs and settings lie beside it and are counted apart.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from measure import CommandError, Cost, run, write_out
from typing_extensions import override

_SECRET = "benchmark"


class MissingPeerError(Exception):
    """A store's command is not installed; names it."""


class Peer(ABC):
    """One store with its settings. `put` and `get` name versions 1, 2, 3, ..."""

    name: ClassVar[str]
    program: ClassVar[str]
    settings: ClassVar[str]
    inside: ClassVar[tuple[str, ...]] = ()
    """Folders below the repository that hold what can be rebuilt; counted apart, as caches are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = folder / "repository"
        self.environment = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        self.command = self.find()

    @classmethod
    def find(cls) -> str:
        """Return the path of the command. Raises MissingPeerError."""
        found = shutil.which(cls.program)
        if found is None:
            raise MissingPeerError(f"{cls.name}: {cls.program} is not installed")
        return found

    @classmethod
    def version(cls) -> str:
        """Return what the command says its version is."""
        done = subprocess.run([cls.find(), *cls.version_words], capture_output=True, text=True, check=False)
        lines = (done.stdout or done.stderr).strip().splitlines()
        return lines[0] if lines else "unknown"

    version_words: ClassVar[tuple[str, ...]] = ("--version",)

    def close(self) -> None:  # noqa: B027 - most leave nothing running
        """End what `create` started."""

    @abstractmethod
    def create(self) -> None:
        """Make an empty repository."""

    @abstractmethod
    def put(self, version: int, source: Path) -> Cost:
        """Store `source` as the next version, durably."""

    @abstractmethod
    def get(self, version: int, target: Path) -> Cost:
        """Write a version to `target`."""

    def _run(self, *words: str, stdin: Path | None = None, stdout: Path | None = None, sync: bool = False) -> Cost:
        command = [self.command, *words]
        return run(command, self.environment, stdin=stdin, stdout=stdout, sync=self.folder if sync else None)


class Nearkin(Peer):
    """Nearkin's command line over a local folder."""

    name = "nearkin"
    program = "nearkin"
    settings = "default"
    inside = ("index",)
    version_words = ("version",)

    @classmethod
    def find(cls) -> str:
        """Prefer the command of the environment that runs the benchmark."""
        beside = Path(sys.executable).with_name(cls.program)
        return str(beside) if beside.exists() else super().find()

    @override
    def create(self) -> None:
        """Nothing: the first put makes the store."""

    @override
    def put(self, version: int, source: Path) -> Cost:
        return self._run("--json", "--store", str(self.repository), "put", "blob", str(source), sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        words = ("--store", str(self.repository), "get", "blob", "--version", str(version), "-o", str(target))
        return self._run(*words)


class NearkinEmbedded(Nearkin):
    """Nearkin through its Python API, one process for all versions: how a service uses it."""

    name = "nearkin-embedded"
    settings = "default, one process"

    @override
    def create(self) -> None:
        worker = [sys.executable, str(Path(__file__).with_name("embedded.py")), str(self.repository)]
        self._process = subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @override
    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @override
    def put(self, version: int, source: Path) -> Cost:
        return self._ask("put", str(source), sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._ask("get", str(version), str(target))

    def _ask(self, *words: str, sync: bool = False) -> Cost:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        started = time.perf_counter()
        self._process.stdin.write("\t".join(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        ended = time.perf_counter()
        if not answer:
            raise CommandError(f"{self.name}: it ended, its last words are above")
        if sync:
            write_out(self.folder)
        return Cost(time.perf_counter() - started, time.perf_counter() - ended, int(json.loads(answer)["peak_bytes"]))


class Restic(Peer):
    """restic: 512 KiB to 8 MiB chunks (1 MiB on average, not to be changed), encrypted always."""

    name = "restic"
    program = "restic"
    settings = "default (compression auto)"
    version_words = ("version",)
    compression: ClassVar[str] = "auto"

    @override
    def create(self) -> None:
        self.environment |= {
            "RESTIC_REPOSITORY": str(self.repository),
            "RESTIC_PASSWORD": _SECRET,
            "RESTIC_COMPRESSION": self.compression,
            "RESTIC_CACHE_DIR": str(self.folder / "cache"),
        }
        self._run("init")

    @override
    def put(self, version: int, source: Path) -> Cost:
        words = ("backup", "--quiet", "--stdin", "--stdin-filename", "blob", "--tag", f"v{version}")
        return self._run(*words, stdin=source, sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._run("dump", "--tag", f"v{version}", "latest", "blob", stdout=target)


class ResticMax(Restic):
    """restic, compressing as hard as it can."""

    name = "restic-max"
    settings = "compression max"
    compression = "max"


class Borg(Peer):
    """borg: 512 KiB to 8 MiB chunks (2 MiB on average), lz4."""

    name = "borg"
    program = "borg"
    settings = "default (lz4), no encryption"
    options: ClassVar[tuple[str, ...]] = ()

    @override
    def create(self) -> None:
        self.environment |= {
            "BORG_BASE_DIR": str(self.folder / "base"),
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
            "BORG_REPO": str(self.repository),
        }
        self._run("init", "--encryption", "none")

    @override
    def put(self, version: int, source: Path) -> Cost:
        words = ("create", *self.options, "--stdin-name", "blob", f"::v{version}", "-")
        return self._run(*words, stdin=source, sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._run("extract", "--stdout", f"::v{version}", "blob", stdout=target)


class BorgZstd(Borg):
    """borg with its own chunker and zstd."""

    name = "borg-zstd"
    settings = "zstd 3, no encryption"
    options = ("--compression", "zstd,3")


class BorgFine(Borg):
    """borg with chunks of 8 KiB on average, as Nearkin's."""

    name = "borg-fine"
    settings = "zstd 3, chunks 4 to 64 KiB, 8 KiB on average, no encryption"
    options = ("--compression", "zstd,3", "--chunker-params", "buzhash,12,16,13,4095")


class Kopia(Peer):
    """kopia: chunks of 4 MiB on average, no compression, encrypted always."""

    name = "kopia"
    program = "kopia"
    settings = "default (no compression)"
    creation: ClassVar[tuple[str, ...]] = ()
    policy: ClassVar[tuple[str, ...]] = ()

    @override
    def create(self) -> None:
        self.environment |= {
            "KOPIA_PASSWORD": _SECRET,
            "KOPIA_CONFIG_PATH": str(self.folder / "kopia.config"),
            "KOPIA_CACHE_DIRECTORY": str(self.folder / "cache"),
            "KOPIA_LOG_DIR": str(self.folder / "log"),
            "KOPIA_CHECK_FOR_UPDATES": "false",
        }
        self.repository.mkdir()
        self._run("repository", "create", "filesystem", "--path", str(self.repository), *self.creation)
        if self.policy:
            self._run("policy", "set", "--global", *self.policy)

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
    def get(self, version: int, target: Path) -> Cost:
        listed = self.folder / "list.json"
        self._run("snapshot", "list", "--all", "--json", "--tags", f"version:{version}", stdout=listed)
        root = json.loads(listed.read_text())[-1]["rootEntry"]["obj"]
        return self._run("show", f"{root}/blob", stdout=target)  # looking the version up is not timed


class KopiaFine(Kopia):
    """kopia with its smallest usual chunks and zstd."""

    name = "kopia-fine"
    settings = "zstd, chunks of 128 KiB on average"
    creation = ("--object-splitter", "DYNAMIC-128K-BUZHASH")
    policy = ("--compression", "zstd")


PEERS: dict[str, tuple[type[Peer], ...]] = {
    "nearkin": (Nearkin, NearkinEmbedded),
    "restic": (Restic, ResticMax),
    "borg": (Borg, BorgZstd, BorgFine),
    "kopia": (Kopia, KopiaFine),
}
"""Every peer by the name that `--peers` takes, each with its settings."""
