"""Power cuts of records that no put writes: every prefix and world of keys, pauses, progress, tokens and uploads."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nearkin_gateway.auth import tokens
from nearkin_gateway.uploads.resumable_store import Meta, Resumable, StagedUpload, UploadOutcome
from nearkin_shared.crypto.key_wrapping import LocalKeys, generate, key_id_of, keys_in
from nearkin_shared.crypto.keyring import Keyring
from nearkin_shared.errors import NotFound, TenantErased
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats.parity_object import scheme_of
from nearkin_shared.objectstore import local as objectstore_base
from nearkin_shared.objectstore.factory import as_set
from nearkin_shared.objectstore.group_put import put_new_many
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.scrub_progress import ScrubState, ScrubStates
from nearkin_shared.utils import durable_files
from tests.support.data.stores import ENCRYPTED, settings
from tests.support.data.test_keys import KEY_ENCRYPTION_KEYS
from tests.support.engines.model import Violation
from tests.support.engines.power_cut_records import Action, RecordWorkload, Results, explore_records

NOW = 1_764_000_000.0
GRACE_SECONDS = 600
OLD, NEW = KEY_ENCRYPTION_KEYS[:2]
WHOLE = b"0123456789" * 300
CUT = 1300
"""Offset of the second part of a staged upload."""


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory if there is one: the disk is simulated."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="nearkin-", dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


# --- keys -------------------------------------------------------------------------------------------------------------


class KeyActions:
    """Actions on the keys of two tenants, with or without parity of the records."""

    def __init__(self, parity: str) -> None:
        self._scheme = scheme_of(parity)
        self._secrets: dict[tuple[str, int], bytes] = {}
        self._first: dict[str, list[int]] = {}

    def opened(self, root: Path, *keks: bytes, now: float = NOW) -> Keyring:
        """Return the keyring of a separate process."""
        objects = ParityObjectStore(LocalObjectStore(root), self._scheme)
        return Keyring(objects, LocalKeys(keks or (NEW, OLD), "the test's keys"), lambda: 0.0, lambda: now)

    def prepare(self, root: Path) -> None:
        """Make the store's key and the first keys of two tenants."""
        keyring = self.opened(root, OLD)
        keyring.make_store_key()
        self._first = {tenant: [self._note(tenant, keyring)] for tenant in ("db", "web")}

    def _note(self, tenant: str, keyring: Keyring) -> int:
        key = keyring.newest(domain_of(tenant))
        self._secrets[tenant, key.number] = key.secret
        return key.number

    def rotate(self, root: Path, _: Results) -> int:
        """Make a new key for a tenant."""
        keyring = self.opened(root, OLD)
        keyring.rotate("db")
        return self._note("db", keyring)

    def make_first(self, root: Path, _: Results) -> int:
        """Make the first key of a tenant that has none."""
        return self._note("new", self.opened(root, OLD))

    def rewrap(self, root: Path, _: Results) -> int:
        """Wrap all keys with a new key-encryption key."""
        return self.opened(root, NEW, OLD).rewrap()

    def close(self, root: Path, _: Results) -> int:
        """Erase a tenant after a grace."""
        return self.opened(root).erase("db", GRACE_SECONDS)

    def erase(self, root: Path, _: Results) -> int:
        """Erase a tenant now."""
        return self.opened(root).erase("db")

    def cancel(self, root: Path, _: Results) -> None:
        """Cancel an erasure in its grace; a repetition is allowed."""
        with suppress(NotFound):
            self.opened(root).cancel_erasure("db")

    def finish(self, root: Path, _: Results) -> int:
        """Remove the keys of erasures whose grace is over."""
        return len(self.opened(root, now=NOW + GRACE_SECONDS + 1).finish_erasures())

    def check_readable(self, root: Path, tenant: str, keyring: Keyring, numbers: list[object]) -> None:
        """Compare the acknowledged keys of a tenant with their values at creation."""
        owner = keyring.owner_of(domain_of(tenant))
        for number in [*self._first.get(tenant, []), *numbers]:
            assert isinstance(number, int)
            assert keyring.key(owner, number, "an object").secret == self._secrets[tenant, number], f"{tenant} {number}"

    def check_erased(self, root: Path, *, removed: bool) -> None:
        """Require that a tenant is closed, and its keys and their parity removed."""
        keyring = self.opened(root)
        assert keyring.is_closed("db")
        with suppress(TenantErased):
            raise Violation(f"an erased tenant has key {keyring.newest(domain_of('db')).number}")
        if removed:
            owner = keyring.owner_of(domain_of("db")).hex()
            left = [name for folder in ("keys", "parity/keys") for name, _ in LocalObjectStore(root).names(folder)]
            assert not [name for name in left if owner in name and "erased" not in name]

    def check_rotated(self, root: Path, done: Results, begun: str | None) -> None:
        """Require every key that was acknowledged, under its key-encryption keys."""
        keyring = self.opened(root, NEW) if "rewrap" in done else self.opened(root)
        assert keyring.has_store_key
        self.check_readable(root, "web", keyring, [])
        self.check_readable(root, "db", keyring, [done[name] for name in ("rotate", "again") if name in done])
        if "first" in done:
            self.check_readable(root, "new", keyring, [done["first"]])
        for name in ("again", "rotate"):
            if name in done:
                newest = keyring.newest(domain_of("db")).number
                assert newest == done[name] or (begun == "again" and newest > int(str(done[name])))
                break
        assert not keyring.problems()

    def check_closed(self, root: Path, done: Results, begun: str | None) -> None:
        """Require that an acknowledged erasure holds, and all data of the other tenant."""
        keyring = self.opened(root)
        self.check_readable(root, "web", keyring, [])
        ended = "erase" in done or "finish" in done
        closed = "close again" in done or ("close" in done and "cancel" not in done and begun != "cancel")
        if ended or closed:
            self.check_erased(root, removed=ended)
        elif begun is None:
            self.check_readable(root, "db", keyring, [])
        else:  # either outcome, but no intermediate one
            with suppress(TenantErased):
                self.check_readable(root, "db", keyring, [])

    def workload(self, check: str, **actions: str) -> RecordWorkload:
        """Return a workload of some of the actions."""
        named: dict[str, Action] = {name.replace("_", " "): getattr(self, action) for name, action in actions.items()}
        return RecordWorkload(named, getattr(self, check), self.prepare)


