"""Nearkin: a store that keeps a chunk as its nearest kin plus the difference.

with nearkin.open_store("backups", create=True) as store:
    store.put("db.dump", Path("db.dump"))
    store.get("db.dump").read()

with nearkin.connect("https://nearkin.example") as store:    # the same calls, to a gateway
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearkin.blob import Blob
    from nearkin.client import connect, connect_async
    from nearkin.client.aio import AsyncRemoteStore
    from nearkin.client.sync import RemoteStore
    from nearkin.store import Store, create_store, open_store
    from nearkin_shared.config.loader import load
    from nearkin_shared.config.settings import Settings
    from nearkin_shared.errors import (
        AccessDenied,
        BadInput,
        ConfigError,
        Corrupt,
        NearkinError,
        NotFound,
        PermanentError,
        RetryableError,
        SourceFailed,
    )

__version__ = "0.2.0"

__all__ = [
    "AccessDenied",
    "AsyncRemoteStore",
    "BadInput",
    "Blob",
    "ConfigError",
    "Corrupt",
    "NearkinError",
    "NotFound",
    "PermanentError",
    "RemoteStore",
    "RetryableError",
    "Settings",
    "SourceFailed",
    "Store",
    "__version__",
    "connect",
    "connect_async",
    "create_store",
    "load",
    "open_store",
]

_HOME = {
    "Blob": "nearkin.blob",
    "Store": "nearkin.store",
    "create_store": "nearkin.store",
    "open_store": "nearkin.store",
    "Settings": "nearkin_shared.config.settings",
    "load": "nearkin_shared.config.loader",
    "connect": "nearkin.client",
    "connect_async": "nearkin.client",
    "RemoteStore": "nearkin.client.sync",
    "AsyncRemoteStore": "nearkin.client.aio",
}


def __getattr__(name: str) -> object:
    """Import what is asked for, and nothing before: `nearkin --help` must not wait for numpy."""
    if name not in __all__:
        raise AttributeError(f"module 'nearkin' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME.get(name, "nearkin_shared.errors")), name)
    globals()[name] = value
    return value
