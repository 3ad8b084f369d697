"""Apply changes of hot settings while a service runs.

      file as started --edited--> its hot fields  \
                                                   > validated together > current, revision
      topic `config`  --newest--> its changes     /

Other settings need a restart and are ignored here. A revision is a digest of the hot values: equal on every worker with
the same values, from the file or the topic.

A message contains all changes, so that the newest is sufficient, and names the message that its sender knew (`over`).
If
another message arrived between them, all readers apply its `patch` only, over the result of that message: neither of
two concurrent senders loses its change.

Invariant: a refused value changes nothing; readers always see one complete revision.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from functools import reduce
from hashlib import blake2b
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage
from tenacity import RetryCallState, Retrying, sleep_using_event, stop_when_event_set, wait_random_exponential
from watchfiles import watch

from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import FIXED_FIELDS, HOT_FIELDS, Settings
from nearkin_shared.errors import BadInput, NearkinError, NotAuthentic
from nearkin_shared.kafka.clients import SELDOM_FILLED, as_bytes, consumer, group, is_final, topic
from nearkin_shared.kafka.message_authentication import MAC_HEADER, EnvelopeAuthenticator
from nearkin_shared.observability import metrics

_log = logging.getLogger("nearkin.config")

CHANGES_BYTES_MAX = 64 * 1024
AUDIT_MAX = 100
"""Changes that are remembered, newest last; at most CHANGES_BYTES_MAX each."""
AUDIT_TEXT_MAX = 200
POLL_SECONDS = 0.5
AGAIN_SECONDS, AGAIN_SECONDS_MAX = 0.5, 30.0
"""How long a watcher that failed waits, by lot: at most the first, then twice as long each time, up to the second."""
LOOK_MS = 5_000
"""Interval of reading the file regardless of the watcher, which does not report changes before its start."""
WATCH_MS = 500
"""How often the watcher of the file looks up: each time it takes the interpreter's lock from the work."""


def revision_of(settings: Settings) -> str:
    """Return 12 hex digits that stand for the hot values."""
    return blake2b(json.dumps(hot_values(settings), sort_keys=True).encode(), digest_size=6).hexdigest()


def hot_values(settings: Settings) -> dict[str, Any]:
    """Return the hot fields by dotted name."""
    tree = asdict(settings)
    return {name: reduce(lambda below, part: below[part], name.split("."), tree) for name in sorted(HOT_FIELDS)}


def check_changes(changes: object) -> dict[str, dict[str, Any]]:
    """Return a JSON merge patch of hot fields. Raises BadInput naming what is not one."""
    if not isinstance(changes, dict) or not all(isinstance(section, dict) for section in changes.values()):
        raise BadInput(f'changes {str(changes)[:100]}: want an object such as {{"features": {{"algorithm": "odess"}}}}')
    for section, fields in changes.items():
        for name in fields:
            if f"{section}.{name}" not in HOT_FIELDS:
                raise BadInput(
                    f'{section}.{name} "{fields[name]}": not a hot setting; hot are {", ".join(sorted(HOT_FIELDS))}'
                )
    return {section: dict(fields) for section, fields in changes.items()}


