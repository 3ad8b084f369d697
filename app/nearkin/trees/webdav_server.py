"""Serve a store by WebDAV, read-only: the folders and files of `nearkin mount`.

    cheroot -> path check -> host check -> authentication -> ?archive= -> HTML listing -> WebDAV

WebDAV has no symlinks: `latest` and times are folders, a symlink to a file of its own tree is that file, and other
symlinks, devices, FIFOs and names that are not UTF-8 are not shown. Archives contain all of them.

Invariant: nothing is changed, and a content that fails its verification breaks the connection (I8).
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import logging
import mimetypes
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import parse_qs, quote

from cheroot.ssl.builtin import BuiltinSSLAdapter
from cheroot.wsgi import Server
from wsgidav.dav_error import (
    HTTP_BAD_REQUEST,
    HTTP_FORBIDDEN,
    HTTP_INTERNAL_ERROR,
    HTTP_NOT_FOUND,
    DAVError,
    PRECONDITION_CODE_PropfindFiniteDepth,
)
from wsgidav.dav_provider import DAVCollection, DAVNonCollection, DAVProvider
from wsgidav.dc.base_dc import BaseDomainController
from wsgidav.dir_browser import WsgiDavDirBrowser
from wsgidav.error_printer import ErrorPrinter
from wsgidav.http_authenticator import HTTPAuthenticator
from wsgidav.mw.base_mw import BaseMiddleware
from wsgidav.request_resolver import RequestResolver
from wsgidav.wsgidav_app import WsgiDAVApp

from nearkin.trees.byte_pipe import BytePipe
from nearkin.trees.mounted_store import MountableStore, MountedStore, Status
from nearkin.trees.tar_writer import TarWriter
from nearkin.trees.zip_writer import check_zip_size, write_zip
from nearkin_shared.errors import BadInput, ConfigError, NearkinError, NotFound
from nearkin_shared.utils.signals import wait_for
from nearkin_shared.utils.terminal import printable

MEMBERS_MAX = 100_000
"""Entries of a listed folder: an answer is built in memory."""
THREADS = 10
REQUEST_BODY_MAX, REQUEST_HEADERS_MAX = 1 << 20, 64 << 10
TIMEOUT_SECONDS = 60
READ_BYTES = 1 << 20
HOLE_BYTES_MAX = 1 << 40
"""Zeros of holes in one answer, which take minutes at the speed of memory; a file with holes may have 8 EiB."""
ARCHIVES = {"tar": "application/x-tar", "zip": "application/zip"}
_SECOND_NS = 1_000_000_000
_PAGE_HEADERS = (("X-Content-Type-Options", "nosniff"), ("Content-Security-Policy", "sandbox"))
"""A page of a backup runs no script in the origin of the server."""
_TRAILER = 'Add <a href="?archive=tar">?archive=tar</a> or <a href="?archive=zip">?archive=zip</a> to a folder.'
_log = logging.getLogger("nearkin")

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


class WebdavOptions(NamedTuple):
    """Where and to whom a store is served."""

    host: str = "127.0.0.1"
    port: int = 8081
    user: str = "nearkin"
    password: str | None = None
    """None: without authentication, which only a loopback address allows."""
    certificate: Path | None = None
    private_key: Path | None = None


def check_webdav_address(options: WebdavOptions) -> None:
    """Raise ConfigError for an address other than loopback without a password."""
    if options.password is None and not _is_loopback(options.host):
        raise ConfigError(
            f'webdav: host "{options.host}": without --password-file only loopback is served; create a file with a '
            "password, readable by this user alone"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class LockedStore:
    """The paths of a store, shared between the threads of the server."""

    def __init__(self, store: MountableStore) -> None:
        self.store = store
        self._paths = MountedStore(store)
        self._lock = threading.Lock()

    def status(self, path: bytes) -> tuple[bytes, Status] | None:
        """Return where a path leads to, and the attributes there; None if nothing is shown."""
        with self._lock:
            try:
                return self._follow(path)
            except NotFound:
                return None

    def _follow(self, path: bytes) -> tuple[bytes, Status] | None:
        found = self._paths.without_link(path)
        status = self._paths.status(found)
        if stat.S_ISLNK(status.st_mode):
            target = self._link_target(found)
            if target is None:
                return None
            found, status = target, self._paths.status(target)
            return (found, status) if stat.S_ISREG(status.st_mode) else None
        is_shown = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        return (found, status) if is_shown else None

    def _link_target(self, path: bytes) -> bytes | None:
        """Return the path that a symlink of a tree leads to; None if that is outside of the tree."""
        entry, target = self._paths.entry_of(path), self._paths.link_target(path)
        if entry is None or target.startswith(b"/"):
            return None
        root, parts = path[: len(path) - len(entry[1])], entry[1].split(b"/")[:-1]
        for part in target.split(b"/"):
            if part == b"..":
                if not parts:
                    return None
                parts.pop()
            elif part not in (b"", b"."):
                parts.append(part)
        return root + b"/".join(parts)

    def names(self, path: bytes) -> list[str]:
        """Return the names in a folder that can be shown. Raises DAVError, NearkinError."""
        found = list[str]()
        with self._lock:
            for child in self._paths.children(path):
                mode = child.status.st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                    continue
                try:
                    found.append(child.name.decode())
                except UnicodeDecodeError:
                    continue
                if len(found) > MEMBERS_MAX:
                    raise DAVError(
                        HTTP_INTERNAL_ERROR, f"more than {MEMBERS_MAX:,} entries: use ?archive=tar, or nearkin mount"
                    )
        return found

    def entry_of(self, path: bytes) -> tuple[str, int, bytes] | None:
        """Return key, version and path in the tree of a path; None for a folder of keys."""
        with self._lock:
            found = self._paths.entry_of(path)
        return None if found is None else (found[0].key, found[0].version, found[1])

    def open(self, path: bytes) -> int:
        """Open a file and return its handle."""
        with self._lock:
            return self._paths.open(path)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Return bytes of an open file."""
        with self._lock:
            return self._paths.read(handle, offset, size)

    def close(self, handle: int) -> None:
        """Close a handle."""
        with self._lock:
            self._paths.close(handle)


