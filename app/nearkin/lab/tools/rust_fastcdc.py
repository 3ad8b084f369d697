"""Measure the Rust crate `fastcdc`.

`fastcdc_crate/` is a program that calls the crate's v2020 chunker. cargo builds it once, in
`$NEARKIN_CACHE/fastcdc-crate` (default: `~/.cache/nearkin/corpora/fastcdc-crate`), from wherever cargo is configured
to look.

Invariant: it runs on the same core over the same bytes as the other rows, in processor time.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path

from nearkin.lab.corpus_cache import cache_dir
from nearkin.lab.measure import CommandFailed
from nearkin.lab.similar_chunks import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, Bytes
from nearkin.lab.suites.kernel_cases import CHUNKING, Material, PreparedRow, kernel
from nearkin.lab.tools.base_tool import MissingPeer

NAME = "fastcdc-crate"
SOURCE = Path(__file__).with_name("fastcdc_crate")
VERSION = "the crate fastcdc 3.2.1, v2020, Rust"
_BUILD_SECONDS_MAX = 600


class Crate:
    """The program's process, which has read `data`.

    It ends with the last reference to this object.
    """

    def __init__(self, command: Path, data: Bytes) -> None:
        self._data_bytes = len(data)
        bounds = [str(bound) for bound in (CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX)]
        with tempfile.NamedTemporaryFile(suffix=".data") as file:
            data.tofile(file.name)
            self._process = subprocess.Popen(
                [command, file.name, *bounds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            weakref.finalize(self, _wait, self._process)
            self.mean_chunk_bytes: float = 0.0
            self.once()  # when it answers it has read the file

    def once(self) -> float:
        """Cut all bytes once; return the seconds of processor time. Raises CommandFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            nanoseconds, chunks, _ = self._process.stdout.readline().split()
        except (OSError, ValueError) as error:
            raise CommandFailed(f"{NAME}: its process ended") from error
        self.mean_chunk_bytes = self._data_bytes / int(chunks)
        return int(nanoseconds) / 1e9


def _wait(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


def built() -> Path:
    """Return the program, built if need be.

    Raises MissingPeer without cargo, CommandFailed when cargo fails.
    """
    cargo = shutil.which("cargo")
    if cargo is None:
        raise MissingPeer("cargo is not installed")
    folder = cache_dir() / NAME
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    words = [cargo, "build", "--release", "--quiet"]
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS_MAX
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"cargo build took longer than {_BUILD_SECONDS_MAX} s") from error
    if done.returncode != 0:
        output_lines = done.stderr.strip().splitlines()
        raise CommandFailed(f"cargo build: exit {done.returncode}: {output_lines[-1] if output_lines else 'no output'}")
    return folder / "target" / "release" / NAME


@kernel(
    NAME,
    group=CHUNKING,
    settings="2, 8, 64 KiB; the whole sample in one call",
    ours=False,
    install="cargo builds it: rustup.rs, or apt install cargo",
)
def _crate(material: Material) -> PreparedRow:
    crate = Crate(built(), material.data)
    return PreparedRow(crate.once, len(material.data), mean_chunk_bytes=crate.mean_chunk_bytes, version=VERSION)
