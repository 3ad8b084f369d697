"""Test JSON of names that are not UTF-8: readable text, and all bytes in a second field."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.utils.terminal import to_json

RAW = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"path": "café"}, {"path": "café"}),
        ({"path": RAW, "size": 1}, {"path": r"caf\xe9", "path_hex": "636166e9", "size": 1}),
        ([{"target": RAW}], [{"target": r"caf\xe9", "target_hex": "636166e9"}]),
        ({"paths": ["a", RAW]}, {"paths": ["a", r"caf\xe9"], "paths_hex": ["61", "636166e9"]}),
        ({"xattrs": {RAW: "00"}}, {"xattrs": {r"caf\xe9": "00"}, "xattrs_hex": {"636166e9": "00"}}),
        ({"a": {"b": [{"c": RAW}]}}, {"a": {"b": [{"c": r"caf\xe9", "c_hex": "636166e9"}]}}),
        ([RAW], [r"caf\xe9"]),
        ({"path": r"caf\xe9 \udce9"}, {"path": r"caf\xe9 \udce9"}),
        ({"text": "\udce9 \U0001f4ab"}, {"text": "\\xe9 \U0001f4ab", "text_hex": "e920f09f92ab"}),
    ],
)
def test_to_json_has_all_bytes_of_names(value: object, expected: object) -> None:
    text = to_json(value)
    assert text.isascii()
    assert json.loads(text) == expected


def test_to_json_accepts_other_lone_surrogates() -> None:
    assert json.loads(to_json({"text": "\udce9\ud800"}))["text_hex"] == "edb3a9eda080"


@given(st.binary(max_size=40))
def test_to_json_returns_any_name(name: bytes) -> None:
    """A program gets each name back: from the `_hex` field if there is one, else from the field itself."""
    found: dict[str, Any] = json.loads(to_json({"path": os.fsdecode(name), "after": None}))
    assert found["after"] is None
    assert (bytes.fromhex(found["path_hex"]) if "path_hex" in found else found["path"].encode()) == name
