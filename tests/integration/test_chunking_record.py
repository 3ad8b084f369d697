"""Test the store's chunking record.

Used by default, others refused or forced, damage named.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from nearkin import create_store, open_store
from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, Corrupt
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.storage import chunking_record
from tests.support.data.stores import SMALL, settings, stored_bytes

COARSE = {"chunker": {"min_bytes": 4096, "target_bytes": 16384, "max_bytes": 65536}}
FIXED = {"chunker": {"algorithm": "fixed"}}
CONTENT = b"".join(number.to_bytes(4, "big") for number in range(30_000))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a version that was cut coarsely."""
    with create_store(tmp_path / "store", settings=settings(COARSE)) as store:
        store.put("k", CONTENT)
    return tmp_path / "store"


def test_store_record_is_used_where_nothing_is_set(root: Path) -> None:
    """Write with the recorded settings if none are set: all chunks of a repeat are duplicates."""
    with open_store(root, settings=Settings()) as store:
        assert store.settings.chunker.target_bytes == 16384
        result = store.put("again", CONTENT + b"x")
        assert result.ledger.duplicate_chunks >= result.ledger.chunks - 1


def test_store_profile_is_used_where_none_is_set(tmp_path: Path) -> None:
    """The profile's other settings come with it, but for those that the caller sets."""
    create_store(tmp_path / "s", settings=load(None, {"profile": "archive"})[0]).close()
    with open_store(tmp_path / "s", settings=settings({"block": {"level": 5}})) as store:
        assert (store.settings.profile, store.settings.delta.max_depth, store.settings.block.level) == ("archive", 6, 5)
        assert store.settings.chunker.target_bytes == 32 * 1024


@pytest.mark.parametrize("force", [False, True])
def test_put_under_other_settings_needs_force(root: Path, caplog: pytest.LogCaptureFixture, force: bool) -> None:
    """Refuse other settings with both values and the remedy.

    Forced, warn of them and use them.
    """
    with open_store(root, settings=settings(COARSE, FIXED), force=force) as store:
        assert store.get("k").read() == CONTENT
        if force:
            store.put("other", CONTENT)
            assert "chunker.algorithm fixed: this store is written with chunker.algorithm leastcdc" in caplog.text
            return
        with pytest.raises(ConfigError, match=r"algorithm fixed: .* with chunker.algorithm leastcdc.*force=True"):
            store.put("other", CONTENT)
        assert [info.key for info in store.versions()] == ["k"]


def test_explicit_default_value_is_refused(root: Path) -> None:
    """With `explicit` a default value that the caller set counts as set."""
    names = {"chunker.target_bytes"}
    with (
        open_store(root, settings=Settings(), explicit=names) as store,
        pytest.raises(ConfigError, match=r"target_bytes 8192: .* chunker.target_bytes 16384"),
    ):
        store.put("other", CONTENT)


