"""Test that the reference describes every setting, in the words of the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearkin.cli import main
from nearkin_shared.config.loader import load
from nearkin_shared.config.reference import describe_settings, format_units
from nearkin_shared.config.settings import HOT_FIELDS, SECRETS, Settings
from tests.support.checks import settings_page

ROOT = Path(__file__).parents[3]


def test_each_setting_is_described() -> None:
    settings = list(describe_settings())
    listed = set(load()[1])
    assert {each.name for each in settings if "[]" not in each.name} == listed
    assert [each.name for each in settings if not each.meaning] == []
    assert {each.name for each in settings if each.hot} == HOT_FIELDS
    assert {each.name for each in settings if each.secret} == SECRETS


def test_page_equals_the_generated_text() -> None:
    remedy = "run python -m tests.support.checks.settings_page"
    assert (ROOT / settings_page.PAGE).read_text() == settings_page.page(), remedy


def test_allowed_values_are_those_of_the_rule() -> None:
    wants = {each.name: each.wants for each in describe_settings()}
    assert wants["delta.max_depth"] == "1 to 63"
    assert wants["container.target_bytes"] == "bytes, 256 KiB to 256 MiB"
    assert wants["features.algorithm"] == "`finesse`, `ntransform`, `odess`, `none`"
    assert wants["ingest.group"] == "text, or unset"
    assert wants["retention.policies[].keep_last"] == "-1 to 1000000"
    assert [format_units(size) for size in (1, 1000, 1024, 3 << 20, 2 << 40)] == [
        "1",
        "1000",
        "1 KiB",
        "3 MiB",
        "2048 GiB",
    ]


def test_config_command_describes_named_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "gc", "delta.codec"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split()[0] for line in shown.splitlines()[3:] if line.strip()]
    assert lines == [*(name for name in load()[1] if name.startswith("gc.")), "delta.codec"]
    assert "VCDIFF" in shown
    assert main(["config", "retention", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["retention.min_age_seconds"]["value"] == Settings().retention.min_age_seconds
    assert found["retention.policies[].prefix"]["meaning"].startswith("Prefix of keys")


@pytest.mark.parametrize(("name", "near"), [("delt", "delta"), ("gc.mod", "gc.mode"), ("", "lists them all")])
def test_unknown_setting_is_refused_with_similar_names(
    name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", name]) == 2
    assert near in capsys.readouterr().err
