"""Open the object store that the settings name.

Invariant: every process of one deployment opens the same one.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import SHARDS
from nearkin_shared.crypto.key_wrapping import KeyWrapper, wrapper_of
from nearkin_shared.crypto.keyring import Keyring
from nearkin_shared.errors import ConfigError, Corrupt, NoStore, NotFound, StoreUnavailable
from nearkin_shared.formats import key_record, reed_solomon
from nearkin_shared.formats.parity_object import scheme_of
from nearkin_shared.objectstore import parity as objectstore_parity
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.objectstore.bucket_limits import REQUEST_LIMITS, RequestLimits
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore, read_decoded
from nearkin_shared.storage import containers, descriptor
from nearkin_shared.storage.chunking_record import check_service_settings
from nearkin_shared.utils.private_files import make_private_folders


def open_objects(settings: Settings, *, services: bool = True, limits: RequestLimits = REQUEST_LIMITS) -> ObjectStore:
    """Open `object_store.url`, or the folder `store` if that is not set.

    `storage.create` creates the folder. `services`: the error for a missing folder names their remedy, otherwise that
    of the command. `limits`: of requests to a bucket, if not the usual ones.

    Raises NotFound for a missing folder; ConfigError when neither is set or the address is none; StoreUnavailable with
    the remedy when it cannot be reached: no such bucket, wrong keys, no server, no permission.
    """
    url = settings.object_store.url or settings.store
    if url is None:
        raise ConfigError(
            'object_store.url: not set; name "s3://bucket/prefix" or a folder, in the config file or by '
            "NEARKIN_OBJECT_STORE__URL"
        )
    if url.startswith("s3://"):
        from nearkin_shared.objectstore.s3 import S3ObjectStore

        bucket = S3ObjectStore(settings.object_store, limits)
        bucket.check()
        return bucket
    folder = Path(unquote(urlsplit(url).path) if url.startswith("file://") else url).expanduser()
    try:
        if not folder.is_dir():
            if not settings.storage.create:
                raise no_store(str(folder), services=services)
            make_private_folders(folder)
    except OSError as err:
        raise StoreUnavailable(f"object_store.url {folder}: {err.strerror}") from err
    return local_objects(folder, settings)


def local_objects(root: Path, settings: Settings) -> LocalObjectStore:
    """Return the folder of a store; `storage.page_cache` controls its large objects."""
    large = f"{containers.FOLDER}/", f"{objectstore_parity.FOLDER}/"
    return LocalObjectStore(root, dropped=large if settings.storage.page_cache == "drop" else ())


def with_parity(objects: ObjectStore, settings: Settings) -> ParityObjectStore:
    """Return `objects` with the parity of the settings; existing parity is always used.

    Raises ConfigError if the parity library is not installed.
    """
    scheme = scheme_of(settings.storage.parity)
    if scheme is not None:
        reed_solomon.check(scheme.data, scheme.parity)
    return ParityObjectStore(objects, scheme)


def as_set(objects: ObjectStore, settings: Settings) -> ParityObjectStore:
    """Return `objects` with the parity and the encryption of the settings.

    Creates the first key of a new store. Raises ConfigError: a library or key is missing, the key belongs to another
    store,
    or the store is not encrypted; Corrupt: its keys are missing; StoreUnavailable.
    """
    covered = with_parity(objects, settings)
    if settings.storage.encryption == "none":
        return covered
    keyring = open_keyring(covered, wrapper_of(settings.storage))
    return EncryptedObjectStore(objects, scheme_of(settings.storage.parity), keyring)


def open_encrypted(settings: Settings) -> EncryptedObjectStore:
    """Open an existing encrypted store.

    Raises NoStore, ConfigError, Corrupt, StoreUnavailable.
    """
    keyring = open_keys(settings)
    return EncryptedObjectStore(open_objects(settings, services=False), scheme_of(settings.storage.parity), keyring)


def open_keys(settings: Settings) -> Keyring:
    """Return the keys of an existing store. Raises NoStore, and as `as_set` does."""
    covered = with_parity(open_objects(settings, services=False), settings)
    try:
        covered.size_bytes(descriptor.NAME)
    except NotFound as err:
        raise no_store(str(settings.object_store.url or settings.store)) from err
    return open_keyring(covered, wrapper_of(settings.storage))


def open_store_of(
    settings: Settings, indexed_store_id: str | None = None, *, may_create: bool = True
) -> tuple[ParityObjectStore, descriptor.Descriptor]:
    """Return the services' object store and its descriptor.

    `storage.create` creates a missing store. `indexed_store_id` is the store whose index the services have: if it is
    known,
    the store is never created again. Without `may_create` another process creates it: StoreUnavailable meanwhile.

    Raises NotFound: there is no store, and it may not be created; ConfigError: the store is written with other
    `chunker.*`
    or another profile; otherwise as `open_objects` and `as_set`.
    """
    inner = open_objects(settings)
    exists = _has_store(inner)
    if not exists and indexed_store_id is not None:
        location = settings.object_store.url or settings.store
        raise NoStore(
            f"no store at {location}, but {_index_name(settings)} has the index of store {indexed_store_id}; is the "
            f"disk mounted, the bucket the right one? For a new store set another {_index_name(settings)}"
        )
    if not exists and not settings.storage.create:
        raise no_store(str(settings.object_store.url or settings.store), services=True)
    if not exists and not may_create:
        location = settings.object_store.url or settings.store
        raise StoreUnavailable(f"no store at {location} yet: the first index shard creates it; is it running?")
    objects = as_set(inner, settings)
    if exists:
        found = descriptor.read(objects)
    else:
        try:
            found = descriptor.create(objects)
        except AlreadyExists:
            found = descriptor.read(objects)
    check_service_settings(objects, settings)
    if objects.far:
        _check_refuses(objects.inner)
    return objects, found


def _index_name(settings: Settings) -> str:
    return "--folder" if settings.index.backend == SHARDS else "redis.prefix"


def read_descriptor(settings: Settings) -> descriptor.Descriptor:
    """Read the descriptor of the services' store. Raises NoStore, and as `open_store_of`."""
    inner = open_objects(settings)
    if not _has_store(inner):
        raise no_store(str(settings.object_store.url or settings.store), services=True)
    return descriptor.read(as_set(inner, settings))


