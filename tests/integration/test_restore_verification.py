"""Test what a restore compares: wrong chunks under valid checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nearkin_shared.fingerprints as fingerprints
from nearkin import Corrupt, open_store
from nearkin.lab.generated_data import random_bytes
from tests.support.data.stores import SMALL, settings

CONTENT = random_bytes(300_000, 7)


def put_with(root: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, change: Any) -> None:
    """Store CONTENT with one kernel changed: all checksums agree with wrong chunk names."""
    real = getattr(fingerprints, kernel)
    with monkeypatch.context() as patched, open_store(root, settings=settings(SMALL), create=True) as store:
        patched.setattr(fingerprints, kernel, lambda *arguments: change(real(*arguments)))
        store.put("k", CONTENT)


def test_restore_wrong_check_tag_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a chunk with a wrong check tag and the right SHA-1 and length (I8)."""
    put_with(tmp_path / "s", monkeypatch, "check_tags", lambda tags: tags ^ np.uint64(1))
    with open_store(tmp_path / "s", settings=settings(SMALL)) as store:
        with pytest.raises(Corrupt, match="failed fingerprint verification"):
            store.get("k").read()
        with pytest.raises(Corrupt, match="failed fingerprint verification"):
            store.get("k", start=10, stop=20).read()
        assert any(found.object_name.startswith("containers/") for found in store.verify().damage)


def test_restore_wrong_fingerprint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a chunk with a wrong SHA-1 and the right check tag and length (I8)."""
    put_with(tmp_path / "s", monkeypatch, "sha1_many", lambda found: found ^ np.uint8(1))
    with open_store(tmp_path / "s", settings=settings(SMALL)) as store:
        with pytest.raises(Corrupt, match="failed fingerprint verification"):
            store.get("k").read()
        assert any(found.object_name.startswith("containers/") for found in store.verify().damage)
