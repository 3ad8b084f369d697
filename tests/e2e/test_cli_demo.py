"""Test `nearkin demo`, which `make demo` runs: it fails unless every byte is restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin import Store
from tests.support import demo
from tests.support.checks.commands import FIRST, SECOND


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two small releases instead of the downloads."""
    paths = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for path, content in zip(paths, (FIRST, SECOND), strict=True):
        path.write_bytes(content)
    monkeypatch.setattr(demo, "_releases", lambda _versions, _cache: paths)
    return paths


def test_demo_passes_when_all_is_restored(
    releases: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--store", str(tmp_path / "store")]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "PASS"
    assert shown.count("restored byte for byte") == len(releases) + 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (SECOND[:-1] + b"?", "version 2 differs from two.tar"),
        (SECOND[:-1], "version 2 differs from two.tar"),
        (SECOND + b"?", "two.tar goes on"),
    ],
)
def test_demo_fails_on_any_difference(
    releases: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    problem: str,
) -> None:
    put = demo._put

    def put_then_change(store: Store, source: Path) -> None:
        put(store, source)
        source.write_bytes(content if source == releases[1] else source.read_bytes())

    monkeypatch.setattr(demo, "_put", put_then_change)
    assert demo.main([]) == 1
    captured = capsys.readouterr()
    assert "PASS" not in captured.out
    assert captured.err.startswith("FAIL: ")
    assert problem in captured.err
