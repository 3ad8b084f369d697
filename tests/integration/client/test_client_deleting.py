"""A deletion whose answer is lost is done once."""

from __future__ import annotations

import pytest

from nearkin.client.sync import RemoteStore
from nearkin_shared.errors import AccessDenied, BadInput, NotFound
from tests.support.fakes.scripted_gateway import ScriptedGateway


@pytest.mark.parametrize("fault", ["lost-reply", "busy", "reset"])
def test_deletion_with_lost_response_is_done_once(store: RemoteStore, gateway: ScriptedGateway, fault: str) -> None:
    """Repeat a deletion whose response was lost; it happens once."""
    store.put("k", b"one")
    store.put("k", b"two")
    gateway.script(fault)
    assert store.delete("k", reason="täglich") == 2
    assert {entry.reason for entry in store.list_deleted()} == {"täglich"}
    keys = [headers["idempotency-key"] for method, _, headers in gateway.seen if method == "DELETE"]
    assert len(keys) == 2
    assert len(set(keys)) == 1
    with pytest.raises(NotFound):
        store.delete("k")
    gateway.script(fault)
    assert store.undelete("k") == 2
    assert store.get("k").read() == b"two"


def test_deletion_without_scope_is_denied(store: RemoteStore, gateway: ScriptedGateway) -> None:
    store.put("k", b"one")
    gateway.script("deny")
    with pytest.raises(AccessDenied):
        store.delete("k")
    with pytest.raises(BadInput):
        store.delete("k", 0)
    with pytest.raises(BadInput):
        store.delete("")
    assert store.get("k").read() == b"one"
