"""Test data keys: created once, rotated, rewrapped, erased.

And the state that a crash in between leaves.
"""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearkin_shared.crypto.key_wrapping import LocalKeys, key_id_of
from nearkin_shared.crypto.keyring import FRESH_SECONDS, NUMBERS_SKIPPED_MAX, Keyring
from nearkin_shared.errors import ConfigError, Corrupt, FormatTooNew, KeysLost, StoreUnavailable, TenantErased
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats import key_record as fmt
from nearkin_shared.formats.encrypted_object import STORE_OWNER
from nearkin_shared.formats.key_record import DataKey
from nearkin_shared.formats.parity_object import Scheme
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.factory import open_keyring
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.storage import descriptor
from tests.support.data.test_keys import KEY_ENCRYPTION_KEYS, MemoryKeys
from tests.support.fakes.faulty_objects import FaultyObjectStore

ONE, TWO, THREE = KEY_ENCRYPTION_KEYS
DB, WEB = domain_of("db"), domain_of("web")


def records(keys: MemoryKeys) -> list[str]:
    return sorted(name for name, _ in keys.below.names("keys"))


def test_each_domain_has_its_own_permanent_key() -> None:
    keys = MemoryKeys()
    found = [keys.keyring.newest(domain) for domain in (None, DB, WEB)]
    assert len({key.secret for key in found}) == 3
    again = keys.another()
    assert [again.newest(domain).secret for domain in (None, DB, WEB)] == [key.secret for key in found]
    for key in found:
        assert again.key(key.owner, key.number, "an object").secret == key.secret


def test_owner_names_are_opaque_without_the_store_key() -> None:
    keys, others, domain = MemoryKeys(), MemoryKeys(), domain_of("a-tenants-name")
    keys.keyring.check_tenant("a-tenants-name")
    key = keys.keyring.newest(domain)
    assert key.tenant == "a-tenants-name"
    assert key.owner != others.keyring.newest(domain).owner
    stored = b"".join(name.encode() + keys.below.get(name) for name in records(keys))
    for needle in (b"a-tenants-name", domain, key.secret, keys.keyring.newest(None).secret):
        for form in (needle, needle.hex().encode(), base64.b64encode(needle)):
            assert form not in stored


def test_concurrent_writers_of_the_first_key_share_it() -> None:
    keys = MemoryKeys()
    rings = [keys.another() for _ in range(6)]
    barrier = threading.Barrier(len(rings))

    def make(ring: Keyring) -> DataKey:
        barrier.wait(60)
        return ring.newest(DB)

    with ThreadPoolExecutor(len(rings)) as threads:
        made = list(threads.map(make, rings))
    for ring in rings:
        assert [ring.key(key.owner, key.number, "an object").secret for key in made] == [key.secret for key in made]


def test_rotated_key_is_used_by_others_within_a_minute() -> None:
    """New objects of the rotating process use it at once."""
    keys = MemoryKeys()
    other = keys.another()
    first = other.newest(DB)
    number = keys.keyring.rotate("db")
    assert first.number < number <= first.number + NUMBERS_SKIPPED_MAX
    second = keys.keyring.newest(DB)
    assert (second.number, second.tenant) == (number, "db")
    assert other.newest(DB).number == first.number
    assert other.key(second.owner, number, "an object").secret == second.secret  # a read looks the key up at once
    keys.clock.now += FRESH_SECONDS + 1
    assert other.newest(DB).number == number
    assert other.key(first.owner, first.number, "an object").secret == first.secret
    assert keys.keyring.rotate(None) > 1
    assert keys.keyring.owner_of(DB) == first.owner  # owners are still named with the store's first key


def test_missing_key_is_damage_and_named() -> None:
    keys = MemoryKeys()
    with pytest.raises(Corrupt, match=r"an object: encrypted by key 7 of 00000000"):
        keys.keyring.key(STORE_OWNER, 7, "an object")
    keys.keyring.check_tenant("db")
    with pytest.raises(Corrupt, match=r"encrypted by key 7 of [0-9a-f]{32} \(tenant 'db'\), which is not in keys/"):
        keys.keyring.key(keys.keyring.owner_of(DB), 7, "an object")


