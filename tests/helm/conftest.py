"""The chart, rendered by Helm itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.servers import programs

CHART = Path(__file__).parents[2] / "deploy/helm/nearkin"


class Refused(Exception):
    """A failed run of Helm; the message is its output."""


@pytest.fixture(scope="session")
def helm(need: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return `helm(*arguments, values={})`, which returns the output.

    Raises Refused with the output on failure.
    """
    program = need(programs.helm)
    home = tmp_path_factory.mktemp("helm")

    def run(*arguments: str, values: dict[str, Any] | None = None) -> str:
        done = subprocess.run(
            [program, *arguments, *(("--values", "-") if values is not None else ())],
            input=json.dumps(values),  # JSON is YAML
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        )
        if done.returncode != 0:
            raise Refused(done.stdout + done.stderr)
        return done.stdout

    return run


@pytest.fixture(scope="session")
def promtool(need: Any) -> Callable[..., str]:
    """Return `promtool(*arguments)`, which returns the output.

    Raises AssertionError with the output on failure.
    """
    program = need(programs.promtool)

    def run(*arguments: str) -> str:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def rendered(helm: Callable[..., str]) -> Callable[..., list[dict[str, Any]]]:
    """Return `rendered(values)`, which returns the objects of a release and renders each once."""

    @cache
    def objects(values: str) -> str:
        return helm("template", "store", str(CHART), "--namespace", "backups", values=json.loads(values))

    def render(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return [one for one in yaml.load_all(objects(json.dumps(values or {})), loader) if one]

    return render
