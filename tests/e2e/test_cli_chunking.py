"""Real commands under the store's chunking record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearkin.cli.exit_codes import ExitCode
from tests.support.checks.commands import FIRST, answer, run


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A store that was created in the profile `archive`."""
    root = tmp_path / "archive"
    assert run("--store", root, "init", env={"NEARKIN_PROFILE": "archive"}).returncode == 0
    return root


def test_commands_use_the_store_record(archive: Path) -> None:
    """Put and config without settings use profile and chunker of the store."""
    assert answer("--store", archive, "put", "k", "-", stdin=FIRST, env={"NEARKIN_PROFILE": "archive"})
    again = answer("--store", archive, "put", "again", "-", stdin=FIRST)
    assert again["duplicate_chunks"] == again["chunks"]
    rows = answer("--store", archive, "config")
    assert rows["chunker.target_bytes"] == {"value": 32 * 1024, "source": "store"}
    assert rows["profile"] == {"value": "archive", "source": "store"}
    assert rows["delta.max_depth"] == {"value": 6, "source": "profile archive of the store"}


def test_put_under_other_settings_wants_force(archive: Path, tmp_path: Path) -> None:
    """Refuse other settings of the environment or a file by name.

    With --force, warn and store.
    """
    file = tmp_path / "other.toml"
    file.write_text("[chunker]\ntarget_bytes = 8192\nmin_bytes = 2048\n")
    refused = run("--store", archive, "--config", file, "put", "k", "-", stdin=FIRST)
    assert refused.returncode == ExitCode.USAGE
    assert b"chunker.target_bytes 8192: this store is written with" in refused.stderr
    assert b"chunker.target_bytes 32768" in refused.stderr
    assert b"--force" in refused.stderr
    other = {"NEARKIN_PROFILE": "finesse-paper"}
    assert b"profile finesse-paper" in run("--store", archive, "put", "k", "-", stdin=FIRST, env=other).stderr
    assert json.loads(run("--store", archive, "--json", "ls").stdout) == []
    forced = run("--store", archive, "put", "--force", "k", "-", stdin=FIRST, env=other)
    assert (forced.returncode, b"nearkin: forced: profile finesse-paper" in forced.stderr) == (0, True)
    assert run("--store", archive, "get", "k", env=other).stdout == FIRST


def test_serve_refuses_other_settings_at_start(archive: Path) -> None:
    """`nearkin serve` under other settings than the store's ends at once and names both."""
    done = run("serve", archive, "--port", "0", "--no-token", env={"NEARKIN_CHUNKER__ALGORITHM": "rabin"})
    assert done.returncode == ExitCode.USAGE
    assert b"chunker.algorithm rabin: this store is written with chunker.algorithm leastcdc" in done.stderr
