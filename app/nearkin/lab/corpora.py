"""Find corpora by name or folder.

    botocore       releases of a Python package as tars, fetched with pip
    rdb            uncompressed dumps of a real Redis server between batches of changes
    vm             vm-debian where this can make it, else vm-synthetic
    vm-debian      a Debian system as an ext4 image, before and after packages are added; needs root and debootstrap
    vm-synthetic   generations of a synthetic disk image
    mutated        text, records and noise after more and more small edits; needs nothing

Corpora are made once and kept in `$NEARKIN_CACHE`, or else in `~/.cache/nearkin/corpora`. Making them takes memory
and threads: a process of its own does it (`python -m nearkin.lab.corpora NAME VERSIONS`).

Invariant: a corpus is a list of files in the order of their versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nearkin.lab.measurement_record import Corpus
from nearkin_shared.errors import BadInput, NearkinError, RetryableError
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.terminal import printable

FILES_MAX = 1000
"""Versions of one folder that are taken."""

_MUTATED_MEBIBYTES = 24
_MUTATED_EDITS = 400  # a version: one every 60 KiB, so that six of seven 8 KiB chunks stay as they are


@frozen
class Known:
    """A corpus that has a name."""

    about: str
    versions: int
    """The number of versions that a suite takes by default."""
    versions_max: int
    make: Callable[[int], list[Path]]


def _botocore(count: int) -> list[Path]:
    from nearkin.lab.corpus_cache import botocore

    return botocore(count)


def _rdb(count: int) -> list[Path]:
    from nearkin.lab.corpus_cache import redis_dumps

    return redis_dumps(max(count, 5))[:count]  # few different series: each is kept


def _vm(count: int) -> list[Path]:
    from nearkin.lab import disk_images

    return _vm_synthetic(count) if disk_images.missing() else disk_images.debian_images(count)


def _vm_debian(count: int) -> list[Path]:
    from nearkin.lab.disk_images import debian_images

    return debian_images(count)


def _vm_synthetic(count: int) -> list[Path]:
    from nearkin.lab.corpus_cache import vm_images

    return vm_images(count)


def _mutated_corpus(count: int) -> list[Path]:
    from nearkin.lab.mutated_files import mutated_files

    return mutated_files(count, mebibytes=_MUTATED_MEBIBYTES, edits=_MUTATED_EDITS)


KNOWN: Mapping[str, Known] = {
    "botocore": Known("source releases of a Python package, 115 MB each", 10, 10, _botocore),
    "rdb": Known("dumps of a Redis server, 60 MB each", 5, 100, _rdb),
    "vm": Known("vm-debian where it can be made, else vm-synthetic", 3, 3, _vm),
    "vm-debian": Known("disk images of a Debian system, 671 MB each; root and debootstrap", 3, 3, _vm_debian),
    "vm-synthetic": Known("generations of a synthetic disk image, 315 MB each", 2, 40, _vm_synthetic),
    "mutated": Known("generated data after small edits, 25 MB each", 6, 1000, _mutated_corpus),
}


def check_names(words: Sequence[str]) -> list[str]:
    """Return the folders and known names in `words`, each once, before any is made.

    Raises BadInput for any other.
    """
    names = [name for word in words for name in ([word] if _is_folder(word) else word.split(","))]
    for name in names:
        if name not in KNOWN and not _is_folder(name):
            raise BadInput(f'corpus "{name}": choose {", ".join(KNOWN)}, or name a folder with one file a version')
    return list(dict.fromkeys(names))


def check_corpora(words: Sequence[str], versions: int | None, versions_at_most: int | None = None) -> None:
    """Refuse what `find_corpora` would, before it makes or fetches anything. Raises BadInput."""
    for name in check_names(words):
        if name in KNOWN:
            _count(name, versions, versions_at_most)
        else:
            _folder(name, versions or versions_at_most)


def find_corpora(words: Sequence[str], versions: int | None, versions_at_most: int | None = None) -> list[Corpus]:
    """Return the corpora that `words` name: folders, known names, or comma-separated lists.

    versions: take so many of each; None: the default of the corpus, at most `versions_at_most`.
    Raises BadInput for an unknown name, a folder without files, a file that cannot be read; and the errors of making
    one.
    """
    names = check_names(words)
    found = [
        _folder(name, versions or versions_at_most) if name not in KNOWN else _known(name, versions, versions_at_most)
        for name in names
    ]
    titles = [corpus.name for corpus in found]
    if clash := next((title for title in titles if titles.count(title) > 1), None):
        raise BadInput(f'corpus "{clash}": two that are called so; rename a folder')
    return found


def _is_folder(word: str) -> bool:
    return bool(word) and word not in KNOWN and Path(word).is_dir()  # ./botocore is a folder, botocore never is


def _folder(word: str, versions: int | None) -> Corpus:
    folder = Path(word)
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size)[:versions]
        for path in paths:
            path.open("rb").close()
    except OSError as error:
        raise BadInput(f'corpus "{word}": {error.strerror}: {error.filename}') from error
    if not paths:
        raise BadInput(f'corpus "{word}": holds no file with anything in it; put one file a version there, in order')
    if len(paths) > FILES_MAX:
        raise BadInput(f'corpus "{word}": {len(paths):,} files, at most {FILES_MAX:,}; say how many with --versions')
    return Corpus(printable(folder.resolve().name) or "folder", paths)


def _count(name: str, versions: int | None, versions_at_most: int | None) -> int:
    """Return how many versions of a known corpus to take.

    Raises BadInput for more than exist.
    """
    known = KNOWN[name]
    count = versions or min(known.versions, versions_at_most or known.versions)
    if count > known.versions_max:
        raise BadInput(f"--versions {count}: {name} has at most {known.versions_max}")
    return count


def _known(name: str, versions: int | None, versions_at_most: int | None) -> Corpus:
    count = _count(name, versions, versions_at_most)
    command = [sys.executable, "-P", "-m", "nearkin.lab.corpora", name, str(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        output_lines = done.stderr.strip().splitlines()
        raise RetryableError(
            f"{name}: {output_lines[-1] if output_lines else 'could not be made'}; vm-synthetic and mutated always can"
        )
    title, *paths = done.stdout.splitlines()
    return Corpus(title, [Path(path) for path in paths])


def main() -> int:
    """Print the name of the corpus, such as `vm-synthetic` for `vm`, and its paths."""
    name, count = sys.argv[1], int(sys.argv[2])
    try:
        paths = KNOWN[name].make(count)
    except NearkinError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        where = f": {printable(str(error.filename))}" if error.filename else ""
        print(f"{error.strerror or error}{where}; NEARKIN_CACHE names the folder for corpora", file=sys.stderr)
        return 1
    if name == "vm":
        name = "vm-debian" if "debian" in paths[0].parent.name else "vm-synthetic"
    print(name, *paths, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
