# size: one reason to change, how the folder of a store looks
"""Recognise the folder of a store.

Invariant: a folder with other files never becomes a store, and a store without its descriptor is never taken for none.
"""

from __future__ import annotations

from pathlib import Path

from nearkin.local.process_lock import NAMES as LOCKS
from nearkin_shared.errors import BadInput, Corrupt, StoreUnavailable
from nearkin_shared.storage import chunking_record, descriptor


def store_path(path: str | Path) -> Path:
    """Return the folder named by `path`. Raises BadInput for a path that cannot be a folder."""
    try:
        root = Path(path).expanduser()
        if "\0" in str(root):
            raise ValueError("a path holds no NUL byte")  # noqa: TRY301 - as all that no path can be
        if root.exists() and not root.is_dir():
            raise BadInput(f"store {root}: is a file; name a folder")
    except OSError as err:
        raise StoreUnavailable(f"store {path}: {err.strerror}") from err
    except (ValueError, RuntimeError, TypeError) as err:  # a user without a home; no path at all
        raise BadInput(f"store {str(path)!r}: {err}") from err
    return root


def has_store(root: Path) -> bool:
    """Return whether the folder has a store. Raises Corrupt if a store has no descriptor."""
    try:
        if (root / descriptor.NAME).is_file():
            return True
    except OSError as err:
        raise StoreUnavailable(f"store {root}: {err.strerror}") from err
    if entry_names(root) >= {"containers", "manifests"}:
        raise Corrupt(
            f"store {root}: {descriptor.NAME} is lost; restore it from a copy, every chunk's tag depends on it"
        )
    return False


def check_only_store_files(root: Path) -> None:
    """Raise BadInput if the folder has files that creating a store does not leave."""
    if entry_names(root) - {*LOCKS, "tmp", "keys", "parity", descriptor.NAME, chunking_record.NAME}:
        raise BadInput(
            f"store {root}: the folder is not empty and holds no {descriptor.NAME}; name an empty or new folder"
        )


def entry_names(root: Path) -> set[str]:
    """Return the names in a folder, none if it is missing. Raises StoreUnavailable."""
    try:
        return {entry.name for entry in root.iterdir()} if root.is_dir() else set()
    except OSError as err:
        raise StoreUnavailable(f"store {root}: {err.strerror}") from err
