"""The comparison of a live index with a rebuilt one, in stores of every kind that the crash engine kills."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import IndexDamaged
from tests.support.checks.inspection import check_index_equals_a_rebuilt_one
from tests.support.data.stores import ENCRYPTED, settings
from tests.support.engines.crash import VARIANTS
from tests.support.engines.crash_child import CHOSEN
from tests.support.engines.model import Violation


@pytest.mark.parametrize("variant", VARIANTS, ids=range(len(VARIANTS)))
def test_rebuilt_index_of_each_variant_is_equal(tmp_path: Path, variant: Mapping[str, object]) -> None:
    """F.1: A rebuild makes the same entries, also where their values are encrypted under random nonces."""
    with open_store(tmp_path / "s", settings=settings(CHOSEN, variant), create=True) as store:
        first = random_bytes(200_000, 1)
        for content in (first, first[:100_000] + random_bytes(1000, 2) + first[100_000:]):
            store.put("k", content)
        store.put("other", b"content")
        store.delete("other")
        check_index_equals_a_rebuilt_one(store)


@pytest.mark.parametrize("variant", [{}, ENCRYPTED], ids=["plain", "sealed"])
def test_version_with_other_fields_is_a_violation(tmp_path: Path, variant: Mapping[str, object]) -> None:
    """F.1: The comparison detects a version whose fields differ from its manifest, encrypted or not."""
    with open_store(tmp_path / "s", settings=settings(CHOSEN, variant), create=True) as store:
        store.put("k", b"content")
        index = store._index.writable()
        names = index._names
        key = names.version_key("default", "k", 1)
        with index._writing() as txn:
            fields = names.decode(key, txn.get(key, db=index._versions))
            value = names.encode(key, {**fields, "manifest_bytes": fields["manifest_bytes"] + 1})
            txn.put(key, value, db=index._versions)
        with pytest.raises(Violation, match="table versions: 1 entries"):
            check_index_equals_a_rebuilt_one(store)


@pytest.mark.parametrize("variant", [{}, ENCRYPTED], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"unknown": 1},
        {"version": "1"},
        {"key": 1},
        {"manifest_bytes": 1.5},
        {"ledger": {"unknown": 1}},
        {"ledger": {"chunks": "1"}},
        {"listed": None},
    ],
    ids=str,
)
def test_version_with_fields_of_other_names_or_types_is_refused(
    tmp_path: Path,
    variant: Mapping[str, object],
    wrong: dict[str, object],
) -> None:
    """F.1: A listing refuses a version whose fields have other names or types, although its check is right."""
    with open_store(tmp_path / "s", settings=settings(CHOSEN, variant), create=True) as store:
        store.put("k", b"content")
        index = store._index.writable()
        names = index._names
        key = names.version_key("default", "k", 1)
        with index._writing() as txn:
            fields = names.decode(key, txn.get(key, db=index._versions))
            txn.put(key, names.encode(key, {**fields, **wrong}), db=index._versions)
        with pytest.raises(IndexDamaged, match="does not decode"):
            list(index.catalog_after("default", "", "", None))
        with pytest.raises(IndexDamaged, match="does not decode"):
            list(index.catalog("default"))
