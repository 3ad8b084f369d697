"""Test objects that records name: frames are of one object, never of two."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin_ingest.frames import DependencyUnavailable, object_frames
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_object_replaced_by_one_of_equal_size_is_read_again(tmp_path: Path, kind: str) -> None:
    objects: LocalObjectStore | ObstoreObjectStore = (
        LocalObjectStore(tmp_path) if kind == "folder" else memory_objects()
    )
    objects.replace("in-dump", b"a" * (3 * FRAME_BYTES_MAX))
    frames = object_frames(objects, "in-dump")
    assert next(frames)[:1] == b"a"
    objects.replace("in-dump", b"b" * (3 * FRAME_BYTES_MAX))
    with pytest.raises(DependencyUnavailable, match="changed while reading"):
        b"".join(frames)
    assert set(b"".join(object_frames(objects, "in-dump"))) == {ord("b")}
