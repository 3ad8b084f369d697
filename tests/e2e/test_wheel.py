"""Test the wheel in an empty virtual environment with its packages at locked hashes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from nearkin_shared.kernels import native

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 300


def ran(*command: str | Path, folder: Path) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "NEARKIN_KERNELS": "cython"}
    if command[0] == sys.executable:  # pip asks the index that this machine is set up with
        environment = None  # type: ignore[assignment]
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of these sources; take built kernels as they are.

    Compiling takes a minute.
    """
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    for name in ("app", "shared", "services"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info"))
    platform = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    built = source / "build" / platform / "nearkin_shared" / "kernels" / "native"
    built.mkdir(parents=True)
    for kernel in Path(native.__path__[0]).glob("_*.so"):
        shutil.copy(kernel, built)  # newer than its sources, so it is up to date
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    ran(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", source / "wheel", source, folder=source)
    (made,) = (source / "wheel").iterdir()
    return made


def locked(names: list[str]) -> str:
    """Return the lines of requirements/runtime.txt for these packages and all that they need."""
    blocks = re.split(r"\n(?=\S)", (ROOT / "requirements/runtime.txt").read_text().strip())
    lock = {canonicalize_name(block.partition("==")[0]): block for block in blocks}
    needed: dict[NormalizedName, None] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in needed or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        needed[name] = None
        waiting += [Requirement(text) for text in requires(name) or ()]
    return "\n".join(lock[name] for name in needed) + "\n"


def test_wheel_holds_runtime_files_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    packages = {
        "nearkin",
        *(
            f"nearkin_{name}"
            for name in (
                "chunker",
                "committer",
                "dedup",
                "delta",
                "gateway",
                "index",
                "ingest",
                "maintenance",
                "resemblance",
                "shared",
            )
        ),
    }
    assert tops == packages | {next(top for top in tops if top.endswith(".dist-info"))}
    kernels = {path.stem for path in (ROOT / "shared/nearkin_shared/kernels/native").glob("_*.pyx")}
    assert {Path(name).name.partition(".")[0] for name in names if name.endswith(".so")} == kernels
    assert not [name for name in names if name.endswith((".c", ".h", ".pyx", ".pyc"))]
    pages = {
        path.name
        for path in (ROOT / "services/gateway/nearkin_gateway/dashboard").glob("*/*.*")
        if path.suffix != ".pyc"
    }
    assert {
        Path(name).name for name in names if "/dashboard/templates/" in name or "/dashboard/static/" in name
    } == pages
    assert wheel.stat().st_size < 4 * 1024 * 1024


@pytest.mark.soak
def test_wheel_puts_and_gets_when_installed(wheel: Path, tmp_path: Path) -> None:
    """Put and get from the wheel in an empty environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (tmp_path / "locked.txt").write_text(locked(project["dependencies"]))
    ran(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty", folder=tmp_path)
    python = tmp_path / "empty/bin/python"
    install = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", python, "install")
    ran(*install, "--no-compile", "--no-deps", "--require-hashes", "-r", tmp_path / "locked.txt", folder=tmp_path)
    ran(*install, "--no-deps", wheel, folder=tmp_path)
    where = ran(python, "-I", "-c", "import nearkin; print(nearkin.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    data = b"one thing " * 50_000
    (tmp_path / "data").write_bytes(data)
    command = (tmp_path / "empty/bin/nearkin", "--store", tmp_path / "store")
    ran(*command, "init", folder=tmp_path)
    ran(*command, "put", "key", tmp_path / "data", folder=tmp_path)
    ran(*command, "get", "key", "-o", tmp_path / "back", folder=tmp_path)
    assert (tmp_path / "back").read_bytes() == data
