"""Locate the index of a local store, and determine whether it matches the store's state.

    index.path not set    ROOT/index
    index.path set        PATH/STORE_ID on a disk of this machine; PATH/STORE_ID.new while it is rebuilt

    ROOT/index.id         a random token of 32 hex digits; the index keeps the token of the state that it has

Several machines may then have an index each, and an index survives the store's folder being copied or rolled back.
Invariant: an index is used only while the store has its token. A writer replaces both before its first change and
after
its last one, so that no other index, and no copy made in between, has the token of its index:

    1 the index keeps old and new    2 ROOT/index.id is new    3 the index keeps new alone

A writer that dies in between leaves an index that matches, or one that is rebuilt.

    ROOT/index.removals   for ROOT/index: a token that is replaced only where entries are removed (GC, purge, repair)

    1 the file has old and new    2 one transaction removes the entries and gives the index the new token
    3 the file has the new one alone; only then are the objects of the entries deleted

An older copy of ROOT/index that lacks entries is completed. One that still names objects deleted since, or a
container
that was rewritten without some chunks, would let a put refer to lost chunks: it has another token and is rebuilt.
Puts
replace no token here: that would cost each some 20 ms.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.local.process_lock import WRITING, WriterLock
from nearkin_shared.errors import ConfigError, Corrupt, NoRoom, NotWritable, StoreLocked, StoreUnavailable
from nearkin_shared.limits import DESCRIPTOR
from nearkin_shared.objectstore.local import sync_folder
from nearkin_shared.utils.private_files import (
    make_private_folders,
    open_private,
    read_private,
    remove_tree,
    write_error,
)

if TYPE_CHECKING:  # a get needs no index
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

TOKEN_FILE = "index.id"  # noqa: S105 - a name
REMOVALS_FILE = "index.removals"
TOKEN_BYTES = 16
NO_REMOVAL = "0" * (2 * TOKEN_BYTES)
"""Of an index from which nothing was removed yet."""
FILE_BYTES_MAX = 4 * TOKEN_BYTES + 2
"""Two tokens, a line each."""
READS_OF_TOKEN = 3
"""Tries to read a token that a writer may replace between the read of the file and that of the index."""
_TOKEN = re.compile(b"[0-9a-f]{32}", re.ASCII)
_STORE_ID = re.compile("[0-9a-f]{32}", re.ASCII)


class IndexLocation:
    """The folders of a store's index, the writer lock, and the token of store and index."""

    def __init__(self, root: Path, store_id: str, index_path: str | None) -> None:
        """Open the location.

        Raises ConfigError as `check_index_path` does, Corrupt for a store id that is no file name.
        """
        check_index_path(root, index_path)
        self.root = root
        self.is_external: bool = index_path is not None
        self._base = root if index_path is None else _expand(index_path)
        if self.is_external and _STORE_ID.fullmatch(store_id) is None:
            raise Corrupt(f"{DESCRIPTOR}: store_id {store_id!r:.60}: want 32 hex digits; restore it from a copy")
        name = store_id if self.is_external else "index"
        self.folder: Path = self._base / name
        self.fresh: Path = self._base / f"{name}.new"
        self._token_file = root / TOKEN_FILE
        self._removals_file = root / REMOVALS_FILE
        self._lock = WriterLock(root)
        self._index_lock = WriterLock(self._base, f"{name}.lock") if self.is_external else None

    # --- the writer's lock -------------------------------------------------------------------------------------------

    def acquire(self, wait_seconds: float = 0.0, what: str = WRITING) -> None:
        """Take the store's lock, and that of an external index.

        Raises StoreLocked, StoreUnavailable.
        """
        self._lock.acquire(wait_seconds, what)
        if self._index_lock is None:
            return
        try:
            self._make_base()
            self._index_lock.acquire(wait_seconds, what)
        except StoreLocked as err:
            self.release()
            raise StoreLocked(f"index {self.folder}: is in use for a copy of store {self.root}: {err}") from err
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the locks back."""
        if self._index_lock is not None:
            self._index_lock.release()
        self._lock.release()

    @property
    def is_wanted(self) -> bool:
        """Return whether a process waits for the store's lock and runs before the next GC step."""
        return self._lock.is_wanted

    def _make_base(self) -> None:
        try:
            make_private_folders(self._base)
        except OSError as err:
            raise write_error(self._base, err) from err

    # --- the folder --------------------------------------------------------------------------------------------------

    def check_owner(self) -> None:
        """Refuse an external folder that another user made, may write, or may replace.

        Raises: NotWritable. Index entries are trusted: a forged index would let a put refer to chunks that are not
        stored.
        """
        if not self.is_external:
            return
        self._check_base()
        try:
            status = os.lstat(self.folder)
        except OSError:  # not there, or out of reach: opening it says so
            return
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise NotWritable(
                f"index {self.folder}: belongs to user {status.st_uid} or may be written by others (mode "
                f"{stat.S_IMODE(status.st_mode):04o}); set index.path to a folder of this user, or remove it: it is "
                "made again"
            )

    def _check_base(self) -> None:
        """Refuse an `index.path` in which another user may rename the index folder.

        Raises: NotWritable.
        """
        try:
            found = [os.stat(self._base)]
            if self._base.is_symlink():
                found.append(os.lstat(self._base))
        except OSError:  # not there, or out of reach: opening the index says so
            return
        mode, own = stat.S_IMODE(found[0].st_mode), os.geteuid()
        foreign = next((status.st_uid for status in found if status.st_uid not in (0, own)), None)
        if foreign is not None:
            raise NotWritable(
                f"index.path {self._base}: belongs to user {foreign}, this process is user {own}: that user could "
                "replace the index; name a folder of this user, or one below it that does not exist yet"
            )
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise NotWritable(
                f"index.path {self._base}: may be written by others (mode {mode:04o}), who could replace the index; "
                f"run `chmod go-w {self._base}`, or name a folder below it that does not exist yet: it is made with "
                "mode 0700"
            )

    # --- the token ---------------------------------------------------------------------------------------------------

    def matches(self, index: LmdbIndex) -> bool:
        """Return whether an index has the store's present state. Raises StoreUnavailable."""
        return any(self._has_token(index) and self._has_removals(index) for _ in range(READS_OF_TOKEN))

    def _has_token(self, index: LmdbIndex) -> bool:
        token = self._read_token()
        if token is None:
            return not self.is_external and not index.tokens
        return token in index.tokens

    def _has_removals(self, index: LmdbIndex) -> bool:
        """Return whether the index has the last removal; an external one follows index.id."""
        if self.is_external:
            return True
        tokens = self._read(self._removals_file)
        return (index.removal_token or NO_REMOVAL) in ([NO_REMOVAL] if tokens is None else tokens)

    @contextmanager
    def removal(self, index: LmdbIndex) -> Iterator[str]:
        """Invalidate older copies of ROOT/index; the caller stores the token with its removal.

        Raises NoRoom, StoreUnavailable.
        """
        if self.is_external:
            yield ""
            return
        token = secrets.token_hex(TOKEN_BYTES)
        self._write(self._removals_file, index.removal_token or NO_REMOVAL, token)  # 1
        yield token  # 2
        self._write(self._removals_file, token)  # 3

    def give_token(self, index: LmdbIndex, *, renew: bool = False) -> str | None:
        """Give a token to a complete new index, under the lock.

        Returns the token for the store, to set after the new index replaced the old one; None if the store has it
        already: the index of another machine stays valid when only this one is rebuilt. `renew`: the store has changed.
        """
        if not self.is_external:
            self._give_removals(index)
        token = self._read_token()
        if token is None and not self.is_external:
            return None
        if token and not renew:
            index.keep_tokens([token])
            return None
        token = secrets.token_hex(TOKEN_BYTES)
        index.keep_tokens([token])
        return token

    def _give_removals(self, index: LmdbIndex) -> None:
        """Give a rebuilt index the token of the last removal; a damaged token is replaced."""
        tokens = self._read(self._removals_file)
        if tokens is not None:
            token = tokens[-1] if tokens else secrets.token_hex(TOKEN_BYTES)
            index.keep_removal_token(token)
            if tokens != [token]:
                self._write(self._removals_file, token)

    def publish_token(self, token: str | None) -> None:
        """Give the store a token that `give_token` returned. Raises NoRoom, StoreUnavailable."""
        if token is None:
            return
        if not self._token_file.exists():  # an index in the store's folder has no token: nothing would invalidate it
            remove_tree(self.root / "index")
        self._write_token(token)

    def replace_token(self, index: LmdbIndex) -> None:
        """Replace the token of store and index durably. Raises NoRoom, StoreUnavailable."""
        before = self._read_token()
        if before is None and not self.is_external:
            return
        token = secrets.token_hex(TOKEN_BYTES)
        index.keep_tokens([*([before] if before else []), token])  # 1
        self._write_token(token)  # 2
        index.keep_tokens([token])  # 3

    def _read_token(self) -> str | None:
        """Return the store's token, "" for a damaged one, None where no index needs one."""
        tokens = self._read(self._token_file)
        return tokens if tokens is None else "".join(tokens[:1])

    @staticmethod
    def _read(file: Path) -> list[str] | None:
        """Return the tokens of a file, [] if damaged, None without a file.

        Raises StoreUnavailable.
        """
        try:
            data = read_private(file, FILE_BYTES_MAX)
        except FileNotFoundError:
            return None
        except OSError as err:
            raise StoreUnavailable(f"{file}: {err.strerror}") from err
        tokens = data.split()
        return [token.decode() for token in tokens] if all(map(_TOKEN.fullmatch, tokens)) else []

    def _write_token(self, token: str) -> None:
        self._write(self._token_file, token)

    def _write(self, file: Path, *tokens: str) -> None:
        """Overwrite the tokens in place.

        A full disk has no room for a second file, and a torn write matches no index.
        """
        data = "".join(f"{token}\n" for token in tokens).encode()
        try:
            is_new = not file.exists()
            descriptor = self._open_token(file)
            try:
                os.pwrite(descriptor, data, 0)
                os.ftruncate(descriptor, len(data))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                sync_folder(self.root)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom(f"{file}: no room left on the device: make room and run the same again") from err
            raise write_error(file, err) from err

    @staticmethod
    def _open_token(file: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT
        descriptor = open_private(file, flags)
        if os.fstat(descriptor).st_nlink > 1:  # a store that was copied as links: the copy keeps its token
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(file)
            descriptor = open_private(file, flags | os.O_EXCL)
        return descriptor


def check_index_path(root: Path, index_path: str | None) -> None:
    """Refuse an `index.path` inside the store's folder, where unknown files are removed.

    Raises ConfigError, also for a home folder that is not known.
    """
    if index_path is None:
        return
    folder = _expand(index_path)
    resolved = Path(os.path.realpath(folder))
    above = {Path(os.path.abspath(folder)), resolved}  # as it is written, and where links lead
    above.update(*(path.parents for path in tuple(above)))
    owned = [root, *_linked_folders(root)]
    names = {Path(os.path.realpath(path)) for path in owned}
    numbers = {number for path in owned if (number := _file_number(path)) is not None}  # a bind mount has another name
    if names & above or numbers & {_file_number(path) for path in above}:
        shown = f'index.path "{index_path}"' + ("" if resolved == folder else f" ({resolved})")
        raise ConfigError(
            f"{shown}: is inside the store {root}; name a folder outside of it, or unset index.path to keep the index "
            "in the store"
        )


def _linked_folders(root: Path) -> list[Path]:
    """Return the links in a store's folder: `containers/` may be on another disk."""
    try:
        with os.scandir(root) as entries:
            return [root / entry.name for entry in entries if entry.is_symlink()]
    except OSError:  # not created yet, or reported by its first user
        return []


def _file_number(path: Path) -> tuple[int, int] | None:
    """Return the device and inode number of what a path leads to."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _expand(index_path: str) -> Path:
    try:
        return Path(index_path).expanduser()
    except RuntimeError as err:
        raise ConfigError(f'index.path "{index_path}": {err}; name an absolute path') from err
