"""Test retention locally and over HTTP.

Deletions, refusals, and policies that `gc` applies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

import nearkin
from nearkin.store import Store, open_store
from nearkin.trees.backup_walk import BackupOptions
from nearkin_shared.config.storage import RetentionPolicy
from nearkin_shared.errors import BadInput, RetentionActive
from nearkin_shared.results import Damage
from nearkin_shared.retention import decisions, forget
from tests.support.checks.waiting import until
from tests.support.data.stores import SMALL, manifests, objects, settings
from tests.support.fakes.clock import DAY, Clock
from tests.support.servers.gateways import RunningGateway, embedded, running

START = datetime(2026, 11, 2, 6, tzinfo=UTC).timestamp()


@pytest.fixture
def clock() -> Clock:
    return Clock(START)


def open_retaining(root: Path, clock: Clock, **retention: object) -> Store:
    changes = {
        "retention": {"superseded_seconds": 0, **retention},
        "deletion": {"undelete_seconds": 2 * DAY},
        "gc": {"grace_seconds": DAY},
    }
    return open_store(root, settings=settings(SMALL, changes), clock=clock, create=True)


def fill(store: Store, clock: Clock) -> None:
    """Put two keys twice a day for six days."""
    for day in range(6):
        for hour in (1, 13):
            clock.now = START + day * DAY + hour * 3600
            for key in ("db/a", "web/a"):
                store.put(key, os.urandom(2000))
    clock.now = START + 6 * DAY


def listed(store: Store, prefix: str) -> list[int]:
    return [info.version for info in store.versions(prefix, all_versions=True)]


def test_unretained_versions_go_and_return(tmp_path: Path, clock: Clock) -> None:
    """Delete what no rule keeps, and undelete it."""
    with open_retaining(tmp_path / "s", clock) as store:
        fill(store, clock)
        policy = RetentionPolicy(keep_last=1, keep_daily=3)
        preview = store.forget("db/", policy, dry_run=True)
        assert listed(store, "db/") == list(range(1, 13))
        done = store.forget("db/", policy)
        assert listed(store, "db/") == [8, 10, 12]
        assert listed(store, "web/") == list(range(1, 13))
        assert {(d.info.version, d.kept) for d in preview} == {(d.info.version, d.kept) for d in done}
        assert store.undelete("db/a", 11) == 1
        assert store.forget("nothing/", policy) == []


def test_policy_applies_to_its_keys_only(tmp_path: Path, clock: Clock) -> None:
    """Keep all versions without a policy; apply one of the settings to its keys."""
    with open_retaining(tmp_path / "s", clock, policies=[{"prefix": "web/", "keep_last": 2}]) as store:
        fill(store, clock)
        store.forget()
        assert (listed(store, "db/"), listed(store, "web/")) == (list(range(1, 13)), [11, 12])


def test_key_with_a_damaged_version_loses_none(tmp_path: Path, clock: Clock) -> None:
    with open_retaining(tmp_path / "s", clock) as store:
        fill(store, clock)
        broken = manifests(tmp_path / "s")[3]
        broken.write_bytes(broken.read_bytes()[:-1])
        damages: list[Damage] = []
        done = store.forget("", RetentionPolicy(keep_last=1), broken=damages.append)
        (damaged,) = {key for damage in damages for key, _ in damage.versions}
        assert len({d.info.key for d in done if not d.kept}) == 1
        assert all(d.reasons == ("a version is damaged",) for d in done if d.info.key == damaged)


def test_too_recent_version_is_not_deleted(tmp_path: Path, clock: Clock) -> None:
    with open_retaining(tmp_path / "s", clock, policies=[{"prefix": "db/", "min_age_seconds": 3 * DAY}]) as store:
        fill(store, clock)
        with pytest.raises(RetentionActive, match="is kept until"):
            store.delete("db/a", 12)
        with pytest.raises(RetentionActive):
            store.delete("db/a")  # one of them is too recent: none is deleted
        assert len(listed(store, "db/")) == 12
        assert store.delete("db/a", 1) == 1
        assert store.delete("web/a") == 12
        done = store.forget("db/", RetentionPolicy(keep_last=1))
        assert [d.info.version for d in done if d.kept] == listed(store, "db/") == [7, 8, 9, 10, 11, 12]
        clock.now += 3 * DAY
        assert store.delete("db/a") == 6


def test_gc_run_applies_policies_of_all_tenants(tmp_path: Path, clock: Clock) -> None:
    """Apply the policies of all tenants in a GC run, and report the bytes."""
    root = tmp_path / "s"
    policies = [{"prefix": "web/", "keep_daily": 1}, {"tenant": "other", "keep_last": 1}]
    with open_retaining(root, clock, policies=policies) as store:
        fill(store, clock)
    other = settings(SMALL, {"tenant": "other"})
    with open_store(root, settings=other, clock=clock, create=True) as store:
        for number in range(3):
            store.put("x", bytes([number]))
    with open_retaining(root, clock, policies=policies) as store:
        for _ in range(8):
            preview, before = store.gc(dry_run=True), sum(map(len, objects(root).values()))
            done = store.gc()
            assert before - sum(map(len, objects(root).values())) == done.freed_bytes == preview.freed_bytes
            assert done.forgotten == preview.forgotten
            clock.now += DAY
        assert (listed(store, "db/"), listed(store, "web/")) == (list(range(1, 13)), [12])
        assert store.verify().damage == ()
    with open_store(root, settings=other, clock=clock, create=True) as store:
        assert listed(store, "x") == [3]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    changes = {"retention": {"policies": [{"prefix": "worm/", "min_age_seconds": 1000}]}}
    with running(embedded(tmp_path / "store", changes)) as found:
        yield found


def test_gateway_refuses_too_recent_deletion(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        client.put("/v1/blobs/worm/a", content=b"1")
        client.put("/v1/blobs/free", content=b"1")
        answer = client.delete("/v1/blobs/worm/a")
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:nearkin:problem:retained")
        assert "is kept until" in answer.json()["detail"]
        assert client.get("/v1/blobs/worm/a").content == b"1"
        assert client.delete("/v1/blobs/free").status_code == 204


def test_embedded_gateway_runs_gc_by_itself(tmp_path: Path) -> None:
    changes = {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0, "interval_seconds": 1}}
    with running(embedded(tmp_path / "store", changes)) as found, found.client() as client:
        client.put("/v1/blobs/gone", content=os.urandom(200_000))
        kept = os.urandom(50_000)
        client.put("/v1/blobs/kept", content=kept)
        client.delete("/v1/blobs/gone")
        until(lambda: sum(map(len, objects(tmp_path / "store").values())) <= 100_000)
        assert client.get("/v1/blobs/kept").content == kept
        assert client.put("/v1/blobs/gone", content=b"again").json()["version"] == 2


def test_client_forgets_by_the_servers_rules(gateway: RunningGateway) -> None:
    with nearkin.connect(gateway.url) as remote:
        for number in range(3):
            remote.put("worm/a", bytes([number]))
            remote.put("free/a", bytes([number]))
        with pytest.raises(RetentionActive):
            remote.delete("worm/a", 1)
        policy = RetentionPolicy(keep_last=1)
        found = list(decisions(remote.versions, "", lambda _: policy, lambda _: 0, time.time(), lambda _: None))
        done = forget(partial(remote.delete, reason="a test"), found)
        assert {d.info.key: d.reasons for d in done if d.info.version == 1} == {"worm/a": ("retained",), "free/a": ()}
        assert [(info.key, info.version) for info in remote.versions(all_versions=True)] == [
            ("free/a", 3),
            *(("worm/a", number) for number in (1, 2, 3)),
        ]


def test_command_shows_a_table_and_deletes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nearkin.cli", "--store", str(tmp_path / "s"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert run("init").returncode == 0
    for number in range(3):
        (tmp_path / "f").write_bytes(bytes([number]))
        assert run("put", "k", str(tmp_path / "f")).returncode == 0
    shown = run("forget", "--keep-last", "2", "--dry-run").stdout
    assert "would forget 1 version of 3" in shown
    assert [line.split()[0] for line in shown.splitlines() if " k " in line] == ["keep", "keep", "forget"]
    preview = json.loads(run("forget", "--keep-last", "2", "--json").stdout)
    assert [(entry["version"], entry["kept"]) for entry in preview["versions"]] == [(1, False), (2, True), (3, True)]
    assert len(json.loads(run("ls", "--versions", "--json").stdout)) == 2
    refused = run("forget", "--keep-within", "soon")
    assert (refused.returncode, "want a time" in refused.stderr) == (2, True)


def test_command_keeps_tagged_trees(tmp_path: Path) -> None:
    """Keep a tree by its tag, locally and through the same decisions of a client."""
    (tmp_path / "home").mkdir()
    with nearkin.open_store(tmp_path / "s", create=True) as store:
        for number, tags in enumerate([("release",), (), ("daily", "release"), ()]):
            (tmp_path / "home" / "f").write_text(str(number))
            store.backup("home", [tmp_path / "home"], options=BackupOptions(tags=tags))
    arguments = ["--store", str(tmp_path / "s"), "forget", "--keep-tag", "release", "--keep-last", "1", "--json"]
    command = [sys.executable, "-m", "nearkin.cli", *arguments]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert {entry["version"]: entry["reasons"] for entry in shown["versions"]} == {
        1: ["tag release"],
        2: [],
        3: ["tag release"],
        4: ["last"],
    }
    with nearkin.open_store(tmp_path / "s", read_only=True) as store:
        assert [info.version for info in store.versions("home", all_versions=True)] == [1, 3, 4]


def test_policies_are_the_servers_own(gateway: RunningGateway) -> None:
    from nearkin.cli.forget import forget_versions
    from nearkin.cli.key_patterns import KeyPattern
    from nearkin.cli.session import Session

    session = Session()
    session.server = gateway.url
    with pytest.raises(BadInput, match="say what to keep"):
        forget_versions(session, "", KeyPattern("", lambda _key: True), RetentionPolicy(), 0, dry_run=True)