def test_holder_of_lost_keys_creates_no_other() -> None:
    """A process that knew an owner's keys must not replace them."""
    keys = MemoryKeys()
    keys.keyring.check_tenant("db")
    secret = keys.keyring.newest(DB).secret
    lost = {name: keys.below.get(name) for name in records(keys) if keys.keyring.owner_of(DB).hex() in name}
    for name in lost:
        keys.below.delete(name)
    assert keys.keyring.newest(DB).secret == secret  # for a minute
    keys.clock.now += FRESH_SECONDS + 1
    for _ in range(2):
        with pytest.raises(KeysLost, match=r"keys/[0-9a-f]{32}: the data keys of tenant 'db' are missing.*from a copy"):
            keys.keyring.newest(DB)
    assert len(records(keys)) == 1
    for name, data in lost.items():
        keys.below.put_new(name, data)
    assert keys.keyring.newest(DB).secret == secret  # at once


def test_first_key_of_another_process_is_not_lost() -> None:
    """It was created after this process listed the keys."""
    keys = MemoryKeys()
    other = keys.another()
    other.check_not_lost("db", lambda: False)
    keys.keyring.newest(DB)
    other.check_not_lost("db", lambda: True)


def test_data_keys_are_rewrapped_without_change() -> None:
    keys = MemoryKeys()
    before = [keys.keyring.newest(domain).secret for domain in (None, DB, WEB)]
    both = keys.another((TWO, ONE))
    assert both.rewrap() == 3
    assert both.rewrap() == 0
    new = keys.another((TWO,))
    assert [new.newest(domain).secret for domain in (None, DB, WEB)] == before
    assert {key.wrapped_by for key in new.list_keys()} == {key_id_of(TWO)}
    assert all(name.endswith(".0001.nkk") for name in records(keys))
    with pytest.raises(ConfigError, match=key_id_of(TWO)):
        keys.another((ONE,)).newest(None)


@pytest.mark.parametrize("script", ["E", "L", ".E", ".L", "..E", "..L", "...E", "....L"])
def test_interrupted_rewrap_is_completed_by_the_next(script: str) -> None:
    keys = MemoryKeys()
    before = [keys.keyring.newest(domain).secret for domain in (None, DB)]
    faulty = FaultyObjectStore(keys.below, script)
    with pytest.raises(StoreUnavailable):
        keys.another((TWO, ONE), faulty).rewrap()
    assert faulty.spent
    both = keys.another((TWO, ONE))
    assert [both.newest(domain).secret for domain in (None, DB)] == before
    both.rewrap()
    assert [keys.another((TWO,)).newest(domain).secret for domain in (None, DB)] == before
    assert len(records(keys)) == 2


def test_erased_keys_are_unusable_within_a_minute() -> None:
    """Each process forgets them; keys of other tenants stay."""
    keys = MemoryKeys()
    other = keys.another()
    db, web = other.newest(DB), other.newest(WEB)
    keys.keyring.rotate("db")
    assert keys.keyring.erase("db") == 2
    for ask in (
        lambda ring: ring.newest(DB),
        lambda ring: ring.key(db.owner, db.number, "an object"),
        lambda ring: ring.rotate("db"),
        lambda ring: ring.check_tenant("db"),
    ):
        for ring in (keys.keyring, keys.another()):
            with pytest.raises(TenantErased):
                ask(ring)
    with pytest.raises(TenantErased, match="tenant 'db': its keys were erased at 2025-11-24T16:00:00Z"):
        keys.keyring.check_tenant("db")
    keys.clock.now += FRESH_SECONDS + 1
    with pytest.raises(TenantErased):
        other.key(db.owner, db.number, "an object")
    assert other.newest(WEB).secret == web.secret
    assert db.owner.hex() not in " ".join(name for name in records(keys) if name.endswith(".nkk"))
    assert keys.keyring.unswept() == {db.owner}


@pytest.mark.parametrize("script", ["E", "L", ".E", ".L", "..E", "..L", "...E", "...L", "....E", "....L"])
def test_interrupted_erasure_changed_nothing_or_reads_fail(script: str) -> None:
    keys = MemoryKeys()
    keys.keyring.newest(DB)
    faulty = FaultyObjectStore(keys.below, script)
    with pytest.raises(StoreUnavailable):
        keys.another(objects=faulty).erase("db")
    fresh = keys.another()
    if len(script) < 3 or script == "..E":  # the erasure epoch is written before the record
        fresh.check_tenant("db")
    else:
        with pytest.raises(TenantErased):
            fresh.newest(DB)
    fresh.erase("db")
    assert [name for name in records(keys) if keys.keyring.owner_of(DB).hex() in name] == [
        fmt.erased_name(keys.keyring.owner_of(DB))
    ]


