"""Trigger a rebalance after the start of a group member.

A group moves partitions in two steps (cooperative rebalancing): in the first their owner revokes them, in the second
they are assigned to another member, and the owner requests the second. A member that dies between the two and returns
before its session ends (static membership, KIP-345) receives the result of the first step: it has nothing to revoke and
requests nothing, so that the revoked partitions have no owner until another member joins or leaves. So each member that
starts triggers a rebalance.

Invariant: however members die and return, each partition of a group soon has an owner.
"""

from __future__ import annotations

import logging
import threading

from confluent_kafka import Consumer, KafkaException, TopicPartition

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError
from nearkin_shared.kafka.clients import consumer, on_parts, topic

_log = logging.getLogger("nearkin.worker")
POLL_SECONDS = 0.2
AGAIN_SECONDS = 5.0
JOIN_SECONDS = 60.0
"""A rebalance waits for members that run a step."""
END_SECONDS = 10.0


class RebalanceTrigger:
    """Makes a group rebalance once, in a thread of its own, at the first `begin`.

    Another member joins and leaves; it subscribes to none of the partitions, so that none moves because of it.
    """

    def __init__(self, settings: Settings, group_id: str) -> None:
        self._settings = settings
        self._group = group_id
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearkin-second-round", daemon=True)
        self._begun = False

    def begin(self) -> None:
        """Ask for it; once is enough."""
        if not self._begun:
            self._begun = True
            self._thread.start()

    def end(self) -> None:
        """Wait for it no longer."""
        self._over.set()
        if self._begun:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                if self._has_rebalanced():
                    return
                _log.warning("group %s: did not divide its partitions in %.0f s; again", self._group, JOIN_SECONDS)
            except (KafkaException, NearkinError) as err:
                _log.warning("group %s: was not asked to divide its partitions; again: %s", self._group, err)
            self._over.wait(AGAIN_SECONDS)

    def _has_rebalanced(self) -> bool:
        """Return whether a rebalance with another member has happened."""
        divided = threading.Event()

        def on_assigned(client: Consumer, parts: list[TopicPartition]) -> None:
            client.incremental_assign(parts)
            divided.set()

        member = consumer(self._settings, self._group, "nearkin-second-round")
        try:
            member.subscribe([topic(self._settings, "config")], on_assign=on_parts(self._settings, on_assigned))
            for _ in range(round(JOIN_SECONDS / POLL_SECONDS)):
                if divided.is_set() or self._over.is_set():
                    break
                member.poll(POLL_SECONDS)
        finally:
            member.close()
        return divided.is_set() or self._over.is_set()
