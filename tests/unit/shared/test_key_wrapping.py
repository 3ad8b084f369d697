"""Test key-encryption keys: their sources, their refusals, and that no key is ever shown."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import StorageSettings
from nearkin_shared.crypto.key_wrapping import LocalKeys, generate, key_id_of, keys_in, wrapper_of
from nearkin_shared.errors import ConfigError, Corrupt
from tests.support.data.test_keys import KEY_ENCRYPTION_KEYS, encode_keys

ONE, TWO, THREE = KEY_ENCRYPTION_KEYS


def test_wrapped_key_needs_its_key_and_context() -> None:
    keys = LocalKeys([ONE], "here")
    wrapped = keys.wrap(b"a data key", b"context")
    assert b"a data key" not in wrapped
    assert keys.unwrap(keys.key_id, wrapped, b"context") == b"a data key"
    for context, bytes_of_it in (
        (b"another", wrapped),
        (b"context", wrapped[:-1] + bytes([wrapped[-1] ^ 1])),
        (b"context", b""),
    ):
        with pytest.raises(Corrupt, match=keys.key_id):
            keys.unwrap(keys.key_id, bytes_of_it, context)


def test_first_key_wraps_and_all_unwrap() -> None:
    old = LocalKeys([ONE], "here").wrap(b"secret", b"")
    both = LocalKeys([TWO, ONE], "here")
    assert both.key_id == key_id_of(TWO)
    assert both.unwrap(key_id_of(ONE), old, b"") == b"secret"
    assert both.unwrap(key_id_of(TWO), both.wrap(b"secret", b""), b"") == b"secret"


def test_missing_key_is_named_with_the_available_ones() -> None:
    with pytest.raises(ConfigError, match=rf"here.*{key_id_of(ONE)}.*{key_id_of(TWO)}.*add that key"):
        LocalKeys([TWO], "here").unwrap(key_id_of(ONE), bytes(40), b"")


def test_key_file_may_have_comments_commas_and_empty_lines(tmp_path: Path) -> None:
    text = f"# the newest\n\n{encode_keys(TWO)}  # 2026\n{encode_keys(ONE)},{encode_keys(THREE)}\n"
    assert keys_in(text, "here") == [TWO, ONE, THREE]


@pytest.mark.parametrize("text", ["", "# none\n", "this is not base64!", base64.b64encode(bytes(31)).decode(), "é"])
def test_text_that_is_no_key_is_refused_unshown(text: str) -> None:
    with pytest.raises(ConfigError, match="here") as raised:
        keys_in(text, "here")
    assert len(text) < 8 or text not in str(raised.value)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602])
def test_key_file_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_text(encode_keys(ONE))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600"):
        wrapper_of(StorageSettings(encryption="aes-256-gcm", key_file=str(path)))
    for fine in (0o600, 0o640, 0o400):
        path.chmod(fine)
        assert wrapper_of(StorageSettings(encryption="aes-256-gcm", key_file=str(path))).key_id == key_id_of(ONE)


def test_missing_empty_or_binary_key_file_is_refused_by_name(tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("binary", bytes(range(128, 160))), ("large", b"#" * 70_000)):
        path = tmp_path / name
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=f"key_file.*{name}"):
            wrapper_of(StorageSettings(encryption="aes-256-gcm", key_file=str(path)))
    with pytest.raises(ConfigError, match="No such file"):
        wrapper_of(StorageSettings(encryption="aes-256-gcm", key_file=str(tmp_path / "missing")))


def test_generated_key_is_first_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    before = os.umask(0)
    try:
        first = generate(path)
        second = generate(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [key_id_of(key) for key in keys_in(path.read_text(), "here")] == [second, first]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["key"]
    assert first != second


def test_file_with_other_content_is_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("my notes")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="line 1 is not a key"):
        generate(path)
    assert path.read_text() == "my notes"


def test_repr_of_settings_and_keys_holds_no_key() -> None:
    chosen = with_changes(Settings(), {"storage": {"encryption": "aes-256-gcm", "key": encode_keys(ONE)}})
    for text in (repr(chosen), repr(chosen.storage), repr(wrapper_of(chosen.storage)), str(chosen)):
        assert encode_keys(ONE) not in text
