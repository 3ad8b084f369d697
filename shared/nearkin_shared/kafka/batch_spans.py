"""Trace batches of records.

record of blob A ──> span "dedup" of A ──> its context continues in the messages that the stage sends for A
record of blob B ──> span "dedup" of B
                       span "dedup batch", a trace of its own, linked to the contexts of A's and B's records

Invariant: each blob's trace continues below its own message; the batch links to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from nearkin_shared.errors import PermanentError
from nearkin_shared.formats.message import read_header
from nearkin_shared.observability.tracing import Tracing, about, closing

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from nearkin_shared.kafka.consumer_loop import Record


@contextmanager
def trace_records(tracing: Tracing, stage: str, records: Sequence[Record]) -> Iterator[list[Record]]:
    """Trace the block; yield the records, each with its blob's span of this stage."""
    found: dict[tuple[int, bytes], list[tuple[int, SpanContext]]] = {}
    for number, record in enumerate(records):
        context = tracing.context_of(record.headers.get("traceparent"))
        if context is not None:
            found.setdefault((context.trace_id, _blob(record)), []).append((number, context))
    given = list(records)
    if not found:
        yield given
        return
    with ExitStack() as stack:
        links = [context for group in found.values() for _, context in group]
        batch = tracing.begin_batch(f"{stage} batch", links, _counts(records))
        stack.enter_context(closing(tracing, batch))
        for group in found.values():
            some = [records[number] for number, _ in group]
            parents = [context for _, context in group]
            attributes = _counts(some) | _about(some[0])
            span = tracing.begin(stage, parents[0], "consumer", [batch.get_span_context(), *parents[1:]], attributes)
            stack.enter_context(closing(tracing, span))
            context_sent = tracing.open(span)
            for number, _ in group:
                given[number] = replace(given[number], headers=given[number].headers | {"traceparent": context_sent})
        yield given


def _blob(record: Record) -> bytes:
    """Return the identity of a record's blob; ids of stage messages are `blob/kind/...`."""
    return record.headers.get("ce_id", b"").partition(b"/")[0]


def _counts(records: Sequence[Record]) -> dict[str, str | int]:
    return {
        "messaging.system": "kafka",
        "messaging.destination.name": records[0].topic,
        "messaging.batch.message_count": len(records),
        "nearkin.bytes": sum(len(record.value) for record in records),
    }


def _about(record: Record) -> dict[str, str]:
    try:
        envelope = read_header(record.value, record.label).envelope
    except PermanentError:  # reported when the record is processed
        return {}
    return about(envelope.blob, envelope.tenant)
