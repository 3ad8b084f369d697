"""Test which loops of a worker read topics that the worker itself feeds in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nearkin.workers.pipeline import STAGES
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka import consumer_loop
from nearkin_shared.kafka.consumer_loop import Loop
from nearkin_shared.kafka.stage_parts import parts_of

ALL = ("chunker", "dedup", "resemblance", "delta", "committer")


@pytest.mark.parametrize(
    ("chosen", "fed"),
    [
        (ALL, ["segments", "fresh", "paired"]),
        (("chunker", "dedup"), ["segments"]),
        (("delta", "committer"), []),
        (("resemblance",), []),
        (("chunker", "resemblance", "delta"), ["paired"]),
    ],
)
def test_topics_behind_a_stage_of_the_worker_are_fed(chosen: tuple[str, ...], fed: list[str]) -> None:
    """Topic `placed` is always fed by Kafka, since its key is another one."""
    assert [part.topic for part in parts_of(STAGES, chosen) if part.is_fed_in_memory] == fed


@pytest.mark.parametrize(("is_fed_in_memory", "wait_ms"), [(True, 1000), (False, None)])
def test_loop_of_a_fed_topic_asks_the_broker_seldom(
    monkeypatch: pytest.MonkeyPatch, is_fed_in_memory: bool, wait_ms: int | None
) -> None:
    """Each empty answer costs the broker CPU; a topic with records keeps the short wait after a pause."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(consumer_loop, "consumer", lambda *_, **more: asked.append(more))
    handler: Any = SimpleNamespace()
    Loop(Settings(), "dedup", "segments", "w", handler, is_fed_in_memory=is_fed_in_memory)
    assert [more.get("fetch.wait.max.ms") for more in asked] == [wait_ms]
