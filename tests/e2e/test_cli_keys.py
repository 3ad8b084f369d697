"""Test `nearkin keys`: the life of an encrypted store's keys, and the refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearkin.cli import main
from tests.support.data.stores import objects

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    for name in [name for name in os.environ if name.startswith("NEARKIN_") and name[8:] not in ("KERNELS", "CPU")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NEARKIN_STORAGE__ENCRYPTION", "aes-256-gcm")
    monkeypatch.setenv("NEARKIN_STORAGE__KEY_FILE", str(tmp_path / "store.key"))
    monkeypatch.setenv("NEARKIN_STORE", str(tmp_path / "store"))

    def run(*arguments: str | Path, code: int = 0) -> Any:
        given = [str(argument) for argument in arguments]
        done = main(["--json", *given])
        out, err = capfdbinary.readouterr()
        assert done == code, err
        return json.loads(out or err) if (out or err).strip().startswith((b"{", b"[")) else out

    return run


@pytest.fixture
def filled_store(run: Run, tmp_path: Path) -> Path:
    run("keys", "generate", tmp_path / "store.key")
    (tmp_path / "content").write_bytes(b"what is kept " * 5000)
    run("init")
    run("put", "db/dump", tmp_path / "content")
    return tmp_path


def test_keys_are_made_listed_rotated_rewrapped(filled_store: Path, run: Run) -> None:
    """Create, list, rotate and rewrap keys."""
    (own, tenants) = run("keys", "list")
    assert (own["tenant"], own["number"], tenants["tenant"], tenants["newest"]) == (None, 1, "default", True)
    assert run("keys", "rotate", "default")["number"] > tenants["number"]
    assert run("keys", "rotate", "--store-key")["number"] > 1
    made = run("keys", "generate", filled_store / "store.key")
    assert run("keys", "rewrap") == {"rewrapped": 4}
    assert {key["wrapped_by"] for key in run("keys", "list")} == {made["key_id"]}
    newest = (filled_store / "store.key").read_text().splitlines()[0]
    (filled_store / "store.key").write_text(newest)
    run("get", "db/dump", "-o", filled_store / "restored")
    assert (filled_store / "restored").read_bytes() == (filled_store / "content").read_bytes()
    assert [key["newest"] for key in run("keys", "list")] == [False, True, False, True]


def test_rotate_refuses_a_tenant_without_keys(filled_store: Path, run: Run) -> None:
    """A mistyped tenant gets no key."""
    error = run("keys", "rotate", "defualt", code=2)["error"]
    assert "has no data keys (its first put makes one); is that its name?" in error["message"]
    assert [key["tenant"] for key in run("keys", "list")] == [None, "default"]


def test_erase_needs_the_tenant_name_twice(filled_store: Path, run: Run) -> None:
    before = objects(filled_store / "store")
    refused = run("keys", "erase", "default", code=2)
    assert "pass --yes" in refused["error"]["message"]
    for typed, code in ((b"", 2), (b"defautl\n", 2), (b"default\n", 0)):
        assert objects(filled_store / "store") == before
        path = os.pathsep.join(entry for entry in sys.path if entry)
        done = subprocess.run(
            [sys.executable, "-m", "nearkin.cli", "keys", "erase", "default", "--now"],
            input=typed, capture_output=True, env={**os.environ, "PYTHONPATH": path}, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    erased = run("get", "db/dump", "-o", filled_store / "restored", code=1)
    assert erased["error"]["kind"] == "TenantErased"
    assert "tenant 'default': its keys were erased" in erased["error"]["message"]
    report = run("verify")
    assert (report["ok"], report["erased_objects"]) == (True, 2)
    assert run("gc")["freed_bytes"] > 0
    assert run("verify")["erased_objects"] == 0


def test_erase_without_keys_is_reported(filled_store: Path, run: Run) -> None:
    """Report that a tenant without keys had none."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "nearkin.cli", "keys", "erase", "defautl", "--yes"],
        capture_output=True, env={**os.environ, "PYTHONPATH": path}, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"tenant defautl had none: is that the name?" in done.stderr
    run("get", "db/dump", "-o", filled_store / "restored")
    assert (filled_store / "restored").read_bytes() == (filled_store / "content").read_bytes()


def test_keys_are_shown_by_no_command(filled_store: Path, run: Run) -> None:
    secret = (filled_store / "store.key").read_text().split()[0]
    for arguments in (("config",), ("keys", "list"), ("stats",), ("verify",)):
        assert secret not in json.dumps(run(*arguments))
    (filled_store / "store.key").write_text(secret[:-4])
    assert secret[:-4] not in json.dumps(run("ls", code=2))
    (filled_store / "store.key").chmod(0o644)
    assert "chmod 600" in run("ls", code=2)["error"]["message"]


def test_keys_of_unencrypted_store_are_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARKIN_STORAGE__ENCRYPTION", "none")
    monkeypatch.delenv("NEARKIN_STORAGE__KEY_FILE")
    (tmp_path / "content").write_bytes(b"in clear")
    run("init")
    run("put", "a", tmp_path / "content")
    assert "not encrypted" in run("keys", "list", code=2)["error"]["message"]
    assert run("keys", "list", "--store", tmp_path / "none", code=10)["error"]["kind"] == "NoStore"
