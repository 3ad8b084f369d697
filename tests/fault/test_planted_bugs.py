"""The engines detect mistakes: each planted one, in a process of its own, is caught."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from tests.support.engines.mutation_engine import BUGS

SAMPLE = 3
"""Number of planted mistakes in one run of `make test`, another choice each time; `make soak` plants all of them."""


def test_planted_mistakes_of_a_sample_are_caught() -> None:
    """Plant them from one process, which forks before anything is opened."""
    names = random.SystemRandom().sample(sorted(BUGS), SAMPLE)
    memory = ["--folder", "/dev/shm"] if os.path.isdir("/dev/shm") else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engines.mutation_engine", *memory, *names],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    outcomes = {line.split("\t")[0]: line.split("\t")[2] for line in done.stdout.splitlines()}
    assert outcomes == dict.fromkeys(names, "caught"), done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.soak
def test_checks_without_a_mistake_find_nothing() -> None:
    """The checks that no other test runs: one of each engine."""
    script = """
import tempfile
from pathlib import Path
from tests.support.engines.mutation_engine import BUGS
names = "directory-unchecked", "delta-not-verified", "block-number-given-again", "scrub-skips", "fence-not-checked"
for name in names:
    with tempfile.TemporaryDirectory() as folder:
        BUGS[name].hunt(Path(folder), lambda: None)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    short = script.replace(
        "for name", "import tests.support.engines.detectors as h\nh.KILLS_MAX, h.SEEDS = 6, (1,)\nfor name"
    )
    done = subprocess.run([sys.executable, "-c", short], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
