"""Backups through a real gateway send changes alone."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

import nearkin
from nearkin.client import http, requests
from nearkin.client.streaming import PartsUpload
from nearkin.client.sync import RemoteStore
from nearkin.embedded.gateway_backend import EmbeddedIngest
from nearkin.store import open_store
from nearkin.store_trees import TreeStorage
from nearkin.trees import remote_trees, tree_sinks
from nearkin.trees.backup import TreeBackup
from nearkin.trees.backup_walk import BackupOptions, ComparisonOptions
from nearkin.trees.spliced_tree import SplicedTree
from nearkin.trees.store_backup import BackupResult
from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_gateway.uploads import tenant_usage
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import Corrupt, QuotaExceeded
from nearkin_shared.formats import upload_parts
from nearkin_shared.formats.columns import CHECK_BYTES, check_bytes
from nearkin_shared.formats.tree_layout import FOOTER_BYTES, GroupInfo, TreeSummary, encode_end
from nearkin_shared.formats.upload_parts import CopiedRange, PartsDecoder, PartsEncoder
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.reading.tree_reader import END_BYTES
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running

FILES, FILE_BYTES = 300, 3_000
LARGE_BYTES = 3_000_000


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running(embedded(tmp_path / "store")) as found:
        yield found


@pytest.fixture
def server(gateway: RunningGateway) -> Iterator[RemoteStore]:
    with nearkin.connect(gateway.url) as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that was written more than a second ago: nothing in it is too recent to be compared."""
    folder = tmp_path / "source"
    for number in range(FILES):
        path = folder / f"{number % 9}" / f"{number:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(FILE_BYTES))
    (folder / "large").write_bytes(os.urandom(LARGE_BYTES))
    os.link(folder / "0" / "000", folder / "link")
    (folder / "empty").touch()
    time.sleep(1.1)
    return folder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies of parts that a client sent."""
    bodies: list[bytes] = []
    pieces = PartsUpload.pieces

    def recorded(upload: PartsUpload) -> Iterator[bytes]:
        bodies.append(b"")
        for piece in pieces(upload):
            bodies[-1] += piece
            yield piece

    monkeypatch.setattr(PartsUpload, "pieces", recorded)
    return bodies


def change(source: Path) -> None:
    """Change one file, add one, remove one."""
    (source / "3" / "003").write_bytes(b"changed" * 500)
    (source / "4" / "added").write_bytes(os.urandom(5_000))
    (source / "5" / "005").unlink()


def check_restored(server: RemoteStore, source: Path, target: Path, version: int | None = None) -> None:
    assert server.restore("home", target, version=version).is_complete
    subprocess.run(["diff", "-r", source, target], check=True)
    whole = server.get("home", version).read()  # the gateway verifies each file of it
    assert len(whole) == server.info("home", version).size_bytes
    shutil.rmtree(target)


def opened_files(
    server: RemoteStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[bytes], BackupResult]:
    """Return the names of the files that a backup opens, and its result."""
    names: list[bytes] = []
    read = TreeBackup._read_file

    def recorded(backup: TreeBackup, listed: Any, name: bytes, found: Any) -> None:
        names.append(name)
        read(backup, listed, name, found)

    with monkeypatch.context() as patch:
        patch.setattr(TreeBackup, "_read_file", recorded)
        return names, server.backup("home", [source])


def test_changed_files_alone_are_opened_and_sent(
    server: RemoteStore, source: Path, tmp_path: Path, sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 302 files two are read; all are restored equal, from both versions."""
    server.backup("home", [source])
    check_restored(server, source, tmp_path / "first")
    shutil.copytree(source, tmp_path / "before", symlinks=True)
    change(source)
    sent.clear()
    names, result = opened_files(server, source, monkeypatch)
    assert names == [b"003", b"added"]
    assert (result.counts.new_files, result.counts.changed_files) == (1, 1)
    assert (result.counts.read_bytes, result.counts.unchanged_files) == (3_500 + 5_000, FILES)
    assert result.counts.reused_bytes == (FILES - 2) * FILE_BYTES + LARGE_BYTES
    assert len(sent) == 1
    assert len(sent[0]) < 70_000  # 8,500 new bytes, and the entries of 312 files
    check_restored(server, source, tmp_path / "second")
    check_restored(server, tmp_path / "before", tmp_path / "again", version=1)


