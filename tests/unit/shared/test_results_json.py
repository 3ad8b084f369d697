"""Test results as JSON: both sides agree, and anything else is refused as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nearkin.store import open_store
from nearkin_shared import results_json
from nearkin_shared.results import IndexReport
from tests.support.data.samples import noise


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of a store with two versions, the second a delta of the first."""
    first = noise(300_000, "answers").tobytes()
    with open_store(Path(tmp_path_factory.mktemp("answers")) / "store", create=True) as store:
        store.put("a/ä", first, metadata={"näme": "wert"})
        second = store.put("a/ä", first[:150_000] + b"between" + first[150_000:] + bytes(100_000))
        return {
            "info": store.info("a/ä", 1),
            "put": second,
            "stats": store.stats(),
            "explanation": store.explain("a/ä"),
        }


def through_text(value: object) -> Any:
    return json.loads(json.dumps(value))


def test_version_round_trips_to_the_millisecond(results: dict[str, Any]) -> None:
    found = results_json.info_from(through_text(results_json.info_json(results["info"])))
    assert abs((found.created - results["info"].created).total_seconds()) < 0.001
    assert results_json.info_json(found) == results_json.info_json(results["info"])
    assert found.metadata == {"näme": "wert"}


def test_put_result_round_trips_in_answer_and_event(results: dict[str, Any]) -> None:
    put = results["put"]
    flat = through_text(results_json.put_json(put))
    nested = {
        **results_json.info_json(put.info),
        "seconds": put.seconds,
        "ledger": results_json.ledger_json(put.ledger, 1.0),
    }
    for value in (flat, through_text(nested)):
        found = results_json.put_from(value)
        assert (found.ledger, found.seconds) == (put.ledger, put.seconds)
        assert results_json.info_json(found.info) == results_json.info_json(put.info)


def test_stats_and_explanation_round_trip(results: dict[str, Any]) -> None:
    assert results_json.stats_from(through_text(results_json.stats_json(results["stats"]))) == results["stats"]
    explained = results["explanation"]
    assert explained.delta_chunks
    assert explained.zero_chunks
    value = through_text(results_json.explain_json(explained, segments=True))
    assert results_json.explanation_from(value, explained.info) == explained


def test_explanation_counts_sketches_by_readable_names(results: dict[str, Any]) -> None:
    answer = results_json.explain_json(results["explanation"], segments=True)
    assert sum(answer["sketches"].values()) == answer["segment_count"]  # type: ignore[attr-defined]
    assert set(answer["sketches"]) == {segment["sketch"] for segment in answer["segments"]}  # type: ignore[call-overload,attr-defined]


def test_fields_of_a_later_nearkin_are_ignored(results: dict[str, Any]) -> None:
    assert results_json.stats_from({**results_json.stats_json(results["stats"]), "later": [1]}) == results["stats"]


def test_report_of_an_index_is_read_and_checked(results: dict[str, Any]) -> None:
    """A server has none, and one of before states none."""
    written = through_text(results_json.stats_json(replace(results["stats"], index=IndexReport("sampled", 77, 0.25))))
    assert results_json.stats_from(written).index == IndexReport("sampled", 77, 0.25)
    assert results_json.stats_from({**written, "index": None}).index is None
    assert results_json.stats_from({name: part for name, part in written.items() if name != "index"}).index is None
    for wrong in ({"kind": 3}, {"memory_bytes": -1}, {"missed_share": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            results_json.stats_from({**written, "index": {**written["index"], **wrong}})


READERS: list[tuple[str, Callable[[dict[str, Any]], object], Callable[[Any], object]]] = [
    ("info", lambda results: results_json.info_json(results["info"]), results_json.info_from),
    ("put", lambda results: results_json.put_json(results["put"]), results_json.put_from),
    ("stats", lambda results: results_json.stats_json(results["stats"]), results_json.stats_from),
]


@pytest.mark.parametrize(("name", "write", "read"), READERS, ids=[name for name, _, _ in READERS])
def test_missing_or_wrong_field_is_refused(
    results: dict[str, Any], name: str, write: Callable[[Any], Any], read: Callable[[Any], object]
) -> None:
    derived = {"reduction_ratio", "dedup_saved_bytes", "delta_saved_bytes", "compression_saved_bytes", "dcr", "dce"}
    derived |= {"policies", "metadata_bytes", "metadata_bytes_per_chunk", "metadata_bytes_per_fresh_chunk"}
    optional = {"sha256", "retain_until", "source_changed", "index"}
    whole = through_text(write(results))
    for field in set(whole) - derived - optional:
        values: list[Any] = [None, -1, True, []]
        for wrong in (*values, "x" if not isinstance(whole[field], str) or field == "created" else 7):
            with pytest.raises(ValueError, match=r"."):
                read({**whole, field: wrong})
        if field in {"checkpoints", "checkpoint_bytes"}:  # a server of an earlier release has none
            assert getattr(read({part: value for part, value in whole.items() if part != field}), field) == 0
            continue
        with pytest.raises(ValueError, match=field):
            read({part: value for part, value in whole.items() if part != field})
    others: list[Any] = [None, [], "text", 5, [whole]]
    for wrong in others:
        with pytest.raises(ValueError, match="want an object"):
            read(wrong)
    numbers: list[Any] = [10**400, float("inf"), float("nan")]
    for wrong in numbers:  # JSON spells each of them
        if "seconds" in whole:
            with pytest.raises(ValueError, match="seconds"):
                read({**whole, "seconds": wrong})
