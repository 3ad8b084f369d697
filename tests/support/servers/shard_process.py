"""Run an index shard as a process, over its folder and port: killed and started again, it has both still."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx

from nearkin_index.state_file import StateFile
from tests.support.servers.server import LOOPBACK, Server


class ShardProcess(Server):
    """One index shard of a store that `environment` or `config` names."""

    name = "index-shard"
    start_seconds = 60.0

    def __init__(
        self,
        folder: Path,
        number: int,
        count: int,
        environment: Mapping[str, str] | None = None,
        config: Path | None = None,
    ) -> None:
        super().__init__(folder)
        self._number, self._count = number, count
        self._environment, self._config = dict(environment or {}), config

    @property
    def url(self) -> str:
        """Return the URL of the shard."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def index_folder(self) -> Path:
        """Return the folder of its index and of its shared state."""
        return self.folder / "index"

    def give_new_lease(self) -> None:
        """Make the file of the shared state with a free lease, which is taken for a while in a new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        StateFile(self.index_folder, lease_wait_seconds=0).close()

    def pause(self) -> None:
        """Stop the process: it accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def environment(self) -> Mapping[str, str]:
        """Return the variables that name the store."""
        return {"PYTHONPATH": os.pathsep.join(sys.path), **self._environment}

    def command(self) -> list[str]:
        """Return the command of the shard."""
        command = [sys.executable, "-m", "nearkin.workers.index_shard", "--shard", str(self._number)]
        command += ["--of", str(self._count), "--folder", str(self.index_folder), "--port", str(self.port)]
        return command if self._config is None else [*command, "--config", str(self._config)]

    def ready(self) -> bool:
        """Return whether its index is complete."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=1).status_code == 200
        except httpx.TransportError:
            return False
