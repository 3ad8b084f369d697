# size: one protocol, implemented towards Kafka and towards the next stage of the process
"""Define the outbox of a stage, towards Kafka or towards a stage of the same process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nearkin_shared.formats.message_layout import Encoded
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator


class StageOutbox(Protocol):
    """Messages in flight to the next stage. Not shared between threads."""

    @property
    def authenticator(self) -> EnvelopeAuthenticator | None:
        """Return the authenticator of messages that Kafka carried."""

    @property
    def stages_in_memory(self) -> frozenset[str]:
        """Return the stages that messages reach in the memory of this process."""

    @property
    def sent_messages(self) -> int:
        """Number of messages sent."""

    @property
    def acknowledged_messages(self) -> int:
        """Number of messages acknowledged before the first one that is not."""

    def send(self, name: str, key: bytes, value: Encoded, headers: Mapping[str, bytes]) -> None:
        """Queue a message for one of TOPICS. Raises StoreUnavailable, PermanentError."""

    def send_to(
        self, full: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        """Queue a message for any topic of Kafka. Raises StoreUnavailable, PermanentError."""

    def poll_acks(self) -> None:
        """Learn what was acknowledged, without waiting. Raises StoreUnavailable, PermanentError."""

    def flush(self) -> None:
        """Wait until all messages are acknowledged. Raises RetryableError, PermanentError."""

    def close(self) -> None:
        """Drop the queued messages: their offsets are not committed."""