def _has_store(objects: ObjectStore) -> bool:
    """Return whether a store exists.

    Raises Corrupt (the descriptor is lost), StoreUnavailable.
    """
    try:
        objects.size_bytes(descriptor.NAME)
    except NotFound:
        for folder in (containers.FOLDER, "manifests"):
            if next(iter(objects.names(folder)), None) is not None:
                raise Corrupt(
                    f"{descriptor.NAME}: is lost, and {folder}/ is not empty; restore it from a copy, every chunk's "
                    "tag depends on it"
                ) from None
        return False
    return True


def no_store(location: str, *, services: bool = False) -> NoStore:
    """Return the error for a location without a store."""
    remedy = "`storage.create = true` makes one at the first start" if services else "`nearkin init` makes one"
    return NoStore(f"no store at {location}; is the disk mounted? {remedy}")


def _check_refuses(objects: ObjectStore) -> None:
    """Raise ConfigError if a server overwrites objects; the test writes identical bytes."""
    try:
        objects.put_new(descriptor.NAME, objects.get(descriptor.NAME))
    except AlreadyExists:
        return
    raise ConfigError(
        "object_store: this server overwrites what is there although asked not to (If-None-Match: *), so that "
        "a version could be lost: use one that knows conditional puts"
    )


def open_keyring(objects: ParityObjectStore, wrapper: KeyWrapper) -> Keyring:
    """Return the keys of a store; create the first one for a new store.

    `objects` are unencrypted.

    Raises:
        ConfigError: the store is not encrypted, or another key wraps its keys.
        Corrupt: the store is encrypted, and its keys are missing.
    """
    keyring = Keyring(objects, wrapper)
    if keyring.has_store_key:
        return keyring
    try:
        sealed = read_decoded(objects, descriptor.NAME, key_record.decode_envelope)
    except NotFound:
        keyring.make_store_key()
        return keyring
    if sealed is None:
        raise ConfigError(
            'storage.encryption: this store is not encrypted: set "none", or create an encrypted store and put '
            "its versions into it"
        )
    raise Corrupt(f"{key_record.FOLDER}/: the keys of this store are missing: restore the folder from a copy")
