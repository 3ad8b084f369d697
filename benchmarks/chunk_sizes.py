"""Compare chunk sizes and feature algorithms on one machine in one run.

Invariant: every version is read back and compared with its file.

    python -m benchmarks.chunk_sizes --work FOLDER [--corpus NAME ...] [--setting NAME ...] [--json FILE]

Each setting stores each corpus twice, in this order of settings and in the reverse one, in a process of its own that is
pinned to one core. Times are CPU seconds, the mean of both. `again` puts the newest version once more. `collected` are
the stored bytes after a GC run; histories have a GC run and deletions after every GC_EVERY puts. The index is counted
apart from the stored bytes.

reordered   releases of botocore, the members of each tar in another order: locality finds few bases
renamed     exports of records whose fields are renamed and whose rows are sorted differently from version to version
history     20 versions of generated data of which the last 8 are kept

For `chunker.rules`, with `--setting "8 KiB, finesse" "8 KiB, finesse, rules"`:

media       films: a tag in front is edited from version to version, and one film is added
database    an SQLite database; 2 % of the rows are changed and 1 % added from version to version
weights     safetensors files of which two layers of 16 change
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np

from nearkin import open_store
from nearkin.lab.corpora import find_corpora
from nearkin.lab.generated_data import random_bytes, text_like, write_vm_image
from nearkin.lab.mutated_files import mutated_files
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from tests.support.data.stores import stored_bytes

KEY = "k"
SIZES_KIB = ((2, 8, 64), (8, 32, 128))
SETTINGS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    f"{target} KiB, {features}": {
        "chunker": {"min_bytes": low << 10, "target_bytes": target << 10, "max_bytes": high << 10},
        "features": {"algorithm": features},
    }
    for low, target, high in SIZES_KIB
    for features in ("finesse", "odess", "none")
}
SETTINGS_OF_SIZES = tuple(SETTINGS)
RULED = {"8 KiB, finesse, rules": {**SETTINGS["8 KiB, finesse"], "chunker": {"rules": "all"}}}
ALL_SETTINGS: Mapping[str, Mapping[str, Mapping[str, object]]] = {**SETTINGS, **RULED}
GC_EVERY = 4
KEPT_VERSIONS = 8
ROWS = 60_000
COLUMNS = ("put", "again", "newest", "oldest", "gc")
BYTES = ("stored", "collected", "index")
FIELDS = ("id", "name", "street", "city", "balance", "created", "note")


def reordered(work: Path, count: int) -> list[Path]:
    """Write releases of botocore with the members of each tar in another order."""
    (corpus,) = find_corpora(["botocore"], count)
    paths = []
    for number, source in enumerate(corpus.paths):
        path = work / f"{number:02}.tar"
        with tarfile.open(source) as members, tarfile.open(path, "w") as shuffled:
            found = members.getmembers()
            random.Random(number).shuffle(found)
            for member in found:
                shuffled.addfile(member, members.extractfile(member) if member.isfile() else None)
        paths.append(path)
    return paths


def renamed(work: Path, count: int) -> list[Path]:
    """Write exports of records as JSON lines; each version renames two fields and sorts by another one."""
    draw = random.Random(7)
    words = text_like(1 << 20, 3).decode("latin-1").split()
    rows = [
        [
            number,
            draw.choice(words),
            draw.choice(words),
            draw.choice(words),
            draw.randrange(10**9),
            draw.random(),
            " ".join(draw.choices(words, k=8)),
        ]
        for number in range(ROWS)
    ]
    names, paths = list(FIELDS), []
    for version in range(count):
        path = work / f"{version:02}.jsonl"
        rows.sort(key=itemgetter(version % len(FIELDS), 0))
        with path.open("w") as out:
            for row in rows:
                out.write(json.dumps(dict(zip(names, row, strict=True))) + "\n")
        for at in draw.sample(range(len(names)), 2):
            names[at] += f"_{version}"
        paths.append(path)
    return paths


def images(work: Path, count: int) -> list[Path]:
    """Write generations of a synthetic disk image of 64 MiB."""
    return [write_vm_image(work / f"{number:02}.img", 64, 0, number) for number in range(count)]


def history(work: Path, count: int) -> list[Path]:
    """Write versions of text, records and noise, 120 edits apart."""
    return mutated_files(count, mebibytes=8, edits=120)


def media(work: Path, count: int) -> list[Path]:
    """Write archives of films: a head, a tag of another length in each version, and bytes that nothing compresses."""
    paths = []
    for version in range(count):
        path = work / f"{version:02}.mp4"
        tag = text_like(2_000 + 777 * version, version)
        path.write_bytes(
            b"\0\0\0\x20ftypisom" + tag + random_bytes(40_000_000, 1) + random_bytes(8_000_000 * version, 2)
        )
        paths.append(path)
    return paths


def databases(work: Path, count: int) -> list[Path]:
    """Write versions of an SQLite database."""
    draw, base_path, paths = random.Random(3), work / "base", []
    words = text_like(1 << 20, 3).decode("latin-1").split()

    def row() -> tuple[str, int, str]:
        return draw.choice(words), draw.randrange(10**9), " ".join(draw.choices(words, k=12))

    base = sqlite3.connect(base_path)
    base.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, name TEXT, amount INTEGER, note TEXT)")
    base.execute("CREATE INDEX by_name ON entries (name)")
    base.executemany("INSERT INTO entries (name, amount, note) VALUES (?, ?, ?)", (row() for _ in range(200_000)))
    for version in range(count):
        base.commit()
        paths.append(Path(shutil.copy(base_path, work / f"{version:02}.db")))
        changed = ((*row(), draw.randrange(200_000)) for _ in range(4_000))
        base.executemany("UPDATE entries SET name = ?, amount = ?, note = ? WHERE id = ?", changed)
        base.executemany("INSERT INTO entries (name, amount, note) VALUES (?, ?, ?)", (row() for _ in range(2_000)))
    base.close()
    return paths


def weights(work: Path, count: int) -> list[Path]:
    """Write safetensors files of 16 layers of 32-bit floats."""
    layers = [np.random.default_rng(number).normal(0, 0.02, 750_000).astype("<f4") for number in range(16)]
    paths = []
    for version in range(count):
        for number in (version % 16, (5 * version + 3) % 16) if version else ():
            layers[number] = layers[number] + np.random.default_rng(version).normal(0, 1e-4, 750_000).astype("<f4")
        spans = {
            f"layer.{number}": {
                "dtype": "F32",
                "shape": [750_000],
                "data_offsets": [3_000_000 * number, 3_000_000 * (number + 1)],
            }
            for number in range(16)
        }
        head = json.dumps(spans).encode()
        path = work / f"{version:02}.safetensors"
        path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(layer.tobytes() for layer in layers))
        paths.append(path)
    return paths


def known(name: str) -> Callable[[Path, int], list[Path]]:
    """Return a maker of a corpus of `nearkin bench`."""
    return lambda _work, count: list(find_corpora([name], count)[0].paths)


CORPORA: Mapping[str, tuple[int, Callable[[Path, int], list[Path]]]] = {
    "botocore": (4, known("botocore")),
    "rdb": (5, known("rdb")),
    "mutated": (6, known("mutated")),
    "images": (3, images),
    "reordered": (3, reordered),
    "renamed": (5, renamed),
    "history": (20, history),
}
CORPORA_OF_SIZES = tuple(CORPORA)
RULED_CORPORA = {"media": (3, media), "database": (4, databases), "weights": (4, weights)}
ALL_CORPORA: Mapping[str, tuple[int, Callable[[Path, int], list[Path]]]] = {**CORPORA, **RULED_CORPORA}


def read_all(root: Path, settings: Settings, version: int, file: Path) -> float:
    """Read a version, compare it with its file and return the CPU seconds of the read."""
    with open_store(root, settings=settings) as store, file.open("rb") as whole:
        spent = 0.0
        started = time.process_time()
        for piece in store.get(KEY, version).pieces():
            spent += time.process_time() - started
            if whole.read(len(piece)) != piece:
                raise SystemExit(f"{file}: version {version} differs")
            started = time.process_time()
        if whole.read(1):
            raise SystemExit(f"{file}: version {version} is too short")
    return spent


def measure(root: Path, files: Sequence[Path], setting: str, *, is_history: bool) -> dict[str, float]:
    """Store the files in order; return CPU seconds and bytes."""
    settings = with_changes(
        Settings(), {**ALL_SETTINGS[setting], "gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}}
    )
    found = dict.fromkeys((*COLUMNS, *BYTES), 0.0)

    def collect() -> None:
        with timing(found, "gc"), open_store(root, settings=settings) as store:
            store.gc()

    for number, file in enumerate(files, 1):
        with timing(found, "put"), open_store(root, settings=settings, create=True) as store:
            store.put(KEY, file)
        if is_history and number > KEPT_VERSIONS:
            with open_store(root, settings=settings) as store:
                store.delete(KEY, number - KEPT_VERSIONS)
        if is_history and number % GC_EVERY == 0:
            collect()
    found["stored"] = stored_bytes(root)
    found["index"] = sum(path.stat().st_blocks * 512 for path in (root / "index").rglob("*") if path.is_file())
    oldest = max(1, len(files) - KEPT_VERSIONS + 1) if is_history else 1
    found["newest"] = read_all(root, settings, len(files), files[-1])
    found["oldest"] = read_all(root, settings, oldest, files[oldest - 1])
    collect()
    found["collected"] = stored_bytes(root)
    read_all(root, settings, len(files), files[-1])
    with timing(found, "again"), open_store(root, settings=settings) as store:
        store.put(KEY, files[-1])
    return found


class timing:  # noqa: N801 - used as a function
    """Adds the CPU seconds of a block to a figure."""

    def __init__(self, found: dict[str, float], name: str) -> None:
        self._found, self._name = found, name

    def __enter__(self) -> None:
        self._started = time.process_time()

    def __exit__(self, *_: object) -> None:
        self._found[self._name] += time.process_time() - self._started


def run_all(work: Path, corpus: str, settings: Sequence[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (setting, figures) of a corpus, each the mean of two runs."""
    count, make = ALL_CORPORA[corpus]
    folder = work / corpus
    folder.mkdir(parents=True, exist_ok=True)
    files = make(folder, count)
    runs: dict[str, list[dict[str, float]]] = {setting: [] for setting in settings}
    for setting in (*settings, *reversed(settings)):
        root = work / "store"
        shutil.rmtree(root, ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.chunk_sizes", "--work", str(work), "--one", corpus, setting]
        done = subprocess.run([*command, *map(str, files)], check=True, capture_output=True, text=True)
        runs[setting].append(json.loads(done.stdout))
        shutil.rmtree(root)
    shutil.rmtree(folder)
    for setting, both in runs.items():
        yield setting, {name: sum(run[name] for run in both) / len(both) for name in both[0]}


def row(corpus: str, setting: str, found: Mapping[str, float], first: Mapping[str, float]) -> str:
    """Return a row of the table: bytes, and in per cent of the first setting."""
    cells = [f"{found[name]:,.0f} ({100 * (found[name] / first[name] - 1):+.1f} %)" for name in BYTES]
    cells += [f"{found[name]:.2f} ({found[name] / max(first[name], 1e-9):.2f})" for name in COLUMNS]
    return f"| {corpus} | {setting} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for stores and made corpora")
    parser.add_argument("--corpus", nargs="+", choices=list(ALL_CORPORA), default=CORPORA_OF_SIZES)
    parser.add_argument("--setting", nargs="+", choices=list(ALL_SETTINGS), default=SETTINGS_OF_SIZES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        corpus, setting, *files = given.one
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        figures = measure(given.work / "store", list(map(Path, files)), setting, is_history=corpus == "history")
        print(json.dumps(figures))
        return
    record: dict[str, dict[str, dict[str, float]]] = {}
    print("| corpus | setting | " + " | ".join((*BYTES, *(f"{name}, CPU s" for name in COLUMNS))) + " |")
    print("|---" * (2 + len(BYTES) + len(COLUMNS)) + "|")
    for corpus in given.corpus:
        record[corpus] = dict(run_all(given.work, corpus, given.setting))
        first = record[corpus][given.setting[0]]
        for setting, found in record[corpus].items():
            print(row(corpus, setting, found, first), flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
