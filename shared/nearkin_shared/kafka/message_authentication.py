"""Authenticate records between processes.

The header `nearkin-mac` is keyed BLAKE3 over the topic, the record's key and its value, under a key that is derived
from the secret in the store's descriptor. It proves who made a record, not when: a record that is sent again has the
same MAC and changes nothing, because every effect of a record is idempotent.

Invariant: only records of holders of the store's secret are processed.
"""

from __future__ import annotations

from hmac import compare_digest
from struct import Struct

from blake3 import blake3

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NotAuthentic
from nearkin_shared.observability import metrics
from nearkin_shared.storage.descriptor import Descriptor

MAC_HEADER = "nearkin-mac"
MAC_BYTES = 16
_CONTEXT = "nearkin 2026 authentication of kafka records"
_SIZES = Struct("<II")


class EnvelopeAuthenticator:
    """Compute and compare the MACs of records. May be shared between threads."""

    def __init__(self, secret: bytes, *, required: bool = True) -> None:
        """`secret` of the descriptor; `required`: refuse records without a MAC too."""
        self._key = blake3(secret, derive_key_context=_CONTEXT).digest()
        self._required = required

    def mac_of(self, full: str, key: bytes | None, value: bytes | None) -> bytes:
        """Return the MAC of a record in the topic `full`."""
        name, key = full.encode(), key or b""
        hasher = blake3(_SIZES.pack(len(name), len(key)) + name + key, key=self._key)
        hasher.update(value or b"")
        return hasher.digest(MAC_BYTES)

    def check(self, reader: str, full: str, key: bytes | None, value: bytes | None, mac: bytes | None) -> None:
        """Refuse a record that is not authentic and count it for `reader`. Raises NotAuthentic."""
        if mac is None and not self._required:
            return
        if mac is not None and compare_digest(mac, self.mac_of(full, key, value)):
            return
        metrics.UNAUTHENTICATED.labels(reader).inc()
        if mac is None:
            raise NotAuthentic(
                f"{full}: not authenticated: a record without the header {MAC_HEADER}; if an older release sent it, "
                'set kafka.unauthenticated to "accept" until all processes run this one; otherwise find out who can '
                "write to the topic"
            )
        raise NotAuthentic(
            f"{full}: not authenticated: its {MAC_HEADER} was not made with this store's key; find out who can write "
            "to the topic, and whether another store uses it (kafka.topic_prefix)"
        )


def authenticator_of(settings: Settings, found: Descriptor) -> EnvelopeAuthenticator:
    """Return the authenticator of a deployment's topics, by `kafka.unauthenticated`."""
    return EnvelopeAuthenticator(bytes.fromhex(found.secret), required=settings.kafka.unauthenticated == "refuse")