def drop_constants(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the changes of an older release without settings that are constants now."""
    kept: dict[str, dict[str, Any]] = {}
    for section, fields in changes.items():
        for name, value in fields.items():
            if f"{section}.{name}" in FIXED_FIELDS:
                _log.warning("topic config: %s.%s is a constant now; its change has no effect", section, name)
            else:
                kept.setdefault(section, {})[name] = value
    return kept


def merge_changes(changes: Mapping[str, Any], patch: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return changes with a merge patch (RFC 7396) over them: null takes one back."""
    found = {section: dict(fields) for section, fields in changes.items()}
    for section, fields in patch.items():
        for field, value in fields.items():
            if value is None:
                found.get(section, {}).pop(field, None)
            else:
                found.setdefault(section, {})[field] = value
    return {section: fields for section, fields in found.items() if fields}


class LiveConfig:
    """The settings in force. `start` watches; `current` may be read by any thread at any time."""

    def __init__(
        self,
        settings: Settings,
        config_file: Path | None,
        authenticator: EnvelopeAuthenticator | None,
        *,
        reload: Callable[[], Settings] | None = None,
    ) -> None:
        """`authenticator` checks the messages of the topic; None: only where no topic is read."""
        self._authenticator = authenticator
        self._started = settings
        self._file = config_file
        self._reload = reload or (lambda: load(config_file)[0])
        self._content: bytes | None = None
        """Of the file when its fields were last taken. It may have changed since `settings` were read from it."""
        self._from_file: Mapping[str, Any] = {}
        self._from_topic: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._state = settings, revision_of(settings)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._audit: deque[dict[str, Any]] = deque(maxlen=AUDIT_MAX)
        self._caught_up = threading.Event()
        self._heard: str | None = None
        """The id of the newest message, "" of one that has none; None where what came before the next is not known."""
        self._settled = True
        self._awaited: dict[str, Future[None]] = {}
        self._next_offset = 0
        """Changes from the topic: a restarted reader must not return to an older state."""
        metrics.CONFIG.info({"revision": self.revision})

    @property
    def settings(self) -> Settings:
        """Return the settings in force: the same object until they change."""
        return self._state[0]

    @property
    def revision(self) -> str:
        """Return the revision in force."""
        return self._state[1]

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Return what the topic changes over the file."""
        return {section: dict(fields) for section, fields in self._from_topic.items()}

    @property
    def audit(self) -> list[dict[str, Any]]:
        """Return the changes from the topic since the start, newest last: by whom, when, what.

        The topic is read from its start, so that the changes that compaction left are included.
        """
        with self._lock:
            return list(self._audit)

    @property
    def known(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """Return the id of the newest message, and what the topic changes since that."""
        with self._lock:
            return self._heard or "", self.changes

    @property
    def caught_up(self) -> bool:
        """Return whether the topic was read to its end once."""
        return self._caught_up.is_set()

    @property
    def is_self_contained(self) -> bool:
        """Whether the newest message states all values by itself: compaction keeps only this one."""
        with self._lock:
            return self._settled

    def await_message(self, ident: str) -> Future[None]:
        """Return a future that ends when a message with this id was applied or refused.

        Its error is the reason of a refusal.
        """
        with self._lock:
            return self._awaited.setdefault(ident, Future())

    def forget(self, ident: str) -> None:
        """Await a message no longer."""
        with self._lock:
            self._awaited.pop(ident, None)

    def start(self) -> None:
        """Watch the file, if there is one, and the topic; return when the topic was read once."""
        watchers: dict[str, Callable[[], None]] = {"topic": self._watch_topic}
        if self._file is not None:
            watchers["file"] = self._watch_file
        for what, watcher in watchers.items():
            thread = threading.Thread(
                target=self._watch_with_restart, args=(what, watcher), name=f"nearkin-watch-{what}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        if not self._caught_up.wait(30.0):
            _log.warning("topic %s: not read in 30 s; running with the file's settings", topic(self._started, "config"))

    def stop(self) -> None:
        """End the watchers."""
        self._stop.set()
        for thread in self._threads:
            thread.join(10.0)

    def on_message(self, value: bytes, what: str) -> None:
        """Apply a message of the topic; messages are in order, from one thread.

        A refused message is logged.
        """
        ident, whole = "", None
        failure: Exception | None = None
        try:
            if len(value) > CHANGES_BYTES_MAX:
                raise BadInput(f"{len(value)} bytes: want at most {CHANGES_BYTES_MAX}")
            message = json.loads(value)
            ident, over = str(message.get("id", ""))[:AUDIT_TEXT_MAX], message.get("over")
            changes = whole = check_changes(drop_constants(message["changes"]))
            if over is not None and self._heard not in (None, over):
                changes = merge_changes(self.changes, check_changes(drop_constants(message["patch"])))
            self._apply(from_topic=changes)
            self._remember(message, changes)
        except (NearkinError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            failure = err
            metrics.CONFIG_REFUSED.inc()
            _log.error("%s: refused, revision %s stays: %s", what, self.revision, err)
        with self._lock:
            self._heard, self._settled = ident, whole == self._from_topic
            waiting = self._awaited.pop(ident, None)
        if waiting is not None and waiting.set_running_or_notify_cancel():
            waiting.set_exception(failure) if failure is not None else waiting.set_result(None)

    def _remember(self, message: Mapping[str, Any], changes: dict[str, dict[str, Any]]) -> None:
        at, by = (str(message.get(name, ""))[:AUDIT_TEXT_MAX] for name in ("at", "by"))
        entry = {"at": at, "by": by, "changes": changes, "revision": self.revision}
        with self._lock:
            if entry not in self._audit:  # the sender of a change receives it again from the topic
                self._audit.append(entry)

    def reread(self) -> None:
        """Apply the current hot fields of the file; a refused value is logged."""
        try:
            content = self._file.read_bytes() if self._file is not None and self._file.is_file() else b""
            if content == self._content:
                return  # something else in its folder has changed
            self._content = content
            self._apply(from_file=hot_values(self._reload()))
        except (NearkinError, OSError) as err:
            metrics.CONFIG_REFUSED.inc()
            _log.error("%s: refused, revision %s stays: %s", self._file, self.revision, err)

    def _apply(
        self, *, from_file: Mapping[str, Any] | None = None, from_topic: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Apply the changes of one source over the latest ones of the other.

        The latter are read under the lock. Read before, a concurrent message of the topic was undone, and with the
        gateway's
        next change everywhere.
        """
        with self._lock:
            from_file = self._from_file if from_file is None else from_file
            from_topic = self._from_topic if from_topic is None else from_topic
            nested: dict[str, dict[str, Any]] = {}
            for name, value in from_file.items():
                section, _, field = name.partition(".")
                nested.setdefault(section, {})[field] = value
            for section, fields in from_topic.items():
                nested.setdefault(section, {}).update(fields)
            settings = with_changes(self._started, nested)
            before, revision = self.revision, revision_of(settings)
            self._from_file, self._from_topic = from_file, from_topic
            if revision != before:
                old, new = hot_values(self._state[0]), hot_values(settings)
                changed = ", ".join(f"{name} {old[name]} -> {new[name]}" for name in new if old[name] != new[name])
                self._state = settings, revision
                metrics.CONFIG.info({"revision": revision})
                _log.warning("revision %s -> %s: %s", before, revision, changed)

    def _watch_with_restart(self, what: str, watcher: Callable[[], None]) -> None:
        """Watch until the stop; a watcher that fails is started again."""

        def failed(state: RetryCallState) -> None:
            problem = None if state.outcome is None else state.outcome.exception()
            _log.error("the %s is not watched, revision %s stays; again soon: %r", what, self.revision, problem)

        again = Retrying(
            wait=wait_random_exponential(multiplier=AGAIN_SECONDS, max=AGAIN_SECONDS_MAX),
            stop=stop_when_event_set(self._stop),
            sleep=sleep_using_event(self._stop),
            before_sleep=failed,
            retry_error_callback=lambda _: None,
        )
        again(watcher)

    def _watch_file(self) -> None:
        assert self._file is not None
        # The watcher reports every change in the folder: each line of a log in the same folder would cause the next.
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        # The folder: editors and Kubernetes replace a file, they do not write into it.
        folder = self._file.absolute().parent
        self.reread()
        found = watch(
            folder,
            stop_event=self._stop,
            recursive=False,
            debounce=WATCH_MS,
            step=WATCH_MS,
            rust_timeout=LOOK_MS,
            yield_on_timeout=True,
        )
        for _ in found:
            self.reread()

    def _is_authentic(self, message: KafkaMessage, what: str) -> bool:
        """Return whether a gateway of this store made a message; log one that none has made."""
        if self._authenticator is None:
            return True
        headers = {str(header[0]): as_bytes(header[1]) for header in message.headers() or ()}
        key, value = as_bytes(message.key()), as_bytes(message.value())
        try:
            self._authenticator.check("config", message.topic() or "", key, value, headers.get(MAC_HEADER))
        except NotAuthentic as err:
            metrics.CONFIG_REFUSED.inc()
            _log.error("%s: refused, revision %s stays: %s", what, self.revision, err)
            return False
        return True

    def _watch_topic(self) -> None:
        full = topic(self._started, "config")
        client = consumer(
            self._started,
            group(self._started, "config-readers"),
            "nearkin-config",
            **{"enable.partition.eof": True},
            **SELDOM_FILLED,
        )
        reported = None
        try:
            client.assign([TopicPartition(full, 0, self._next_offset)])
            while not self._stop.is_set():
                message = client.poll(POLL_SECONDS)
                if message is None:
                    continue
                problem = message.error()
                if problem is None:
                    value, offset = message.value(), message.offset() or 0
                    if offset != self._next_offset:  # compaction took what came before: this one stands for it
                        self._heard = None
                    self._next_offset = offset + 1
                    if self._is_authentic(message, f"{full} offset {offset}"):
                        self.on_message(value if isinstance(value, bytes) else b"", f"{full} offset {offset}")
                elif problem.code() == KafkaError._PARTITION_EOF:
                    self._caught_up.set()
                elif problem.code() == KafkaError.OFFSET_OUT_OF_RANGE:
                    client.assign([TopicPartition(full, 0, 0)])
                elif is_final(problem):
                    raise KafkaException(problem)
                elif problem.code() != reported:
                    reported = problem.code()
                    _log.warning("%s: %s", full, problem.str())
        finally:
            client.close()


def config_message(
    changes: Mapping[str, Any], by: str, at: str, patch: Mapping[str, Any], ident: str, over: str
) -> bytes:
    """Encode the message that applies changes everywhere.

    `changes` are the result of `patch` on those up to message `over`.
    """
    message = {"changes": changes, "by": by, "at": at, "patch": patch, "id": ident, "over": over}
    return json.dumps(message, sort_keys=True).encode()
