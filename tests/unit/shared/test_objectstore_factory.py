"""Test the object store that settings select, and the messages of refusals."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, Corrupt, NotFound, StoreUnavailable
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore import factory
from nearkin_shared.objectstore.base import Payload
from nearkin_shared.objectstore.delegating import DelegatingObjectStore
from nearkin_shared.objectstore.factory import open_objects, open_store_of
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects
from nearkin_shared.objectstore.s3 import Where
from nearkin_shared.storage import descriptor


def opened(**section: Any) -> Any:
    return open_objects(with_changes(Settings(), {"object_store": section, "storage": {"create": True}}))


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_folder_is_created_and_opened(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "with space" / "deep"
    url = form.format(folder if form == "{}" else str(folder).replace(" ", "%20"))
    objects = opened(url=url)
    assert isinstance(objects, LocalObjectStore)
    objects.put_new("a", b"x")
    assert (folder / "a").read_bytes() == b"x"


def test_local_store_is_selected_without_a_url(tmp_path: Path) -> None:
    open_objects(with_changes(Settings(), {"store": str(tmp_path)})).put_new("a", b"x")
    assert (tmp_path / "a").exists()


def in_page_cache(path: Path) -> bool:
    """Return whether the first page of a file can be read without waiting for the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"this file system has no RWF_NOWAIT: {error}")
    finally:
        os.close(descriptor)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """Return a folder whose files leave the page cache on request."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("the content of the page cache is known on Linux only")
    descriptor = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, bytes(MIB))
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if in_page_cache(tmp_path / "probe"):
        pytest.skip("a file system in memory")
    return tmp_path


LARGE, OTHERS = ("containers/0/a", "parity/containers/0/a"), ("manifests/a", "uploads/a", "containers/0/b")


@pytest.mark.parametrize(("choice", "stay"), [("drop", OTHERS), ("keep", (*LARGE, *OTHERS))])
def test_large_containers_leave_the_page_cache(on_disk: Path, choice: str, stay: tuple[str, ...]) -> None:
    changed = {"store": str(on_disk), "storage": {"page_cache": choice}}
    objects = open_objects(with_changes(Settings(), changed))
    content = {name: os.urandom(MIB if name.endswith("a") else 1000) for name in (*LARGE, *OTHERS)}
    for name, data in content.items():
        objects.put_new(name, data[:500], data[500:])
    assert tuple(name for name in content if in_page_cache(on_disk / name)) == stay
    assert {name: objects.get(name) for name in content} == content


def test_no_store_setting_is_refused_with_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"object_store\.url: not set; .*NEARKIN_OBJECT_STORE__URL"):
        open_objects(Settings())


def test_missing_folder_without_create_is_refused(tmp_path: Path) -> None:
    """F.2: services do not create the folder of a store unless `storage.create` is set."""
    with pytest.raises(NotFound, match=r"no store at .*storage\.create = true"):
        open_objects(with_changes(Settings(), {"object_store": {"url": str(tmp_path / "new")}}))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("encryption", ["none", "aes-256-gcm"])
def test_empty_store_without_create_is_refused(tmp_path: Path, encryption: str) -> None:
    """F.2: services create a store only if `storage.create` is set."""
    key = {"key": base64.b64encode(bytes(32)).decode()} if encryption != "none" else {}
    chosen = {"object_store": {"url": str(tmp_path)}, "storage": {"encryption": encryption, **key}}
    with pytest.raises(NotFound, match="no store at"):
        open_store_of(with_changes(Settings(), chosen))
    assert os.listdir(tmp_path) == []
    created = with_changes(Settings(), {**chosen, "storage": {**chosen["storage"], "create": True}})
    with pytest.raises(NotFound, match="has the index of store 1234"):
        open_store_of(created, indexed_store_id="1234")
    assert os.listdir(tmp_path) == []
    _, found = open_store_of(created)
    assert open_store_of(with_changes(Settings(), chosen))[1] == found


@pytest.mark.parametrize("folder", ["containers", "manifests"])
def test_store_that_lost_its_descriptor_is_damaged(tmp_path: Path, folder: str) -> None:
    """F.2: services never write a second descriptor next to the objects of a store."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "0").write_bytes(b"x")
    with pytest.raises(Corrupt, match="is lost"):
        open_store_of(with_changes(Settings(), {"object_store": {"url": str(tmp_path)}, "storage": {"create": True}}))
    assert not (tmp_path / "nearkin.json").exists()


def test_file_at_the_path_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailable, match="file/below: Not a directory"):
        opened(url=str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"url": "gs://bucket"}, 'url "gs://bucket": want s3://'),
        ({"url": "file://host/folder"}, 'url "file://host/folder": want'),
        ({"access_key_id": "a"}, "secret_access_key is not set"),
        ({"secret_access_key": "a"}, "access_key_id is not set"),
        ({"endpoint": "s3.example.org"}, "want a URL such as"),
        ({"endpoint": "http://s3.example.org"}, "is not encrypted; use https:// or set allow_http = true"),
        ({"checksum": "md5"}, "choose crc64nvme, none or sha256"),
        ({"retries": 101}, r"retries: no longer a setting, but a constant \(12\); remove it"),
        ({"bucket": "b"}, "no such setting"),
    ],
)
def test_invalid_setting_is_refused_with_valid_examples(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^object_store.*{message}"):
        opened(**section)


@pytest.mark.parametrize("url", ["s3://", "s3://B", "s3://ab", "s3://bucket?x=1", "s3://bu_cket/p", "s3://-bucket"])
def test_url_that_is_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r'^object_store\.url "s3://.*want s3://bucket/prefix; a bucket is 3 to 63'):
        opened(url=url)


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [("s3://bucket", "bucket", ""), ("s3://bucket/", "bucket", ""), ("s3://bu.ck-et/a/b/", "bu.ck-et", "a/b")],
)
def test_url_is_parsed_into_bucket_and_prefix(url: str, bucket: str, prefix: str) -> None:
    where = Where.parse(with_changes(Settings(), {"object_store": {"url": url}}).object_store)
    assert (where.bucket, where.prefix) == (bucket, prefix)


def test_missing_ca_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'object_store\.ca_file ".*none": No such file'):
        opened(url="s3://bucket", ca_file=str(tmp_path / "none"))


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "nearkin.toml"
    file.write_text('[object_store]\naccess_key_id = "id"\nsecret_access_key = "hidden"\nsession_token = "hidden"')
    settings, origins = load(file)
    assert settings.object_store.secret_access_key == "hidden"
    assert "hidden" not in str(origins)
    assert origins["object_store.access_key_id"].value == "id"


class Overwriting(DelegatingObjectStore):
    """A server that ignores `If-None-Match: *`."""

    far = True

    def put_new(self, name: str, *parts: Payload) -> None:
        assert isinstance(self.inner, ObstoreObjectStore)
        self.inner.replace(name, b"".join(parts))


class Refusing(DelegatingObjectStore):
    """A server that honours `If-None-Match: *`."""

    far = True


@pytest.mark.parametrize("existing", [True, False])
def test_server_that_overwrites_is_refused(monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    """F.32: a server that ignores `If-None-Match: *` is refused at the start."""
    objects = memory_objects()
    if existing:
        descriptor.create(objects)
    own = with_changes(Settings(), {"storage": {"create": True}})
    monkeypatch.setattr(factory, "open_objects", lambda settings: Overwriting(objects))
    with pytest.raises(ConfigError, match="overwrites what is there"):
        open_store_of(own)
    monkeypatch.setattr(factory, "open_objects", lambda settings: Refusing(objects))
    open_store_of(own)
