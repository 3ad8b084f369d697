"""Check that an interrupt at any moment of a get leaves its output folder unchanged."""

from __future__ import annotations

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
    real = getattr(Path, step)

    def interrupted(*given: Any, **named: Any) -> None:
        made = real(*given, **named)
        if made is not None:
            made.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, step, interrupted)
    with pytest.raises(KeyboardInterrupt), OutputFile(str(target)):
        pass
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"as it was"
