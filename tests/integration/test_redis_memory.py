"""Redis memory: at most 64 bytes a unique chunk, all tables together (DESIGN, section 6)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BYTES_PER_CHUNK_MAX = 64


@pytest.mark.soak
def test_unique_chunk_needs_at_most_64_bytes(tmp_path: Path) -> None:
    """Measure at a tenth of the benchmark's size: constant costs weigh ten times as much here."""
    made = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.redis_index",
        "--chunks",
        "100000",
        "--lookups",
        "5000",
        "--json",
        str(made),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = json.loads(made.read_text())
    assert 50 < found["bytes_per_chunk"]["used_memory"] <= BYTES_PER_CHUNK_MAX
    assert found["bytes_per_chunk"]["used_memory_dataset"] <= BYTES_PER_CHUNK_MAX