def test_store_without_record_gets_one_at_a_put(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read a store of an older release as before; record the first put's settings, once."""
    (root / chunking_record.NAME).unlink()
    with open_store(root, settings=settings(FIXED)) as store:
        assert store.get("k").read() == CONTENT
        assert not (root / chunking_record.NAME).exists()
        with caplog.at_level(logging.WARNING):
            store.put("a", CONTENT)
            store.put("b", CONTENT)
    assert caplog.text.count("recorded for later puts") == 1
    with open_store(root, settings=Settings()) as store:
        assert store.settings.chunker.algorithm == "fixed"
        assert store.stats().ledger.stored_bytes == stored_bytes(root)


def test_first_of_two_writers_makes_the_record(root: Path) -> None:
    """Create the record exclusively: the second process has to follow it."""
    (root / chunking_record.NAME).unlink()
    with open_store(root, settings=settings(FIXED)) as late:
        with open_store(root, settings=settings(COARSE)) as first:
            first.put("a", CONTENT)
        with pytest.raises(ConfigError, match="algorithm fixed"):
            late.put("b", CONTENT)


@pytest.mark.parametrize("encrypted", [False, True])
def test_damaged_record_is_named_and_stops_puts_alone(tmp_path: Path, encrypted: bool) -> None:
    """With a damaged or forged record reads go on, `verify` names it, and puts are refused."""
    chosen = settings(SMALL)
    if encrypted:
        key = "A" * 43 + "="
        chosen = settings(SMALL, {"storage": {"encryption": "aes-256-gcm", "key": key}})
    root = tmp_path / "store"
    with create_store(root, settings=chosen) as store:
        store.put("k", CONTENT)
        assert store.verify().damage == ()
    path = root / chunking_record.NAME
    sound = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(sound[:-20] + bytes([sound[-20] ^ 1]) + sound[-19:])
    with open_store(root, settings=chosen) as store:
        assert store.get("k").read() == CONTENT
        assert [one.object_name for one in store.verify().damage] == [chunking_record.NAME]
        with pytest.raises(Corrupt, match=chunking_record.NAME):
            store.put("other", CONTENT)


def test_record_is_not_forged_without_the_secret(root: Path) -> None:
    """A record with a valid check but without the store's MAC is not believed."""
    path = root / chunking_record.NAME
    path.chmod(0o600)
    path.write_bytes(chunking_record.encode_record(chunking_record.record_of(settings(FIXED)), bytes(32)))
    with open_store(root, settings=Settings()) as store, pytest.raises(Corrupt, match="not authenticated"):
        store.put("other", CONTENT)


def test_record_is_repaired_from_parity(tmp_path: Path) -> None:
    """The record has parity as the descriptor has: puts go on, `repair` restores it."""
    chosen = settings(COARSE, {"storage": {"parity": "rs-4-2"}})
    with create_store(tmp_path / "s", settings=chosen) as store:
        store.put("k", CONTENT)
    path = tmp_path / "s" / chunking_record.NAME
    sound = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(sound[:40] + b"?" + sound[41:])
    with open_store(tmp_path / "s", settings=chosen) as store:
        store.put("more", CONTENT)
        assert [one.object_name for one in store.repair().repaired] == [chunking_record.NAME]
    assert path.read_bytes() == sound


@pytest.mark.parametrize("changes", [FIXED, {"profile": "archive"}])
def test_service_under_other_settings_is_refused(root: Path, changes: dict[str, object]) -> None:
    """Refuse to start a service whose settings differ from the store's, unless allowed."""
    location = {"object_store": {"url": str(root)}}
    open_store_of(settings(COARSE, location))
    with pytest.raises(ConfigError, match=r"this store is written with .*storage.allow_other_chunking"):
        open_store_of(settings(COARSE, location, changes))
    open_store_of(settings(COARSE, location, changes, {"storage": {"allow_other_chunking": True}}))


def test_service_records_the_settings_of_a_new_store(tmp_path: Path) -> None:
    """The service that creates a store records its settings."""
    place = {"object_store": {"url": str(tmp_path / "s")}, "storage": {"create": True}}
    objects, _ = open_store_of(settings(COARSE, place))
    record = chunking_record.read_record(objects)
    assert record is not None
    assert record.chunker.target_bytes == 16384
    assert json.loads((tmp_path / "s" / chunking_record.NAME).read_bytes())["profile"] == "default"


def test_store_rules_are_recorded_and_used(tmp_path: Path) -> None:
    """Rules of the store apply wherever nothing else is set; others are refused with both values."""
    root = tmp_path / "store"
    create_store(root, settings=settings({"chunker": {"rules": "tar,media"}})).close()
    body = json.loads((root / chunking_record.NAME).read_bytes())
    assert (body["format_version"], body["chunker"]["rules"]) == (2, "media,tar")
    with open_store(root, settings=Settings()) as store:
        assert store.settings.chunker.rules == "media,tar"
    with (
        open_store(root, settings=settings({"chunker": {"rules": "all"}})) as store,
        pytest.raises(
            ConfigError, match=r"rules media,compressed.*: this store is written with chunker.rules media,tar"
        ),
    ):
        store.put("k", CONTENT)


def test_record_without_rules_is_that_of_older_releases(root: Path) -> None:
    """Version 1 and four settings: releases without rules go on writing to such a store."""
    body = json.loads((root / chunking_record.NAME).read_bytes())
    assert body["format_version"] == 1
    assert sorted(body["chunker"]) == ["algorithm", "max_bytes", "min_bytes", "target_bytes"]
