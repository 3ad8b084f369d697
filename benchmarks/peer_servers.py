"""Compare Nearkin's services with the servers of its peers: CPU seconds a GB, MB/s and stored bytes over a network.

    python -m benchmarks.peer_servers --versions 4 --runs 3

Every store is a server process on loopback and its own client: `curl` and Nearkin's gateway, Kafka, Redis and one
worker; restic and rest-server; kopia and its repository server; borg over ssh; `curl` and versitygw, which keeps plain
objects. Each puts the same versions one after another, then the last one again, and gets it back; the bytes are
compared. CPU seconds are those of client and servers together. A store whose programs are not installed is omitted and
named. Figures: docs/benchmarks/history.md.
"""

from __future__ import annotations

import argparse
import filecmp
import getpass
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from typing_extensions import override

from nearkin.lab.corpus_cache import botocore
from nearkin.lab.measure import Cost
from nearkin.lab.tools.base_tool import MissingPeer, Peer
from nearkin.lab.tools.peer_tools import Borg, Kopia, Restic
from nearkin_shared.storage.staged_packs import FOLDER as STAGING
from tests.support.servers.pipeline import FUSED, GATEWAY, Pipeline
from tests.support.servers.s3_server import REGION, S3
from tests.support.servers.server import LOOPBACK, accepts, free_port
from tests.support.servers.servers import Kafka, Redis

MB = 1_000_000
GB = 1_000_000_000
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
SETTLE_SECONDS_MAX = 20.0
PUTS = ("first version", "new version", "duplicate")
SECRET = "benchmark"


