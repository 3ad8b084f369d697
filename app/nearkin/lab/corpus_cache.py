"""Make and cache corpora of real data that change from version to version, oldest first.

    botocore      consecutive source releases as uncompressed tars, checked against recorded digests
    redis_dumps   uncompressed dumps of a real Redis server between batches of changes
    vm_images     generations of a synthetic disk image (`nearkin.lab.generated_data.vm_image`)

The cache is `$NEARKIN_CACHE`, or else `~/.cache/nearkin/corpora`. `python -m nearkin.lab.corpus_cache botocore 10`
prints the paths.

Invariant: a cached corpus is complete; it appears under its name by one rename or not at all.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like, vm_image, write_vm_image
from nearkin_shared.errors import BadInput, Corrupt, NearkinError, PermanentError, RetryableError, choose
from nearkin_shared.utils.frozen import frozen

__all__ = [
    "BOTOCORE",
    "CORPORA",
    "MissingTool",
    "botocore",
    "cache_dir",
    "mutate",
    "random_bytes",
    "records_like",
    "redis_dumps",
    "text_like",
    "vm_image",
    "vm_images",
    "write_vm_image",
]


class MissingTool(PermanentError):
    """A program that a corpus is made with is not installed; tests skip with this text."""


def cache_dir() -> Path:
    """Return the folder of the corpora: `$NEARKIN_CACHE`, or `~/.cache/nearkin/corpora`.

    It need not exist yet.
    """
    chosen = os.environ.get("NEARKIN_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "nearkin" / "corpora"


# ------------------------------------------------------------------ botocore


@frozen
class Release:
    """One botocore source release: version, SHA-256 of the .tar.gz, length of the .tar."""

    version: str
    sdist_sha256: str
    tar_bytes: int


BOTOCORE = (
    Release("1.35.0", "6ab2f5a5cbdaa639599e3478c65462c6d6a10173dc8b941bfc69b0c9eb548f45", 115_107_840),
    Release("1.35.1", "e599cef6305e950a212f85adb86c1f4713d4b2678b3c2ec54df6b8e2dbe9ef2f", 115_148_800),
    Release("1.35.2", "96c8eb6f0baed623a1b57ca9f24cb21d5508872cf0dfebb55527a85b6dbc76ba", 115_159_040),
    Release("1.35.3", "ff0c3189c0aa588c3aeda3f3e5e37925d64deaac6748310124307f978933e768", 115_077_120),
    Release("1.35.4", "4cc51a6a486915aedc140f9d027b7e156646b7a0f7b33b1000762c81aff9a12f", 115_107_840),
    Release("1.35.5", "3a0086c7124cb3b0d9f98563d00ffd14a942c3f9e731d8d1ccf0d3a1ac7ed884", 115_128_320),
    Release("1.35.6", "93ef31b80b05758db4dd67e010348a05b9ff43f82839629b7ac334f2a454996e", 115_148_800),
    Release("1.35.7", "85e4b58f2c6e54dfbf52eaee72ebc9b70188fd1716d47f626874abadcee45512", 115_159_040),
    Release("1.35.8", "4b820cf680ab5d778bd2fe4feeef1ff8a2b96d5c535d4638ab30f703ade282f8", 115_292_160),
    Release("1.35.9", "9e44572fd2401b89dd58bf8b71ac2c36d5b0437f8cbf40de83302c499965fb54", 115_302_400),
)
"""The series, oldest first; consecutive releases, a few days apart."""

_DOWNLOADS = 3  # at once: ten releases take 40 s rather than 85 s, most of it pip asking each for its metadata


def botocore(versions: int = len(BOTOCORE), cache: Path | None = None) -> list[Path]:
    """Return the first `versions` releases of `BOTOCORE` as tars of 115 MB, oldest first.

    Releases missing under `cache` (default: `cache_dir()`) are fetched with `pip download`, thus from wherever pip is
    configured to look, checked against the recorded SHA-256 and gunzipped bit for bit.

    Raises BadInput for a number outside 1 to len(BOTOCORE); RetryableError when pip fails, with pip's last line;
    Corrupt when a release differs from its record.
    """
    if not 1 <= versions <= len(BOTOCORE):
        raise BadInput(f"versions {versions}: choose 1 to {len(BOTOCORE)}")
    folder = (cache or cache_dir()) / "botocore"
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        return list(pool.map(lambda release: _botocore_tar(release, folder), BOTOCORE[:versions]))


def _botocore_tar(release: Release, folder: Path) -> Path:
    tar = folder / f"botocore-{release.version}.tar"
    if tar.exists():
        if tar.stat().st_size != release.tar_bytes:
            raise Corrupt(f"{tar}: {tar.stat().st_size} bytes, not {release.tar_bytes}: delete it to fetch it again")
        return tar
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        sdist = _pip_download(f"botocore=={release.version}", Path(partial))
        found = hashlib.sha256(sdist.read_bytes()).hexdigest()
        if found != release.sdist_sha256:
            raise Corrupt(f"{sdist.name}: SHA-256 {found}, not the recorded {release.sdist_sha256}")
        unpacked = Path(partial) / tar.name
        with gzip.open(sdist) as compressed, unpacked.open("wb") as plain:
            shutil.copyfileobj(compressed, plain, 1 << 20)
        if unpacked.stat().st_size != release.tar_bytes:
            raise Corrupt(f"{sdist.name}: {unpacked.stat().st_size} bytes unpacked, not {release.tar_bytes}")
        return unpacked.replace(tar)


def _pip_download(requirement: str, folder: Path) -> Path:
    """Return the source release that pip put into `folder`."""
    project = requirement.partition("==")[0]
    # only this project's wheels are refused: a blanket ":all:" would have pip build setuptools from source as well
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", project, requirement]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode != 0 or len(found) != 1:
        reason = (done.stderr.strip() or "no .tar.gz arrived").splitlines()[-1]
        raise RetryableError(
            f"{requirement}: pip could not download it ({reason}); check the network and `pip config list`, or copy the"
            f" .tar to {folder.parent} from a machine that has it"
        )
    return found[0]


# ------------------------------------------------------------------ Redis dumps


_REDIS_KEYS = 200_000  # 300 bytes a key in a dump: 60 MB
_REDIS_CHANGED_PERCENT = 3  # between two dumps; an 8 KiB chunk holds about 27 keys, so over half of the chunks change
_SERVERS = ("redis-server", "valkey-server")
_START_SECONDS_MAX = 90
_STOP_SECONDS_MAX = 20


def redis_dumps(count: int = 5, cache: Path | None = None, seed: int = 0, keys: int = _REDIS_KEYS) -> list[Path]:
    """Return `count` uncompressed RDB dumps, oldest first, of a server with `keys` keys.

    The keys are strings, hashes, lists, sets and sorted sets; at the default number a dump is about 60 MB. Between two
    of them 3 % of the keys change: a value or a field is replaced, an element appended, a key deleted and another
    added. The commands depend on `seed` alone; the dumps also hold the server's version, the time and the order of its
    hash table, which it draws at each start: they are the same only while they lie in the cache, in a folder per
    (count, seed, keys).
    Errors: BadInput for a count below 1 or fewer than 100 keys; MissingTool where neither redis-server nor
    valkey-server is installed; RetryableError when the server does not start or refuses a command.
    """
    if count < 1:
        raise BadInput(f"count {count}: must be at least 1")
    if keys < 100:
        raise BadInput(f"keys {keys}: must be at least 100")
    folder = (cache or cache_dir()) / f"redis-{count}-dumps-{keys}-keys-seed-{seed}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
            made = Path(partial) / "dumps"
            made.mkdir()
            _make_dumps(made, count, seed, keys)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was quicker: its dumps are as good
                    raise
    return sorted(folder.glob("*.rdb"))


def _make_dumps(folder: Path, count: int, seed: int, keys: int) -> None:
    with _redis_server() as (socket_path, dump):
        changes = _RedisChanges(seed, keys)
        for number in range(count):
            _redis_pipe(socket_path, changes.load() if number == 0 else changes.change())
            _redis_call(socket_path, "SAVE")
            shutil.copyfile(dump, folder / f"{number:02}.rdb")


@contextmanager
def _redis_server() -> Iterator[tuple[Path, Path]]:
    """Yield (socket, dump file) of a Redis server on a unix socket; stop it at the end."""
    program = next((found for name in _SERVERS if (found := shutil.which(name))), None)
    if program is None:
        known = ", ".join(_SERVERS)
        raise MissingTool(f"Redis dumps: none of {known} is installed: apt install redis-server")
    if shutil.which("redis-cli") is None and shutil.which("valkey-cli") is None:
        raise MissingTool("Redis dumps: neither redis-cli nor valkey-cli is installed: apt install redis-tools")
    # the short prefix matters: a unix socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="nk-") as folder:
        socket_path, log = Path(folder) / "s", Path(folder) / "log"
        options = {
            "port": "0",
            "unixsocket": str(socket_path),
            "unixsocketperm": "700",
            "dir": folder,
            "logfile": str(log),
            "save": "",
            "appendonly": "no",
            "rdbcompression": "no",
            "rdbchecksum": "yes",
            "daemonize": "no",
        }
        command = [program, *(word for name, value in options.items() for word in (f"--{name}", value))]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            _wait_for_redis(server, socket_path, log)
            yield socket_path, Path(folder) / "dump.rdb"
        finally:
            server.terminate()
            try:
                server.wait(_STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for_redis(server: subprocess.Popen[bytes], socket_path: Path, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:  # it is there before it is listened on
            client.connect(str(socket_path))
            return
        time.sleep(0.02)
    output_lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    raise RetryableError(f"the Redis server did not start: {output_lines[-1] if output_lines else 'no output'}")


def _redis_cli(socket_path: Path, *words: str) -> list[str]:
    return [shutil.which("redis-cli") or "valkey-cli", "-s", str(socket_path), *words]


def _redis_call(socket_path: Path, *words: str) -> None:
    done = subprocess.run(_redis_cli(socket_path, *words), capture_output=True, text=True, check=False)
    if done.returncode != 0 or done.stdout.strip() != "OK":
        raise RetryableError(f"Redis {' '.join(words)}: {(done.stdout + done.stderr).strip()}")


def _redis_pipe(socket_path: Path, commands: Iterator[bytes]) -> None:
    with tempfile.TemporaryFile() as file:
        file.writelines(commands)
        file.seek(0)
        done = subprocess.run(
            _redis_cli(socket_path, "--pipe"), stdin=file, capture_output=True, text=True, check=False
        )
    if done.returncode != 0 or "errors: 0" not in done.stdout:
        raise RetryableError(f"Redis refused commands: {(done.stdout + done.stderr).strip().splitlines()[-1]}")


def _command(*words: bytes) -> bytes:
    """Return one command in the protocol's array form."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class _RedisChanges:
    """The commands that change the data of the Redis server.

    Invariant: they depend on the seed and the number of keys alone, and keep the number of keys.
    """

    def __init__(self, seed: int, keys: int) -> None:
        self._draws = np.random.PCG64(np.random.SeedSequence((9, seed)))
        self._live = list(range(keys))
        self._next_key = keys
        self._text = text_like(4 << 20, seed)

    def load(self) -> Iterator[bytes]:
        """Yield the commands that make every key."""
        for key in self._live:
            yield self._make(key)

    def change(self) -> Iterator[bytes]:
        """Yield the commands of one change: `_REDIS_CHANGED_PERCENT` of the keys get new values."""
        for _ in range(len(self._live) * _REDIS_CHANGED_PERCENT // 100):
            at = self._below(len(self._live))
            key = self._live[at]
            if self._below(10) == 0:
                yield _command(b"DEL", self._name(key))
                self._live[at] = self._next_key
                self._next_key += 1
                yield self._make(self._live[at])
            else:
                yield self._update(key)

    def _below(self, bound: int) -> int:
        return int(self._draws.random_raw()) % bound

    def _some_text(self, byte_count: int) -> bytes:
        at = self._below(len(self._text) - byte_count)
        return self._text[at : at + byte_count]

    def _name(self, key: int) -> bytes:
        return b"%b:%d" % ((b"session", b"user", b"feed", b"tags", b"rank")[key % 5], key)

    def _token(self) -> bytes:
        return b"%016x" % int(self._draws.random_raw())

    def _session(self, key: int) -> bytes:
        return b'{"id":%d,"token":"%b","seen":%d,"agent":"%b","cart":[%d,%d],"note":"%b"}' % (
            key,
            self._token(),
            1_700_000_000 + self._below(10_000_000),
            self._some_text(60),
            self._below(100_000),
            self._below(100_000),
            self._some_text(100 + self._below(250)),
        )

    def _make(self, key: int) -> bytes:
        name = self._name(key)
        match key % 5:
            case 0:
                return _command(b"SET", name, self._session(key))
            case 1:
                fields = [(b"mail", b"user%d@example.org" % key), (b"bio", self._some_text(150 + self._below(150)))]
                fields += [(b"f%d" % number, self._token()) for number in range(4)]
                return _command(b"HSET", name, *(word for field in fields for word in field))
            case 2:
                return _command(b"RPUSH", name, *(self._some_text(40) for _ in range(4 + self._below(8))))
            case 3:
                return _command(b"SADD", name, *(self._some_text(12) for _ in range(6 + self._below(12))))
            case _:
                members = [(b"%d" % self._below(1_000_000), self._token()) for _ in range(5 + self._below(10))]
                return _command(b"ZADD", name, *(word for member in members for word in member))

    def _update(self, key: int) -> bytes:
        name = self._name(key)
        match key % 5:
            case 0:
                return _command(b"SET", name, self._session(key))
            case 1:
                return _command(b"HSET", name, b"f%d" % self._below(4), self._token())
            case 2:
                return _command(b"RPUSH", name, self._some_text(40))
            case 3:
                return _command(b"SADD", name, self._some_text(12))
            case _:
                return _command(b"ZADD", name, b"%d" % self._below(1_000_000), self._token())


# ------------------------------------------------------------------ images, and every corpus by name


def vm_images(count: int = 2, cache: Path | None = None, seed: int = 0, mebibytes: int = 300) -> list[Path]:
    """Return generations 0 to count - 1 of `vm_image(mebibytes, seed)` as files, oldest first.

    Errors: BadInput for a count below 1, and as `vm_image`.
    """
    if count < 1:
        raise BadInput(f"count {count}: must be at least 1")
    folder = (cache or cache_dir()) / f"vm-{mebibytes}-mebibytes-seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    images = [folder / f"{generation:02}.img" for generation in range(count)]
    for generation, image in enumerate(images):
        if not image.exists():
            write_vm_image(image, mebibytes, seed, generation)
    return images


CORPORA: dict[str, Callable[[int, Path | None], list[Path]]] = {
    "botocore": botocore,
    "rdb": redis_dumps,
    "vm": vm_images,
}
"""Every corpus by name: a function of (versions, cache) that returns paths, oldest first."""


def main(arguments: list[str] | None = None) -> int:
    """Print the paths of one corpus, making what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m nearkin.lab.corpus_cache", description="Make a corpus, print its paths."
    )
    parser.add_argument("corpus", help=", ".join(sorted(CORPORA)))
    parser.add_argument("versions", type=int)
    parser.add_argument("--cache", type=Path, help="default: $NEARKIN_CACHE, or ~/.cache/nearkin/corpora")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.corpus not in CORPORA:
            raise choose("corpus", chosen.corpus, CORPORA)
        for path in CORPORA[chosen.corpus](chosen.versions, chosen.cache):
            print(path)
    except NearkinError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
