"""Stores with a history: versions that are deltas of one another, unrelated content, a mixture, and an empty one."""

from __future__ import annotations

from pathlib import Path

from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import open_store
from nearkin_shared.config.settings import Settings

WORD = b"a sentence that no other than the owner reads. "
"""Part of every version of `history`."""


def history() -> dict[tuple[str, int], bytes]:
    """Return content by key and version: three versions of `history`, and `alone`, `mixed`, `empty`."""
    contents: dict[tuple[str, int], bytes] = {}
    content = text_like(400_000, 1) + WORD * 50
    for version in range(1, 4):
        contents["history", version] = content
        content = mutate(content, version, edits=60, edit_bytes_max=90)
    contents["alone", 1] = random_bytes(300_000, 7)
    contents["mixed", 1] = contents["alone", 1][:100_000] + contents["history", 2][200_000:]
    contents["empty", 1] = b""
    return contents


def make_store(root: Path, chosen: Settings) -> Path:
    """Make a store that holds `history()`, and a deleted key `deleted`; return `root`."""
    with open_store(root, settings=chosen, create=True) as store:
        for (key, _), content in history().items():
            store.put(key, content, metadata={"a-name": "a-value"})
        store.put("deleted", b"soon")
        store.delete("deleted", reason="a-reason")
        assert store.verify().damage == ()
    return root
