"""The OpenAPI document declares the fields of the JSON that results become."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from nearkin_gateway.http import response_models
from nearkin_shared.results import Deletion, Explanation, Ledger, Stats, VersionInfo
from nearkin_shared.results_json import deletion_json, explain_json, info_json, stats_json

NOW = datetime(2026, 1, 1, tzinfo=UTC)
INFO = VersionInfo("k", 1, 5, NOW, "blake3:" + 64 * "0", None, 1, 1, {"name": "value"}, NOW, True)
STATS = Stats(Ledger(), 1, 1, 1, 1, {}, 0, {}, {}, 0, 0, 0.5)


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (response_models.BlobVersion, info_json(INFO)),
        (response_models.DeletedVersion, deletion_json(Deletion("k", 1, NOW, NOW, "who", "why", NOW))),
    ],
)
def test_model_declares_exactly_the_json_fields(model: type[BaseModel], value: dict[str, Any]) -> None:
    """A model without `extra` has each field of the result, in its order."""
    assert list(model.model_fields) == list(value)
    assert model.model_validate(value).model_dump(mode="json").keys() == value.keys()


@pytest.mark.parametrize(
    ("model", "value", "own"),
    [
        (response_models.TenantStats, stats_json(STATS), {"whole", "quotas"}),
        (response_models.BlobExplanation, explain_json(Explanation(INFO, (), 0, 0, 0, 0), segments=True), set()),
        (response_models.Outcome, info_json(INFO), {"id", "state", "status", "failure", "reason", "seconds", "ledger"}),
    ],
)
def test_open_model_declares_no_other_field(model: type[BaseModel], value: dict[str, Any], own: set[str]) -> None:
    """A model with `extra` names some fields of the result, and the gateway's own."""
    assert model.model_config["extra"] == "allow"
    assert set(model.model_fields) - own <= set(value)
