"""Contract of every object store.

Invariant: each test states one sentence of the ObjectStore protocol.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import NotFound
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore, SupportsReplace

WRITERS = 8
LARGE_BYTES = 5 * 1024 * 1024
"""Above a container, and above the size from which S3 clients cut uploads into parts."""


class ObjectStoreContract:
    """Contract of an object store. Subclasses provide the fixture `objects`: an empty ObjectStore."""

    def test_get_returns_the_bytes_put(self, objects: ObjectStore) -> None:
        """The same bytes are returned."""
        objects.put_new("a/b/c.bin", b"content")
        assert objects.get("a/b/c.bin") == b"content"
        assert objects.size_bytes("a/b/c.bin") == 7

    def test_any_buffer_can_be_put(self, objects: ObjectStore) -> None:
        """Writers pass views of their buffers."""
        objects.put_new("a/view", memoryview(b"--content--")[2:-2])
        assert objects.get("a/view") == b"content"

    def test_parts_make_one_object(self, objects: ObjectStore) -> None:
        """More parts than a system call takes, empty ones and large ones among them."""
        parts = [random_bytes(size, size) for size in (0, 1, 2_000_000, 0, 7, *range(3000), 0)]
        objects.put_new("a/parts", *parts[:-1], memoryview(parts[-1]))
        assert objects.get("a/parts") == b"".join(parts)
        with pytest.raises(AlreadyExists):
            objects.put_new("a/parts", b"", b"")

    def test_empty_object_is_an_object(self, objects: ObjectStore) -> None:
        """Empty is not missing."""
        objects.put_new("a/empty", b"")
        assert objects.get("a/empty") == b""
        assert objects.size_bytes("a/empty") == 0
        assert objects.get_ranges("a/empty", [0], [0]) == [b""]
        assert list(objects.names("a")) == [("a/empty", 0)]
        with pytest.raises(AlreadyExists):
            objects.put_new("a/empty", b"")

    def test_large_object_is_read_back(self, objects: ObjectStore) -> None:
        """The size does not matter."""
        data = random_bytes(LARGE_BYTES, 1)
        objects.put_new("a/large", data)
        assert objects.get("a/large") == data
        starts = [LARGE_BYTES - 3, 0, 1_000_000]
        ends = [LARGE_BYTES, 64, 3_000_000]
        found = objects.get_ranges("a/large", starts, ends)
        assert found == [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def test_ranges_are_in_the_requested_order(self, objects: ObjectStore) -> None:
        """Also where they overlap, repeat, or are empty."""
        objects.put_new("a/r", b"0123456789")
        assert objects.get_ranges("a/r", [8, 0, 2, 2, 5], [10, 10, 4, 4, 5]) == [
            b"89",
            b"0123456789",
            b"23",
            b"23",
            b"",
        ]
        assert objects.get_ranges("a/r", [], []) == []
        joining = [b"01", b"234", b"", b"5678", b"9", b""]
        assert objects.get_ranges("a/r", [0, 2, 5, 5, 9, 10], [2, 5, 5, 9, 13, 15]) == joining

    def test_existing_object_is_not_overwritten(self, objects: ObjectStore) -> None:
        """A second put of a name is refused with AlreadyExists."""
        objects.put_new("a/x", b"first")
        for data in (b"first", b"second"):
            with pytest.raises(AlreadyExists, match="a/x"):
                objects.put_new("a/x", data)
        assert objects.get("a/x") == b"first"

    def test_object_is_replaced_whole(self, objects: ObjectStore) -> None:
        """If the store supports it, new bytes replace damaged ones, longer or shorter."""
        if not isinstance(objects, SupportsReplace):
            pytest.skip("this store replaces nothing")
        objects.put_new("a/x", b"damaged")
        for data in (b"what it was", b"short", b"short", memoryview(b"-a view-")[1:-1]):
            objects.replace("a/x", data)
            assert objects.get("a/x") == data
            assert list(objects.names("a")) == [("a/x", len(data))]
        objects.replace("a/missing", b"it was lost")
        assert objects.get("a/missing") == b"it was lost"
        with pytest.raises(AlreadyExists):
            objects.put_new("a/missing", b"")

    def test_reader_during_replace_sees_old_or_new_object(self, objects: ObjectStore) -> None:
        """It never sees a part of it."""
        if not isinstance(objects, SupportsReplace):
            pytest.skip("this store replaces nothing")
        contents = [random_bytes(300_000, 1), random_bytes(200_000, 2)]
        objects.put_new("a/x", contents[0])
        ended = threading.Event()

        def replace_often() -> None:
            for number in range(12):
                objects.replace("a/x", contents[number % 2])
            ended.set()

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(replace_often)
            while not ended.is_set() and not done.done():
                assert objects.get("a/x") in contents
            done.result()

    def test_missing_object_is_not_found(self, objects: ObjectStore) -> None:
        """A missing name is not found, in a store with other objects and in an empty one."""
        for _ in range(2):
            with pytest.raises(NotFound, match="a/none"):
                objects.get("a/none")
            with pytest.raises(NotFound, match="a/none"):
                objects.size_bytes("a/none")
            with pytest.raises(NotFound, match="a/none"):
                objects.get_ranges("a/none", [0], [1])
            if not list(objects.names("a")):
                objects.put_new("a/nonesuch", b"")

    def test_names_are_those_below_the_prefix_with_their_sizes(self, objects: ObjectStore) -> None:
        """A prefix is a folder: `a` is not the start of `ab`."""
        for name, size_bytes in (("a/1", 1), ("a/b/2", 2), ("ab/3", 3), ("c", 4)):
            objects.put_new(name, bytes(size_bytes))
        assert sorted(objects.names("a")) == [("a/1", 1), ("a/b/2", 2)]
        assert sorted(objects.names("a/b")) == [("a/b/2", 2)]
        assert sorted(objects.names("ab")) == [("ab/3", 3)]

    def test_prefix_without_objects_lists_nothing(self, objects: ObjectStore) -> None:
        """A name can be used again after a deletion."""
        assert list(objects.names("a")) == []
        objects.put_new("a/b/x", b"")
        objects.delete("a/b/x")
        assert list(objects.names("a")) == []
        assert list(objects.names("a/b")) == []

    def test_many_names_are_listed_each_once(self, objects: ObjectStore) -> None:
        """More than one page of a listing."""
        expected = {f"many/{number // 100:02d}/{number:04d}" for number in range(2100)}
        for name in expected:
            objects.put_new(name, b"x")
        assert Counter(name for name, _ in objects.names("many")) == Counter(expected)

    def test_deleted_object_can_be_put_again(self, objects: ObjectStore) -> None:
        """Deleting a missing object succeeds: a maintenance worker repeats itself."""
        objects.put_new("a/x", b"first")
        objects.delete("a/x")
        objects.delete("a/x")
        objects.delete("never/there")
        with pytest.raises(NotFound):
            objects.get("a/x")
        objects.put_new("a/x", b"second")
        assert objects.get("a/x") == b"second"

    def test_concurrent_writers_have_one_winner(self, objects: ObjectStore) -> None:
        """This is the commit point: afterwards the object is the winner's, whole (I2)."""
        contents = [bytes([number]) * 100_000 for number in range(WRITERS)]
        for race in range(10):
            barrier = threading.Barrier(WRITERS)

            def put(number: int, barrier: threading.Barrier = barrier, name: str = f"race/{race // 5}/{race}") -> bool:
                barrier.wait(60)
                try:
                    objects.put_new(name, contents[number])
                except AlreadyExists:
                    return False
                return True

            with ThreadPoolExecutor(WRITERS) as pool:
                won = list(pool.map(put, range(WRITERS)))
            assert won.count(True) == 1
            assert objects.get(f"race/{race // 5}/{race}") == contents[won.index(True)]

    def test_listing_during_writes_misses_nothing_older(self, objects: ObjectStore) -> None:
        """Objects that exist throughout are listed with their sizes; partly written ones are not."""
        before = {f"busy/{number % 7}/old{number}" for number in range(300)}
        for name in before:
            objects.put_new(name, b"12345")
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                objects.put_new(f"busy/{number % 9}/new{number}", b"12345")
                if number % 2:
                    objects.delete(f"busy/{number % 9}/new{number}")
                number += 1

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            try:
                for _ in range(10):
                    found = list(objects.names("busy"))
                    assert before <= {name for name, _ in found}
                    assert len(found) == len(set(found))
                    assert {size_bytes for _, size_bytes in found} == {5}
            finally:
                stop.set()
            writing.result(10)
