"""The object store that the settings name. Invariant: every process of one deployment opens the same one."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from nearkin import erasure
from nearkin.config import Settings
from nearkin.errors import ConfigError, NotFound, StoreUnavailable
from nearkin.formats.parity import scheme_of
from nearkin.store import containers, descriptor, parity
from nearkin.store.encrypted import EncryptedObjects
from nearkin.store.keyring import Keyring, open_keyring
from nearkin.store.objects import AlreadyExists, LocalObjects, ObjectStore
from nearkin.store.parity import ParityObjects
from nearkin.store.private_files import make_private_folders
from nearkin.wrapping import wrapper_of


def open_objects(settings: Settings) -> ObjectStore:
    """Return `object_store.url`, or the folder `store` where that is not set; a folder is made if need be.

    Raises ConfigError when neither is set or the address is none; StoreUnavailable with the remedy when it cannot be
    reached: no such bucket, wrong keys, no server, no permission.
    """
    url = settings.object_store.url or settings.store
    if url is None:
        raise ConfigError(
            'object_store.url: not set; name "s3://bucket/prefix" or a folder, in the config file or by '
            "NEARKIN_OBJECT_STORE__URL"
        )
    if url.startswith("s3://"):
        from nearkin.store.s3 import S3Objects

        bucket = S3Objects(settings.object_store)
        bucket.check()
        return bucket
    folder = Path(unquote(urlsplit(url).path) if url.startswith("file://") else url).expanduser()
    try:
        if not folder.is_dir():
            make_private_folders(folder)
    except OSError as err:
        raise StoreUnavailable(f"object_store.url {folder}: {err.strerror}") from err
    return local_objects(folder, settings)


def local_objects(root: Path, settings: Settings) -> LocalObjects:
    """Return the folder of a store; what takes room in it stays in the page cache only where the settings say so."""
    large = f"{containers.FOLDER}/", f"{parity.FOLDER}/"
    return LocalObjects(root, dropped=large if settings.storage.page_cache == "drop" else ())


def with_parity(objects: ObjectStore, settings: Settings) -> ParityObjects:
    """Return `objects` with the parity that the settings name; what others have added is used in any case.

    Raises ConfigError where the library for it is not installed.
    """
    scheme = scheme_of(settings.storage.parity)
    if scheme is not None:
        erasure.check(scheme.data, scheme.parity)
    return ParityObjects(objects, scheme)


def as_set(objects: ObjectStore, settings: Settings) -> ParityObjects:
    """Return `objects` with the parity and the encryption that the settings name: what all of a store is read through.

    The first key of a new store is made. Raises ConfigError: a library or a key is missing, it is another key's store,
    or one without encryption; Corrupt: its keys are gone; StoreUnavailable.
    """
    covered = with_parity(objects, settings)
    if settings.storage.encryption == "none":
        return covered
    keyring = open_keyring(covered, wrapper_of(settings.storage))
    return EncryptedObjects(objects, scheme_of(settings.storage.parity), keyring)


def open_keys(settings: Settings) -> Keyring:
    """Return the keys of a store that is there. Raises NotFound where there is none, and as `as_set` does."""
    covered = with_parity(open_objects(settings), settings)
    covered.size_bytes(descriptor.NAME)
    return open_keyring(covered, wrapper_of(settings.storage))


def open_store_of(settings: Settings) -> tuple[ParityObjects, descriptor.Descriptor]:
    """Return the object store as it is set, and its descriptor, made when this is the first process to come."""
    objects = as_set(open_objects(settings), settings)
    try:
        found = descriptor.read(objects)
    except NotFound:
        try:
            found = descriptor.create(objects)
        except AlreadyExists:
            found = descriptor.read(objects)
    if objects.far:
        _check_refuses(objects.inner)
    return objects, found


def _check_refuses(objects: ObjectStore) -> None:
    """Raise ConfigError where a server overwrites what is there: one that does gets the very bytes that it has."""
    try:
        objects.put_new(descriptor.NAME, objects.get(descriptor.NAME))
    except AlreadyExists:
        return
    raise ConfigError(
        "object_store: this server overwrites what is there although asked not to (If-None-Match: *), so that "
        "a version could be lost: use one that knows conditional puts"
    )
