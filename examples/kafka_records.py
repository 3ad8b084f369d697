"""Produce records to an ingest topic and read the blobs that they become.

python examples/kafka_records.py BOOTSTRAP TOPIC URL    the gateway's token is in NEARKIN_TOKEN

The topic is one of `ingest.topics`, and `python -m nearkin_ingest` is running (services/ingest/README.md).
"""

from __future__ import annotations

import argparse
import os
import time

from confluent_kafka import Producer

import nearkin

COMMIT_SECONDS_MAX = 120.0
"""A record becomes visible after all stages have processed it: seconds, unless the fleet is busy."""

RECORDS = {"sensor/1": b"21.5", "sensor/2": b"19.0", "sensor/3": b"20.25"}


def produce(bootstrap: str, topic: str) -> None:
    """Send all records; return when Kafka has acknowledged them."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for key, value in RECORDS.items():
        producer.produce(topic, value, key, headers=[("content-type", b"text/plain")])
    waiting = producer.flush(30)
    if waiting:
        raise SystemExit(f"topic {topic}: {waiting} records not acknowledged in 30 s; is the broker reachable?")


def await_blob(store: nearkin.RemoteStore, key: str) -> bytes:
    """Return the content of a key as soon as it is committed."""
    deadline = time.monotonic() + COMMIT_SECONDS_MAX
    while True:
        try:
            return bytes(store.get(key).read())
        except nearkin.NotFound:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main() -> None:
    """Produce, await and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="host:port of a broker")
    parser.add_argument("topic")
    parser.add_argument("url", help="of the gateway")
    arguments = parser.parse_args()

    produce(arguments.bootstrap, arguments.topic)
    with nearkin.connect(arguments.url, os.environ.get("NEARKIN_TOKEN")) as store:
        for key, value in RECORDS.items():
            equal = await_blob(store, key) == value
            print(f"{key}: {store.info(key).metadata['kafka']}, equal: {equal}")


if __name__ == "__main__":
    main()
