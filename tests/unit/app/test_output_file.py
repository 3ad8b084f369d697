"""Where a get writes: an interrupt at any moment leaves the folder as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nearkin.cli.output_file import OutputFile


@pytest.mark.parametrize("step", ["open", "chmod"])
def test_an_interrupt_while_the_file_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A signal that is sent as soon as the file is seen falls here, in one of some hundred runs on a fast machine."""
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
