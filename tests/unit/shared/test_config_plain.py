"""Test settings read without pydantic.

They equal those of pydantic, and none is accepted that pydantic refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource

from nearkin_shared.config.plain import make_plain_settings, nest_values
from nearkin_shared.config.settings import PROFILES, Settings

FIELDS = [
    *((field.name,) for field in fields(Settings) if not is_dataclass(field.default)),
    *(
        (section.name, field.name)
        for section in fields(Settings)
        if is_dataclass(section.default)
        for field in fields(section.default)
    ),
]
ADAPTER = TypeAdapter(Settings)

texts = st.one_of(
    st.sampled_from(
        ["", "true", "True", "false", "yes", "on", "1", "0", "007", "1_000", " 5", "-3", "+4", "1e3", "2.0"]
    ),
    st.sampled_from(["none", "odess", "finesse", "ntransform", "locality", "archive", "default", "keep", "rs-10-4"]),
    st.builds(
        "{}{}{}".format,
        st.integers(0, 10**16),
        st.sampled_from(["", " "]),
        st.sampled_from(["", "b", "KiB", "kib", "MB", "mb", "GiB", "GB", "TiB", "k", "EiB", "M\u0130B", "G\u0131B"]),
    ),
    st.text(max_size=6),
)
values = st.one_of(
    texts,
    st.none(),
    st.booleans(),
    st.integers(-2, 200),
    st.integers(0, 2**70),
    st.floats(),
    st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def as_pydantic(tree: dict[str, Any]) -> Settings | None:
    try:
        return ADAPTER.validate_python(tree)
    except (ValidationError, ValueError):
        return None


@profile(max_examples=1000, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), values), min_size=1, max_size=3))
def test_accepted_settings_equal_those_of_pydantic(given: list[tuple[tuple[str, ...], Any]]) -> None:
    tree: dict[str, Any] = {}
    for path, value in given:
        below = tree
        for name in path[:-1]:
            below = below.setdefault(name, {})
        below[path[-1]] = value
    plain = make_plain_settings(tree)
    assert plain is None or repr(plain) == repr(as_pydantic(tree))


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_plain(name: str) -> None:
    tree = {"profile": name, **PROFILES[name]}
    assert make_plain_settings(tree) == as_pydantic(tree) != Settings() or name == "default"
    assert make_plain_settings(tree) is not None


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"features": {"algorithm": "fineese"}}, "a name that is not known"),
        ({"features": {"algorythm": "finesse"}}, "a setting that is not there"),
        ({"featurs": {"algorithm": "finesse"}}, "a section that is not there"),
        ({"features": "finesse"}, "a section that is one value"),
        ({"delta": {"max_depth": 99}}, "out of bounds"),
        ({"delta": {"max_depth": True}}, "pydantic's to read"),
        ({"chunker": {"min_bytes": "1MiB"}}, "bounds of a section that contradict each other"),
        ({"ingest": {"topics": "a"}, "kafka": {"topic_prefix": "a"}}, "two sections that do"),
        ({"token": "two words"}, "no token"),
        ({"ingest": {"topics": ["a"]}}, "a list"),
    ],
)
def test_refused_or_complex_settings_are_left_to_pydantic(tree: dict[str, Any], why: str) -> None:
    assert make_plain_settings(tree) is None, why


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8388608", 8388608), ("8MiB", 8 << 20), ("64mib", 64 << 20), ("400MB", 400_000_000), ("1GiB", 1 << 30)],
)
def test_sizes_are_read_in_common_notations(text: str, size_bytes: int) -> None:
    plain = make_plain_settings({"restore": {"cache_bytes": text}})
    assert plain is not None
    assert plain.restore.cache_bytes == size_bytes


@pytest.mark.parametrize(
    "variables",
    [
        {"store": "s", "tenant": "t"},
        {"features__algorithm": "odess", "delta__max_depth": "3", "restore__cache_bytes": "64MiB"},
        {"storage__create": "true", "storage__parity": "rs-4-2"},
    ],
)
def test_variables_are_read_as_pydantic_settings_reads_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(f"NEARKIN_{name.upper()}", text)

    class Environment(BaseSettings):
        store: Any = None
        tenant: Any = None
        features: dict[str, Any] | None = None
        delta: dict[str, Any] | None = None
        restore: dict[str, Any] | None = None
        block: dict[str, Any] | None = None
        storage: dict[str, Any] | None = None

    found = EnvSettingsSource(Environment, env_prefix="NEARKIN_", env_nested_delimiter="__")()
    assert nest_values(variables) == found


@pytest.mark.parametrize(
    "name", ["features", "features__algorithm__x", "features__nothing", "ingest__topics", "nothing"]
)
def test_variables_of_several_values_are_left_to_pydantic(name: str) -> None:
    assert nest_values({"store": "s", name: "1"}) is None


def test_commands_with_plain_settings_do_not_import_pydantic(tmp_path: Path) -> None:
    file = tmp_path / "nearkin.toml"
    file.write_text('profile = "archive"\n[features]\nalgorithm = "ntransform"\n[restore]\ncache_bytes = "64MiB"\n')
    script = (
        "import sys; from nearkin_shared.config.loader import load; found = load(sys.argv[1])[0];"
        "print(found.token, found.features.algorithm, found.delta.max_depth, 'pydantic' in sys.modules)"
    )
    named = {"NEARKIN_SERVER": "http://h", "NEARKIN_TOKEN": "t", "NEARKIN_STORE": "s"}
    named |= {"NEARKIN_FEATURES__ALGORITHM": "odess", "NEARKIN_delta__Max_Depth": "2", "NEARKIN_TENANT": "acme"}
    outside = {name: value for name, value in os.environ.items() if not name.upper().startswith("NEARKIN_")}
    run = subprocess.run(
        [sys.executable, "-c", script, str(file)],
        env={**outside, **named, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.split() == ["t", "odess", "2", "False"]
