"""Run an S3 server.

Invariant: a real server answers over HTTP on loopback; it keeps acknowledged objects over a restart.

versitygw   objects are files in the folder; conditional create is atomic; the one to measure and to break moto
where there is no Go: objects are in memory and lost after a restart
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearkin.lab.corpus_cache import MissingTool
from nearkin_shared.config.storage import ObjectStoreSettings
from nearkin_shared.errors import choose
from tests.support.servers import programs
from tests.support.servers.server import LOOPBACK, Server, accepts

PROGRAMS = ("versitygw", "moto")
REGION = "us-east-1"
HEALTH = "/health"


class S3(Server):
    """An S3 server: `endpoint` is its URL, `access_key_id` and `secret_access_key` are its credentials."""

    name = "s3"
    stop_seconds = 2.0  # versitygw waits 10 s for its clients to close; acknowledged objects are in files
    access_key_id = "nearkin"
    secret_access_key = "nearkin-on-loopback"

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        owner_pid: int | None = None,
        detached: bool = False,
        program: str | None = None,
    ) -> None:
        """`program`: versitygw or moto; by default versitygw where it can be had.

        Raises MissingTool, RetryableError.
        """
        super().__init__(folder, port=port, owner_pid=owner_pid, detached=detached)
        if program not in (None, *PROGRAMS):
            raise choose("program", program, PROGRAMS)
        self._versitygw = None if program == "moto" else programs.versitygw()
        if program == "versitygw" and self._versitygw is None:
            raise MissingTool("versitygw is not installed, nor is Go, which builds it")

    @property
    def program(self) -> str:
        """Return the name of the program, one of PROGRAMS."""
        return "versitygw" if self._versitygw else "moto"

    @property
    def endpoint(self) -> str:
        """Return the server's URL."""
        return f"http://{LOOPBACK}:{self.port}"

    def prepare(self) -> None:
        """Make the folder of the buckets."""
        self._buckets.mkdir(exist_ok=True)

    def command(self) -> list[str]:
        """Return the command of the server itself."""
        if self._versitygw is None:
            return [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(self.port)]
        listening = ["--port", f"{LOOPBACK}:{self.port}", "--health", HEALTH, "--region", REGION]
        return [str(self._versitygw), *listening, "--keep-alive", "--quiet", "posix", str(self._buckets)]

    def environment(self) -> Mapping[str, str]:
        """Return the keys: on a command line every user of the machine could read them."""
        return {"ROOT_ACCESS_KEY_ID": self.access_key_id, "ROOT_SECRET_ACCESS_KEY": self.secret_access_key}

    def ready(self) -> bool:
        """Return whether it answers HTTP."""
        if self._versitygw is None:
            return accepts(self.port)
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=1)
        try:
            connection.request("GET", HEALTH)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def make_bucket(self, name: str) -> str:
        """Make a bucket unless it exists; return its name."""
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key_id,
            aws_secret_access_key=self.secret_access_key,
        )
        try:
            client.create_bucket(Bucket=name)
        except (client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            pass
        finally:
            client.close()
        return name

    def settings(self, bucket: str, prefix: str = "", **changed: Any) -> ObjectStoreSettings:
        """Return the settings of a store in `bucket` below `prefix`; `changed` are fields of the section."""
        chosen: dict[str, Any] = {
            "url": f"s3://{bucket}/{prefix}",
            "endpoint": self.endpoint,
            "region": REGION,
            "allow_http": True,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
        }
        return ObjectStoreSettings(**{**chosen, **changed})

    @property
    def _buckets(self) -> Path:
        return self.folder / "buckets"
