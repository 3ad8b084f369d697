"""Make disk images of a real system.

A minimal Debian, installed with debootstrap, then with more packages added as its users add them: with apt, in place.
Each state becomes an ext4 image. Packages are fetched from apt's configured archive, so two series made at different
times hold different packages; a series stays as it is while the cache holds it.

Invariant: a cached series is complete; it appears under its name by one rename.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nearkin.lab.corpus_cache import MissingTool, cache_dir
from nearkin_shared.errors import BadInput, RetryableError

_PROGRAMS = ("debootstrap", "mke2fs", "chroot")
_STEP_SECONDS_MAX = 1800  # debootstrap took 100 s on one core of a busy machine
_ADDED: Sequence[Sequence[str]] = (
    ("ca-certificates", "curl", "less", "openssh-client", "python3-minimal", "vim-tiny"),
    ("cron", "git", "logrotate", "python3", "rsyslog", "sqlite3"),
)
_IMAGE_MEBIBYTES = 640  # the last state takes some 480
_UUID = "6e656172-6b69-4e00-8000-000000000000"


def missing() -> str | None:
    """Return why this machine cannot make the images, None where it can."""
    if os.geteuid() != 0:
        return "only root may install a system into a folder"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt install debootstrap e2fsprogs"
    return None


def debian_images(count: int = 3, cache: Path | None = None) -> list[Path]:
    """Return up to three images of 640 MiB: minimal, with 6 and with 12 packages.

    Raises BadInput for a count outside 1 to 3; MissingTool if the images are not cached and this process is not root,
    or debootstrap or mke2fs is not installed; RetryableError when one of them fails, with its last line.
    """
    if not 1 <= count <= len(_ADDED) + 1:
        raise BadInput(f"count {count}: choose 1 to {len(_ADDED) + 1}")
    folder = (cache or cache_dir()) / f"vm-debian-{_IMAGE_MEBIBYTES}-mebibytes"
    if not folder.exists():
        reason = missing()
        if reason is not None:
            raise MissingTool(f"images of a Debian system: {reason}; vm-synthetic needs nothing")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
            made = Path(partial) / "images"
            made.mkdir()
            _make_images(Path(partial) / "root", made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was quicker: its images are as good
                    raise
    return sorted(folder.glob("*.img"))[:count]


def _make_images(root: Path, images: Path) -> None:
    _run("debootstrap", "--variant=minbase", _release(), str(root), *_mirror())
    _image(root, images / "00.img")
    for number, packages in enumerate(_ADDED, start=1):
        _run("chroot", str(root), "apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages)
        _image(root, images / f"{number:02}.img")


def _image(root: Path, image: Path) -> None:
    # one UUID and hash seed for all: two states of one disk, not two disks
    words = ("-q", "-t", "ext4", "-d", str(root), "-U", _UUID, "-E", f"hash_seed={_UUID}")
    _run("mke2fs", *words, str(image), f"{_IMAGE_MEBIBYTES}M")


def _targets() -> list[tuple[str, str]]:
    """Return (archive, release) of every package list that apt is set up with."""
    words = ("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    pairs = (line.split() for line in done.stdout.splitlines())
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def _release() -> str:
    return next((release for _, release in _targets()), "stable")


def _mirror() -> tuple[str, ...]:
    return next(((archive,) for archive, _ in _targets()), ())


def _run(*command: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=environment,
            timeout=_STEP_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired as err:
        raise RetryableError(f"{command[0]} took longer than {_STEP_SECONDS_MAX} s") from err
    if done.returncode != 0:
        output_lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RetryableError(
            f"{' '.join(command[:3])}: exit {done.returncode}: {output_lines[-1] if output_lines else 'no output'}"
        )
