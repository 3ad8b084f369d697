# size: one function for files outside of stores
"""Replace files outside a store durably: key files and token files.

Invariant: at any moment the file is the old or the new one, whole; once `replace_file` has returned, the new one.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from nearkin_shared.objectstore.local import sync_folder, write_durably

FOLDER_MODE = 0o777
"""As the user's umask has it: these folders are the user's own."""


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically, with mode 0600. Raises OSError."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        write_durably(fresh, [data], drop=False)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            os.unlink(fresh)
        raise
    sync_folder(path.parent)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it that are missing, durably. Raises OSError."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder, FOLDER_MODE)
    sync_folder(folder.parent)