@pytest.mark.parametrize("erased_us", [float("inf"), 1e300, 253_402_300_800_000_000, -(1 << 63), "soon", None])
def test_erasure_record_of_no_time_blocks_its_owner(erased_us: object) -> None:
    """F.22: an authenticated record that does not parse erases nothing."""
    keys = MemoryKeys()
    owner = keys.keyring.newest(DB).owner
    data = fmt.encode_erased(owner, erased_us, 0, keys.keyring._record_key())  # type: ignore[arg-type]
    keys.below.put_new(fmt.erased_name(owner), data)
    with pytest.raises(Corrupt, match="not the record of an erasure"):
        keys.another().newest(DB)
    assert [name for name in records(keys) if name.startswith(f"keys/{owner.hex()}/")]


def test_key_created_during_an_erasure_is_removed() -> None:
    keys = MemoryKeys()
    eraser = keys.another()

    class Slow(FaultyObjectStore):
        def put_new(self, name: str, *parts: bytes | memoryview) -> None:
            if name.endswith(".nkk"):
                eraser.erase("db")
            super().put_new(name, *parts)

    late = keys.another(objects=Slow(keys.below, ""))
    with pytest.raises(TenantErased):
        late.newest(DB)
    assert not [name for name in records(keys) if name.startswith(f"keys/{keys.keyring.owner_of(DB).hex()}")]


def test_parity_does_not_restore_an_erased_key() -> None:
    below = memory_objects()
    wrapper = LocalKeys([ONE], "here")
    covered = ParityObjectStore(below, Scheme(4, 2))
    keyring = open_keyring(covered, wrapper)
    owner = keyring.newest(DB).owner
    assert list(below.names(f"parity/keys/{owner.hex()}"))
    open_keyring(ParityObjectStore(below, None), wrapper).erase("db")  # by a process that writes no parity
    assert not list(below.names(f"parity/keys/{owner.hex()}"))
    assert not list(below.names(f"keys/{owner.hex()}"))


def test_damaged_key_is_read_by_its_parity() -> None:
    below = memory_objects()
    wrapper = LocalKeys([ONE], "here")
    secret = open_keyring(ParityObjectStore(below, Scheme(4, 2)), wrapper).newest(DB).secret
    for name in [name for name, _ in below.names("keys")]:
        data = bytearray(below.get(name))
        data[len(data) // 2] ^= 4
        below.replace(name, bytes(data))
    fresh = open_keyring(ParityObjectStore(below, None), wrapper)
    assert fresh.newest(DB).secret == secret
    assert len(fresh.problems()) == 2


def test_each_flipped_bit_of_a_record_is_detected() -> None:
    keys = MemoryKeys()
    keys.keyring.newest(DB)
    (name,) = [name for name in records(keys) if not name.startswith(f"keys/{STORE_OWNER.hex()}")]
    sound = keys.below.get(name)
    wrapped = fmt.decode_key(sound, name)
    for at in range(len(sound)):
        for bit in range(8):
            data = bytearray(sound)
            data[at] ^= 1 << bit
            try:
                found = fmt.decode_key(bytes(data), name)
            except (Corrupt, FormatTooNew):
                continue
            assert found == wrapped  # white space, or a letter's case in an escape: an equal record


def test_store_opens_with_its_existing_keys() -> None:
    wrapper = LocalKeys([ONE], "here")
    clear, below = ParityObjectStore(memory_objects(), None), ParityObjectStore(memory_objects(), None)
    descriptor.create(clear)
    with pytest.raises(ConfigError, match="is not encrypted"):
        open_keyring(clear, wrapper)
    descriptor.create(EncryptedObjectStore(below.inner, None, open_keyring(below, wrapper)))
    with pytest.raises(ConfigError, match="this store is encrypted: set storage"):
        descriptor.read(below)
    with pytest.raises(ConfigError, match=f"{key_id_of(ONE)}.*{key_id_of(TWO)}"):
        open_keyring(below, LocalKeys([TWO], "here"))
    for name, _ in list(below.names("keys")):
        below.delete(name)
    with pytest.raises(Corrupt, match="the keys of this store are missing"):
        open_keyring(below, wrapper)


def test_repr_of_keys_holds_no_secret() -> None:
    keys = MemoryKeys()
    key = keys.keyring.newest(DB)
    for text in (repr(key), repr(keys.keyring), repr(keys.keyring.list_keys())):
        assert key.secret.hex() not in text
        assert repr(key.secret) not in text
