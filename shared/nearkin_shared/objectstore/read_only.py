# size: one wrapper of object stores
"""Read a folder of objects without changing it.

Invariant: no call changes an object.
"""

from __future__ import annotations

from typing import NoReturn

from nearkin_shared.errors import BadInput
from nearkin_shared.objectstore.base import Payload
from nearkin_shared.objectstore.local import LocalObjectStore


class ReadOnlyObjectStore(LocalObjectStore):
    """The objects of a folder; every call that would change one raises BadInput.

    It is the innermost store, below all wrappers: a wrapper that simulates changes (a dry run) works above it.
    """

    def put_new(self, name: str, *parts: Payload) -> NoReturn:
        """Refuse to write an object. Raises BadInput."""
        del parts
        self._refuse(name)

    def replace(self, name: str, data: Payload) -> NoReturn:
        """Refuse to replace an object. Raises BadInput."""
        del data
        self._refuse(name)

    def delete(self, name: str) -> NoReturn:
        """Refuse to delete an object. Raises BadInput."""
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise BadInput(f"{name}: store {self._root} was opened with read_only=True; open it without to write")
