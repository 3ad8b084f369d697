"""Run the object store contract over two S3 servers, with races for names."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_shared.formats.parity_object import Scheme
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.s3 import S3ObjectStore
from tests.support.conformance import ObjectStoreContract
from tests.support.data.test_keys import MemoryKeys
from tests.support.servers.servers import S3

WRITERS = 16


def new_store(server: S3, **changed: object) -> S3ObjectStore:
    return S3ObjectStore(server.settings(server.make_bucket(f"b{secrets.token_hex(6)}"), "some/prefix", **changed))


class TestEncryptedVersitygw(ObjectStoreContract):
    @pytest.fixture
    def objects(self, versitygw: S3) -> EncryptedObjectStore:
        bucket = new_store(versitygw)
        return EncryptedObjectStore(bucket, Scheme(4, 2), MemoryKeys().keyring)


class TestVersitygw(ObjectStoreContract):
    @pytest.fixture
    def objects(self, versitygw: S3) -> S3ObjectStore:
        return new_store(versitygw)

    def test_sixteen_writers_of_one_name_have_one_winner(self, objects: S3ObjectStore) -> None:
        """The writer whose put succeeds is the one whose bytes are stored."""
        for race in range(20):
            contents = [random_bytes(200_000, race * WRITERS + number) for number in range(WRITERS)]
            barrier = threading.Barrier(WRITERS)

            def put(
                number: int,
                contents: list[bytes] = contents,
                barrier: threading.Barrier = barrier,
                name: str = f"race/{race}",
            ) -> bool:
                barrier.wait(60)
                try:
                    objects.put_new(name, contents[number])
                except AlreadyExists:
                    return False
                return True

            with ThreadPoolExecutor(WRITERS) as pool:
                won = list(pool.map(put, range(WRITERS)))
            assert won.count(True) == 1
            assert objects.get(f"race/{race}") == contents[won.index(True)]

    def test_writers_of_equal_bytes_have_one_winner(self, objects: S3ObjectStore) -> None:
        barrier = threading.Barrier(WRITERS)

        def put(_: int) -> bool:
            barrier.wait(60)
            try:
                objects.put_new("same", b"content")
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(WRITERS) as pool:
            assert sum(pool.map(put, range(WRITERS))) == 1


class TestMoto(ObjectStoreContract):
    test_concurrent_writers_have_one_winner = None  # type: ignore[assignment]
    """It looks and stores in two steps: on a busy machine two of eight win now and then. No store to commit to."""

    @pytest.fixture
    def objects(self, moto: S3) -> S3ObjectStore:
        return new_store(moto)


@pytest.mark.parametrize("checksum", ["crc64nvme", "none"])
def test_put_with_each_checksum_stores_equal_bytes(versitygw: S3, checksum: str) -> None:
    objects = new_store(versitygw, checksum=checksum)
    data = random_bytes(300_000, 5)
    objects.put_new("a", data)
    assert objects.get("a") == data


def test_prefixes_of_one_bucket_are_separate(versitygw: S3) -> None:
    bucket = versitygw.make_bucket(f"b{secrets.token_hex(6)}")
    whole = S3ObjectStore(versitygw.settings(bucket))
    one, other = (S3ObjectStore(versitygw.settings(bucket, prefix)) for prefix in ("one", "one-more/"))
    one.put_new("a/x", b"1")
    other.put_new("a/x", b"22")
    assert (list(one.names("")), list(other.names("a"))) == ([("a/x", 1)], [("a/x", 2)])
    assert dict(whole.names("")) == {"one/a/x": 1, "one-more/a/x": 2}
