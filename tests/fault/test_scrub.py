"""Scrubbing: a pass reads all stored data, continues after a restart, keeps its rate, and handles damage."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin.store import Store
from nearkin_maintenance.verify.scrubber import BUSY_SHARE, ScrubStep
from nearkin_shared.errors import Corrupt, StoreUnavailable
from nearkin_shared.storage.scrub_progress import ScrubState, decode_state, encode_state
from tests.support.checks.waiting import until
from tests.support.data.stores import SMALL, containers, find_broken, flip, objects, settings
from tests.support.engines.bitflips import run
from tests.support.fakes.clock import DAY
from tests.support.servers.gateways import embedded, running

CHOSEN = settings(SMALL)
COVERED = settings(SMALL, {"storage": {"parity": "rs-8-2"}})
CONTENTS = {(f"k{number}", 1): random_bytes(120_000, number) for number in range(6)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        for (key, _), content in CONTENTS.items():
            store.put(key, content)
        store.delete("k5")
        store.undelete("k5")
    return root


def whole_pass(store: Store) -> list[ScrubStep]:
    """Do the steps of a pass; return them."""
    scrubber, steps = store.scrubber(), list[ScrubStep]()
    while not steps or not steps[-1].ended:
        steps.append(scrubber.step())
    return steps


def test_scrub_pass_reads_every_byte(root: Path) -> None:
    """A pass reads every byte of containers, manifests and tombstones."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        steps = whole_pass(store)
        stored = [name for name in objects(root) if not name.startswith("scrub/")]
        assert sum(step.read_bytes for step in steps) == sum(len(objects(root)[name]) for name in stored)
        assert sum(step.objects for step in steps) == len(stored) - 2  # all but descriptor and chunking record
        assert not any(step.damaged for step in steps)
        state = store.scrubber().state
        assert (state.running, state.ended_objects, state.ended_damaged) == (False, len(stored) - 2, 0)
        assert sum(store.stats().parts.values()) == sum(map(len, objects(root).values()))


