"""Nearkin: a store that keeps a chunk as its nearest kin plus the difference.

with nearkin.open_store("backups") as store:
store.put("db.dump", Path("db.dump"))
store.get("db.dump").read()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearkin.api import Store, open_store
    from nearkin.config import Settings, load
    from nearkin.errors import BadInput, ConfigError, Corrupt, NearkinError, NotFound, Permanent, Retryable
    from nearkin.restore import Blob

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "Blob",
    "ConfigError",
    "Corrupt",
    "NearkinError",
    "NotFound",
    "Permanent",
    "Retryable",
    "Settings",
    "Store",
    "__version__",
    "load",
    "open_store",
]

_HOME = {"Blob": "restore", "Store": "api", "open_store": "api", "Settings": "config", "load": "config"}


def __getattr__(name: str) -> object:
    """Import what is asked for, and nothing before: `nearkin --help` must not wait for numpy."""
    if name not in __all__:
        raise AttributeError(f"module 'nearkin' has no attribute {name!r}")
    value: object = getattr(import_module(f"nearkin.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
