"""Test that services of tests run with other values of constants, and with their settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.servers import changed_constants
from tests.support.servers.changed_constants import Sections, split_constants

PROGRAM = """
import sys
from nearkin_shared.config.loader import load
settings, _ = load(sys.argv[1])
print(settings.kafka.upload_idle_seconds, settings.kafka.partitions, settings.block.raw_bytes, sys.argv[1:])
"""


def test_constants_reach_the_started_program(tmp_path: Path) -> None:
    """Merge constants below a file's settings, in the section that both have."""
    (tmp_path / "nearkin.toml").write_text('profile = "archive"\n[kafka]\npartitions = 7\n')
    (tmp_path / "program_of_a_test.py").write_text(PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-m", changed_constants.__name__, '{"kafka": {"upload_idle_seconds": 2}}'),
            *("program_of_a_test", str(tmp_path / "nearkin.toml")),
        ],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
    )
    assert done.stdout.split(" ", 3) == ["2", "7", str(30 << 20), f"['{tmp_path / 'nearkin.toml'}']\n"]


def test_split_constants_separates_them_from_settings() -> None:
    config: Sections = {"kafka": {"partitions": 2, "upload_idle_seconds": 4}, "redis": {"url": "redis://x"}}
    assert split_constants(config) == (
        {"kafka": {"partitions": 2}, "redis": {"url": "redis://x"}},
        {"kafka": {"upload_idle_seconds": 4}},
    )
