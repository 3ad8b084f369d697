"""Bad input: what is refused says why and leaves every object as it was; odd keys are kept and listed as they are."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from io import BytesIO
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.api import Store
from nearkin.errors import BadInput, FormatTooNew, NearkinError, NotFound
from nearkin.testing.generated import random_bytes
from nearkin.testing.stores import SMALL, objects, settings

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
def store(tmp_path):
    with open_store(tmp_path / "store", settings=settings(SMALL)) as opened:
        opened.put("there", CONTENT)
        yield opened


def assert_refused(store: Store, kind: type[NearkinError], says: str, attempt) -> None:
    before, versions = objects(store.root), store.versions(all_versions=True)
    with pytest.raises(kind, match=says) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    assert objects(store.root) == before
    assert store.versions(all_versions=True) == versions
    assert store.verify().damage == ()
    assert store.put("there", CONTENT).ledger.duplicate_chunks > 0  # and the store goes on


def test_odd_keys_are_kept_apart_and_listed_faithfully(store, tmp_path):
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
        assert name == "nearkin.json" or set(Path(name).stem) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("key", "says"),
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
def test_a_key_that_could_not_be_listed_faithfully_is_refused_everywhere(key, says, store):
    assert_refused(store, BadInput, says, lambda: store.put(key, b"x"))
    assert_refused(store, BadInput, says, lambda: list(store.put_many([("fine", b"y"), (key, b"x")])))
    assert_refused(store, BadInput, says, lambda: store.get(key))
    assert_refused(store, BadInput, says, lambda: store.info(key))
    assert_refused(store, BadInput, says, lambda: store.explain(key))
    assert_refused(store, NotFound, "fine", lambda: store.get("fine"))  # its group was not committed


@pytest.mark.parametrize(
    "metadata", [{"a": "x" * 70_000}, {"\ud800": "x"}, {"a": "\udc80"}], ids=["large", "bad-name", "bad-value"]
)
def test_metadata_that_could_not_be_kept_are_refused(metadata, store):
    assert_refused(store, BadInput, "metadata", lambda: store.put("k", b"x", metadata=metadata))


def test_metadata_come_back_as_they_were(store):
    metadata = {"Ω": "line\n\0", "": "empty name", "n": ""}
    store.put("k", b"x", metadata=metadata)
    assert store.info("k").metadata == metadata


def test_a_contradictory_sha256_stores_nothing(store):
    assert_refused(store, BadInput, "SHA-256", lambda: store.put("k", b"x", sha256=hashlib.sha256(b"y").digest()))
    assert_refused(store, BadInput, "SHA-256", lambda: store.put("k", b"x", sha256=b"short"))
    big = random_bytes(12_000_000, 5)
    with pytest.raises(BadInput, match="SHA-256"):  # more than a container: its chunks may be there, no version is
        store.put("k", big, sha256=bytes(32))
    with pytest.raises(NotFound):
        store.get("k")
    assert [info.key for info in store.versions()] == ["there"]
    ledger = store.stats().ledger
    assert min(getattr(ledger, name) for name in ledger.__slots__) >= 0
    assert store.put("k", big, sha256=hashlib.sha256(big).digest()).info.sha256 == hashlib.sha256(big).hexdigest()
    assert store.get("k").read() == big


def test_sources_that_are_no_files_are_refused(store, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "loop").symlink_to("loop")
    for path, says in [
        (tmp_path / "missing", "no such file"),
        (tmp_path, "not a regular file"),
        (fifo, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "loop", "loop"),
        (tmp_path / ("n" * 300), "nnn"),
    ]:
        assert_refused(store, BadInput, says, lambda path=path: store.put("k", path))


def test_a_source_that_fails_in_the_middle_stores_no_version(store):
    class Failing(BytesIO):
        def readinto(self, window):
            if self.tell() >= 3_000_000:
                raise OSError(5, "Input/output error")
            return super().readinto(memoryview(window)[:100_000])

    with pytest.raises(OSError, match="Input/output"):
        store.put("k", Failing(random_bytes(4_000_000)))
    with pytest.raises(NotFound):
        store.get("k")
    assert store.put("k", CONTENT).info.version == 1


def test_a_source_with_nothing_to_read_yet_is_refused_and_not_taken_for_ended(store):
    class Waiting(BytesIO):
        def readinto(self, window):
            return None

    assert_refused(store, BadInput, "non-blocking", lambda: store.put("k", Waiting(b"x")))


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, None), (0, -1), (50_001, None), (50_001, 50_002), (10, 9), (60_000, 10)]
)
def test_a_range_outside_is_refused(start, stop, store):
    assert_refused(store, BadInput, "50000 bytes", lambda: store.get("there", start=start, stop=stop))


@pytest.mark.parametrize("version", [0, -1, 1 << 64])
def test_a_version_that_cannot_be_is_refused(version, store):
    assert_refused(store, BadInput, "count from 1", lambda: store.get("there", version))


def test_what_is_not_there_is_not_found(store):
    assert_refused(store, NotFound, "nowhere", lambda: store.get("nowhere"))
    assert_refused(store, NotFound, "version 9", lambda: store.get("there", 9))


def test_an_unknown_tenant_sees_an_empty_store(store):
    store.close()
    with open_store(store.root, settings=settings(SMALL, {"tenant": "stranger"})) as other:
        assert other.versions() == []
        with pytest.raises(NotFound):
            other.get("there")


@pytest.mark.xfail(
    reason="verify takes another tenant's containers for damage and a rebuild leaves them out: one key is known"
)
def test_two_tenants_of_one_store_share_nothing_and_harm_nothing(tmp_path):
    chosen = {tenant: settings(SMALL, {"tenant": tenant}) for tenant in ("one", "other")}
    for tenant in ("one", "other", "one"):
        with open_store(tmp_path / "s", settings=chosen[tenant]) as store:
            put = store.put("k", CONTENT)
            assert (put.ledger.duplicate_chunks > 0) == (put.info.version == 2)
    for tenant in ("one", "other"):
        with open_store(tmp_path / "s", settings=chosen[tenant]) as store:
            assert store.get("k").read() == CONTENT
            assert store.verify().damage == ()
            assert store.rebuild_index().skipped == ()
    for tenant in ("one", "other"):
        with open_store(tmp_path / "s", settings=chosen[tenant]) as store:
            assert store.get("k").read() == CONTENT
            assert store.put("k", CONTENT).ledger.unique_bytes == 0


# ------------------------------------------------------------------ folders


def test_a_store_of_a_newer_format_is_refused_untouched(tmp_path):
    root = tmp_path / "s"
    open_store(root, settings=settings(SMALL)).close()
    fields = json.loads((root / "nearkin.json").read_bytes())
    (root / "nearkin.json").write_text(json.dumps({**fields, "format_version": 2, "what_comes": "later"}))
    before = objects(root)
    with pytest.raises(FormatTooNew, match=r"format 2.*up to 1"):
        open_store(root, settings=settings(SMALL))
    assert objects(root) == before


def test_a_foreign_folder_or_file_is_refused_untouched(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(BadInput, match="not empty"):
        open_store(tmp_path, settings=settings(SMALL))
    with pytest.raises(BadInput, match="is a file"):
        open_store(tmp_path / "photo.jpg", settings=settings(SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]
    with pytest.raises(NotFound, match="there is none"):
        open_store(tmp_path / "new", settings=settings(SMALL), create=False)
    assert not (tmp_path / "new").exists()


def test_a_store_made_by_many_at_once_is_one_store(tmp_path):
    from threading import Barrier, Thread

    barrier, opened, errors = Barrier(8), [], []

    def make() -> None:
        barrier.wait()
        try:
            opened.append(open_store(tmp_path / "s", settings=settings(SMALL)))
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
