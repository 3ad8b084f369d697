"""Test restore from a copy taken during writes (see docs/how-to/operate-services.md)."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin_shared.errors import NotFound
from tests.support.data.stores import SMALL, attempt, settings

TRUTH = ("nearkin.json", "chunking.json", "containers", "manifests", "gc", "parity", "quarantine", "scrub", "heads")
"""The copied objects: no index, no locks, no unfinished files."""
BEFORE = 6


def copy_objects(source: Path, target: Path, order: tuple[str, ...]) -> None:
    """Copy objects one by one, as any tool does; omit one that is deleted meanwhile."""
    for top in order:
        found = source / top
        files = [found] if found.is_file() else sorted(path for path in found.rglob("*") if path.is_file())
        for path in files:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(path, place)
            except FileNotFoundError:
                continue


@pytest.mark.parametrize("order", [TRUTH, TRUTH[::-1]], ids=["containers-first", "manifests-first"])
def test_copy_during_puts_has_committed_data(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Find in a copy taken during puts all earlier commits and nothing false."""
    chosen = settings(SMALL, {"storage": {"parity": "rs-4-1"}})
    contents: dict[int, bytes] = {}
    data = random_bytes(200_000, 1)
    with open_store(tmp_path / "store", settings=chosen, create=True) as store:
        for number in range(BEFORE):
            data = mutate(data, number, 20)
            contents[store.put("db", data).info.version] = data
        over, started = threading.Event(), threading.Event()

        def write() -> None:
            changed = data
            for number in range(200):
                changed = mutate(changed, 1000 + number, 20)
                contents[store.put("db", changed).info.version] = changed
                started.set()
                if over.is_set():
                    return

        writer = threading.Thread(target=write)
        writer.start()
        assert started.wait(30)
        copy_objects(tmp_path / "store", tmp_path / "copy", order)
        over.set()
        writer.join()
    assert len(contents) > BEFORE

    with open_store(tmp_path / "copy", settings=chosen, create=True) as store:
        for version in range(1, BEFORE + 1):
            assert store.get("db", version).read() == contents[version]
        touched = set()
        for version in range(BEFORE + 1, max(contents) + 1):
            given, err = attempt(store, "db", version)
            assert contents[version].startswith(given)
            if err is None:
                assert given == contents[version]
            elif not isinstance(err, NotFound):  # that: it was committed after the copy had passed its manifest
                touched.add(("db", version))  # its manifest was copied, a container of it was not yet there
        assert {version for damage in store.verify().damage for version in damage.versions} == touched
        new = store.put("after", contents[BEFORE]).info
        assert store.get("after", new.version).read() == contents[BEFORE]
