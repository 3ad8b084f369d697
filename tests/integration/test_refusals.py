"""Test bad input: refusals give a reason and change no object.

Odd keys are kept as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin.local.index_lifecycle import LocalIndex
from nearkin.store import Store
from nearkin_shared.errors import (
    BadInput,
    ConfigError,
    Corrupt,
    FormatTooNew,
    NearkinError,
    NotFound,
    RetryableError,
    SourceFailed,
    StoreLocked,
    StoreUnavailable,
)
from nearkin_shared.storage.manifests import object_name
from tests.support.data.stores import SMALL, containers, flip, objects, settings

if TYPE_CHECKING:
    from typing_extensions import Buffer


CONTENT = random_bytes(50_000)
ODD_KEYS = [
    "..",
    "a/../../b",
    "/etc/passwd",
    "../../../../tmp/x",
    "./.",
    "a//b/",
    "C:\\windows\\system32",
    " ",
    "-rf",
    "line\nbreak\r\n",
    "\x1b[31mred\x07",
    unicodedata.normalize("NFC", "Zoë"),
    unicodedata.normalize("NFD", "Zoë"),
    "\u2126",  # the ohm sign: equal to the letter omega after normalisation
    "\u03a9",
    "ﬁle",
    "file",
    "FILE",
    "👩‍👩‍👧‍👦",
    "עברית/ملف",
    "\u202egnp.exe",
    "\ufeffbom",
    "\uffff",
    "%2e%2e%2f",
    "k" * 1024,
    "𝔘" * 256,
    "𝔘" * 255 + "tail",
    "a" * 400 + "b" * 100,
    "a" * 400 + "c" * 100,
    "nearkin.json",
    "manifests/",
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store", settings=settings(SMALL), create=True) as opened:
        opened.put("there", CONTENT)
        yield opened


def assert_refused(store: Store, kind: type[NearkinError], problem: str, attempt: Callable[[], object]) -> None:
    before, versions = objects(store.root), store.versions(all_versions=True)
    with pytest.raises(kind, match=problem) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    assert objects(store.root) == before
    assert store.versions(all_versions=True) == versions
    assert store.verify().damage == ()
    assert store.put("there", CONTENT).ledger.duplicate_chunks > 0  # and the store goes on


def test_odd_keys_are_kept_apart_and_listed_faithfully(store: Store, tmp_path: Path) -> None:
    assert len(set(ODD_KEYS)) == len(ODD_KEYS)
    outside = {path for path in tmp_path.parent.rglob("*") if (tmp_path / "store") not in path.parents}
    for number, key in enumerate(ODD_KEYS):
        store.put(key, str(number).encode())
    for number, key in enumerate(ODD_KEYS):
        assert store.get(key).read() == str(number).encode()
        assert store.info(key).key == key
        assert store.info(key).version == 1
        assert [info.key for info in store.versions(key) if info.key == key] == [key]
    listed = [info.key for info in store.versions()]
    assert listed == sorted([*ODD_KEYS, "there"], key=str.encode)
    store.rebuild_index()
    assert [info.key for info in store.versions()] == listed
    # no key became a path: nothing new outside the store, and inside only names made of digits
    assert {path for path in tmp_path.parent.rglob("*") if (tmp_path / "store") not in path.parents} == outside
    for name in objects(store.root):
        assert name in ("nearkin.json", "chunking.json") or set(Path(name).stem) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "at least one character"),
        ("k" * 1025, "1025 bytes"),
        ("k" * (64 * 1024), "65536 bytes"),
        ("𝔘" * 257, "1028 bytes"),
        ("a\0b", "NUL"),
        ("\0", "NUL"),
        ("lone \ud800", "UTF-8"),
        ("\udcff", "UTF-8"),
    ],
    ids=["empty", "1025", "64KiB", "4-byte", "nul-inside", "nul", "surrogate", "escaped-byte"],
)
def test_unlistable_key_is_refused_everywhere(key: str, problem: str, store: Store) -> None:
    """Refuse a key that could not be listed unchanged."""
    assert_refused(store, BadInput, problem, lambda: store.put(key, b"x"))
    assert_refused(store, BadInput, problem, lambda: list(store.put_many([("fine", b"y"), (key, b"x")])))
    assert_refused(store, BadInput, problem, lambda: store.get(key))
    assert_refused(store, BadInput, problem, lambda: store.info(key))
    assert_refused(store, BadInput, problem, lambda: store.explain(key))
    assert_refused(store, NotFound, "fine", lambda: store.get("fine"))  # its group was not committed


@pytest.mark.parametrize(
    "metadata", [{"a": "x" * 70_000}, {"\ud800": "x"}, {"a": "\udc80"}], ids=["large", "bad-name", "bad-value"]
)
def test_metadata_that_could_not_be_kept_are_refused(metadata: dict[str, str], store: Store) -> None:
    assert_refused(store, BadInput, "metadata", lambda: store.put("k", b"x", metadata=metadata))


def test_metadata_are_returned_unchanged(store: Store) -> None:
    metadata = {"Ω": "line\n\0", "": "empty name", "n": ""}
    store.put("k", b"x", metadata=metadata)
    assert store.info("k").metadata == metadata


def test_contradictory_sha256_stores_nothing(store: Store) -> None:
    assert_refused(store, BadInput, "SHA-256", lambda: store.put("k", b"x", sha256=hashlib.sha256(b"y").digest()))
    assert_refused(store, BadInput, "SHA-256", lambda: store.put("k", b"x", sha256=b"short"))
    big = random_bytes(12_000_000, 5)
    with pytest.raises(BadInput, match="SHA-256"):  # more than a container: its chunks may be there, no version is
        store.put("k", big, sha256=bytes(32))
    with pytest.raises(NotFound):
        store.get("k")
    assert [info.key for info in store.versions()] == ["there"]
    ledger = store.stats().ledger
    assert min(getattr(ledger, field.name) for field in fields(ledger)) >= 0
    assert store.put("k", big, sha256=hashlib.sha256(big).digest()).info.sha256 == hashlib.sha256(big).hexdigest()
    assert store.get("k").read() == big


def test_sources_that_are_no_files_are_refused(store: Store, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "loop").symlink_to("loop")
    for path, problem in [
        (tmp_path / "missing", "no such file"),
        (tmp_path, "not a regular file"),
        (fifo, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "loop", "loop"),
        (tmp_path / ("n" * 300), "nnn"),
    ]:
        assert_refused(store, BadInput, problem, partial(store.put, "k", path))


def test_source_failing_midway_stores_no_version(store: Store) -> None:
    class Failing(BytesIO):
        def readinto(self, window: Buffer) -> int:
            if self.tell() >= 3_000_000:
                raise OSError(5, "Input/output error")
            return super().readinto(memoryview(window)[:100_000])

    with pytest.raises(SourceFailed, match=r"Input/output error; nothing was stored") as caught:
        store.put("k", Failing(random_bytes(4_000_000)))
    assert isinstance(caught.value.__cause__, OSError)
    assert isinstance(caught.value, RetryableError)
    with pytest.raises(NotFound):
        store.get("k")
    assert store.put("k", CONTENT).info.version == 1


def test_source_without_bytes_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    closed = BytesIO(b"x")
    closed.close()

    class OverstatingSource(BytesIO):
        def readinto(self, window: Buffer) -> int:
            # Beyond the window the bytes would be those of an earlier blob.
            return memoryview(window).nbytes + 1 if self.read(1) else 0

    with (tmp_path / "text").open() as text:
        sources: list[tuple[Any, str]] = [
            (text, "for reading bytes"),
            ("text", "type str"),
            (None, "type NoneType"),
            (7, "type int"),
            (closed, "closed file"),
            (OverstatingSource(b"x"), "readinto returned"),
            (Path("a\0b"), "no such file"),
        ]
        for source, problem in sources:
            assert_refused(store, BadInput, problem, partial(store.put, "k", source))
    assert store.put("k", cast("bytes", bytearray(CONTENT))).ledger.unique_bytes == 0
    assert store.put("k", cast("bytes", memoryview(CONTENT)[:100])).info.size_bytes == 100


@pytest.mark.parametrize("key", [b"k", None, 7, Path("k")])
def test_key_that_is_no_text_is_refused(key: Any, store: Store) -> None:
    assert_refused(store, BadInput, "want text, not", lambda: store.put(key, b"x"))
    assert_refused(store, BadInput, "want text, not", lambda: store.get(key))


@pytest.mark.parametrize("prefix", ["\udcff", "db/\ud800"])
def test_impossible_prefix_is_refused(prefix: str, store: Store) -> None:
    assert_refused(store, BadInput, "prefix .*UTF-8", lambda: store.versions(prefix))


def test_tenant_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tenant.*UTF-8"):
        settings({"tenant": "\udcff"})
    with pytest.raises(BadInput, match=r"tenant.*UTF-8"):
        open_store(tmp_path / "s", settings=replace(settings(SMALL), tenant="\udcff"), create=True)


def test_put_inside_another_put_is_refused(store: Store) -> None:
    results = store.put_many([(f"k{number}", CONTENT) for number in range(3)])
    next(results)
    with pytest.raises(StoreLocked, match="another put is in progress"):
        store.put("k", b"x")
    assert len(list(results)) == 2
    assert store.put("k", b"x").info.version == 1


@pytest.mark.parametrize("name", ["a\0b", "n" * 300, "~no-such-user/s"], ids=["nul", "long", "home"])
def test_impossible_store_path_is_one_line(name: str, tmp_path: Path) -> None:
    path = Path(name) if name.startswith("~") else tmp_path / name
    with pytest.raises(NearkinError, match=r"^store ") as caught:
        open_store(path, settings=settings(SMALL), create=True)
    assert "\n" not in str(caught.value)
    assert "PosixPath" not in str(caught.value)


def test_source_not_ready_is_refused(store: Store) -> None:
    """Refuse a source with nothing to read yet instead of taking it for ended."""

    class Waiting(BytesIO):
        def readinto(self, window: Buffer) -> Any:
            return None

    assert_refused(store, BadInput, "non-blocking", lambda: store.put("k", Waiting(b"x")))


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, None), (0, -1), (50_001, None), (50_001, 50_002), (10, 9), (60_000, 10)]
)
def test_range_outside_is_refused(start: int, stop: int | None, store: Store) -> None:
    assert_refused(store, BadInput, "50000 bytes", lambda: store.get("there", start=start, stop=stop))


@pytest.mark.parametrize(
    "bounds", [{"start": 1.5}, {"start": "1"}, {"start": None}, {"stop": 2.5}, {"stop": float("inf")}], ids=repr
)
def test_range_between_bytes_is_refused(bounds: dict[str, Any], store: Store) -> None:
    assert_refused(store, BadInput, "want a whole number of bytes", lambda: store.get("there", **bounds))


@pytest.mark.parametrize("version", [0, -1, 1 << 64])
def test_impossible_version_is_refused(version: int, store: Store) -> None:
    assert_refused(store, BadInput, "count from 1", lambda: store.get("there", version))


def test_missing_key_or_version_is_not_found(store: Store) -> None:
    assert_refused(store, NotFound, "nowhere", lambda: store.get("nowhere"))
    assert_refused(store, NotFound, "version 9", lambda: store.get("there", 9))


def test_unknown_tenant_sees_an_empty_store(store: Store) -> None:
    store.close()
    with open_store(store.root, settings=settings(SMALL, {"tenant": "stranger"}), create=True) as other:
        assert other.versions() == []
        with pytest.raises(NotFound):
            other.get("there")


def test_two_tenants_share_nothing(tmp_path: Path) -> None:
    """Share nothing between two tenants, and harm neither."""
    chosen = {tenant: settings(SMALL, {"tenant": tenant}) for tenant in ("one", "other")}
    for tenant in ("one", "other", "one"):
        with open_store(tmp_path / "s", settings=chosen[tenant], create=True) as store:
            put = store.put("k", CONTENT)
            assert (put.ledger.duplicate_chunks > 0) == (put.info.version == 2)
    for tenant in ("one", "other"):
        with open_store(tmp_path / "s", settings=chosen[tenant], create=True) as store:
            assert store.get("k").read() == CONTENT
            assert store.verify().damage == ()
            assert store.rebuild_index().skipped == ()
    for tenant in ("one", "other"):
        with open_store(tmp_path / "s", settings=chosen[tenant], create=True) as store:
            assert store.get("k").read() == CONTENT
            assert store.put("k", CONTENT).ledger.unique_bytes == 0


def of_tenant(root: Path, tenant: str) -> Store:
    return open_store(root, settings=settings(SMALL, {"tenant": tenant}), create=True)


def test_damage_names_the_versions_of_a_tenant(tmp_path: Path) -> None:
    """Report damage to one tenant with the affected versions of all."""
    for tenant in ("one", "other"):
        with of_tenant(tmp_path / "s", tenant) as store:
            store.put("k", CONTENT)
    mine, others = containers(tmp_path / "s")
    flip(others, 4000)
    with of_tenant(tmp_path / "s", "one") as store:
        (damage,) = store.verify().damage
        assert damage.object_name.endswith(others.name)
        assert (damage.versions, damage.of_other_tenants) == ((), (("other", "k", 1),))
    with of_tenant(tmp_path / "s", "other") as store:
        (damage,) = store.verify().damage
        assert (damage.versions, damage.of_other_tenants) == ((("k", 1),), ())
        assert store.put("again", CONTENT).ledger.duplicate_chunks == 0  # its own are broken, the other's not its own
        assert store.get("again").read() == CONTENT
    with of_tenant(tmp_path / "s", "one") as store:
        assert store.put("again", CONTENT).ledger.unique_bytes == 0
    assert mine.exists()


def test_unexplained_containers_are_compared(tmp_path: Path) -> None:
    """Compare containers that no version explains by SHA-1, and count them."""
    root = tmp_path / "s"
    for tenant in ("one", "gone"):
        with of_tenant(root, tenant) as store:
            store.put("k", CONTENT)
    _, theirs = containers(root)
    with of_tenant(root, "gone") as store:
        name = object_name("gone", "k", 1)
    (root / name).unlink()
    with of_tenant(root, "one") as store:
        (damage,) = store.verify().damage  # the index still knows whose version is missing, and whose container it is
        assert (damage.object_name, damage.of_other_tenants) == (name, (("gone", "k", 1),))
        assert store.rebuild_index().skipped == ()
        report = store.verify()
        assert (report.damage, report.untagged_containers, report.containers) == ((), 1, 2)
        flip(theirs, 4000)
        (damage,) = store.verify().damage
        assert damage.object_name.endswith(theirs.name)
        flip(theirs, 4000)
        assert store.verify().damage == ()  # sound again: out of quarantine
        assert store.rebuild_index().skipped == ()
    with of_tenant(root, "gone") as store:  # its chunks were not lost from the rebuilt index
        assert store.put("k", CONTENT).ledger.unique_bytes == 0
        assert store.get("k").read() == CONTENT


def test_stats_add_up_over_all_tenants(tmp_path: Path) -> None:
    for tenant in ("one", "other"):
        with of_tenant(tmp_path / "s", tenant) as store:
            store.put("k", CONTENT)
    for tenant in ("one", "other", "third"):
        with of_tenant(tmp_path / "s", tenant) as store:
            stats = store.stats()
            assert (stats.versions, stats.keys, stats.ledger.logical_bytes) == (2, 2, 2 * len(CONTENT))
            assert stats.ledger.unique_bytes == 2 * len(CONTENT)
            stored = sum(len(data) for data in objects(tmp_path / "s").values())
            assert stats.ledger.stored_bytes == sum(stats.parts.values()) == stored


def test_two_stores_read_and_one_writes(tmp_path: Path) -> None:
    """Read two stores side by side in one process while one writes."""
    root = tmp_path / "s"
    with of_tenant(root, "one") as one, of_tenant(root, "other") as other:
        one.put("k", CONTENT)
        assert [info.key for info in one.versions()] == ["k"]
        assert other.versions() == []
        with pytest.raises(StoreLocked, match="which is this one: close its other Store"):
            other.put("k", b"x")
        one.close()
        assert [info.key for info in one.versions()] == ["k"]
        other.put("mine", b"x")
        assert [info.key for info in other.versions()] == ["mine"]
        assert [info.key for info in one.versions()] == ["k"]
        other.rebuild_index()
        other.put("more", b"x")
        other.close()
        assert one.stats().versions == 3  # of the index that is there now


# ------------------------------------------------------------------ folders


def test_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    root = tmp_path / "s"
    open_store(root, settings=settings(SMALL), create=True).close()
    fields = json.loads((root / "nearkin.json").read_bytes())
    (root / "nearkin.json").write_text(json.dumps({**fields, "format_version": 2, "what_comes": "later"}))
    before = objects(root)
    with pytest.raises(FormatTooNew, match=r"format 2.*up to 1"):
        open_store(root, settings=settings(SMALL), create=True)
    assert objects(root) == before


def test_lost_descriptor_names_the_remedy(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        store.put("k", b"content")
    (tmp_path / "s" / "nearkin.json").unlink()
    before = objects(tmp_path / "s")
    with pytest.raises(Corrupt, match=r"nearkin\.json is lost; restore it from a copy"):
        open_store(tmp_path / "s", settings=settings(SMALL), create=True)
    assert objects(tmp_path / "s") == before


def test_lost_index_on_read_only_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the lost index if nothing can be written."""
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        store.put("k", b"content")
    shutil.rmtree(tmp_path / "s" / "index")
    refused = StoreUnavailable("s/lock: Read-only file system")
    monkeypatch.setattr(LocalIndex, "_lock_complete", lambda self: (_ for _ in ()).throw(refused))
    with open_store(tmp_path / "s", settings=settings(SMALL), read_only=True) as store:
        assert store.get("k").read() == b"content"
        with pytest.raises(StoreUnavailable, match=r"index of .*s is missing.* cannot be made: s/lock"):
            store.stats()


def test_foreign_folder_or_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(BadInput, match="not empty"):
        open_store(tmp_path, settings=settings(SMALL), create=True)
    with pytest.raises(BadInput, match="is a file"):
        open_store(tmp_path / "photo.jpg", settings=settings(SMALL), create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]
    with pytest.raises(NotFound, match="no store at"):
        open_store(tmp_path / "new", settings=settings(SMALL))
    assert not (tmp_path / "new").exists()


def test_store_made_by_many_at_once_is_one_store(tmp_path: Path) -> None:
    from threading import Barrier, Thread

    barrier, opened, errors = Barrier(8), [], []

    def make() -> None:
        barrier.wait()
        try:
            opened.append(open_store(tmp_path / "s", settings=settings(SMALL), create=True))
        except NearkinError as err:
            errors.append(err)

    threads = [Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    opened[0].put("k", CONTENT)
    assert {store.get("k").read() for store in opened} == {CONTENT}
