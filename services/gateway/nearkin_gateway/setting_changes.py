"""Change settings at run time.

Invariant: a change is validated as a whole before it is published; no change discards another.

    PATCH -> merged with earlier changes -> validated -> published -> read back -> in force in every reader

Changes of one gateway are serialised. Of concurrent changes of two gateways, every reader of the topic merges the later
into the earlier (nearkin_shared.kafka.live_config). A gateway whose message was not based on the newest one publishes
the merged settings again, because a compacted topic keeps only the last message.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from nearkin_gateway.http.problems import Problem
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, ConfigError, StoreUnavailable
from nearkin_shared.kafka.live_config import CHANGES_BYTES_MAX, LiveConfig, check_changes, config_message, merge_changes
from nearkin_shared.observability import metrics

ACKNOWLEDGE_SECONDS = 15.0
"""How long a change may take from the topic back to here."""
SETTLE_MAX = 8

Publish = Callable[[bytes], Awaitable[None]]


class ConfigChanges:
    """Apply merge patches; `publish` is None if no other process needs them."""

    def __init__(self, loaded: Settings, hot: LiveConfig, publish: Publish | None = None) -> None:
        self._loaded = loaded
        self._hot = hot
        self._publish = publish
        self._turn = asyncio.Lock()

    @property
    def settings(self) -> Settings:
        """Return the settings in force."""
        return self._hot.settings

    @property
    def revision(self) -> str:
        """Return what stands for the hot values: equal wherever the same are in force."""
        return self._hot.revision

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Return what is changed over the file."""
        return self._hot.changes

    @property
    def audit(self) -> list[dict[str, Any]]:
        """Return who changed what, newest last."""
        return self._hot.audit

    async def patch(self, patch: Mapping[str, Any], by: str) -> None:
        """Merge a JSON merge patch (RFC 7396): null takes a change back.

        Raises ConfigError, RetryableError, Problem 409.
        """
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        try:
            await self._serialize(check_changes(patch), by, at)
        except BadInput as err:  # a ConfigError is one
            metrics.CONFIG_REFUSED.inc()
            raise ConfigError(str(err)) from err

    async def _serialize(self, patch: Mapping[str, Mapping[str, Any]], by: str, at: str) -> None:
        async with self._turn:
            try:
                await self._apply_patch(patch, by, at)
            finally:
                for _ in range(SETTLE_MAX):
                    if self._hot.is_self_contained:
                        break
                    await self._apply_patch({}, by, at)

    async def _apply_patch(self, patch: Mapping[str, Mapping[str, Any]], by: str, at: str) -> None:
        """1 merge with the known changes  2 validate  3 publish  4 wait until it is read back."""
        if self._publish is not None and not self._hot.caught_up:
            raise StoreUnavailable("the changes of settings so far are not read yet; try again")
        over, before = self._hot.known
        changes, ident = merge_changes(before, patch), secrets.token_hex(8)  # 1
        with_changes(self._loaded, changes)  # 2
        message = config_message(changes, by, at, patch, ident, over)
        if len(message) > CHANGES_BYTES_MAX:
            raise ConfigError(f"changes of {len(message)} bytes together: want at most {CHANGES_BYTES_MAX}")
        heard = asyncio.wrap_future(self._hot.await_message(ident))
        try:
            if self._publish is None:
                self._hot.on_message(message, f"change by {by}")
            else:
                await self._publish(message)  # 3
            await asyncio.wait_for(heard, ACKNOWLEDGE_SECONDS)  # 4
        except TimeoutError as err:
            why = (
                f"the change was published and not read back in {ACKNOWLEDGE_SECONDS:.0f} s; ask GET /v1/config for it"
            )
            raise StoreUnavailable(why) from err
        except BadInput as err:
            why = f"another change came first, which this one does not agree with: {err}; look at GET /v1/config"
            raise Problem(409, "conflicting-change", why) from err
        finally:
            self._hot.forget(ident)
