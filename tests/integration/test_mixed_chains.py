"""Test that patches have no delta bases.

A mix of codecs costs no tree of blocks per chunk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin_shared.reading.chunk_reader import ChunkReader
from tests.support.data.stores import settings

MIB = 1 << 20
SMALL_CACHES = {"base": {"cache_bytes": MIB}, "restore": {"cache_bytes": 8 * MIB}}


def test_alternating_codecs_need_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Need few blocks per chunk for versions under patch and xdelta3 alternately."""
    by_themselves = []
    before = ChunkReader._read_alone

    def record_read(reader: Any, name: Any, record: Any) -> Any:
        by_themselves.append(name)
        return before(reader, name, record)

    monkeypatch.setattr(ChunkReader, "_read_alone", record_read)
    content = text_like(4 * MIB, 1)
    for version in range(10):
        codec = ("patch", "xdelta3")[version % 2]
        with open_store(
            tmp_path / "s", settings=settings(SMALL_CACHES, {"delta": {"codec": codec, "max_depth": 16}}), create=True
        ) as store:
            by_themselves.clear()
            store.put("k", content)
            assert store.get("k").read() == content
            assert len(by_themselves) < 20, version
        content = mutate(content, version, edits=300, edit_bytes_max=300)