def test_unchanged_tree_opens_no_file(
    server: RemoteStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third version copies ranges of the second, which copied them itself."""
    server.backup("home", [source])
    for number in (2, 3):
        names, result = opened_files(server, source, monkeypatch)
        assert names == []
        assert result.put is not None
        assert (result.put.info.version, result.counts.read_bytes) == (number, 0)
        check_restored(server, source, tmp_path / "target", number)


def test_forced_backup_reads_every_file(server: RemoteStore, source: Path, sent: list[bytes]) -> None:
    """`--force-rescan` sends all bytes."""
    server.backup("home", [source])
    sent.clear()
    result = server.backup("home", [source], options=BackupOptions(comparison=ComparisonOptions(force_rescan=True)))
    assert (len(sent), result.counts.read_bytes) == (0, FILES * FILE_BYTES + LARGE_BYTES)


def test_tree_of_many_changes_is_streamed(
    server: RemoteStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that is not held whole is sent while it is made; idle records and read ranges change no byte."""
    monkeypatch.setattr(remote_trees, "AHEAD_BYTES_MAX", 1000)
    monkeypatch.setattr(tree_sinks, "IDLE_SECONDS", 0)
    monkeypatch.setattr(tree_sinks, "COPIED_RECORDS_MAX", 5)
    server.backup("home", [source])
    for number in range(0, FILES, 7):
        (source / f"{number % 9}" / f"{number:03}").write_bytes(os.urandom(100 + number))
    result = server.backup("home", [source])
    assert result.counts.unchanged_files == FILES + 2 - 43
    check_restored(server, source, tmp_path / "target")


@pytest.mark.parametrize("kind", ["none", "deleted", "late", "damaged", "blob"])
def test_backup_without_base_sends_all_bytes(
    kind: str, server: RemoteStore, source: Path, tmp_path: Path, sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that is deleted or damaged at any moment before the commit, or is no tree, is no error."""
    if kind == "blob":
        server.put("home", b"no tree")
    elif kind == "deleted":
        server.backup("home", [source])
        put_parts = RemoteStore.put_parts

        def put_late(store: RemoteStore, *arguments: Any) -> Any:
            store.delete("home")
            return put_parts(store, *arguments)

        monkeypatch.setattr(RemoteStore, "put_parts", put_late)
    elif kind in ("late", "damaged"):
        server.backup("home", [source])
        check = SplicedTree.check

        def check_late(tree: SplicedTree, *arguments: Any) -> None:
            check(tree, *arguments)
            if kind == "late":
                server.delete("home")
            else:
                next((tmp_path / "store" / "containers").rglob("*.nkc")).unlink()

        monkeypatch.setattr(SplicedTree, "check", check_late)
    result = server.backup("home", [source])
    assert result.counts.read_bytes == FILES * FILE_BYTES + LARGE_BYTES
    assert result.counts.files == FILES + 2
    check_restored(server, source, tmp_path / "target")


def test_write_token_sends_all_bytes(tmp_path: Path, source: Path, sent: list[bytes]) -> None:
    """A token that may not read, as of a machine whose backups no intruder shall see, still stores backups."""
    file = tmp_path / "tokens.json"
    token, writer = (tokens.create(file, "default", scopes)[0] for scopes in (["read", "write"], ["write"]))
    settings = embedded(tmp_path / "store", {"auth": {"tokens_file": str(file)}})
    with running(settings) as gateway, nearkin.connect(gateway.url, writer) as server:
        for number in (1, 2):
            result = server.backup("home", [source])
            assert (result.put.info.version, result.counts.files) == (number, FILES + 2)  # type: ignore[union-attr]
        with nearkin.connect(gateway.url, token) as reading:
            check_restored(reading, source, tmp_path / "target")
    assert sent == []


def test_damaged_manifest_sends_all_bytes(tmp_path: Path, source: Path, sent: list[bytes]) -> None:
    """A newest version whose manifest is damaged is no base, and no reason to refuse backups."""
    settings = embedded(tmp_path / "store")
    with running(settings) as gateway, nearkin.connect(gateway.url) as server:
        server.backup("home", [source])
    (manifest,) = (path for path in (tmp_path / "store" / "manifests").rglob("*") if path.is_file())
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    sent.clear()
    with running(settings) as gateway, nearkin.connect(gateway.url) as server:
        with pytest.raises(Corrupt):
            server.info("home")
        server.backup("home", [source])
        check_restored(server, source, tmp_path / "target", 2)
    assert sent == []


def put_parts(gateway: RunningGateway, body: bytes, key: str = "home", **headers: str) -> tuple[int, str, str]:
    """Put a body of parts; return status, problem and its detail."""
    sent = {"Content-Type": upload_parts.PARTS_MEDIA_TYPE, "Nearkin-Base": "1", **headers}
    with gateway.client() as client:
        answer = client.put(f"/v1/blobs/{key}", content=body, headers=sent)
    found = answer.json()
    return answer.status_code, str(found.get("type", "")).rpartition(":")[2], str(found.get("detail", ""))


def parts(*ranges: tuple[int, int], size_bytes: int) -> bytes:
    body = bytearray()
    encoder = PartsEncoder(body.extend)
    for copied in ranges:
        encoder.add_copy(*copied)
    encoder.end(size_bytes, bytes(32))
    return bytes(body)


def test_wrong_bodies_are_refused(gateway: RunningGateway, server: RemoteStore, source: Path) -> None:
    """Each refusal names what is wrong, and nothing is stored."""
    size = server.backup("home", [source]).put.info.size_bytes  # type: ignore[union-attr]
    server.put("other", b"no tree")
    whole = parts((0, size), size_bytes=size)
    for body, key, headers, status, name, detail in [
        (b"no parts at all", "home", {}, 400, "bad-input", "begins with"),
        (parts((0, 5), size_bytes=5), "home", {}, 400, "bad-input", "too few for a tree"),
        (parts((0, size + 1), size_bytes=size + 1), "home", {}, 400, "bad-input", "copies bytes 0 to"),
        (whole, "home", {}, 400, "bad-input", "the entries of a tree must be new bytes"),
        (whole[:-1], "home", {}, 400, "bad-input", "ends within record 2"),
        (whole, "home", {"Nearkin-Base": "2"}, 409, "base-unusable", "key 'home' has no such tree"),
        (whole, "absent", {}, 409, "base-unusable", "key 'absent'"),
        (whole, "other", {}, 409, "base-unusable", "is no tree"),
        (whole, "home", {"Nearkin-Base": "newest"}, 400, "bad-base", "Nearkin-Base newest"),
        (whole, "home", {"Content-Type": "text/plain"}, 400, "bad-base", "want it with Content-Type"),
        (whole, "home", {"X-Nearkin-Meta-Content-Type": "text/plain"}, 400, "bad-metadata", "a tree has its own"),
        (whole, "home", {"X-Content-SHA256": "0" * 64}, 400, "bad-digest", "ends with its own digest"),
    ]:
        found = put_parts(gateway, body, key, **headers)
        assert found[:2] == (status, name), found
        assert detail in found[2]
    assert [info.version for info in server.versions("", all_versions=True)] == [1, 1]


def body_of(server: RemoteStore, source: Path, sent: list[bytes]) -> bytes:
    """Return the body of a backup with one changed file."""
    server.backup("home", [source])
    (source / "3" / "003").write_bytes(b"changed" * 500)
    server.backup("home", [source])
    return sent[-1]


def encoded(body: bytes, base_bytes: int, *, old: bytes = b"", new: bytes = b"", digest: bytes | None = None) -> bytes:
    """Return a body whose new bytes, or whose digest, are replaced."""
    decoder, result = PartsDecoder([base_bytes], 1 << 40), bytearray()
    encoder = PartsEncoder(result.extend)
    for part in decoder.feed(body):
        if isinstance(part, CopiedRange):
            encoder.add_copy(*part)
        else:
            encoder.add_data(bytes(part).replace(old, new) if old else part)
    assert decoder.digest is not None
    encoder.end(decoder.size_bytes, decoder.digest if digest is None else digest)
    return bytes(result)


def test_false_digests_are_refused(
    gateway: RunningGateway, server: RemoteStore, source: Path, sent: list[bytes]
) -> None:
    """A version whose reader would find a wrong digest is never stored."""
    body = body_of(server, source, sent)
    size = server.info("home", 1).size_bytes
    for changes, detail in [
        ({"old": b"changedchanged", "new": b"changedChanged"}, "BLAKE3 of b'3/003' differs from its entry"),
        ({"old": b"NKTREE", "new": b"NOTREE"}, "is not a tree"),
        ({"digest": b"d" * 32}, "at the end of the body, its parts make"),
    ]:
        status, name, found = put_parts(gateway, encoded(body, size, **changes))
        assert (status, name) == (400, "bad-input"), found
        assert detail in found
    assert [info.version for info in server.versions("home", all_versions=True)] == [1, 2]


@pytest.mark.parametrize("part", ["index", "group"])
def test_large_index_of_ranges_is_refused(
    part: str, gateway: RunningGateway, server: RemoteStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A footer, or an index, that states that megabytes of ranges are entries takes no memory for them."""
    size = server.backup("home", [source]).put.info.size_bytes  # type: ignore[union-attr]
    made: list[int] = []
    read = SplicedTree._read_new

    def recorded(tree: SplicedTree, start: int, stop: int) -> bytes:
        found = read(tree, start, stop)
        made.append(len(found))
        return found

    monkeypatch.setattr(SplicedTree, "_read_new", recorded)
    group = GroupInfo(b"", b"", 1, size, 0, bytes(16))
    end = encode_end(TreeSummary(root=b"/"), [group])
    if part == "index":
        footer = struct.pack("<8sHHIQQQ", b"NKTREE\r\n", 1, 0, 0, 0, 0, size).ljust(FOOTER_BYTES - CHECK_BYTES, b"\0")
        end = footer + check_bytes(footer)
    body = bytearray()
    encoder = PartsEncoder(body.extend)
    encoder.add_copy(0, size)
    encoder.add_data(end)
    encoder.end(size + len(end), bytes(32))
    status, name, detail = put_parts(gateway, bytes(body))
    assert (status, name) == (400, "bad-input")
    assert "the entries of a tree must be new bytes" in detail
    assert max(made) <= END_BYTES


def test_repeated_body_is_stored_once(
    gateway: RunningGateway, server: RemoteStore, source: Path, sent: list[bytes]
) -> None:
    """A body with the same Idempotency-Key answers the first version; another body is refused."""
    body = body_of(server, source, sent)
    size = server.info("home", 1).size_bytes
    headers = {"Idempotency-Key": "one"}
    assert put_parts(gateway, body, **headers)[0] == 201
    assert put_parts(gateway, body, **headers)[0] == 201
    refused = put_parts(gateway, encoded(body, size, digest=b"d" * 32), **headers)
    assert refused[:2] == (422, "idempotency-key-reused")
    assert [info.version for info in server.versions("home", all_versions=True)] == [1, 2, 3]


def test_interrupted_body_stores_nothing(
    gateway: RunningGateway, server: RemoteStore, source: Path, sent: list[bytes], tmp_path: Path
) -> None:
    """A client that dies within a body, even before its last byte, leaves no version; the next backup is complete."""
    body = body_of(server, source, sent)
    headers = {"Content-Type": upload_parts.PARTS_MEDIA_TYPE, "Nearkin-Base": "1"}
    for length in (20, len(body) // 2, len(body) - 1):

        def broken(stop: int = length) -> Iterator[bytes]:
            yield body[:stop]
            raise OSError("the client dies")

        with gateway.client() as client, pytest.raises(OSError, match="the client dies"):
            client.put("/v1/blobs/home", content=broken(), headers=headers)
    until(lambda: not gateway.gateway.uploads.occupancy)
    assert [info.version for info in server.versions("home", all_versions=True)] == [1, 2]
    server.backup("home", [source])
    check_restored(server, source, tmp_path / "target", 3)


@pytest.mark.parametrize("ahead_bytes", [1000, 1 << 20])
def test_slow_commit_is_awaited(
    ahead_bytes: int, server: RemoteStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that takes longer than a connection may be silent ends no backup, streamed or sent again."""
    server.backup("home", [source])
    (source / "large").write_bytes(os.urandom(LARGE_BYTES // 10))
    feed = SplicedTree.feed

    def feed_late(tree: SplicedTree, *arguments: Any) -> bytes:
        time.sleep(2.5)
        return feed(tree, *arguments)

    monkeypatch.setattr(SplicedTree, "feed", feed_late)
    monkeypatch.setattr(remote_trees, "AHEAD_BYTES_MAX", ahead_bytes)
    monkeypatch.setattr(http, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(requests, "WAIT_SECONDS", 0.1)
    result = server.backup("home", [source])
    assert result.put is not None
    assert (result.put.info.version, result.counts.unchanged_files) == (2, FILES + 1)


def test_whole_segments_are_not_read(
    gateway: RunningGateway, server: RemoteStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an unchanged tree the server reads less than a segment; a trusted digest is that of the tree."""
    server.backup("home", [source])
    read: list[int] = []
    write_range = SplicedTree._write_range

    def recorded(tree: SplicedTree, writer: Any, blob: Any, base: Any, start: int, stop: int) -> None:
        read.append(stop - start)
        write_range(tree, writer, blob, base, start, stop)

    monkeypatch.setattr(SplicedTree, "_write_range", recorded)
    result = server.backup("home", [source])
    assert result.put is not None
    assert sum(read) < SEGMENT_BYTES_MAX < LARGE_BYTES
    assert result.put.info.digest == f"blake3:{server.tree('home').digest.hex()}"
    assert result.put.ledger.logical_bytes == result.put.info.size_bytes


def test_many_ranges_of_a_segment_read_it_twice(
    server: RemoteStore, source: Path, tmp_path: Path, sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every other file changed, the writer opens no range for each: other puts wait for it."""
    server.backup("home", [source])
    for folder in (source / f"{number}" for number in range(9)):
        for path in sorted(folder.iterdir())[::2]:
            path.write_bytes(os.urandom(100))
    opened: list[int] = []
    open_range = TreeStorage._range

    def recorded(store: Any, manifest: Any, start: int, stop: int) -> Any:
        opened.append(start)
        return open_range(store, manifest, start, stop)

    monkeypatch.setattr(TreeStorage, "_range", recorded)
    sent.clear()
    server.backup("home", [source])
    assert len(sent) == 1
    segments = server.info("home", 1).segments
    assert 0 < len(opened) <= 2 * segments + 2 < FILES // 3
    check_restored(server, source, tmp_path / "target")


def test_version_outlives_its_base(tmp_path: Path, source: Path) -> None:
    """Segments that a version copies stay when their first version is collected, in an encrypted store too."""
    generate(tmp_path / "store.key")
    changes = {
        "storage": {"encryption": "aes-256-gcm", "key_file": str(tmp_path / "store.key")},
        "gc": {"grace_seconds": 0},
    }
    settings = embedded(tmp_path / "store", changes)
    with running(settings) as gateway, nearkin.connect(gateway.url) as server:
        server.backup("home", [source])
        change(source)
        assert server.backup("home", [source]).counts.unchanged_files == FILES
        server.delete("home", 1)
    with open_store(tmp_path / "store", settings=settings) as store:
        for _ in range(3):
            store.gc()
        assert store.verify().damage == ()
    with running(settings) as gateway, nearkin.connect(gateway.url) as server:
        check_restored(server, source, tmp_path / "target")


def test_copied_bytes_count_for_the_quota(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body that stands for many bytes is refused as they would be."""
    monkeypatch.setattr(tokens, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(tenant_usage, "REFUSED_SECONDS", 0.0)
    file = tmp_path / "tokens.json"
    token = tokens.create(file, "default", ["read", "write"])[0]
    writer = tokens.create(file, "default", ["write"])[0]
    with (
        running(embedded(tmp_path / "store", {"auth": {"tokens_file": str(file)}})) as gateway,
        nearkin.connect(gateway.url, token) as server,
    ):
        size = server.backup("home", [source]).put.info.size_bytes  # type: ignore[union-attr]
        tokens.set_quota(file, "default", TenantQuota(logical_bytes=size * 3 // 2))
        with pytest.raises(QuotaExceeded, match="logical_bytes"):
            server.backup("home", [source])
        tokens.set_quota(file, "default", TenantQuota(logical_bytes=size * 3))
        assert server.backup("home", [source]).counts.read_bytes == 0
        with gateway.client(writer) as client:
            sent = {"Content-Type": upload_parts.PARTS_MEDIA_TYPE, "Nearkin-Base": "1"}
            answer = client.put("/v1/blobs/home", content=b"", headers=sent)
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:nearkin:problem:missing-scope")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_backend_without_ranges_gets_their_bytes(
    is_damaged: bool,
    gateway: RunningGateway,
    server: RemoteStore,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the pipeline: the gateway reads ranges, and a base that it cannot read makes the client send all bytes."""
    monkeypatch.setattr(EmbeddedIngest, "takes_ranges", False)
    server.backup("home", [source])
    change(source)
    put_late = RemoteStore.put_parts

    def put_after_damage(store: RemoteStore, *arguments: Any) -> Any:
        for container in (tmp_path / "store" / "containers").rglob("*.nkc"):
            container.unlink()
        gateway.gateway.catalogue._containers.blocks.bound(0)  # or the gateway has all of so small a tree in memory
        return put_late(store, *arguments)

    if is_damaged:
        monkeypatch.setattr(RemoteStore, "put_parts", put_after_damage)
    result = server.backup("home", [source])
    assert result.put is not None
    assert (result.counts.read_bytes > LARGE_BYTES) == is_damaged
    assert result.put.info.digest == f"blake3:{blake3(server.get('home').read()).hexdigest()}"
    check_restored(server, source, tmp_path / "target")
    found = put_parts(gateway, parts((0, 70), size_bytes=70))
    assert found[:2] == ((409, "base-unusable") if is_damaged else (400, "bad-input"))
    assert ("no such tree to copy from" if is_damaged else "is not a tree") in found[2]
