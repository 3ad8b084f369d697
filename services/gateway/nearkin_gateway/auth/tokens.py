"""Tokens, and quotas of tenants, in one file.

Invariant: the file never holds a token, only what recognises one.

    nk_7f3a9c0e_5tR...        nk_ID_SECRET, the secret 32 random bytes in base64url

The file keeps a plain SHA-256 of each token. A slow hash protects what people choose; 256 random bits cannot be
searched for at any speed, and a slow hash would cost every request its time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

from nearkin_gateway.auth.tenant_quota import TenantQuota, check_quota, read_quotas
from nearkin_shared.errors import BadInput, ConfigError, NotFound, choose
from nearkin_shared.tenant_names import tenant_problem
from nearkin_shared.utils.durable_files import make_folders, replace_file
from nearkin_shared.utils.file_locks import lock_file
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import open_private

OPERATOR = "operator"
SCOPES = ("read", "write", "delete", "admin", OPERATOR)
"""The first four are of the token's tenant; `operator` is of all services: settings, GC, workers, scrub, dead letters,
sums of every tenant. A token of an operator alone has no tenant."""
NO_TENANT = ""
SECRET_BYTES = 32
TOKENS_MAX = 10_000
FILE_BYTES_MAX = 8 * 1024 * 1024
NOTE_CHARACTERS_MAX = 200
DAYS_MAX = 3650
LOOK_SECONDS = 1.0
"""How long a revoked token may still be taken: the file is looked at this often at most."""

_TEXT = re.compile(r"nk_([0-9a-f]{8})_[A-Za-z0-9_-]{43}", re.ASCII)
_log = logging.getLogger("nearkin.gateway")


@frozen
class AccessToken:
    """A token without its text.

    `expires` and `created`: seconds since 1970; `expires` None: never.
    """

    id: str
    sha256: str
    tenant: str
    scopes: tuple[str, ...]
    created: int
    expires: int | None = None
    note: str = ""

    def expired(self, now: float) -> bool:
        """Return whether the token is not taken any more."""
        return self.expires is not None and now >= self.expires


@frozen
class _FileContent:
    """The content of a tokens file: tokens by id, quotas by tenant."""

    tokens: dict[str, AccessToken]
    quotas: dict[str, TenantQuota]
    has_several_tenants: bool = False


def create(
    path: Path, tenant: str, scopes: Sequence[str], *, days: int | None = 90, note: str = ""
) -> tuple[str, AccessToken]:
    """Add a token to the file; return its text, which is stored nowhere, and its entry.

    Raises BadInput.
    """
    for scope in scopes:
        if scope not in SCOPES:
            raise choose("scope", scope, SCOPES)
    if not scopes:
        raise BadInput(f"scopes: want at least one of {', '.join(SCOPES)}")
    if set(scopes) == {OPERATOR}:
        tenant = NO_TENANT
    elif (problem := tenant_problem(tenant)) is not None:
        raise BadInput(f"tenant {tenant!r:.200}: {problem}")
    if days is not None and not 1 <= days <= DAYS_MAX:
        raise BadInput(f"days {days}: want 1 to {DAYS_MAX}")
    if len(note) > NOTE_CHARACTERS_MAX:
        raise BadInput(f"note of {len(note)} characters: want at most {NOTE_CHARACTERS_MAX}")
    now = datetime.now(UTC)
    with _lock(path):
        content = _read(path) if path.exists() else _FileContent({}, {})
        found = content.tokens
        if len(found) >= TOKENS_MAX:
            raise BadInput(f"{path}: holds {TOKENS_MAX} tokens already; revoke some")
        number = secrets.token_hex(4)
        while number in found:
            number = secrets.token_hex(4)
        text = f"nk_{number}_{secrets.token_urlsafe(SECRET_BYTES)}"
        token = AccessToken(
            id=number,
            sha256=_digest(text),
            tenant=tenant,
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            created=int(now.timestamp()),
            expires=None if days is None else int((now + timedelta(days=days)).timestamp()),
            note=note,
        )
        _write(path, _FileContent({**found, number: token}, content.quotas))
    return text, token


def revoke(path: Path, number: str) -> AccessToken:
    """Take a token, named by its id, out of the file. Raises NotFound."""
    with _lock(path):
        content = _read(path)
        if number not in content.tokens:
            raise NotFound(f"token {number!r}: {path} has none; `nearkin token list` lists them")
        gone = content.tokens.pop(number)
        _write(path, content)
    return gone


def set_quota(path: Path, tenant: str, quota: TenantQuota) -> None:
    """Replace the quotas of a tenant; without any limit the tenant is unlimited.

    Raises BadInput, ConfigError.
    """
    check_quota(tenant, quota)
    with _lock(path):
        content = _read(path)
        content.quotas.pop(tenant, None)
        if quota.to_json():
            content.quotas[tenant] = quota
        read_quotas({name: limits.to_json() for name, limits in content.quotas.items()})
        _write(path, content)


def read_tokens(path: Path) -> list[AccessToken]:
    """Return all tokens, oldest first. Raises ConfigError."""
    return sorted(_read(path).tokens.values(), key=lambda token: (token.created, token.id))


def read_tenant_quotas(path: Path) -> dict[str, TenantQuota]:
    """Return the quotas by tenant. Raises ConfigError."""
    return _read(path).quotas


class TokenFile:
    """The tokens of a file, read again within LOOK_SECONDS; an invalid file is ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.on_change: Callable[[list[AccessToken], list[AccessToken]], None] | None = None
        """Called with the tokens that a change of the file added and removed."""
        self._seen = self._mark()  # before the read, so that the next check sees a change made during it
        self._content = _read(path)
        self._failed: tuple[int, ...] | None = None
        self._looked = time.monotonic()

    def find(self, text: str) -> AccessToken | None:
        """Return the token, expired or not, that `text` is."""
        self._look()
        match = _TEXT.fullmatch(text)
        token = self._content.tokens.get(match[1]) if match is not None else None
        # A missing id takes as long as a wrong secret; ids are no secret.
        right = hmac.compare_digest(_digest(text), token.sha256 if token is not None else "0" * 64)
        return token if right else None

    def by_id(self, number: str) -> AccessToken | None:
        """Return the token with this id, expired or not. The caller has verified the secret part."""
        self._look()
        return self._content.tokens.get(number)

    def quota(self, tenant: str) -> TenantQuota | None:
        """Return the quotas of a tenant, None without any."""
        self._look()
        return self._content.quotas.get(tenant)

    def has_several_tenants(self) -> bool:
        """Return whether tokens name more than one tenant."""
        self._look()
        return self._content.has_several_tenants

    def tenants(self) -> list[str]:
        """Return the tenants that tokens name."""
        self._look()
        return sorted({token.tenant for token in self._content.tokens.values() if token.tenant != NO_TENANT})

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        mark = self._mark()
        if mark == self._seen:
            return
        try:
            before, self._content, self._failed = self._content.tokens, _read(self._path), None
            now_held = self._content.tokens
            _log.info("%s: read again, %d tokens", self._path, len(now_held))
            if self.on_change is not None:
                self.on_change(_missing_from(before, now_held), _missing_from(now_held, before))
        except ConfigError as err:
            if mark != self._failed:
                _log.error("%s; the tokens read before stay", err)
            self._failed = mark
            if isinstance(err.__cause__, OSError):
                return  # no descriptor to spare, no permission: that ends, the mark stays, and so would who was revoked
        self._seen = mark

    def _mark(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size


def token_file(name: str | None) -> TokenFile | None:
    """Return the tokens of `auth.tokens_file`, where there is one. Raises ConfigError."""
    return None if name is None else TokenFile(Path(name).expanduser())


def _missing_from(tokens: dict[str, AccessToken], others: dict[str, AccessToken]) -> list[AccessToken]:
    """Return those of `others` that `tokens` lacks; a token that differs is another one."""
    return [token for number, token in others.items() if tokens.get(number) != token]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _read(path: Path) -> _FileContent:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes")  # noqa: TRY301 - one place names the file
        found = json.loads(data)
        tokens = [AccessToken(**{**entry, "scopes": tuple(entry["scopes"])}) for entry in found["tokens"]]
        quotas = read_quotas(found.get("quotas", {}))
        for token in tokens:
            whole = re.fullmatch("[0-9a-f]{8}", token.id) and re.fullmatch("[0-9a-f]{64}", token.sha256)
            known = bool(token.scopes) and set(token.scopes) <= set(SCOPES)
            timed = isinstance(token.created, int) and isinstance(token.expires, int | None)
            owned = isinstance(token.tenant, str) and (
                token.tenant == NO_TENANT if token.scopes == (OPERATOR,) else tenant_problem(token.tenant) is None
            )
            if not (whole and known and timed and owned):
                raise ValueError(f"token {token.id!r:.40} is not one that `nearkin token` wrote")  # noqa: TRY301
    except FileNotFoundError as err:
        raise ConfigError(f'tokens file "{path}": no such file; `nearkin token create` makes one') from err
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, BadInput) as err:
        raise ConfigError(f'tokens file "{path}": {err}') from err
    tenants = {token.tenant for token in tokens if token.tenant != NO_TENANT}
    return _FileContent({token.id: token for token in tokens}, quotas, len(tenants) > 1)


def _write(path: Path, content: _FileContent) -> None:
    """Replace the token file atomically and durably, readable by its owner only.

    Durable, because a revoked token must not reappear after a crash.
    """
    held: dict[str, object] = {"tokens": [asdict(token) for token in content.tokens.values()]}
    if content.quotas:
        held["quotas"] = {tenant: quota.to_json() for tenant, quota in content.quotas.items()}
    data = json.dumps(held, indent=1).encode()
    try:
        replace_file(path, data)
    except OSError as err:
        raise BadInput(f'tokens file "{path}": {err.strerror}') from err


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one change the file at a time."""
    try:
        make_folders(path.parent)
        lock = os.fdopen(open_private(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT), "r+b")
    except OSError as err:
        raise BadInput(f'tokens file "{path}": {err.strerror}') from err
    with lock:
        lock_file(lock.fileno(), wait=True)
        yield