KEY_WORKLOADS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "rotation": ("check_rotated", {"rotate": "rotate", "first": "make_first", "again": "rotate"}),
    "rewrap": ("check_rotated", {"rotate": "rotate", "rewrap": "rewrap"}),
    "erasure": ("check_closed", {"erase": "erase"}),
    "erasure with a grace": (
        "check_closed",
        {"close": "close", "cancel": "cancel", "close_again": "close", "finish": "finish"},
    ),
    "erasure before its grace is over": ("check_closed", {"close": "close", "erase": "erase"}),
}


def key_workload(name: str, parity: str) -> RecordWorkload:
    check, actions = KEY_WORKLOADS[name]
    return KeyActions(parity).workload(check, **actions)


# --- pauses and progress ----------------------------------------------------------------------------------------------


def check_pause(root: Path, done: Results, begun: str | None) -> None:
    found = GcPauseFlag(LocalObjectStore(root)).read()
    paused = ("pause" in done and "resume" not in done) or "pause again" in done
    if begun is None:
        assert (found is not None) == paused
    assert found is None or found.who == "me"


PAUSES = RecordWorkload(
    {
        "pause": lambda root, _: GcPauseFlag(LocalObjectStore(root)).pause("me"),
        "resume": lambda root, _: GcPauseFlag(LocalObjectStore(root)).resume(),
        "pause again": lambda root, _: GcPauseFlag(LocalObjectStore(root)).pause("me"),
    },
    check_pause,
)


def write_progress(number: int) -> Action:
    return lambda root, _: ScrubStates(LocalObjectStore(root)).write(ScrubState(begun_us=number))


def check_progress(root: Path, done: Results, begun: str | None) -> None:
    found = ScrubStates(LocalObjectStore(root)).read().begun_us
    assert found == len(done) or (begun is not None and found == len(done) + 1)


PROGRESS = RecordWorkload({str(number): write_progress(number) for number in (1, 2, 3)}, check_progress)


# --- tokens and key files ---------------------------------------------------------------------------------------------


def create_token(note: str) -> Action:
    return lambda root, _: tokens.create(root / "etc" / "tokens.json", "db", ["read"], note=note)


def revoke_token(root: Path, done: Results) -> None:
    first = done["create"]
    assert isinstance(first, tuple)
    with suppress(NotFound):
        tokens.revoke(root / "etc" / "tokens.json", first[1].id)


