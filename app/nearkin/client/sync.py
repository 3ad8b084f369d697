"""Access the store behind a gateway from threads, with the methods of `Store`.

A RemoteStore may be used by many threads; it holds at most 32 connections.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import httpx
from tenacity import Retrying

from nearkin.blob import VersionFile
from nearkin.client import requests
from nearkin.client.http import (
    ANSWER_BYTES_MAX,
    Answer,
    Call,
    Conversation,
    Endpoint,
    T,
    closed_error,
    error_of,
    retry_options,
    unreachable,
)
from nearkin.client.requests import AcceptedPut
from nearkin.client.streaming import Download, Upload
from nearkin_shared.errors import NearkinError, StoreUnavailable
from nearkin_shared.preconditions import precondition_of
from nearkin_shared.results import Damage, Deletion, Explanation, PutResult, Stats, VersionInfo
from nearkin_shared.validation import Progress, Source

if TYPE_CHECKING:
    from nearkin.trees.backup_walk import BackupCounts, BackupOptions
    from nearkin.trees.store_backup import BackupResult
    from nearkin.trees.tar_import import ImportCounts, ImportOptions, ImportResult
    from nearkin.trees.tree_restore import RestoreCounts, RestoreOptions
    from nearkin_shared.reading.tree_reader import TreeReader

PUTS_IN_FLIGHT_MAX = 64
"""Blobs of one `put_many` that are durable and not yet committed."""


class RemoteStore:
    """A store behind a gateway; `close` gives its connections back."""

    def __init__(self, endpoint: Endpoint, commit_seconds: float) -> None:
        self.url: str = endpoint.url
        self._commit_seconds = commit_seconds
        self._http = httpx.Client(**endpoint.client_options())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # --- put ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        source: Source,
        *,
        metadata: Mapping[str, str] | None = None,
        sha256: bytes | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
        progress: Progress | None = None,
    ) -> PutResult:
        """Store a new version of `key`. Returns once it is committed and durable.

        `source` is the path of a file, a file-like object open for reading bytes, or bytes. If the connection fails, a
        path, bytes or a seekable file are sent again; they are stored once all the same (perhaps twice by an embedded
        gateway that was ended in between). `if_match` and `if_none_match` as for `Store.put`. Raises
        PreconditionFailed (nothing stored), BadInput (nothing stored), AccessDenied, StoreUnavailable (the same put may
        be tried again), SourceFailed, Corrupt (what was stored is not what was sent).
        """
        upload, precondition = Upload(source, progress), precondition_of(if_match, if_none_match)
        return self._hold(requests.put(key, upload, metadata or {}, sha256, self._commit_seconds, precondition))

    def put_many(self, items: Iterable[tuple[str, Source]], *, progress: Progress | None = None) -> Iterator[PutResult]:
        """Store many blobs, each sent while earlier ones are committed. Yields results in order."""
        waiting: deque[AcceptedPut] = deque()
        for key, source in items:
            upload = Upload(source, progress)
            done = self._hold(requests.accept(key, upload, {}, None, 0.0, self._commit_seconds))
            if isinstance(done, AcceptedPut):
                waiting.append(done)
            else:
                yield from (self._settled(accepted) for accepted in _drain(waiting))
                yield done
            if len(waiting) >= PUTS_IN_FLIGHT_MAX:
                yield self._settled(waiting.popleft())
        yield from (self._settled(accepted) for accepted in _drain(waiting))

    def _settled(self, accepted: AcceptedPut) -> PutResult:
        return self._hold(requests.await_commit(accepted, self._commit_seconds))

    # --- get ---------------------------------------------------------------------------------------------------------

    def get(self, key: str, version: int | None = None, *, start: int = 0, stop: int | None = None) -> RemoteBlob:
        """Return a version (the newest by default) or its bytes [start, stop).

        Raises NotFound, BadInput, AccessDenied.
        """
        found = self.info(key, version)
        return RemoteBlob(self, found, start, requests.check_range(found, start, stop))

    # --- trees -------------------------------------------------------------------------------------------------------

    def backup(
        self,
        key: str,
        paths: Sequence[str | Path],
        *,
        options: BackupOptions | None = None,
        counts: BackupCounts | None = None,
    ) -> BackupResult:
        """Store folders and files as one version of `key`, a tree; see `Store.backup`.

        Every file is read and sent. Raises BadInput, and what `put` raises.
        """
        from nearkin.trees.backup_walk import BackupCounts, BackupOptions
        from nearkin.trees.remote_trees import back_up_remote

        return back_up_remote(self, key, paths, options or BackupOptions(), counts or BackupCounts())

    def import_tar(
        self,
        key: str,
        source: str | Path | BinaryIO,
        *,
        options: ImportOptions | None = None,
        counts: ImportCounts | None = None,
    ) -> ImportResult:
        """Store a tar archive as one version of `key`, a tree; see `Store.import_tar`.

        Raises as `Store.import_tar` does, and AccessDenied.
        """
        from nearkin.trees.remote_trees import import_tar_remote
        from nearkin.trees.tar_import import ImportCounts, ImportOptions

        return import_tar_remote(self, key, source, options or ImportOptions(), counts or ImportCounts())

    def tree(self, key: str, version: int | None = None) -> TreeReader:
        """Return a reader of a tree's entries, which reads ranges of the version.

        Raises NotFound, Corrupt (damaged, or no tree), AccessDenied, StoreUnavailable.
        """
        from nearkin.trees.remote_trees import open_remote_tree

        return open_remote_tree(self, key, version)

    def restore(
        self,
        key: str,
        target: str | Path,
        *,
        version: int | None = None,
        path: bytes = b"",
        options: RestoreOptions | None = None,
        counts: RestoreCounts | None = None,
    ) -> RestoreCounts:
        """Restore a tree, or `path` in it, into the folder `target`; see `Store.restore`.

        Raises as `Store.restore` does, and AccessDenied.
        """
        from nearkin.trees.remote_trees import restore_remote
        from nearkin.trees.tree_restore import RestoreCounts, RestoreOptions

        return restore_remote(
            self, key, Path(target), version, path, options or RestoreOptions(), counts or RestoreCounts()
        )

    # --- versions ----------------------------------------------------------------------------------------------------

    def info(self, key: str, version: int | None = None) -> VersionInfo:
        """Return what is known of a version, the newest by default. Raises NotFound."""
        return self._hold(requests.info(key, version))

    def explain(self, key: str, version: int | None = None) -> Explanation:
        """Return how each chunk of a version is kept. Raises NotFound."""
        return self._hold(requests.explain(key, version))

    def versions(
        self, prefix: str = "", *, all_versions: bool = False, broken: Callable[[Damage], None] | None = None
    ) -> list[VersionInfo]:
        """Return the newest version, or all, of each key that starts with `prefix`, by key.

        Unreadable versions are omitted and passed to `broken`, by default logged as a warning.
        """
        return self._hold(requests.versions(prefix, all_versions, broken))

    # --- delete ------------------------------------------------------------------------------------------------------

    def delete(self, key: str, version: int | None = None, *, reason: str = "") -> int:
        """Delete a version, or all current versions of the key; return how many.

        They are deleted for every reader. Sent again if the connection fails, and done once all the same. Raises
        NotFound, RetentionActive (retention.min_age_seconds: none is deleted), AccessDenied,
        TenantErased, StoreUnavailable.
        """
        return self._hold(requests.delete(key, version, reason))

    def undelete(self, key: str, version: int | None = None, *, reason: str = "") -> int:
        """Undelete a version, or all that the latest `delete` of the key took; return how many.

        Raises NotFound (no version of it is deleted, or the time to undelete has passed), AccessDenied, TenantErased,
        StoreUnavailable.
        """
        return self._hold(requests.undelete(key, version, reason))

    def retain(self, key: str, until: datetime, version: int | None = None, *, reason: str = "") -> VersionInfo:
        """Retain a version, the newest by default, until a time; return it.

        Until then it cannot be deleted. A retention is extended, never shortened. Sent again if the connection fails;
        a repeat changes nothing. Raises NotFound, BadInput (the time is earlier than the current retention),
        AccessDenied, TenantErased, StoreUnavailable.
        """
        return self._hold(requests.retain(key, until, version, reason))

    def list_deleted(self, prefix: str = "", *, broken: Callable[[Damage], None] | None = None) -> list[Deletion]:
        """Return the deleted, not yet collected versions of keys that start with `prefix`, by key."""
        return self._hold(requests.list_deleted(prefix, broken))

    # --- the store as a whole ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return sums over the store."""
        return self._hold(requests.stats())

    def gc_state(self) -> dict[str, Any]:
        """Return the result of the last GC run, and whether GC is paused. Raises AccessDenied."""
        return self._hold(requests.gc_state())

    def change_gc(self, action: str) -> dict[str, Any]:
        """Request a GC run (`run`), `pause` GC or `resume` it; return the state.

        After `run` it is the state before the run, which is done later: poll until `last.ended` changes. Raises
        BadInput, AccessDenied, GcPaused.
        """
        return self._hold(requests.change_gc(action))

    def config(self) -> dict[str, Any]:
        """Return the settings that the services run with. Raises AccessDenied."""
        return self._hold(requests.config())

    def change_config(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Change settings of the running services; return all settings.

        Example: {"features": {"algorithm": "odess"}}. Raises BadInput (nothing is changed), AccessDenied.
        """
        return self._hold(requests.change_config(changes))

    def dead_letters(self) -> list[dict[str, Any]]:
        """Return the newest dead letters that are not dropped, newest first. Raises AccessDenied."""
        return self._hold(requests.dead_letters())

    def dead_letter(self, name: str, value_bytes_max: int) -> dict[str, Any]:
        """Return a dead letter with its headers and the first bytes of its value.

        Raises NotFound, AccessDenied.
        """
        return self._hold(requests.dead_letter(name, value_bytes_max))

    def settle_dead_letters(self, action: str, names: Sequence[str]) -> list[str]:
        """`replay` or `drop` dead letters, each once; return their names.

        Raises BadInput, NotFound, AccessDenied.
        """
        return self._hold(requests.settle_dead_letters(action, names))

    # --- the wire ----------------------------------------------------------------------------------------------------

    def _hold(self, conversation: Conversation[T]) -> T:
        try:
            call = next(conversation)
            while True:
                call = conversation.send(self._answer(call))
        except StopIteration as end:
            value: T = end.value
            return value

    def _answer(self, call: Call) -> Answer:
        time.sleep(call.after_seconds)
        for attempt in Retrying(**retry_options(call)):
            with attempt:
                return self._answer_once(call)
        raise AssertionError("unreachable: tenacity returns or raises")

    def _answer_once(self, call: Call) -> Answer:
        response = self._send(call)
        try:
            return self._collected(call, response)
        finally:
            response.close()

    def _collected(self, call: Call, response: httpx.Response) -> Answer:
        """Return the whole answer. Raises the error that it stands for."""
        named, body = self._named(call), bytearray()
        try:
            for piece in response.iter_raw():
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    raise StoreUnavailable(f"{named}: answers more than {ANSWER_BYTES_MAX:,} bytes")
        except httpx.TransportError as err:
            raise unreachable(named, err) from err
        if not response.is_success:
            raise error_of(named, response.status_code, response.headers, bytes(body))
        return Answer(response.status_code, response.headers, bytes(body), named)

    def _send(self, call: Call) -> httpx.Response:
        if self._http.is_closed:
            raise closed_error(self.url)
        request = self._http.build_request(
            call.method,
            self.url + call.path,
            params=dict(call.params),
            headers=dict(call.headers),
            content=call.upload.pieces() if call.upload is not None else call.body,
            timeout=call.timeout(),
        )
        try:
            return self._http.send(request, stream=True)
        except httpx.TransportError as err:
            raise unreachable(self._named(call), err) from err

    def _named(self, call: Call) -> str:
        return f"{call.method} {self.url}{call.path}"

    def open_download(self, download: Download) -> tuple[httpx.Response, Iterator[bytes], bytes]:
        """Return a started response, the rest of its pieces, and the first. Raises as `get` does."""
        call = download.call()
        for attempt in Retrying(**retry_options(call)):
            with attempt:
                response = self._send(call)
                try:
                    if not response.is_success:
                        self._collected(call, response)
                    download.on_headers(response.status_code, response.headers)
                    pieces = response.iter_raw()
                    return response, pieces, next(pieces, b"")
                except httpx.TransportError as err:
                    response.close()
                    raise unreachable(self._named(call), err) from err
                except BaseException:
                    response.close()
                    raise
        raise AssertionError("unreachable: tenacity returns or raises")


class RemoteBlob(VersionFile):
    """A version behind a gateway as a file; the gateway verifies each chunk."""

    def __init__(self, store: RemoteStore, info: VersionInfo, start: int, stop: int) -> None:
        super().__init__(info, stop - start)
        self._store = store
        self._start = start

    def _pieces_of(self, start: int, stop: int) -> Generator[memoryview, None, None]:
        """Yield bytes in order, over another connection where one breaks.

        The BLAKE3 of a whole version is compared here too, before its last bytes are yielded.
        """
        download = Download(self.info, self._start + start, self._start + stop)
        while not download.is_complete:
            response, pieces, piece = self._store.open_download(download)
            failure: NearkinError | None = None
            try:
                while piece and not download.is_complete:
                    ready = download.take(piece)
                    if download.is_complete:  # before the last bytes: a reader may never ask for more than these
                        response.close()
                    if ready:
                        yield memoryview(ready)
                    piece = b"" if download.is_complete else next(pieces, b"")
            except httpx.TransportError as err:
                failure = unreachable(download.label, err)
            finally:
                response.close()
            if not download.is_complete:
                download.on_disconnect(failure)


def _drain(waiting: deque[AcceptedPut]) -> Iterator[AcceptedPut]:
    while waiting:
        yield waiting.popleft()
