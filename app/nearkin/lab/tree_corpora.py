"""Make and cache trees that change from week to week.

    packages   what pip installs: ten releases of each of three Python packages, two of which advance each week
    home       a generated home folder: documents, sources, photos, a mailbox, a database
    small      10,000 generated text files of 1 to 8 KiB, 100 of which change each week
    small-200k 200,000 of them, 2,000 of which change each week

A corpus is a list of folders, one for each week. They lie in the cache of `nearkin.lab.corpus_cache`.

Invariant: a cached state is complete; it appears under its name by one rename or not at all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from nearkin.lab.corpus_cache import cache_dir
from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like
from nearkin.lab.measurement_record import Corpus
from nearkin_shared.errors import BadInput, NearkinError, RetryableError
from nearkin_shared.limits import KIB, MIB
from nearkin_shared.utils.terminal import printable

WEEKS = 10
RELEASES: Mapping[str, Sequence[str]] = {
    "Django": ("5.0.1", "5.0.2", "5.0.3", "5.0.4", "5.0.6", "5.0.7", "5.0.8", "5.0.9", "5.0.10", "5.0.11"),
    "setuptools": ("69.0.3", "69.1.0", "69.1.1", "69.2.0", "69.5.1", "70.0.0", "70.1.0", "70.2.0", "70.3.0", "71.0.0"),
    "pip": ("23.1", "23.2", "23.2.1", "23.3", "23.3.1", "23.3.2", "24.0", "24.1", "24.1.1", "24.2"),
}
"""Releases as wheels, oldest first. All are pure Python: the same everywhere."""

_DOCUMENTS, _SOURCES, _PHOTOS = 2400, 1200, 40
_MAILBOX_BYTES, _DATABASE_BYTES = 6 * MIB, 8 * MIB


def packages(weeks: int = WEEKS, cache: Path | None = None) -> list[Path]:
    """Return site-packages as of the first `weeks` weeks.

    Missing wheels are fetched with `pip download`. Raises RetryableError when pip fails, with pip's last line.
    """
    folder = (cache or cache_dir()) / "trees-packages"
    return [_state(folder, week, partial(_install, folder / "wheels", week)) for week in range(weeks)]


def releases_of(week: int) -> dict[str, str]:
    """Return the release of each package in a week; each keeps its own in one week of three."""
    found = {}
    for place, (name, versions) in enumerate(RELEASES.items()):
        advances = sum((past + place) % len(RELEASES) != 0 for past in range(1, week + 1))
        found[name] = versions[advances]
    return found


def _install(wheels: Path, week: int, target: Path) -> None:
    for name, version in releases_of(week).items():
        with zipfile.ZipFile(_wheel(wheels / f"{name}-{version}", f"{name}=={version}")) as wheel:
            wheel.extractall(target)


def _wheel(folder: Path, requirement: str) -> Path:
    """Return a wheel that pip downloaded, now or earlier."""
    for found in folder.glob("*.whl"):
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, requirement, "--dest", partial], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not list(Path(partial).glob("*.whl")):
            reason = (done.stderr.strip() or "no wheel arrived").splitlines()[-1]
            raise RetryableError(
                f"{requirement}: pip could not download it ({reason}); check the network and `pip config list`, or "
                "measure over home"
            )
        Path(partial).rename(folder)
        Path(partial).mkdir()  # which the block removes
    return next(folder.glob("*.whl"))


def home(weeks: int = WEEKS, cache: Path | None = None, scale: int = 1) -> list[Path]:
    """Return a generated home folder as of the first `weeks` weeks.

    The same arguments give the same bytes. `scale` divides the number and size of its files.
    """
    folder = (cache or cache_dir()) / f"trees-home-{scale}"

    def make(week: int, target: Path) -> None:
        if not week:
            _first_home(target, scale)
            return
        shutil.copytree(folder / _name(week - 1), target, dirs_exist_ok=True)
        _live_a_week(target, week, scale)

    return [_state(folder, week, partial(make, week)) for week in range(weeks)]


def _first_home(home_folder: Path, scale: int) -> None:
    for number in range(_DOCUMENTS // scale):
        _write(home_folder / "documents" / f"{number % 40:02}" / f"note-{number:05}.txt", _document(number))
    for number in range(_SOURCES // scale):
        text = text_like(2 * KIB + number * 977 % (10 * KIB), 100_000 + number)
        _write(home_folder / "src" / f"project-{number % 12:02}" / f"module_{number:05}.py", text)
    for number in range(_PHOTOS // scale):
        _write(home_folder / "photos" / "2025" / f"img-{number:05}.jpg", _photo(number))
    _write(home_folder / "mail" / "inbox.mbox", text_like(_MAILBOX_BYTES // scale, 1))
    _write(home_folder / ".local" / "app.db", records_like(_DATABASE_BYTES // scale, 2))


def _live_a_week(home_folder: Path, week: int, scale: int) -> None:
    """Edit, add, delete and rename files as a person does in a week."""
    documents = sorted((home_folder / "documents").rglob("*.txt"))
    for number, path in enumerate(documents):
        lot = (number * 2_654_435_761 + week * 40_503) % 100
        if lot < 3:
            _write(path, mutate(path.read_bytes(), week * 10_000 + number, 3))
        elif lot == 3 and number % 3 == 0:
            path.unlink()
    sources = sorted((home_folder / "src").rglob("*.py"))
    for number in range(week, len(sources), 25):
        _write(sources[number], mutate(sources[number].read_bytes(), week * 20_000 + number, 6))
    for number in range(40 // scale):
        name = f"note-{week:02}-{number:03}.txt"
        _write(home_folder / "documents" / f"week-{week:02}" / name, _document(week * 30_000 + number))
    for number in range(3):
        _write(home_folder / "photos" / "2026" / f"week-{week:02}-{number}.jpg", _photo(week * 1_000 + number))
    if week == WEEKS // 2:  # a folder gets another name
        (home_folder / "photos" / "2025").rename(home_folder / "photos" / "2025 sorted")
    mailbox, database = home_folder / "mail" / "inbox.mbox", home_folder / ".local" / "app.db"
    _write(mailbox, mailbox.read_bytes() + text_like(300 * KIB // scale, week * 50_000))
    _write(database, mutate(database.read_bytes(), week, 200))


def small(files: int, weeks: int = WEEKS, cache: Path | None = None) -> list[Path]:
    """Return a folder of `files` text files of 1 to 8 KiB as of the first `weeks` weeks.

    The same arguments give the same bytes. Each week edits one file in a hundred.
    """
    folder = (cache or cache_dir()) / f"trees-small-{files}"

    def make(week: int, target: Path) -> None:
        if not week:
            for number in range(files):
                _write(target / _small_path(number), _small_file(number))
            return
        shutil.copytree(folder / _name(week - 1), target, dirs_exist_ok=True)
        for number in range(week, files, 100):
            path = target / _small_path(number)
            _write(path, mutate(path.read_bytes(), week * 10_000_000 + number, 3))

    return [_state(folder, week, partial(make, week)) for week in range(weeks)]


def _small_path(number: int) -> Path:
    return Path(f"{number // 200:04}") / f"file-{number:06}.txt"


def _small_file(number: int) -> bytes:
    return text_like(KIB + number * 7_919 % (7 * KIB), 40_000_000 + number)


def _document(number: int) -> bytes:
    return text_like(KIB + number * 7_919 % (24 * KIB), 200_000 + number)


def _photo(number: int) -> bytes:
    return random_bytes(200 * KIB + number * 104_729 % (600 * KIB), 300_000 + number)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _name(week: int) -> str:
    return f"week-{week:02}"


def _state(folder: Path, week: int, make: Callable[[Path], None]) -> Path:
    path = folder / _name(week)
    if path.is_dir():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder, prefix=".partial-"))
    try:
        make(partial)
        partial.chmod(0o755)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return path


TREES: Mapping[str, Callable[[int], list[Path]]] = {
    "packages": packages,
    "home": home,
    "small": partial(small, 10_000),
    "small-200k": partial(small, 200_000),
}


def check_trees(words: Sequence[str], versions: int | None) -> list[str]:
    """Return the known names and folders in `words`, each once. Raises BadInput for any other."""
    names = [name for word in words for name in ([word] if _is_folder(word) else word.split(","))]
    for name in names:
        if name in TREES:
            if versions is not None and versions > WEEKS:
                raise BadInput(f"--versions {versions}: {name} has at most {WEEKS}")
        elif not _is_folder(name):
            raise BadInput(f'corpus "{name}": choose {", ".join(TREES)}, or name a folder with one folder a version')
        elif not _folders(name, versions):
            raise BadInput(f'corpus "{name}": holds no folder; put one folder a version there, in order')
    return list(dict.fromkeys(names))


def find_trees(words: Sequence[str], versions: int | None) -> list[Corpus]:
    """Return the trees that `words` name; those that are missing are made first.

    Raises what `check_trees` does, and RetryableError if one cannot be made.
    """
    found = []
    for name in check_trees(words, versions):
        if name not in TREES:
            found.append(Corpus(printable(Path(name).resolve().name) or "folder", _folders(name, versions)))
            continue
        try:
            found.append(Corpus(name, TREES[name](versions or WEEKS)))
        except NearkinError:
            raise
        except OSError as err:
            raise RetryableError(f"{name}: {err.strerror or err}; NEARKIN_CACHE names the folder for corpora") from err
    return found


def _is_folder(word: str) -> bool:
    return bool(word) and word not in TREES and Path(word).is_dir()


def _folders(word: str, versions: int | None) -> list[Path]:
    try:
        return sorted(path for path in Path(word).iterdir() if path.is_dir() and any(path.iterdir()))[:versions]
    except OSError as err:
        raise BadInput(f'corpus "{word}": {err.strerror}: {err.filename}') from err
