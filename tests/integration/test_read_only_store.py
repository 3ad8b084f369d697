"""Test that a store opened with `read_only=True` refuses every call that changes data."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nearkin.store import Store, open_store
from nearkin_shared.errors import BadInput
from tests.support.data.stores import ENCRYPTED, SMALL, settings

WRITES: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("b", b"2"),
    "put_many": lambda store: list(store.put_many([("b", b"2")])),
    "delete": lambda store: store.delete("a"),
    "undelete": lambda store: store.undelete("gone"),
    "retain": lambda store: store.retain("a", datetime.now(UTC) + timedelta(days=1)),
    "forget": lambda store: store.forget(),
    "gc": lambda store: store.gc(),
    "purge": lambda store: store.purge(),
    "repair": lambda store: store.repair(),
    "rebuild_index": lambda store: store.rebuild_index(),
    "erase_tenant": lambda store: store.erase_tenant("default"),
    "pause": lambda store: store.pauses.pause("test"),
    "deletions": lambda store: store.deletions.delete("default", "a", undelete_seconds=60),
}


@pytest.mark.parametrize("call", WRITES.values(), ids=WRITES)
def test_read_only_store_refuses_writes(tmp_path: Path, call: Callable[[Store], object]) -> None:
    """A writing call raises before it changes anything; reading calls and dry runs work."""
    with open_store(tmp_path, settings=settings(SMALL), create=True) as store:
        for key in ("a", "gone"):
            store.put(key, b"1" * 10_000)
        store.delete("gone")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.nk*") if path.is_file()}
    with open_store(tmp_path, settings=settings(SMALL), read_only=True) as store:
        with pytest.raises(BadInput, match="read_only=True; open it without"):
            call(store)
        assert [info.key for info in store.versions()] == ["a"]
        assert store.get("a").read() == b"1" * 10_000
        store.gc(dry_run=True)
        assert [decision.info.key for decision in store.forget(dry_run=True)] == ["a"]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.nk*") if path.is_file()} == before


def test_read_only_store_refuses_new_keys(tmp_path: Path) -> None:
    """The keys of an encrypted store are listed, and neither rotated nor erased."""
    encrypted = settings({**SMALL, **ENCRYPTED})
    with open_store(tmp_path / "store", settings=encrypted, create=True) as store:
        store.put("a", b"1" * 10_000)
    with open_store(tmp_path / "store", settings=encrypted, read_only=True) as store:
        before = store.keyring.list_keys()
        for call in (store.keyring.rotate, lambda tenant: store.keyring.erase(tenant, 0)):
            with pytest.raises(BadInput, match="read_only=True; open it without"):
                call("default")
        assert store.keyring.list_keys() == before
        assert store.get("a").read() == b"1" * 10_000
