"""`nearkin retain`."""

from __future__ import annotations

from pathlib import Path

from tests.support.checks.commands import InProcess, assert_refused, new_store


def test_retain_prints_end_and_rm_refuses(call: InProcess, tmp_path: Path) -> None:
    """Extend a retention with the command; `info` shows it, rm refuses, nothing shortens it."""
    new_store(tmp_path / "store")
    call("put", "db/dump", "-", stdin=b"one", env={"NEARKIN_STORE": str(tmp_path / "store")})
    output = call("retain", "db/dump", "--until", "2100-01-02").stdout
    assert output == b"db/dump version 1: retained until 2100-01-02T00:00:00Z\n"
    assert call.answer("retain", "db/dump@1", "--until", "2100-01-02")["version"] == 1
    assert "retained    until 2100-01-02" in call("info", "db/dump").stdout.decode()
    assert call.answer("retain", "db/dump", "--until", "2100-01-02")["retain_until"].startswith("2100-01-02T00:00")
    assert_refused(call("retain", "db/dump", "--for", "30d"), 2, "never shortened; give a later time")
    assert_refused(call("retain", "db/dump"), 2, "--until, --for: give one of them")
    assert_refused(call("rm", "db/dump"), 1, "is retained until 2100-01-02T00:00:00Z")
    assert_refused(call("rm", "db/dump", "--now", "--yes"), 1, "is retained until")
    assert call("get", "db/dump").stdout == b"one"
