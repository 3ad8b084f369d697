"""Measure Nearkin as one of the peers.

Invariant: the measured code is the code that runs this process, regardless of other installations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from nearkin.lab.measure import CommandFailed, Cost, kill_on_timeout, write_out
from nearkin.lab.tools.base_tool import Peer
from nearkin_shared.errors import choose
from nearkin_shared.utils.terminal import printable

# -P: the folder it is started in is not searched for modules
_PYTHON = (sys.executable, "-P", "-m")
_PLACES = ("store", "server", "token")


class Nearkin(Peer):
    """Nearkin's command line over a local folder.

    NEARKIN_* variables and `config` set it as they always do.
    """

    name = "nearkin"
    program = "nearkin"
    settings = "default"
    install = "it is what you run"
    ours = True
    inside: ClassVar[tuple[str, ...]] = ("index", "reserve")
    version_words: ClassVar[tuple[str, ...]] = ("version",)
    profile: ClassVar[str | None] = None
    config: ClassVar[Path | None] = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in _PLACES:
            self.environment.pop(f"NEARKIN_{name.upper()}", None)
        if self.profile is not None:
            self.environment["NEARKIN_PROFILE"] = self.profile
        # modules are found where this process finds them: the command may run from a source folder
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

    @classmethod
    @override
    def find(cls) -> tuple[str, ...]:
        return (*_PYTHON, "nearkin.cli")

    @override
    def create(self) -> None:
        self._run(*self._place(), "init")

    @override
    def put(self, version: int, source: Path) -> Cost:
        # absolute: a file called `-` is not stdin, and `-a` no option
        return self._run("--json", *self._place(), "put", "blob", str(source.absolute()), sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._run(*self._place(), "get", "blob", "--version", str(version), "-o", str(target))

    @override
    def upkeep(self) -> Cost:
        return self._run("--json", *self._place(), "gc", sync=True)

    def _place(self) -> tuple[str, ...]:
        config = () if self.config is None else ("--config", str(self.config))
        return (*config, "--store", str(self.repository))


class NearkinEmbedded(Nearkin):
    """Nearkin through its Python API, one process for all versions: how a service uses it."""

    name = "nearkin-embedded"
    settings = "default, one process"

    @override
    def create(self) -> None:
        config = () if self.config is None else (str(self.config),)
        worker = [*_PYTHON, "nearkin.lab.tools.embedded_nearkin", str(self.repository), *config]
        self._process = subprocess.Popen(
            worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment
        )

    @override
    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait()
        except BaseException:  # interrupted: it may be in the midst of a put
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._process.stdout.close()

    @override
    def put(self, version: int, source: Path) -> Cost:
        return self._ask("put", str(source), sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._ask("get", str(version), str(target))

    @override
    def upkeep(self) -> Cost:
        return self._ask("gc", sync=True)

    def _ask(self, *words: str, sync: bool = False) -> Cost:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        started = time.perf_counter()
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        with kill_on_timeout(self._process):
            answer = self._process.stdout.readline()
        ended = time.perf_counter()
        if not answer:
            raise CommandFailed(f"{self.name}: its process ended; its last words are above")
        if sync:
            write_out(self.folder)
        synced = time.perf_counter()
        report = json.loads(answer)
        return Cost(synced - started, synced - ended, report["cpu_seconds"], report["peak_bytes"])


OURS: Sequence[type[Nearkin]] = (Nearkin, NearkinEmbedded)
"""Those that a name chooses, plain or as NAME@PROFILE."""


def with_profile(base: type[Nearkin], profile: str) -> type[Nearkin]:
    """Return `base` under another profile, named after both.

    Raises ConfigError for an unknown profile.
    """
    from nearkin_shared.config.settings import PROFILE_NAMES

    if profile not in PROFILE_NAMES:
        raise choose("profile", profile, PROFILE_NAMES)
    settings = base.settings.replace("default", f"profile {profile}")
    return type(base.__name__, (base,), {"name": f"{base.name}@{profile}", "settings": settings, "profile": profile})


def as_set(base: type[Nearkin], config: Path | None) -> type[Nearkin]:
    """Return `base` with a settings file, described by that file and NEARKIN_* variables.

    Raises ConfigError for settings that its first put would refuse.
    """
    from nearkin_shared.config.loader import load

    _, origins = load(config, {"profile": base.profile})
    given = {
        name: origin.value
        for name, origin in origins.items()
        if origin.source.startswith(("file ", "environment ")) and name not in _PLACES
    }
    profile = given.pop("profile", None)
    of = [] if config is None else [f"settings of {config.name}"]
    of += [] if profile is None else [f"profile {profile}"]
    settings = base.settings.replace("default", ", ".join(of) or "default")
    description = printable(
        "; ".join([settings, *([", ".join(f"{n}={v}" for n, v in given.items())] if given else [])])
    )
    return type(
        base.__name__, (base,), {"settings": description, "config": None if config is None else config.absolute()}
    )