def check_tokens(root: Path, done: Results, begun: str | None) -> None:
    path = root / "etc" / "tokens.json"
    found = tokens.read_tokens(path) if done or path.exists() else []
    revoked = {"create"} if "revoke" in {begun, *done} else set()
    for name, made in done.items():
        if isinstance(made, tuple) and name not in revoked:
            assert made[1] in found, f"the {name} token was lost"
            assert tokens.TokenFile(path).find(made[0]) == made[1]
        elif "revoke" in done and isinstance(made, tuple):
            assert made[1] not in found, "a revoked token is back"


TOKENS = RecordWorkload(
    {"create": create_token("create"), "second": create_token("second"), "revoke": revoke_token}, check_tokens
)


def generate_key(root: Path, _: Results) -> str:
    return generate(root / "kek")


def check_key_file(root: Path, done: Results, _: str | None) -> None:
    path = root / "kek"
    assert path.exists() or not done, "the key file was lost"
    found = [key_id_of(key) for key in keys_in(path.read_text(), "kek")] if path.exists() else []
    for name, number in done.items():
        assert number in found, f"the {name} key was lost"


KEY_FILE = RecordWorkload({"first": generate_key, "second": generate_key, "third": generate_key}, check_key_file)


# --- staged uploads ---------------------------------------------------------------------------------------------------


class UploadActions:
    """Actions on a resumable upload of an embedded gateway's store, and on one that concatenates two."""

    def __init__(self, changes: Mapping[str, Mapping[str, object]]) -> None:
        self._settings = settings(changes)

    def opened(self, root: Path) -> Resumable:
        return Resumable(as_set(LocalObjectStore(root), self._settings), 100)

    def prepare(self, root: Path) -> None:
        """Make the keys of an encrypted store."""
        self.opened(root).create(self.meta())

    @staticmethod
    def meta(**more: Any) -> Meta:
        now_us = time.time_ns() // 1000
        event = {"length_bytes": len(WHOLE), "created_us": now_us, "expires_us": now_us + 3_600_000_000}
        return Meta(tenant="default", key="k", **{**event, **more})

    def create(self, root: Path, _: Results) -> str:
        return self.opened(root).create(self.meta())

    def create_partial(self, root: Path, _: Results) -> str:
        return self.opened(root).create(self.meta(partial=True, length_bytes=CUT))

    def _stage(self, root: Path, number: object, data: bytes) -> int:
        """Stage a part at the offset that HEAD reports; the offset after it is acknowledged."""
        resumable = self.opened(root)
        offset = resumable.load("default", str(number)).offset
        if offset < len(data):
            resumable.stage(str(number), offset, data[offset:], tenant="default")
        return len(data)

    def stage_first(self, root: Path, done: Results) -> int:
        return self._stage(root, done["create"], WHOLE[:CUT])

    def stage_second(self, root: Path, done: Results) -> int:
        return self._stage(root, done["create"], WHOLE)

    def finish(self, root: Path, done: Results) -> UploadOutcome:
        resumable = self.opened(root)
        return resumable.finish(resumable.load("default", str(done["create"])), UploadOutcome("ab" * 16))

    def remove(self, root: Path, done: Results) -> None:
        self.opened(root).remove(str(done["create"]))

    def create_final(self, root: Path, done: Results) -> StagedUpload:
        sources = (str(done["partial"]), str(done["create"]))
        meta = self.meta(sources=sources, length_bytes=CUT + len(WHOLE))
        return self.opened(root).create_final("f" * 32, meta)

    def stage_partial(self, root: Path, done: Results) -> int:
        return self._stage(root, done["partial"], WHOLE[:CUT])

    def finish_final(self, root: Path, _: Results) -> UploadOutcome:
        resumable = self.opened(root)
        return resumable.finish(resumable.load("default", "f" * 32), UploadOutcome("ab" * 16))

    def check(self, root: Path, done: Results, begun: str | None) -> None:
        """Require every byte whose offset was acknowledged, and the acknowledged outcome."""
        resumable = self.opened(root)
        if "create" not in done or begun == "remove" or "finish final" in {begun, *done}:
            return
        number = str(done["create"])
        if "remove" in done:
            with suppress(NotFound):
                raise Violation(f"a removed upload is there: {resumable.load('default', number)}")
            return
        staged = resumable.load("default", number)
        if staged.done is not None:
            assert {"finish", begun} & {"finish", *done} == {"finish"} or begun == "finish"
            return
        assert "finish" not in done
        offset = max((int(str(done[name])) for name in ("first", "second") if name in done), default=0)
        assert staged.offset >= offset
        assert b"".join(resumable.read(staged)) == WHOLE[: staged.offset]

    def check_final(self, root: Path, done: Results, begun: str | None) -> None:
        """Require the content of a final upload whose creation was acknowledged, and its outcome."""
        self.check(root, done, begun)
        if "final" not in done:
            return
        staged = self.opened(root).load("default", "f" * 32)
        if staged.done is None:
            assert "finish final" not in done
            assert b"".join(self.opened(root).read(staged)) == WHOLE[:CUT] + WHOLE
        else:
            assert "finish final" in {begun, *done}

    def workload(self) -> RecordWorkload:
        actions = {
            "create": self.create,
            "first": self.stage_first,
            "second": self.stage_second,
            "finish": self.finish,
            "remove": self.remove,
        }
        return RecordWorkload(actions, self.check, self.prepare)

    def concatenation(self) -> RecordWorkload:
        actions = {
            "create": self.create_partial_whole,
            "second": self.stage_second,
            "partial": self.create_partial,
            "partial staged": self.stage_partial,
            "final": self.create_final,
            "finish final": self.finish_final,
        }
        return RecordWorkload(actions, self.check_final, self.prepare)

    def create_partial_whole(self, root: Path, _: Results) -> str:
        return self.opened(root).create(self.meta(partial=True))


