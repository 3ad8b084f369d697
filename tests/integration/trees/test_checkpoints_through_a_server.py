"""Checkpoints of backups through a real gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from blake3 import blake3

import nearkin
from nearkin.client.streaming import Upload
from nearkin.client.sync import RemoteStore
from nearkin.trees import checkpoint_schedule, checkpointed_tree, tree_sinks, tree_writer
from nearkin.trees.backup import TreeBackup
from nearkin.trees.backup_walk import BackupCounts, BackupOptions
from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_shared.errors import AccessDenied, NotFound, QuotaExceeded
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES
from nearkin_shared.formats.upload_parts import PARTS_MEDIA_TYPE
from nearkin_shared.limits import MIB
from nearkin_shared.results import CONTENT_TYPE_TREE, PutResult
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running

FILES, FILE_BYTES = 120, 30_000


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running(embedded(tmp_path / "store")) as found:
        yield found


@pytest.fixture
def server(gateway: RunningGateway) -> Iterator[RemoteStore]:
    with nearkin.connect(gateway.url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _small_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a checkpoint after each 300 KB."""
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 300_000)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 300_000)
    monkeypatch.setattr(checkpointed_tree, "HELD_BYTES_MAX", 100_000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for number in range(FILES):
        path = folder / f"{number // 10}" / f"{number:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(FILE_BYTES))
    os.link(folder / "0" / "000", folder / "link")
    (folder / "empty").touch()
    time.sleep(1.1)
    return folder


class Died(Exception):
    """Ends a run."""


def run_until(server: RemoteStore, source: Path, files: int) -> BackupCounts:
    """Run a backup that ends by an error after so many files were read."""
    counts = BackupCounts()
    read = TreeBackup._read_file

    def failing(backup: TreeBackup, *arguments: object) -> None:
        if counts.read_bytes >= files * FILE_BYTES:
            raise Died
        read(backup, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeBackup, "_read_file", failing)
        with pytest.raises(Died):
            server.backup("home", [source], counts=counts)
    return counts


def check_whole(server: RemoteStore, source: Path, target: Path) -> None:
    assert server.restore("home", target).is_complete
    subprocess.run(["diff", "-r", source, target], check=True)
    assert server.checkpoints("home") == []


def test_next_run_continues_behind_the_checkpoints(server: RemoteStore, source: Path, tmp_path: Path) -> None:
    """A run that ends early leaves what it read; the next one reads the rest, and no listing shows a part."""
    run_until(server, source, 60)
    assert len(server.checkpoints("home")) >= 4
    assert server.versions(all_versions=True) == []
    with pytest.raises(NotFound):
        server.info("home")
    result = server.backup("home", [source])
    assert result.is_complete
    assert result.counts.reused_bytes >= 50 * FILE_BYTES
    assert result.counts.read_bytes + result.counts.reused_bytes == FILES * FILE_BYTES
    check_whole(server, source, tmp_path / "target")
    assert [(info.key, info.version) for info in server.versions(all_versions=True)] == [("home", 1)]


def test_several_runs_that_end_early_are_continued(server: RemoteStore, source: Path, tmp_path: Path) -> None:
    """Files of the newest version and of the checkpoints of two runs alternate."""
    assert server.backup("home", [source]).is_complete
    for number in range(0, FILES, 2):
        (source / f"{number // 10}" / f"{number:03}").write_bytes(os.urandom(FILE_BYTES))
    time.sleep(1.1)
    run_until(server, source, 30)
    for number in range(0, FILES, 6):
        (source / f"{number // 10}" / f"{number:03}").write_bytes(os.urandom(FILE_BYTES))
    time.sleep(1.1)
    counts = run_until(server, source, 20)
    assert counts.reused_bytes
    result = server.backup("home", [source])
    assert result.counts.read_bytes + result.counts.reused_bytes == FILES * FILE_BYTES
    assert result.counts.read_bytes < 36 * FILE_BYTES
    check_whole(server, source, tmp_path / "target")


def test_ranges_beyond_the_limit_are_read_and_sent(
    server: RemoteStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the base and of checkpoints are read from the server, where a body would have too many ranges."""
    assert server.backup("home", [source]).is_complete
    for number in range(0, FILES, 3):
        (source / f"{number // 10}" / f"{number:03}").write_bytes(os.urandom(FILE_BYTES))
    time.sleep(1.1)
    run_until(server, source, 25)
    monkeypatch.setattr(tree_sinks, "COPIED_RECORDS_MAX", 7)
    result = server.backup("home", [source])
    assert result.counts.reused_bytes > 80 * FILE_BYTES
    check_whole(server, source, tmp_path / "target")


def test_deleted_checkpoints_send_all_bytes(server: RemoteStore, source: Path, tmp_path: Path) -> None:
    """A checkpoint that another backup of the key deletes ends in a second reading, not in a wrong version."""
    read = TreeBackup._read_file
    deleted: list[int] = []

    def deleting(backup: TreeBackup, *arguments: object) -> None:
        if backup.counts.read_bytes == 100 * FILE_BYTES and not deleted:
            deleted.append(server.delete_checkpoints("home"))
        read(backup, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeBackup, "_read_file", deleting)
        result = server.backup("home", [source])
    assert deleted[0] > 4
    assert result.counts.read_bytes == FILES * FILE_BYTES
    check_whole(server, source, tmp_path / "target")


def test_checkpoint_ends_while_no_bytes_are_read(
    server: RemoteStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload of a checkpoint is not left silent while unchanged files are compared."""
    monkeypatch.setattr(checkpointed_tree, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1 << 40)
    monkeypatch.setattr(tree_writer, "GROUP_ROWS_MIN", 1)
    monkeypatch.setattr(tree_writer, "GROUP_ROWS_MAX", 10)
    run_until(server, source, 100)
    until(lambda: server.checkpoints("home"))
    server.backup("home", [source])
    check_whole(server, source, tmp_path / "target")


def test_checkpoints_older_than_the_version_are_not_used(server: RemoteStore, source: Path, tmp_path: Path) -> None:
    run_until(server, source, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteStore, "delete_checkpoints", lambda *_: 0)  # a client that dies before it deletes them
        server.backup("home", [source])
    left = server.checkpoints("home")
    assert left
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        opened = RemoteStore.open_checkpoint
        patch.setattr(
            RemoteStore, "open_checkpoint", lambda *arguments: names.append(arguments[1].key) or opened(*arguments)
        )
        assert server.backup("home", [source]).counts.read_bytes == 0
    assert names == []
    check_whole(server, source, tmp_path / "target")


def test_checkpoints_are_those_of_tenant_and_scope(tmp_path: Path, source: Path) -> None:
    """Only who may read or write the key of the tenant reaches them; a token of both needs no other scope."""
    file = tmp_path / "tokens.json"
    scopes = {"backup": ("read", "write"), "reader": ("read",), "writer": ("write",)}
    text = {name: tokens.create(file, "default", some)[0] for name, some in scopes.items()}
    text["other"] = tokens.create(file, "other", ["read", "write", "delete", "admin"])[0]
    settings = embedded(tmp_path / "store", {"auth": {"tokens_file": str(file)}})
    with running(settings) as gateway:
        opened = {name: nearkin.connect(gateway.url, token) for name, token in text.items()}
        run_until(opened["backup"], source, 60)
        (first, *_) = opened["backup"].checkpoints("home")
        assert opened["reader"].checkpoints("home")[0] == first
        for call in (
            lambda: opened["writer"].checkpoints("home"),
            lambda: opened["reader"].delete_checkpoints("home"),
            lambda: opened["reader"].put_checkpoint("home", Upload(b""), {}),
            lambda: opened["other"].put_checkpoint("home", Upload(b""), {}),
        ):
            with pytest.raises(AccessDenied):
                call()
        assert opened["other"].checkpoints("home") == []
        assert opened["other"].delete_checkpoints("home") == 0
        with pytest.raises(NotFound):
            opened["other"].open_checkpoint(first, 0, 1).read()
        headers = {"Content-Type": PARTS_MEDIA_TYPE, "Nearkin-Checkpoints": str(first.version)}
        with gateway.client(text["backup"]) as client:
            assert client.put("/v1/blobs/another", content=b"", headers=headers).status_code == 409
        assert opened["backup"].backup("home", [source]).counts.reused_bytes >= 50 * FILE_BYTES
        assert opened["writer"].backup("other", [source]).counts.read_bytes == FILES * FILE_BYTES
        check_whole(opened["backup"], source, tmp_path / "target")
        for store in opened.values():
            store.close()


def die_after(server: RemoteStore, source: Path, read_bytes: int) -> BackupCounts:
    """Run a backup that ends by an error once so many bytes were read, inside a file."""
    counts = BackupCounts()
    count = TreeBackup._count_read

    def failing(backup: TreeBackup, size_bytes: int) -> None:
        count(backup, size_bytes)
        if counts.read_bytes >= read_bytes:
            raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeBackup, "_count_read", failing)
        with pytest.raises(Died):
            server.backup("home", [source], counts=counts)
    return counts


def await_checkpoints(server: RemoteStore, size_bytes: int) -> None:
    """Wait until checkpoints that had ended are durable."""
    until(lambda: sum(one.size_bytes for one in server.checkpoints("home")) >= size_bytes)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder with a large file, one with holes, and small ones around them; 36 MiB of data."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("a", "c", "e"):
        (folder / name).write_bytes(os.urandom(FILE_BYTES))
    (folder / "b").write_bytes(os.urandom(24 * MIB))
    with (folder / "d").open("wb") as file:
        for offset in (1, 9, 20):
            file.seek(offset * MIB)
            file.write(os.urandom(4 * MIB))
        file.truncate(30 * MIB)
    time.sleep(1.1)
    return folder


@pytest.mark.parametrize("stops", [[10], [33], [10, 8], [5, 5, 5, 17], [10, 1, 1]])
def test_run_that_ends_inside_a_file_is_continued(
    stops: list[int], server: RemoteStore, large: Path, tmp_path: Path
) -> None:
    """Each run goes on inside the file, behind the parts that the runs before stored."""
    total, done = 36 * MIB + 3 * FILE_BYTES, 0
    for stop in stops:
        counts = die_after(server, large, stop * MIB)
        assert counts.reused_bytes >= done - 4 * MIB
        done = counts.reused_bytes + counts.read_bytes
        await_checkpoints(server, done - 4 * MIB)
    result = server.backup("home", [large])
    assert result.is_complete
    assert result.counts.read_bytes + result.counts.reused_bytes == total
    assert result.counts.reused_bytes >= done - 4 * MIB
    for placed in server.tree("home").entries():
        if placed.entry.digest:
            stored = server.get("home", start=placed.start, stop=placed.stop).read()
            assert placed.entry.digest == blake3(stored).digest(length=DIGEST_BYTES)
    check_whole(server, large, tmp_path / "target")
    assert (tmp_path / "target" / "d").stat().st_blocks < 20 * MIB // 512


def test_file_that_changed_is_not_continued(server: RemoteStore, large: Path, tmp_path: Path) -> None:
    """Neither parts of the old content, nor parts without their start, are taken over."""
    die_after(server, large, 15 * MIB)
    await_checkpoints(server, 11 * MIB)
    (large / "b").write_bytes(os.urandom(24 * MIB))
    time.sleep(1.1)
    die_after(server, large, 9 * MIB)
    await_checkpoints(server, 16 * MIB)
    result = server.backup("home", [large])
    assert 4 * MIB <= result.counts.reused_bytes <= 9 * MIB + FILE_BYTES
    check_whole(server, large, tmp_path / "target")


@pytest.mark.parametrize("lost", [0, 2])
def test_lost_part_of_a_file_ends_what_is_taken_over(
    lost: int, server: RemoteStore, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts behind a missing one are read again."""
    die_after(server, large, 23 * MIB)
    await_checkpoints(server, 19 * MIB)
    found = server.checkpoints("home")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "checkpoints", lambda *_: found[:lost] + found[lost + 1 :])
        result = server.backup("home", [large])
    assert result.is_complete
    assert result.counts.read_bytes >= 30 * MIB
    check_whole(server, large, tmp_path / "target")


def test_parts_of_a_file_are_joined_in_any_order(
    server: RemoteStore, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are sent two at a time: a later part may have the lower version."""
    die_after(server, large, 23 * MIB)
    await_checkpoints(server, 19 * MIB)
    found = server.checkpoints("home")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "checkpoints", lambda *_: found[::-1])
        result = server.backup("home", [large])
    assert result.counts.reused_bytes >= 19 * MIB
    check_whole(server, large, tmp_path / "target")


def test_stored_bytes_include_those_of_checkpoints(server: RemoteStore, source: Path) -> None:
    """The result of a backup counts what its checkpoints stored: they are found again by the version."""
    result = server.backup("home", [source]).put
    assert result is not None
    assert result.ledger.stored_bytes >= FILES * FILE_BYTES
    assert FILES * FILE_BYTES <= result.ledger.unique_bytes <= result.ledger.logical_bytes
    assert 0.9 < result.ledger.reduction_ratio < 1.1


def test_no_more_checkpoints_are_made_than_a_version_takes(
    server: RemoteStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a schedule asks for too many, and earlier runs left some, the rest is one upload."""
    monkeypatch.setattr(checkpointed_tree, "CHECKPOINTS_MAX", 6)
    monkeypatch.setattr(checkpointed_tree, "CHECKPOINTS_SPARE", 2)
    run_until(server, source, 60)
    assert len(server.checkpoints("home")) == 4
    run_until(server, source, 20)
    assert len(server.checkpoints("home")) == 4
    result = server.backup("home", [source])
    assert result.counts.reused_bytes >= 30 * FILE_BYTES
    check_whole(server, source, tmp_path / "target")


def test_deleted_key_has_no_checkpoints(gateway: RunningGateway, server: RemoteStore) -> None:
    """Deleting a key deletes its checkpoints, also if it has no version.

    They stay if one version is deleted, or an entity tag is wanted and there is no version.
    """
    server.put_checkpoint("home", Upload(b"of an interrupted run"), {})
    with gateway.client() as client:
        assert client.delete("/v1/blobs/home", headers={"If-Match": '"x"'}).status_code == 404
    assert server.checkpoints("home") != []
    assert server.delete("home") == 0
    assert server.checkpoints("home") == []
    with pytest.raises(NotFound):
        server.delete("home")
    server.put("home", b"first")
    server.put("home", b"second")
    server.put_checkpoint("home", Upload(b"of an interrupted run"), {})
    server.delete("home", 1)
    assert server.checkpoints("home") != []
    assert server.delete("home") == 1
    assert server.checkpoints("home") == []


def test_skipped_backup_deletes_checkpoints(server: RemoteStore, source: Path) -> None:
    """A run that finds nothing changed has no use for the checkpoints of an interrupted one."""
    server.backup("home", [source])
    server.put_checkpoint("home", Upload(b"of an interrupted run"), {})
    options = BackupOptions(skip_if_unchanged=True)
    assert server.backup("home", [source], options=options).put is None
    assert server.checkpoints("home") == []


def test_false_metadata_of_a_checkpoint_ends_no_backup(server: RemoteStore, source: Path, tmp_path: Path) -> None:
    """Any writer of the key may store a checkpoint: a number that is none counts as 0."""
    server.backup("other", [source])
    tree = server.get("other").read()
    server.put_checkpoint("home", Upload(tree), {"read-bytes": "abc", "content-type": CONTENT_TYPE_TREE})
    assert server.backup("home", [source]).is_complete
    check_whole(server, source, tmp_path / "target")


def test_empty_piece_does_not_end_a_checkpoint() -> None:
    """A flush of an empty buffer sends nothing: the end of the upload is the end of the checkpoint."""
    received = bytearray()

    def send(file: BinaryIO) -> PutResult:
        while piece := file.read(1 << 20):
            received.extend(piece)
        return cast("PutResult", None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointed_tree, "HELD_BYTES_MAX", 0)
        outgoing = checkpointed_tree.OutgoingCheckpoint(send)
        outgoing.write(b"first")
        outgoing.write(b"")
        outgoing.write(b"second")
        outgoing.end()
        outgoing.done.result(10)
    assert bytes(received) == b"firstsecond"


def test_run_that_ended_stores_no_checkpoint(
    server: RemoteStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends by an error has waited for all its uploads: none is stored later."""
    put, running_uploads = RemoteStore.put_checkpoint, []

    def put_slowly(store: RemoteStore, key: str, upload: Upload, metadata: dict[str, str]) -> PutResult:
        running_uploads.append(key)
        time.sleep(0.3)  # a server that takes long
        result = put(store, key, upload, metadata)
        running_uploads.pop()
        return result

    monkeypatch.setattr(RemoteStore, "put_checkpoint", put_slowly)
    monkeypatch.setattr(checkpoint_schedule.CheckpointSchedule, "checkpoint_to_await", lambda *_: None)
    run_until(server, source, 60)
    assert running_uploads == []


def test_answers_name_the_key_of_the_backup(gateway: RunningGateway) -> None:
    """No answer names the reserved key of checkpoints: neither a result nor an error."""
    headers = {"Content-Type": PARTS_MEDIA_TYPE, "Nearkin-Checkpoints": "7"}
    with gateway.client() as client:
        stored = client.put("/v1/checkpoints/home", content=b"checkpoint")
        missing = client.get("/v1/checkpoints/home", params={"version": 7})
        source = client.put("/v1/blobs/home", content=b"", headers=headers)
    assert (stored.status_code, stored.json()["key"]) == (201, "home")
    assert "location" not in stored.headers
    assert (missing.status_code, source.status_code) == (404, 409)
    for answer in (stored, missing, source):
        assert ".nearkin/" not in answer.text
        assert "home" in answer.text
    assert "checkpoints of key 'home'" in source.json()["detail"]


@pytest.mark.parametrize("name", ["Nearkin-Base", "Nearkin-Checkpoints"])
def test_repeated_header_of_sources_is_refused(gateway: RunningGateway, name: str) -> None:
    """Of two headers one would be ignored, and ranges be read of other versions."""
    with gateway.client() as client:
        headers = [("Content-Type", PARTS_MEDIA_TYPE), (name, "1"), (name, "2")]
        answer = client.put("/v1/blobs/home", content=b"", headers=headers)
    assert answer.status_code == 400
    assert f"{name}: the request has it 2 times" in answer.json()["detail"]


def test_dry_run_counts_checkpoints_of_a_server(gateway: RunningGateway, server: RemoteStore, source: Path) -> None:
    """The dry run predicts what the next backup reads, with the checkpoints of runs before it."""

    def plan() -> dict[str, int]:
        command = [
            sys.executable,
            "-m",
            "nearkin",
            "--server",
            gateway.url,
            "--json",
            "backup",
            "home",
            str(source),
            "-n",
        ]
        found: dict[str, int] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        return found

    run_until(server, source, 60)
    first = plan()
    assert server.backup("home", [source]).counts.reused_bytes == first["reused_bytes"] > 0
    assert first["removed"] == 0, "there is no version yet"
    for number in range(0, FILES, 2):
        (source / f"{number // 10}" / f"{number:03}").write_bytes(os.urandom(FILE_BYTES))
    (source / "0" / "001").unlink()
    time.sleep(1.1)
    run_until(server, source, 30)
    second = plan()
    counts = server.backup("home", [source]).counts
    assert (second["read_bytes"], second["reused_bytes"]) == (counts.read_bytes, counts.reused_bytes)
    assert second["removed"] == 1


@contextmanager
def limited(tmp_path: Path, logical_bytes: int) -> Iterator[RemoteStore]:
    """Yield a store behind a gateway with a quota of logical bytes."""
    file = tmp_path / "tokens.json"
    token = tokens.create(file, "default", ["read", "write", "delete"])[0]
    tokens.set_quota(file, "default", TenantQuota(logical_bytes=logical_bytes))
    with (
        running(embedded(tmp_path / "store", {"auth": {"tokens_file": str(file)}})) as gateway,
        nearkin.connect(gateway.url, token) as server,
    ):
        yield server


def test_bytes_of_checkpoints_count_once_in_a_quota(tmp_path: Path, source: Path) -> None:
    """A version does not count together with the checkpoints that have its bytes."""
    with limited(tmp_path, FILES * FILE_BYTES * 5 // 4) as server:
        counts = BackupCounts()
        assert server.backup("home", [source], counts=counts).is_complete
        assert counts.checkpoints
        check_whole(server, source, tmp_path / "target")


def test_checkpoints_beyond_the_quota_are_left_out(tmp_path: Path, source: Path) -> None:
    """Checkpoints have a quota's bound together; a backup that would exceed it goes on without them."""
    limit = FILES * FILE_BYTES * 5 // 4
    with limited(tmp_path, limit) as server:
        server.put_checkpoint("other", Upload(os.urandom(limit * 3 // 4)), {})
        with pytest.raises(QuotaExceeded):
            server.put_checkpoint("other", Upload(os.urandom(limit * 3 // 4)), {})
        counts = BackupCounts()
        assert server.backup("home", [source], counts=counts).is_complete
        assert not counts.checkpoints
        check_whole(server, source, tmp_path / "target")


def test_stats_count_checkpoints_apart(server: RemoteStore) -> None:
    """A checkpoint is no version, no key and no logical byte, until and after it is deleted."""
    server.put("key", b"x" * 1000)
    server.put_checkpoint("home", Upload(os.urandom(50_000)), {})
    found = server.stats()
    assert (found.versions, found.keys, found.ledger.logical_bytes) == (1, 1, 1000)
    assert (found.checkpoints, found.checkpoint_bytes) == (1, 50_000)
    assert found.ledger.stored_bytes > 50_000
    server.delete_checkpoints("home")
    found = server.stats()
    assert (found.versions, found.deleted_versions, found.deleted_bytes) == (1, 0, 0)
    assert (found.checkpoints, found.checkpoint_bytes) == (0, 0)