class _OpenFile:
    """A file of the store, as the library reads it."""

    def __init__(self, store: LockedStore, path: bytes) -> None:
        self._store = store
        self._path = path
        self._handle = store.open(path)
        self._position = 0

    def seek(self, position: int) -> None:
        """Set the position."""
        self._position = position

    def read(self, size: int) -> bytes:
        """Return the next bytes. Raises NearkinError."""
        try:
            data = self._store.read(self._handle, self._position, size)
        except NearkinError as err:
            _log.error("webdav: reading %r failed: %s", self._path, err)
            raise
        self._position += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._store.close(self._handle)


class _File(DAVNonCollection):  # type: ignore[misc]  # the library has no types
    """A file of a tree, or a version of `put`."""

    def __init__(self, path: str, environ: Environ, store: LockedStore, found: tuple[bytes, Status]) -> None:
        super().__init__(path, environ)
        self._store = store
        self._found, self._status = found

    def get_content_length(self) -> int:
        return self._status.st_size

    def get_content_type(self) -> str:
        return mimetypes.guess_type(self.name)[0] or "application/octet-stream"

    def get_content(self) -> _OpenFile:
        return _OpenFile(self._store, self._found)

    def get_display_name(self) -> str:
        return printable(str(self.name))

    def get_etag(self) -> str:
        return f"{self._status.st_ino:x}-{self._status.st_size:x}-{self._status.st_mtime:x}"

    def get_last_modified(self) -> int:
        return max(0, self._status.st_mtime // _SECOND_NS)

    def support_etag(self) -> bool:
        return True

    def support_ranges(self) -> bool:
        return True

    def finalize_headers(self, _environ: Environ, response_headers: list[tuple[str, str]]) -> None:
        answer_bytes = int(dict(response_headers)["Content-Length"])
        if answer_bytes - self._status.st_blocks * 512 > HOLE_BYTES_MAX:
            raise DAVError(
                HTTP_FORBIDDEN,
                f"{answer_bytes:,} bytes, nearly all of them holes, {HOLE_BYTES_MAX:,} at most: request a range, or "
                "?archive=tar, which has no bytes for holes",
            )
        response_headers.extend(_PAGE_HEADERS)


class _Folder(DAVCollection):  # type: ignore[misc]  # the library has no types
    """A part of a key, a key, a version or a folder of a tree."""

    def __init__(self, path: str, environ: Environ, store: LockedStore, found: tuple[bytes, Status]) -> None:
        super().__init__(path, environ)
        self._store = store
        self._found, self._status = found

    def get_member_names(self) -> list[str]:
        with dav_errors("list", self.path):
            return self._store.names(self._found)

    def get_member_list(self) -> list[_File | _Folder]:
        found = (self.get_member(name) for name in self.get_member_names())
        return [member for member in found if member is not None]

    def get_member(self, name: str) -> _File | _Folder | None:
        return _resource(self._store, f"{self.path.rstrip('/')}/{name}", self.environ)

    def get_display_name(self) -> str:
        return printable(str(self.name))

    def get_descendants(self, **options: Any) -> list[_File | _Folder]:
        if options.get("depth") == "infinity":
            raise DAVError(
                HTTP_FORBIDDEN,
                "Depth: infinity is not served; list each folder",
                err_condition=PRECONDITION_CODE_PropfindFiniteDepth,
            )
        found: list[_File | _Folder] = super().get_descendants(**options)
        return found

    def get_etag(self) -> None:
        return None

    def get_last_modified(self) -> int | None:
        return max(0, self._status.st_mtime // _SECOND_NS) if self._status.st_mtime else None


def _resource(store: LockedStore, path: str, environ: Environ) -> _File | _Folder | None:
    with dav_errors("stat", path):
        found = store.status(path.encode("utf-8", "surrogateescape"))
    if found is None:
        return None
    create = _Folder if stat.S_ISDIR(found[1].st_mode) else _File
    return create(path, environ, store, found)


class _Provider(DAVProvider):  # type: ignore[misc]  # the library has no types
    """The paths of the store."""

    def __init__(self, store: LockedStore) -> None:
        super().__init__()
        self._store = store

    def is_readonly(self) -> bool:
        return True

    def get_resource_inst(self, path: str, environ: Environ) -> _File | _Folder | None:
        return _resource(self._store, path, environ)


@contextmanager
def dav_errors(action: str, path: str) -> Iterator[None]:
    """Raise errors of a store as HTTP errors; log those that are no plain absence."""
    try:
        yield
    except (NotFound, NotADirectoryError) as err:
        raise DAVError(HTTP_NOT_FOUND, path) from err
    except NearkinError as err:
        _log.error("webdav: %s %r failed: %s", action, path, err)
        raise DAVError(HTTP_INTERNAL_ERROR, f"{path}: the store reported an error; the server has logged it") from err


class _Archives:
    """Answers `?archive=tar` and `?archive=zip`."""

    def __init__(self, store: LockedStore, next_app: Callable[[Environ, StartResponse], Iterable[bytes]]) -> None:
        self._store = store
        self._next_app = next_app

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        chosen = parse_qs(environ.get("QUERY_STRING", "")[:200]).get("archive")
        if not chosen or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return self._next_app(environ, start_response)
        return self._answer(environ, start_response, chosen[0])

    def _answer(self, environ: Environ, start_response: StartResponse, kind: str) -> Iterator[bytes]:
        path = environ["PATH_INFO"]
        if kind not in ARCHIVES:
            raise DAVError(HTTP_BAD_REQUEST, f"archive={kind}: choose {' or '.join(ARCHIVES)}")
        with dav_errors("archive", path):
            found = self._store.status(path.encode("utf-8", "surrogateescape"))
            entry = None if found is None else self._store.entry_of(found[0])
            if found is None:
                raise NotFound(path)
            if entry is None or not (entry[2] or stat.S_ISDIR(found[1].st_mode)):
                raise DAVError(HTTP_BAD_REQUEST, f"{path}: is no tree, nor in one; choose a version or a folder of it")
            write = self._writer(kind, *entry)
        name = quote(f"{path.strip('/').rpartition('/')[2]}.{kind}")
        headers = [
            ("Content-Type", ARCHIVES[kind]),
            ("Content-Disposition", f"attachment; filename*=UTF-8''{name}"),
            ("Date", formatdate(usegmt=True)),
        ]
        start_response("200 OK", headers)
        if environ["REQUEST_METHOD"] == "HEAD":
            yield b""
            return
        with closing(BytePipe(write, "archive")) as pipe:
            try:
                yield from iter(pipe.read, b"")
            except NearkinError as err:
                _log.error("webdav: archive of %r failed: %s", path, err)
                raise

    def _writer(self, kind: str, key: str, version: int, path: bytes) -> Callable[[BinaryIO], None]:
        """Return the function that writes an archive. Raises NearkinError, DAVError."""
        store = self._store.store
        tree = store.tree(key, version)
        if kind == "zip":
            try:
                check_zip_size(tree, path)
            except BadInput as err:
                raise DAVError(HTTP_FORBIDDEN, str(err)) from err

        def write(file: BinaryIO) -> None:
            with closing(store.get(key, version, stop=tree.content_bytes)) as contents:
                if kind == "zip":
                    write_zip(tree, contents, path, file)
                else:
                    TarWriter(tree, contents).write(path, file)

        return write


class _Password(BaseDomainController):  # type: ignore[misc]  # the library has no types
    """One user with one password for everything."""

    def __init__(self, wsgidav_app: object, config: dict[str, Any]) -> None:
        super().__init__(wsgidav_app, config)
        self._options: WebdavOptions = config["nearkin.options"]

    def get_domain_realm(self, _path_info: str, _environ: Environ) -> str:
        return "nearkin"

    def require_authentication(self, _realm: str, _environ: Environ) -> bool:
        return self._options.password is not None

    def basic_auth_user(self, _realm: str, user_name: str, password: str, _environ: Environ) -> bool:
        expected = (self._options.password or "").encode()
        is_user = hmac.compare_digest(user_name.encode("utf-8", "replace"), self._options.user.encode())
        return hmac.compare_digest(password.encode("utf-8", "replace"), expected) and is_user

    def supports_http_digest_auth(self) -> bool:
        return False


class _Authenticator(HTTPAuthenticator):  # type: ignore[misc]  # the library has no types
    """Asks for the password again if the header with it is malformed; the library would fail."""

    def handle_basic_auth_request(self, environ: Environ, start_response: StartResponse) -> Any:
        try:
            pair = base64.b64decode(environ["HTTP_AUTHORIZATION"].partition(" ")[2].strip(), validate=True).decode()
        except ValueError:
            pair = ""
        if ":" not in pair:
            return self.send_basic_auth_response(environ, start_response)
        return super().handle_basic_auth_request(environ, start_response)


def _refuse(start_response: StartResponse, status: str, reason: bytes) -> Iterable[bytes]:
    body = reason + b"\n"
    start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


class _PathCheck:
    """Refuses paths on which the library fails.

    The connection would end without an answer.
    """

    def __init__(self, next_app: Callable[[Environ, StartResponse], Iterable[bytes]]) -> None:
        self._next_app = next_app

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        try:
            path.encode("latin-1").decode()
        except UnicodeError:
            return _refuse(
                start_response, "404 Not Found", b"names that are not UTF-8 are not shown; ?archive=tar has them"
            )
        if not path.startswith("/") and (path, environ["REQUEST_METHOD"]) != ("*", "OPTIONS"):
            return _refuse(start_response, "400 Bad Request", b"the path begins with no slash")
        return self._next_app(environ, start_response)


class _HostCheck:
    """Refuses other host names where no password is set.

    A web page whose name leads to this machine could make a browser read the store.
    """

    def __init__(self, next_app: Callable[[Environ, StartResponse], Iterable[bytes]]) -> None:
        self._next_app = next_app

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if not _is_loopback(name.strip("[]")):
            return _refuse(start_response, "403 Forbidden", b"this server answers to localhost and 127.0.0.1 alone")
        return self._next_app(environ, start_response)


def webdav_app(store: MountableStore, options: WebdavOptions) -> Callable[[Environ, StartResponse], Iterable[bytes]]:
    """Return the WSGI application."""
    shared = LockedStore(store)

    class Archives(BaseMiddleware):  # type: ignore[misc]  # the library has no types
        def __init__(self, wsgidav_app: object, next_app: Any, config: dict[str, Any]) -> None:
            super().__init__(wsgidav_app, next_app, config)
            self._archives = _Archives(shared, next_app)

        def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            return self._archives(environ, start_response)

    app = WsgiDAVApp(
        {
            "provider_mapping": {"/": _Provider(shared)},
            "middleware_stack": [ErrorPrinter, _Authenticator, Archives, WsgiDavDirBrowser, RequestResolver],
            "http_authenticator": {
                "domain_controller": _Password,
                "accept_basic": True,
                "accept_digest": False,
                "default_to_digest": False,
            },
            "nearkin.options": options,
            "lock_storage": False,
            "block_size": READ_BYTES,
            "dir_browser": {
                "ignore": [],
                "icon": False,
                "response_trailer": _TRAILER,
                "show_user": False,
                "davmount": False,
                "ms_sharepoint_support": False,
                "libre_office_support": False,
            },
            "logging": {"enable": False},
            "verbose": 1,
            "suppress_version_info": True,
        }
    )
    return _PathCheck(app if options.password is not None else _HostCheck(app))


def serve_webdav(store: MountableStore, options: WebdavOptions, on_listen: Callable[[str], None]) -> None:
    """Serve a store until an exception, such as KeyboardInterrupt.

    `on_listen` is called with the URL once the server listens. Raises ConfigError.
    """
    check_webdav_address(options)
    for name in ("wsgidav", "cheroot"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are logged here, with the reason
    server = _Server(
        (options.host, options.port), webdav_app(store, options), numthreads=THREADS, server_name="nearkin"
    )
    server.timeout = TIMEOUT_SECONDS
    server.max_request_body_size, server.max_request_header_size = REQUEST_BODY_MAX, REQUEST_HEADERS_MAX
    if options.certificate is not None:
        server.ssl_adapter = BuiltinSSLAdapter(str(options.certificate), str(options.private_key))
    try:
        server.prepare()
    except OSError as err:
        raise ConfigError(f"webdav: {options.host} port {options.port}: {err.strerror or err}") from err
    host = f"[{options.host}]" if ":" in options.host else options.host
    ended = threading.Event()

    def serve() -> None:
        try:
            server.serve()
        finally:
            ended.set()

    # Not in this thread: a KeyboardInterrupt inside the server's queue leaves one of its workers waiting for ever.
    serving = threading.Thread(target=serve, name="nearkin-webdav")
    serving.start()
    try:
        on_listen(f"{'http' if options.certificate is None else 'https'}://{host}:{server.bind_addr[1]}/")
        wait_for(ended)
    finally:
        server.stop()
        serving.join()


class _Server(Server):
    """Logs errors of connections for debugging alone: failed reads have their own line."""

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        _log.debug("webdav: %s", msg)