# --- groups of new objects -------------------------------------------------------------------------------------------

GROUPS = {name: [(f"manifests/{key:02x}/{name}{key}/0001.nkm", name.encode() * 400) for key in (1, 2)] for name in "ab"}
"""Each group makes the folder of a key in a folder that another group uses, too."""


def put_group(root: Path, name: str) -> list[bool]:
    with ThreadPoolExecutor(1) as threads:  # one: the order of the recorded steps is that of the objects
        return put_new_many(LocalObjectStore(root), GROUPS[name], threads)


def check_groups(root: Path, done: Results, begun: str | None) -> None:
    """Check that each object of an acknowledged group is whole, and each of an interrupted one whole or not there."""
    objects = LocalObjectStore(root)
    for name in (*done, *([begun] if begun is not None else [])):
        for path, data in GROUPS[name]:
            try:
                assert objects.get(path) == data, path
            except NotFound:
                assert name not in done, path


GROUP_PUTS = RecordWorkload(
    {"a": lambda root, _: put_group(root, "a"), "b": lambda root, _: put_group(root, "b")}, check_groups
)

# --- tests ------------------------------------------------------------------------------------------------------------

WORKLOADS: Mapping[str, RecordWorkload] = {
    **{name: key_workload(name, "none") for name in KEY_WORKLOADS},
    **{f"{name}, parity": key_workload(name, "rs-4-2") for name in KEY_WORKLOADS},
    "pauses": PAUSES,
    "progress": PROGRESS,
    "tokens": TOKENS,
    "key file": KEY_FILE,
    "uploads": UploadActions({}).workload(),
    "uploads, sealed": UploadActions(ENCRYPTED).workload(),
    "concatenation": UploadActions({}).concatenation(),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_power_cut_keeps_acknowledged_records(memory_folder: Path, name: str) -> None:
    """F.32: After a power cut each acknowledged record holds, and the interrupted action can be repeated."""
    explored = explore_records(memory_folder, WORKLOADS[name])
    assert explored.prefixes > 12
    assert explored.worlds > 4


@pytest.mark.parametrize("name", WORKLOADS)
def test_unsynced_record_names_are_found(memory_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.32: The engine finds a planted mistake: folders are not synced after a record was written or removed."""
    for module in (objectstore_base, durable_files):
        monkeypatch.setattr(module, "sync_folder", lambda _: None)
    with pytest.raises(Violation, match="power cut after step"):
        explore_records(memory_folder, WORKLOADS[name])


def test_cut_during_a_group_of_new_objects(memory_folder: Path) -> None:
    """The manifests of a batch are whole once their group is acknowledged, and never there in part."""
    explored = explore_records(memory_folder, GROUP_PUTS)
    assert explored.prefixes > 20
    assert explored.worlds > 8