class ServedPeer(Peer):
    """A store behind servers of its own; `server_pids` are the processes whose CPU time counts as the server's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._started = ExitStack()
        self.server_pids: list[int] = []

    @abstractmethod
    def start(self, started: ExitStack) -> None:
        """Start the servers, and fill `server_pids`."""

    def settle(self) -> None:
        """Wait until the servers have deleted what is of no version."""

    @override
    def close(self) -> None:
        self._started.close()

    def server_seconds(self) -> float:
        """Return the CPU seconds of the servers and of all their children so far."""
        return sum(_tree_seconds(psutil.Process(pid)) for pid in self.server_pids)

    def _serve(self, started: ExitStack, command: Sequence[str], port: int) -> None:
        process = started.enter_context(_process(command, self.environment, self.folder / "server.log"))
        self.server_pids.append(process.pid)
        deadline = time.monotonic() + START_SECONDS_MAX
        while not accepts(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise MissingPeer(f"{command[0]} does not answer: {(self.folder / 'server.log').read_text()[-500:]}")
            time.sleep(0.05)


class ResticServed(ServedPeer, Restic):
    """restic and rest-server."""

    name = "restic, rest-server"

    @override
    def create(self) -> None:
        self.start(self._started)
        Restic.create(self)

    @override
    def start(self, started: ExitStack) -> None:
        port = free_port()
        words = ("--path", str(self.repository), "--listen", f"{LOOPBACK}:{port}", "--no-auth")
        self._serve(started, [_program("rest-server"), *words], port)
        self._url = f"rest:http://{LOOPBACK}:{port}/"

    @override
    def _run(
        self, *words: str, stdin: Path | Sequence[Path] = (), stdout: Path | None = None, sync: bool = False
    ) -> Cost:
        self.environment["RESTIC_REPOSITORY"] = self._url
        return super()._run(*words, stdin=stdin, stdout=stdout, sync=sync)


class BorgServed(ServedPeer, Borg):
    """borg over ssh."""

    name = "borg, ssh"

    @override
    def create(self) -> None:
        self.start(self._started)
        Borg.create(self)

    @override
    def start(self, started: ExitStack) -> None:
        port, folder = free_port(), self.folder / "ssh"
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # as the service of the distribution does
        folder.mkdir(mode=0o700)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        lines = [
            f"ListenAddress {LOOPBACK}:{port}",
            f"HostKey {folder / 'host'}",
            f"AuthorizedKeysFile {folder / 'user.pub'}",
            *("StrictModes no", "UsePAM no", "PidFile none", "PasswordAuthentication no", "PermitRootLogin yes"),
        ]
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        self._serve(started, [_program("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")], port)
        options = f"-p {port} -i {folder / 'user'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q"
        self.environment["BORG_RSH"] = f"ssh {options}"
        self.environment["BORG_REMOTE_PATH"] = _program("borg")
        self._url = f"ssh://{getpass.getuser()}@{LOOPBACK}:{port}{self.repository}"

    @override
    def _run(
        self, *words: str, stdin: Path | Sequence[Path] = (), stdout: Path | None = None, sync: bool = False
    ) -> Cost:
        self.environment["BORG_REPO"] = self._url
        return super()._run(*words, stdin=stdin, stdout=stdout, sync=sync)


class KopiaServed(ServedPeer, Kopia):
    """kopia and its repository server: the client asks the server for contents that it has not cached."""

    name = "kopia, server"

    @override
    def create(self) -> None:
        Kopia.create(self)
        (self.folder / "source").mkdir()
        self.start(self._started)

    @override
    def start(self, started: ExitStack) -> None:
        port, certificate = free_port(), self.folder / "certificate.pem"
        subprocess.run(
            [*self.command, "server", "users", "add", "bench@client", "--user-password", SECRET],
            env=self.environment,
            check=True,
            capture_output=True,
        )
        key = self.folder / "key.pem"
        words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        subprocess.run(
            ["openssl", *words, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
        )
        server = [*self.command, "server", "start", "--address", f"{LOOPBACK}:{port}", "--no-ui"]
        server += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        self._serve(started, server, port)
        shown = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", str(certificate)]
        printed = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
        fingerprint = printed.strip().rpartition("=")[2].replace(":", "").lower()
        self.environment |= {
            "KOPIA_CONFIG_PATH": str(self.folder / "client.config"),
            "KOPIA_CACHE_DIRECTORY": str(self.folder / "client-cache"),
        }
        words = ["repository", "connect", "server", "--url", f"https://{LOOPBACK}:{port}", "--password", SECRET]
        words += [
            "--server-cert-fingerprint",
            fingerprint,
            "--override-username",
            "bench",
            "--override-hostname",
            "client",
        ]
        self._run(*words)


class Curled(ServedPeer):
    """A store that `curl` puts to and gets from."""

    program = "curl"
    install = "Debian and Ubuntu: apt install curl"
    settings = "default"
    options: tuple[str, ...] = ()

    @abstractmethod
    def _url(self, version: int, *, is_put: bool) -> str:
        """Return the URL of a version."""

    @override
    def create(self) -> None:
        self.repository.mkdir()
        self.start(self._started)

    @override
    def put(self, version: int, source: Path) -> Cost:
        words = (*self.options, "-fsS", "-T", str(source), "-o", os.devnull, self._url(version, is_put=True))
        return self._run(*words, sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        return self._run(*self.options, "-fsS", "-o", str(target), self._url(version, is_put=False))


class NearkinServed(Curled):
    """Nearkin's gateway, Kafka, Redis and one worker with all stages; a put waits until the version is committed."""

    name = "nearkin"
    ours = True
    edge = False
    """Whether the gateway deduplicates."""

    @override
    def start(self, started: ExitStack) -> None:
        kafka = started.enter_context(Kafka(self.folder / "kafka"))
        redis = started.enter_context(Redis(self.folder / "redis"))
        self._port = free_port()
        config: dict[str, dict[str, object]] = {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": "bench.", "partitions": 2},
            "redis": {"url": redis.url},
            "object_store": {"url": str(self.repository)},
            "gateway": {"port": self._port, "edge": self.edge},
        }
        services = (*FUSED, GATEWAY)
        pipeline = started.enter_context(Pipeline(self.folder / "pipeline", config, services=services))
        deadline = time.monotonic() + START_SECONDS_MAX
        while not accepts(self._port):
            if time.monotonic() > deadline:
                raise MissingPeer(f"the gateway does not answer: {pipeline.logs()[-500:]}")
            time.sleep(0.05)
        self.server_pids = [kafka.pid, redis.pid, *(process.pid for process in pipeline.processes.values())]

    @override
    def _url(self, version: int, *, is_put: bool) -> str:
        where = f"http://{LOOPBACK}:{self._port}/v1/blobs/blob"
        return f"{where}?wait=30" if is_put else f"{where}?version={version}"

    @override
    def settle(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while any(path.is_file() for path in (self.repository / STAGING).rglob("*")):
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: packs of committed uploads remain")
            time.sleep(0.1)


class NearkinEdgeServed(NearkinServed):
    """The same, where the gateway deduplicates."""

    name = "nearkin, edge"
    edge = True


class PlainObjects(Curled):
    """versitygw: each version is an object of its own, as it is."""

    name = "versitygw, plain"

    @override
    def start(self, started: ExitStack) -> None:
        self._s3 = started.enter_context(S3(self.repository, program="versitygw"))
        self._s3.make_bucket("bench")
        self.server_pids = [self._s3.pid]
        keys = f"{self._s3.access_key_id}:{self._s3.secret_access_key}"
        unsigned = ("-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD")
        self.options = ("--aws-sigv4", f"aws:amz:{REGION}:s3", "--user", keys, *unsigned)

    @override
    def _url(self, version: int, *, is_put: bool) -> str:
        return f"{self._s3.endpoint}/bench/{version}"


STORES: tuple[type[ServedPeer], ...] = (
    *(NearkinServed, NearkinEdgeServed),
    *(ResticServed, KopiaServed, BorgServed, PlainObjects),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1, help="whole repetitions, in turn; the medians are printed")
    parser.add_argument("--stores", nargs="+", choices=[store.name for store in STORES], help="these alone")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    chosen = parser.parse_args()
    files = botocore(chosen.versions)
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(chosen.runs):
        for store in STORES if number % 2 == 0 else reversed(STORES):
            if chosen.stores is None or store.name in chosen.stores:
                try:
                    figures = measured(store, files)
                except MissingPeer as err:
                    print(f"{store.name} is omitted: {err}", file=sys.stderr)
                else:
                    found.setdefault(store.name, []).append(figures)
    print(table(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1))


def measured(store: type[ServedPeer], files: Sequence[Path]) -> dict[str, float]:
    """Return CPU seconds a GB and MB/s of each kind of put and of a get, and the stored bytes a put byte."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="nearkin-peer-servers-") as folder:
        peer = store(Path(folder))
        try:
            peer.create()
            versions = {PUTS[0]: [1], PUTS[1]: list(range(2, len(files) + 1)), PUTS[2]: [len(files) + 1]}
            sources = [*files, files[-1]]
            for kind, numbers in versions.items():
                if numbers:
                    before = peer.server_seconds()
                    costs = [peer.put(number, sources[number - 1]) for number in numbers]
                    put_bytes = sum(sources[number - 1].stat().st_size for number in numbers)
                    figures |= _figures(kind, costs, peer.server_seconds() - before, put_bytes)
            target, before = Path(folder) / "target", peer.server_seconds()
            cost = peer.get(len(files), target)
            figures |= _figures("get", [cost], peer.server_seconds() - before, target.stat().st_size)
            if not filecmp.cmp(target, files[-1], shallow=False):
                raise SystemExit(f"{store.name}: other bytes were returned")
            peer.settle()
            stored = sum(path.stat().st_size for path in peer.repository.rglob("*") if path.is_file())
            figures["stored %"] = stored / sum(path.stat().st_size for path in sources) * 100
        finally:
            peer.close()
    return figures


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return a Markdown table of the medians."""
    columns = list(dict.fromkeys(name for runs in found.values() for name in runs[0]))
    lines = [f"| store | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for store, runs in found.items():
        medians = (statistics.median(one[column] for one in runs) for column in columns)
        lines.append(f"| {store} | {' | '.join(f'{value:.1f}' for value in medians)} |")
    return "\n".join(lines)


def _figures(kind: str, costs: Sequence[Cost], server_seconds: float, all_bytes: int) -> dict[str, float]:
    cpu_seconds = sum(cost.cpu_seconds for cost in costs) + server_seconds
    return {
        f"{kind}, CPU s/GB": cpu_seconds / all_bytes * GB,
        f"{kind}, MB/s": all_bytes / sum(cost.seconds for cost in costs) / MB,
    }


def _tree_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, of its children, and of those that ended."""
    times = process.cpu_times()
    living = sum(_tree_seconds(child) for child in process.children())
    return float(times.user + times.system + times.children_user + times.children_system) + living


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise MissingPeer(f"{name} is not installed")
    return found


@contextmanager
def _process(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