def test_scrub_after_a_restart_continues_without_repetition(root: Path) -> None:
    """After a restart a pass continues at its position and repeats nothing."""
    count = len(containers(root))
    with open_store(root, settings=CHOSEN, create=True) as store:
        scrubber = store.scrubber()
        for _ in range(count // 2):
            scrubber.step()
        scrubber.save()
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.scrubber().state.read_objects == count // 2
        assert sum(step.objects for step in whole_pass(store)) == len(objects(root)) - 3 - count // 2
        assert store.scrubber().state.ended_objects == len(objects(root)) - 3


def test_scrub_with_lost_or_broken_state_begins_a_new_pass(root: Path) -> None:
    """A lost or broken state begins a new pass."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        whole_pass(store)
        (path,) = (root / "scrub").iterdir()
        flip(path, 40)
        assert store.scrubber().state == ScrubState()
        assert store.scrubber().waits_seconds() == 0.0
        whole_pass(store)
        assert len(list((root / "scrub").iterdir())) == 1


def test_scrub_steps_take_a_bounded_share_of_the_time(root: Path) -> None:
    """F.18: Many small objects, which are few bytes, do not keep a core busy while a gateway lists them."""
    chosen = settings(CHOSEN, {"scrub": {"rate_bytes": "1GiB"}})
    with open_store(root, settings=chosen, create=True) as store:
        scrubber = store.scrubber()
        scrubber.step()  # begins the pass, which is recorded durably
        started = time.monotonic()
        scrubber.step()
        took = time.monotonic() - started
        assert (scrubber.waits_seconds() or 0.0) >= 0.8 * took * (1 / BUSY_SHARE - 1)


def test_scrub_step_is_due_by_the_bytes_of_the_last(root: Path) -> None:
    """A step is due when its rate allows the bytes of the step before."""
    chosen = settings(CHOSEN, {"scrub": {"rate_bytes": 100_000}})
    with open_store(root, settings=chosen, create=True) as store:
        scrubber = store.scrubber()
        assert scrubber.waits_seconds() == 0.0
        started = time.monotonic()
        read_bytes = scrubber.step().read_bytes
        waits = scrubber.waits_seconds()
        elapsed = time.monotonic() - started
        assert waits is not None
        assert read_bytes / 100_000 - elapsed - 0.1 <= waits <= read_bytes / 100_000


@pytest.mark.parametrize("begun", [1795817040.5, 1795817039.6683779])
def test_scrub_pass_begins_when_due_and_never_at_zero_days(root: Path, begun: float) -> None:
    """The next pass begins when it is due, and never at zero days.

    Rounded to a microsecond, the second time is one later; that is not a wrong clock.
    """
    now = [begun]
    with open_store(root, settings=CHOSEN, clock=lambda: now[0], create=True) as store:
        whole_pass(store)
        scrubber = store.scrubber()
        assert scrubber.waits_seconds() == pytest.approx(30 * DAY, abs=60)
        now[0] += 31 * DAY
        assert scrubber.waits_seconds() == 0.0
        now[0] += 4000 * DAY  # a wrong clock
        whole_pass(store)
        now[0] -= 4000 * DAY
        scrubber = store.scrubber()
        assert scrubber.waits_seconds() == 0.0
        whole_pass(store)
        assert store.scrubber().waits_seconds() == pytest.approx(30 * DAY, abs=60)
    with open_store(root, settings=settings(CHOSEN, {"scrub": {"every_days": 0}}), create=True) as store:
        assert store.scrubber().waits_seconds() is None


@pytest.mark.parametrize("seed", range(4))
def test_scrub_names_damage_and_a_put_repairs_it(root: Path, seed: int) -> None:
    """Damage is named with its versions, and repaired when the content is put again."""
    draw = random.Random(seed)
    path = draw.choice(containers(root)[:-1])
    flip(path, draw.randrange(40, path.stat().st_size // 2))
    with open_store(root, settings=CHOSEN, create=True) as store:
        (found,) = [step for step in whole_pass(store) if step.damaged]
        assert list(found.damaged) == [str(path.relative_to(root))]
        harmed = find_broken(store, CONTENTS)
        repaired, left = store.attend(found)
        assert repaired == ()
        assert [set(damage.versions) for damage in left] == [harmed]
        assert harmed
        assert list(store._quarantine.read()) == [int(path.stem, 16)]
        for key, version in harmed:
            store.put(f"again {key}", CONTENTS[key, version])
        assert find_broken(store, CONTENTS) == set()
        assert store._quarantine.read() == {}
        assert not any(step.damaged for step in whole_pass(store))


@pytest.mark.parametrize("fails", ["attend", "save"])
def test_scrub_damage_not_handled_is_found_again(root: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage that could not be handled is found again by the next step."""
    flip(containers(root)[1], 60)
    rooms = iter([False])  # no room on the device at first, then enough

    def only_with_room(*_: object) -> None:
        if not next(rooms, True):
            raise StoreUnavailable("no room left on the device")

    with open_store(root, settings=CHOSEN, create=True) as store:
        scrubber, found = store.scrubber(), list[str]()
        scrubber.step()
        if fails == "save":
            monkeypatch.setattr(scrubber, "save", only_with_room)
        with pytest.raises(StoreUnavailable):
            scrubber.step(only_with_room if fails == "attend" else None)
        assert (scrubber.state.read_objects, scrubber.state.damaged_objects) == (1, 0)
        scrubber.step(lambda step: found.extend(step.damaged))
        assert found == [str(containers(root)[1].relative_to(root))]
        assert (scrubber.state.read_objects, scrubber.state.damaged_objects) == (2, 1)


def test_scrub_with_parity_repairs_and_adds_parity(root: Path) -> None:
    """With parity a scrub repairs damage and adds missing parity."""
    with open_store(root, settings=COVERED, create=True) as store:
        assert not any(step.damaged for step in whole_pass(store))
        before = {name: data for name, data in objects(root).items() if not name.startswith("scrub/")}
        assert len([name for name in before if name.startswith("parity/")]) == len(before) // 2
        bare = random.Random(3).sample([name for name in sorted(before) if not name.startswith("parity/")], 8)
        names = [*bare[:4], *(f"parity/{name}.nkp" for name in bare[4:])]
        for name in names:
            flip(root / name, len(before[name]) // 2)
        found = [step for step in whole_pass(store) if step.damaged]
        assert {name for step in found for name in step.damaged} == set(names)
        for step in found:
            _, left = store.attend(step)
        assert left == ()
        assert {name: data for name, data in objects(root).items() if not name.startswith("scrub/")} == before


def test_embedded_gateway_scrubs_reports_and_repairs(root: Path) -> None:
    """An embedded gateway scrubs by itself, reports its progress, and repairs."""
    path = containers(root)[1]
    chosen = embedded(root, {"storage": {"parity": "rs-8-2"}, "scrub": {"rate_bytes": "1GiB", "every_days": 1}})
    with open_store(root, settings=chosen, create=True) as store:
        assert store.repair().parity_added
    whole = path.read_bytes()
    flip(path, 60)
    with running(chosen) as gateway, gateway.client() as client:
        status: dict[str, Any] = {}

        def ended() -> bool:
            status.update(client.get("/v1/scrub").json())
            return status["last"] is not None

        until(ended, lambda: status)
        assert status["last"]["damaged"] == 1
        assert status["last"]["objects"] >= len(containers(root))
        assert status["running"] is None
        assert (status["every_days"], status["rate_bytes"], status["quarantined"]) == (1, 1 << 30, [])
        assert client.get("/v1/blobs/k1").content == CONTENTS["k1", 1]
    assert path.read_bytes() == whole


def test_scrub_state_round_trips_and_refuses_flipped_bits() -> None:
    """A state is read as written, and refused with any flipped bit."""
    state = ScrubState(7, 9, "manifests/a\0", 100, 3, 1, 5, 4, 3, 2)
    data = encode_state(state)
    assert decode_state(data, "s") == state
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode_state(bytes(changed), "s")


@pytest.mark.parametrize("parity", [pytest.param("none", marks=pytest.mark.soak), "rs-8-2"])
def test_flipped_bits_are_detected_and_repaired_with_parity(tmp_path: Path, parity: str) -> None:
    """Every flipped bit is detected, and repaired if there is parity."""
    result = run(70, seed=11, parity=parity, root=tmp_path / "store")
    assert result.missed == []
    assert len(result.by_kind) >= 5
    assert result.repaired >= (50 if parity != "none" else 0)


def test_descriptor_with_flipped_version_is_read_by_parity(root: Path) -> None:
    """A descriptor whose format version a flip increased is read through its parity."""
    with open_store(root, settings=COVERED, create=True) as store:
        store.repair()
    path = root / "nearkin.json"
    whole = path.read_bytes()
    flip(path, whole.index(b'"format_version": ') + len('"format_version": '), 3)
    assert b'"format_version": 9' in path.read_bytes()
    with open_store(root, settings=COVERED, create=True) as store:
        assert find_broken(store, CONTENTS) == set()
        assert [one.object_name for one in store.repair().repaired] == ["nearkin.json"]
    assert path.read_bytes() == whole
