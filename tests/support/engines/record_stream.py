"""Send records to a user's topic, and check that ingest stored each of them once.

Invariant: the versions of a key have the bytes of its records, each once, in the order in which they were sent.

Small records, some of them empty, travel in batches; a few larger ones travel by themselves among them. Some records
cannot be stored (without a key, without a value): their dead letters must not take other records along.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import consumer, group
from nearkin_shared.limits import KIB
from tests.support.engines.durability import CLIENTS, SETTLE_SECONDS_MAX, Report, group_lag, list_versions

TOPIC = "chaos-records"
PARTITIONS = 2
PREFIX = "records/"
BURSTS = 12
BURST_WAIT_SECONDS_MAX = 20.0
RECORDS_A_KEY = 8
LARGE_SHARE = 0.02
EMPTY_SHARE = 0.02
REFUSED_SHARE = 0.02
DELIVERY_SECONDS_MAX = 300


class RecordStream:
    """A producer of a user's topic, and the values that each of its keys has received."""

    def __init__(self, seed: int, records: int) -> None:
        self._random = random.Random(seed + 1)
        self._records = records
        self._keys = max(1, records // RECORDS_A_KEY)
        self._failures: list[str] = []
        self.sent: dict[str, list[bytes]] = {}

    @staticmethod
    def make_topic(bootstrap: str) -> None:
        """Create the user's topic."""
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)

    def send(self, bootstrap: str, share_of_puts: Callable[[], float]) -> None:
        """Send all records in bursts, spread over the puts, and wait until Kafka has them."""
        # Idempotent: neither a repeated nor an overtaking request of the producer may look like a fault of ingest.
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "message.timeout.ms": DELIVERY_SECONDS_MAX * 1000,
            }
        )
        for burst in range(BURSTS):
            waited = time.monotonic()
            while share_of_puts() < burst / BURSTS and time.monotonic() - waited < BURST_WAIT_SECONDS_MAX:
                time.sleep(0.05)
            for number in range(burst * self._records // BURSTS, (burst + 1) * self._records // BURSTS):
                self._send_one(producer, number)
            producer.poll(0)
        left = producer.flush(DELIVERY_SECONDS_MAX)
        if left or self._failures:
            raise TimeoutError(f"kafka did not take {left + len(self._failures)} records: {self._failures[:3]}")

    def _send_one(self, producer: Producer, number: int) -> None:
        drawn = self._random.random()
        key = f"{PREFIX}{self._random.randrange(self._keys)}"
        if drawn < REFUSED_SHARE:
            refused: tuple[bytes | None, str | None] = (b"no key", None) if number % 2 else (None, key)
            producer.produce(TOPIC, *refused, on_delivery=self._delivered)
            return
        value = self._value(number, drawn - REFUSED_SHARE)
        self.sent.setdefault(key, []).append(value)
        producer.produce(TOPIC, value, key, on_delivery=self._delivered)

    def _value(self, number: int, drawn: float) -> bytes:
        """Return an empty value, or one that no other record has."""
        if drawn < EMPTY_SHARE:
            return b""
        is_large = drawn < EMPTY_SHARE + LARGE_SHARE
        size_bytes = self._random.randrange(20 * KIB, 200 * KIB) if is_large else self._random.randrange(2 * KIB)
        return b"%d;" % number + self._random.randbytes(size_bytes)

    def _delivered(self, problem: KafkaError | None, _: Message) -> None:
        if problem is not None:
            self._failures.append(str(problem))

    # --- what was promised -------------------------------------------------------------------------------------------

    def check(self, url: str, settings: Settings, report: Report) -> None:
        """Wait for the versions of all records, and compare them; add what is wrong to the problems."""
        wanted = sum(map(len, self.sent.values()))
        report.records = wanted
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        with httpx.Client(base_url=url, timeout=60) as client:
            while len(list_versions(client, PREFIX)) < wanted and time.monotonic() < deadline:
                time.sleep(1)
            self._await_offsets(settings, report, deadline)
            found: dict[str, list[int]] = {}
            for key, version in sorted(list_versions(client, PREFIX)):
                found.setdefault(key, []).append(version)
            with ThreadPoolExecutor(CLIENTS) as threads:
                keys = sorted(found.keys() | self.sent.keys())
                for problems in threads.map(lambda key: self._problems_of(client, key, found.get(key, [])), keys):
                    report.problems.extend(problems)

    def _problems_of(self, client: httpx.Client, key: str, versions: list[int]) -> list[str]:
        """Compare the versions of a key with its records; return what is wrong."""
        problems: list[str] = []
        sent, stored = self.sent.get(key, []), list[bytes]()
        for version in versions:
            answer = client.get(f"/v1/blobs/{key}", params={"version": version})
            if answer.status_code != 200:
                problems.append(f"{key} version {version}: {answer.status_code}")
            stored.append(answer.content)
        if stored != sent:
            problems.append(
                f"{key}: {len(sent)} records were sent, and its {len(stored)} versions are the records "
                f"{[sent.index(value) if value in sent else None for value in stored]}"
            )
        return problems

    @staticmethod
    def _await_offsets(settings: Settings, report: Report, deadline: float) -> None:
        """Wait until ingest has committed the offset of every record."""
        reader = consumer(settings, group(settings, "ingest"), "chaos-records-lag")
        try:
            while lag := group_lag(reader, TOPIC, PARTITIONS):
                if time.monotonic() > deadline:
                    report.problems.append(f"ingest is {lag} records behind on {TOPIC}")
                    return
                time.sleep(0.5)
        except KafkaException as err:
            report.problems.append(f"the offsets of {TOPIC}: {err}")
        finally:
            reader.close()
