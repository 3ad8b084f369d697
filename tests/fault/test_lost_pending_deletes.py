"""A lost pending-delete record, which has no parity: no data are lost, and its entries are found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.utils import failpoints
from tests.support.checks.gc_checks import COLLECTED
from tests.support.data.stores import find_broken, flip
from tests.support.fakes.clock import DAY, Clock


@pytest.mark.parametrize("died", [False, True], ids=["whole run", "died in between"])
@pytest.mark.parametrize("rebuilt", [False, True], ids=["index", "rebuilt index"])
@pytest.mark.parametrize("harm", ["flip", "delete"])
def test_lost_pending_delete_record_is_found_again(tmp_path: Path, harm: str, rebuilt: bool, died: bool) -> None:
    """Entries of a lost pending-delete record are found again, and data used meanwhile are kept."""
    clock, content, contents = Clock(), text_like(200_000, 1), dict[tuple[str, int], bytes]()
    with open_store(tmp_path / "s", settings=COLLECTED, clock=clock, create=True) as store:
        for number in range(1, 9):
            content = mutate(content, number, edits=40)
            store.put("k", content)
            contents["k", number] = content
        for number in range(1, 6):
            dead = contents.pop(("k", number))
            store.delete("k", number)
        clock.now += 8 * DAY
        store.gc()
        assert store.gc_state().pending_delete_containers
        clock.now += 2 * DAY
        if died:
            failpoints.arm("gc.container:1:error")
            try:
                with pytest.raises(StoreUnavailable):
                    store.gc()
            finally:
                failpoints.disarm()
        (record,) = (store.root / "gc").glob("*.nkg")
        flip(record, 40) if harm == "flip" else record.unlink()
        assert {damage.object_name.partition("/")[0] for damage in store.verify().damage} <= {"gc"}
        if rebuilt:
            assert store.rebuild_index().skipped == ()
        contents["again", 1] = dead  # a rebuilt index finds the data pending delete
        store.put("again", dead)
        freed_bytes = 0
        for _ in range(4):
            freed_bytes += store.gc().freed_bytes
            assert find_broken(store, contents) == set()
            clock.now += 2 * DAY
        assert freed_bytes > 0
        assert store.verify().damage == ()
