"""Changes of hot settings. Invariant: a change is validated as a whole before anybody sees it.

    PATCH -> merged with the changes before it -> validated -> published -> in force here, and wherever it is read

What is published are all changes over the file: the newest message of the compacted topic is enough. Two gateways
that are asked in the same instant both publish; the later message stands for both then.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from nearkin.config import Settings
from nearkin.config_layers import with_changes
from nearkin.errors import BadInput, ConfigError
from nearkin.runners.kafka.hot import HotSettings, checked_changes, config_message

_audit = logging.getLogger("nearkin.audit")

Publish = Callable[[bytes], Awaitable[None]]


class HotChanges:
    """Takes merge patches; `publish` None where there is nobody else to tell."""

    def __init__(self, loaded: Settings, hot: HotSettings, publish: Publish | None = None) -> None:
        self._loaded = loaded
        self._hot = hot
        self._publish = publish

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
        """Merge a JSON merge patch (RFC 7396): null takes a change back. Raises ConfigError, Retryable."""
        try:
            changes = _merged(self.changes, checked_changes(patch))
        except ConfigError:
            raise
        except BadInput as err:
            raise ConfigError(str(err)) from err
        with_changes(self._loaded, changes)
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        message = config_message(changes, by, at)
        if self._publish is not None:
            await self._publish(message)
        self._hot.told(message, f"change by {by}")
        _audit.info("config: by=%s at=%s revision=%s patch=%s", by, at, self.revision, dict(patch))


def _merged(changes: Mapping[str, Any], patch: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    merged = {section: dict(fields) for section, fields in changes.items()}
    for section, fields in patch.items():
        for field, value in fields.items():
            if value is None:
                merged.get(section, {}).pop(field, None)
            else:
                merged.setdefault(section, {})[field] = value
    return {section: fields for section, fields in merged.items() if fields}
