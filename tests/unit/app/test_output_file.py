"""Check that an interrupt at any moment of a get leaves its output folder unchanged."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from nearkin.cli.output_file import OutputFile


@pytest.mark.parametrize("step", ["open", "chmod"])
def test_interrupt_during_creation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A signal sent as soon as the file appears arrives here.

    On a fast machine that is one of some hundred runs.
    """
    target = tmp_path / "there"
    target.write_bytes(b"as it was")
    owner: Any = {"open": os, "chmod": Path}[step]
    real = getattr(owner, step)

    def interrupted(*given: Any, **named: Any) -> None:
        made = real(*given, **named)
        if made is not None:
            os.close(made)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, step, interrupted)
    with pytest.raises(KeyboardInterrupt), OutputFile(str(target)):
        pass
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"as it was"


@pytest.mark.parametrize(
    ("mode_max", "existing", "expected"),
    [
        (0o600, None, 0o600),
        (0o400, None, 0o400),
        (0o777, None, 0o755),
        (0o4755, None, 0o755),
        (None, None, 0o644),
        (0o600, 0o644, 0o600),
        (0o644, 0o600, 0o600),
        (None, 0o666, 0o666),
    ],
)
def test_output_file_gets_at_most_the_mode(
    tmp_path: Path, mode_max: int | None, existing: int | None, expected: int
) -> None:
    """It has the bits before the first byte is written, and none of setuid; an existing mode is never widened."""
    target = tmp_path / "there"
    if existing is not None:
        target.touch()
        target.chmod(existing)
    before = os.umask(0o022)
    try:
        with OutputFile(str(target), mode_max=mode_max) as file:
            file.write(b"secret")
            file.flush()
            during = [stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir() if one != target]
    finally:
        os.umask(before)
    assert (during, stat.S_IMODE(target.stat().st_mode)) == ([expected], expected)
    assert target.stat().st_size == len(b"secret")


def test_output_file_on_a_mount_point_is_narrowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount point cannot be renamed over; it gets the mode before the content."""
    target = tmp_path / "there"
    target.touch()
    target.chmod(0o644)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(Path, "replace", refuse)
    with OutputFile(str(target), mode_max=0o600) as file:
        file.write(b"secret")
    assert (stat.S_IMODE(target.stat().st_mode), target.read_bytes()) == (0o600, b"secret")
    assert list(tmp_path.iterdir()) == [target]
