"""Test services over an encrypted store.

Objects are encrypted, an erased tenant's uploads fail.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nearkin
from nearkin.lab.generated_data import mutate, text_like
from nearkin_gateway.auth import tokens
from nearkin_shared.config.loader import with_changes
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import TenantErased
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.kafka.dead_letter_replay import list_letters
from nearkin_shared.objectstore.factory import open_keys, open_store_of
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.data.stores import objects
from tests.support.servers.gateways import running
from tests.support.servers.pipeline import Pipeline, uploading

FIRST = text_like(2_000_000, 1)


@pytest.fixture
def pipeline(kafka: object, redis: object, topic_prefix: str, key_prefix: str, tmp_path: Path) -> Iterator[Pipeline]:
    generate(tmp_path / "store.key")
    config = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2},  # type: ignore[attr-defined]
        "redis": {"url": redis.url, "prefix": key_prefix},  # type: ignore[attr-defined]
        "object_store": {"url": str(tmp_path / "objects")},
        "storage": {"encryption": "aes-256-gcm", "key_file": str(tmp_path / "store.key"), "parity": "rs-8-2"},
    }
    with Pipeline(tmp_path / "pipeline", config) as made:
        yield made
        codes = made.stop()
        assert set(codes.values()) == {0}, made.logs()


def uploaded(pipeline: Pipeline, tenant: str, key: str, data: bytes) -> dict[str, Any]:
    with uploading(pipeline.settings, tenant) as uploader:
        return uploader.wait(uploader.put(key, [data]))


def restored(pipeline: Pipeline, tenant: str, key: str, version: int) -> bytes:
    stored, found = open_store_of(pipeline.settings)
    namer = Fingerprinter(bytes.fromhex(found.secret), tenant)
    manifest = ManifestStore(stored).get(tenant, key, version)
    containers = ContainerStore(stored, namer.domain, 64 << 20)
    return b"".join(VersionReader(manifest.info, manifest, containers, namer, 0, manifest.size_bytes).pieces())


def request_erased_blobs(pipeline: Pipeline, folder: Path) -> None:
    """Request an erased tenant's blobs and put more through a gateway.

    410 before a body is read.
    """
    text, _ = tokens.create(folder / "tokens.json", "db", tokens.SCOPES)
    auth = {"auth": {"tokens_file": str(folder / "tokens.json")}, "gateway": {"port": 0}}
    with running(with_changes(pipeline.settings, auth)) as gateway:
        with nearkin.connect(gateway.url, text) as store:
            for refused in (
                lambda: store.put("k", FIRST),
                lambda: store.get("a-secret-key"),
                store.versions,
                store.stats,
            ):
                with pytest.raises(TenantErased):
                    refused()
        tus = {"Tus-Resumable": "1.0.0", "Upload-Length": "5", "Upload-Metadata": "key a2V5"}
        with gateway.client(text) as client:
            assert client.put("/v1/blobs/k", content=b"bytes").status_code == 410
            assert client.post("/v1/uploads", headers=tus).status_code == 410
            assert {client.get(path).status_code for path in ("/v1/reduction", "/v1/growth")} == {410}


def test_stored_objects_are_encrypted_erasable(pipeline: Pipeline, tmp_path: Path) -> None:
    """Encrypt what services store; erase a tenant."""
    versions = [FIRST, mutate(FIRST, 2, edits=40, edit_bytes_max=90)]
    reported_bytes = 0
    for tenant in ("db", "web"):
        for data in versions:
            event = uploaded(pipeline, tenant, "a-secret-key", data)
            assert event["state"] == "committed", (event, pipeline.logs())
            reported_bytes += event["ledger"]["stored_bytes"]
    of_versions = ("containers/", "manifests/", "parity/containers/", "parity/manifests/")
    stored_sizes = {
        name: len(data) for name, data in objects(tmp_path / "objects").items() if name.startswith(of_versions)
    }
    assert (
        reported_bytes
        == sum(stored_sizes.values())
        > sum(size for name, size in stored_sizes.items() if not name.startswith("parity"))
    )
    for name, data in objects(tmp_path / "objects").items():
        assert data[:4] == b"NKE1" or name.startswith(("keys/", "parity/")) or name == "nearkin.json", name
        assert b"a-secret-key" not in data
        assert FIRST[:24] not in data
    for tenant in ("db", "web"):
        assert [restored(pipeline, tenant, "a-secret-key", number) for number in (1, 2)] == versions
    assert {key.tenant for key in open_keys(pipeline.settings).list_keys()} == {None, "db", "web"}

    assert open_keys(pipeline.settings).erase("db") == 1
    for service in ("dedup", "resemblance", "delta"):  # or wait a minute
        pipeline.kill(service)
        pipeline.start(service)
    with pytest.raises(TenantErased):
        restored(pipeline, "db", "a-secret-key", 1)
    request_erased_blobs(pipeline, tmp_path)
    event = uploaded(pipeline, "db", "another", FIRST)
    assert event["state"] == "failed", (event, pipeline.logs())
    assert "its keys were erased" in event["failure"]
    event = uploaded(pipeline, "web", "another", FIRST)
    assert event["state"] == "committed", (event, pipeline.logs())
    assert restored(pipeline, "web", "another", 1) == FIRST


@pytest.mark.soak
def test_lost_tenant_keys_fail_until_restored(pipeline: Pipeline, tmp_path: Path) -> None:
    """Fail uploads while the keys are lost.

    A worker that made a new key would commit deltas whose bases cannot be decrypted.
    """
    versions = [FIRST, mutate(FIRST, 3, edits=40, edit_bytes_max=90)]
    for tenant in ("db", "web"):
        assert uploaded(pipeline, tenant, "key", versions[0])["state"] == "committed", pipeline.logs()
    keyring = open_keys(pipeline.settings)
    folder = tmp_path / "objects" / "keys" / keyring.owner_of(domain_of("db")).hex()
    folder.rename(tmp_path / "lost")
    shutil.rmtree(tmp_path / "objects" / "parity" / "keys" / folder.name)
    for service in ("dedup", "resemblance", "delta"):  # or wait a minute
        pipeline.kill(service)
        pipeline.start(service)
    event = uploaded(pipeline, "db", "key", versions[1])
    assert event["state"] == "failed", (event, pipeline.logs())
    assert re.search(
        r"keys/[0-9a-f]{32}: the data keys of tenant 'db' are missing.*restore the folder", event["failure"]
    )
    letters = [letter for letter in list_letters(pipeline.settings) if "'db' are missing" in letter.message]
    assert letters, pipeline.logs()
    assert not folder.exists()
    assert uploaded(pipeline, "web", "key", versions[1])["state"] == "committed", pipeline.logs()

    (tmp_path / "lost").rename(folder)
    event = uploaded(pipeline, "db", "key", versions[1])
    assert event["state"] == "committed", (event, pipeline.logs())
    assert [restored(pipeline, "db", "key", number) for number in (1, 2)] == versions
