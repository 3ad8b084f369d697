"""Test settings: precedence and named origin of values, and the message of a refusal."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nearkin
from nearkin_chunker import chunking_algorithms as chunkers
from nearkin_delta import codecs
from nearkin_gateway import gateway_limits
from nearkin_resemblance import feature_algorithms as sketches
from nearkin_shared.config import reduction as config_reduction
from nearkin_shared.config import settings as config_settings
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.plain import SECTIONS, UNITS
from nearkin_shared.config.reference import describe_settings
from nearkin_shared.config.removed import REMOVED, REPLACED
from nearkin_shared.config.settings import FIXED_FIELDS, PROFILES, Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from tests.support.data.samples import noise

CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 60}


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("NEARKIN_"):
            monkeypatch.delenv(name)


def toml(folder: Path, text: str) -> Path:
    path = folder / "nearkin.toml"
    path.write_text(text)
    return path


# --- precedence and origins ------------------------------------------------------------------------------------------


def test_each_layer_overrides_those_below_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "delta.max_depth"

    def found(*given: Any) -> tuple[int, str]:
        settings, origins = load(*given)
        assert origins[name].value == settings.delta.max_depth
        return settings.delta.max_depth, origins[name].source

    assert found() == (4, "default")
    only_profile = toml(tmp_path, 'profile = "finesse-paper"')
    assert found(only_profile) == (1, "profile finesse-paper")
    file = toml(tmp_path, 'profile = "finesse-paper"\n[delta]\nmax_depth = 3')
    assert found(file) == (3, f"file {file}")
    monkeypatch.setenv("NEARKIN_DELTA__MAX_DEPTH", "4")
    assert found(file) == (4, "environment NEARKIN_DELTA__MAX_DEPTH")
    assert found(file, {"delta": {"max_depth": 5}}) == (5, "argument")


def test_profile_setting_follows_the_same_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path, 'profile = "finesse-paper"')
    assert load(file)[0].profile == "finesse-paper"
    monkeypatch.setenv("NEARKIN_PROFILE", "default")
    settings, origins = load(file)
    assert (settings.profile, settings.chunker.algorithm) == ("default", "leastcdc")
    assert origins["profile"].source == "environment NEARKIN_PROFILE"
    assert load(file, {"profile": "finesse-paper"})[0].chunker.algorithm == "rabin"


def test_each_setting_has_an_origin() -> None:
    settings, origins = load()
    flat = {f"{a}.{b}" for a, section in asdict(settings).items() if isinstance(section, dict) for b in section}
    assert set(origins) == (flat - FIXED_FIELDS) | {"profile", "store", "server", "token", "tenant"}
    assert {origin.source for origin in origins.values()} == {"default"}


def test_arguments_that_are_none_change_nothing() -> None:
    assert load(None, {"store": None, "profile": None})[0] == Settings()


def test_defaults_pass_their_own_rules() -> None:
    assert with_changes(Settings(), asdict(Settings())) == Settings()
    for profile in PROFILES:
        assert load(None, {"profile": profile})[0].profile == profile


def test_sizes_are_read_in_units(tmp_path: Path) -> None:
    file = toml(tmp_path, '[chunker]\ntarget_bytes = "16KiB"\n[base]\ncache_bytes = "400MB"')
    settings, _ = load(file)
    assert (settings.chunker.target_bytes, settings.base.cache_bytes) == (16384, 400_000_000)
    assert type(settings.chunker.target_bytes) is int


def test_changes_keep_unnamed_settings() -> None:
    changed = with_changes(load(None, {"tenant": "t"})[0], {"features": {"algorithm": "odess"}})
    assert (changed.tenant, changed.features.algorithm, changed.features.count) == ("t", "odess", 12)


# --- a server and its token -----------------------------------------------------------------------------------------

TOKEN = "s3cret.token-~+/=="


@pytest.mark.parametrize("with_section", [False, True])
def test_token_is_read_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], with_section: bool
) -> None:
    monkeypatch.setenv("NEARKIN_SERVER", "http://127.0.0.1:8080/under")
    monkeypatch.setenv("NEARKIN_TOKEN", TOKEN)
    if with_section:  # the variable that pydantic reads
        monkeypatch.setenv("NEARKIN_DELTA__MAX_DEPTH", "2")
    settings, origins = load()
    assert (settings.server, settings.token) == ("http://127.0.0.1:8080/under", TOKEN)
    assert origins["token"] == ("***", "environment NEARKIN_TOKEN")
    assert TOKEN not in repr(settings) + repr(origins)


@pytest.mark.parametrize("with_section", [False, True])
@pytest.mark.parametrize("token", ["two words", "zwölf", "line\nbreak", "x" * 1025, ""])
def test_token_unfit_for_a_header_is_refused_unshown(token: str, with_section: bool) -> None:
    with pytest.raises(ConfigError, match=r'^token "\*\*\*": want up to 1024 letters') as raised:
        load(None, {"token": token} | ({"delta": {"max_depth": 2}} if with_section else {}))
    assert token[:20] == "" or token[:20] not in str(raised.value)


@pytest.mark.parametrize("with_section", [False, True])
@pytest.mark.parametrize(
    "server",
    [
        "",
        "127.0.0.1:80",
        "ftp://host",
        "http://",
        "http://user:pass@host",
        "http://host:99999",
        "http://host/?a",
        "http://a b",
    ],
)
def test_server_that_is_no_gateway_url_is_refused(server: str, with_section: bool) -> None:
    with pytest.raises(ConfigError, match=r"^server .*want http:// or https:// with a host"):
        load(None, {"server": server} | ({"delta": {"max_depth": 2}} if with_section else {}))


@pytest.mark.parametrize("server", ["http://localhost", "https://nearkin.example:8443/a/b", "http://[::1]:80/"])
def test_gateway_urls_are_accepted(server: str) -> None:
    assert load(None, {"server": server})[0].server == server


def test_variable_in_two_cases_takes_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARKIN_FEATURES__ALGORITHM", "ntransform")
    monkeypatch.setenv("nearkin_features__algorithm", "odess")
    assert load()[0].features.algorithm == "odess"
    monkeypatch.setenv("NEARKIN_INGEST__TOPICS", "a")  # a variable that pydantic reads
    assert load()[0].features.algorithm == "odess"


@pytest.mark.parametrize("value", ["64M\u0130B", "-1", "abc", "4XB", ""])
def test_invalid_size_is_refused_with_valid_examples(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NEARKIN_BASE__CACHE_BYTES", value)
    with pytest.raises(ConfigError, match=r"base\.cache_bytes .*want 1048576 to 68719476736 bytes, or a unit"):
        load()


# --- the paper's settings --------------------------------------------------------------------------------------------


def test_paper_settings_are_a_profile() -> None:
    """Finesse, FAST '19, section 5.1."""
    settings, _ = load(None, {"profile": "finesse-paper"})
    chunker, features = settings.chunker, settings.features
    assert (chunker.algorithm, chunker.min_bytes, chunker.target_bytes, chunker.max_bytes) == (
        *("rabin", 2048, 8192, 65536),
    )
    assert (features.algorithm, features.count, features.super_features) == ("finesse", 12, 3)
    assert sketches.sketcher(features).name == "finesse/12/3/48"
    assert (settings.base.policy, settings.base.cache_bytes) == ("first-fit", 400_000_000)
    assert (settings.delta.codec, settings.delta.max_depth) == ("xdelta3", 1)


# --- names ----------------------------------------------------------------------------------------------------------


def test_names_in_settings_are_those_of_the_services() -> None:
    assert set(config_reduction.CHUNKERS) == set(chunkers.NAMES)
    assert set(config_reduction.FEATURES) == set(sketches.NAMES)
    assert set(config_reduction.DELTA_CODECS) == set(codecs.NAMES)
    assert set(config_settings.PROFILE_NAMES) == set(PROFILES)


@pytest.mark.parametrize("algorithm", config_reduction.CHUNKERS)
def test_each_chunker_cuts_within_the_bounds_of_settings(algorithm: str) -> None:
    least = 256 if algorithm in ("rabin", "inck") else 64
    data = noise(100_000, "chunks")
    for bounds in ((least, least, least), (least, 4096, 900 * 1024), (2048, 8192, 65536)):
        if least & (least - 1):
            continue
        named = dict(zip(("min_bytes", "target_bytes", "max_bytes"), bounds, strict=True))
        settings, _ = load(None, {"chunker": {"algorithm": algorithm, **named}})
        lengths = chunkers.chunker(settings.chunker, SEGMENT_BYTES_MAX)(data, True)
        assert int(lengths.sum()) == len(data)


@pytest.mark.parametrize("algorithm", config_reduction.FEATURES)
def test_each_sketch_accepts_the_extremes_of_settings(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, offsets, lengths = noise(70_000, "sketch"), np.array([0, 5], np.uint64), np.array([100, 65_000], np.uint32)
    for count, groups, window, bits in ((1, 1, 48, 0), (64, 16, 64, 16), (64, 1, 64, 0), (12, 3, 48, 16)):
        monkeypatch.setattr(sketches, "WINDOW_BYTES", window)
        monkeypatch.setattr(sketches, "ODESS_SAMPLING_BITS", bits)
        named = {"count": count, "super_features": groups}
        settings = with_changes(Settings(), {"features": {"algorithm": algorithm, **named}})
        sketch = sketches.sketcher(settings.features)
        found = sketch.super_features(data, offsets, lengths)
        assert found.shape == (2, groups if algorithm != "none" else 1)
        assert sketches.Sketch.parse(sketch.name) == sketch


# --- refusals -------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"features": {"algorithm": "fineese"}},
        ['features.algorithm "fineese": choose', "finesse, none, ntransform or odess"],
    ),
    ({"chunker": {"algorithm": "cdc"}}, ['chunker.algorithm "cdc": choose', "fastcdc"]),
    ({"delta": {"codec": "gdelta"}}, ['delta.codec "gdelta": choose none, patch or xdelta3']),
    ({"base": {"policy": "best"}}, ['base.policy "best": choose first-fit']),
    ({"index": {"backend": "lmdb"}}, ['index.backend "lmdb": choose redis or shards']),
    ({"index": {"backend": "shards"}}, ["index.shards is empty"]),
    ({"index": {"shards": ["http://a:1"]}}, ['backend is "redis"']),
    ({"index": {"backend": "shards", "shards": ["a:1"]}}, ["index.shards", "a:1", "http"]),
    ({"index": {"backend": "shards", "shards": ["http://u:p@a:1"]}}, ["index.shards", "no password"]),
    ({"index": {"backend": "shards", "shards": ["http://a:1", "http://a:1"]}}, ["index.shards", "twice"]),
    ({"profile": "fast"}, ['profile "fast": choose archive, default or finesse-paper']),
    ({"profile": ["default"]}, ["profile", "['default']", "choose archive, default or finesse-paper"]),
    ({"delta": {"max_depth": 64}}, ['delta.max_depth "64"', "1 to 63"]),
    ({"delta": {"max_depth": 0}}, ['delta.max_depth "0"', "1 to 63"]),
    ({"delta": {"max_depth": "deep"}}, ['delta.max_depth "deep"', "integer"]),
    ({"chunker": {"algorithm": "rabin", "target_bytes": 9000}}, ["target_bytes 9000", "rabin wants a power of two"]),
    ({"chunker": {"target_bytes": 32}}, ["chunker.target_bytes", "32", "921600"]),
    ({"chunker": {"min_bytes": 16384}}, ["min_bytes 16384", "want min <= target <= max"]),
    ({"chunker": {"max_bytes": "1MiB"}}, ["chunker.max_bytes", "1MiB", "921600"]),
    ({"chunker": {"algorithm": "rabin", "min_bytes": 128}}, ["min_bytes 128", "rabin wants >= 256"]),
    ({"segment": {"target_chunks": 12}}, ["segment.target_chunks: no longer a setting, but a constant (16)"]),
    ({"redis": {"partitions": 48}}, ["redis.partitions: no longer a setting, but a constant (16)"]),
    ({"base": {"cache_bytes": "lots"}}, ['base.cache_bytes "lots"']),
    ({"base": {"cache_bytes": -1}}, ['base.cache_bytes "-1"']),
    ({"tenant": ""}, ['tenant ""', "1 to 128 bytes"]),
    ({"tenant": "ä" * 65}, ["tenant", "1 to 128 bytes"]),
    *(
        ({"tenant": f"a{mark}b"}, ["tenant", "without line ends and control"])
        for mark in "\n\t\x1b\x00\x7f\x85\u2028\u202e"
    ),
    ({"tenant": "a\ud800"}, ["tenant"]),
    ({"ingest": {"topics": ["t=a\nb"]}}, ["ingest.topics", "tenant: want", "without line ends"]),
    ({"retention": {"policies": [{"tenant": "a\nb", "keep_last": 1}]}}, ["tenant", "without line ends"]),
    ({"kafka": {"replication": 99}}, ['kafka.replication "99"', "1 to 9"]),
    ({"block": {"level": 23}}, ['block.level "23"', "1 to 22"]),
    ({"chunker": {"algorthm": "rabin"}}, ['chunker.algorthm "rabin"', "no such setting"]),
    ({"chunkers": {"algorithm": "rabin"}}, ["chunkers", "no such setting"]),
    ({"chunker": "rabin"}, ["chunker", "rabin"]),
    ({"chunker": "rabin"}, ['chunker "rabin": a section, not a single value; `nearkin config chunker`']),
    ({"chunker": {"algorthm": "rabin"}}, ["did you mean chunker.algorithm?"]),
    ({"chunkers": {"algorithm": "rabin"}}, ["chunkers: no such setting; did you mean chunker? (set by argument)"]),
    ({"objectstore": {"secret_access_key": "s3same"}}, ["objectstore: no such setting; did you mean object_store?"]),
    ({"delta": {"max_depth": 2.5}}, ['delta.max_depth "2.5": ', "; takes 1 to 63 (set by argument)"]),
    ({"base": {"policy": True}}, ['base.policy "true": ', "; takes first-fit, locality, locality+first-fit (set by"]),
    ({"profile": True}, ['profile "true": choose archive, default or finesse-paper (set by argument)']),
    ({"delta": {"max_depth": True}}, ['delta.max_depth "true": want 1 to 63 (set by argument)']),
    ({"delta": {"max_depth": False}}, ['delta.max_depth "false": want 1 to 63']),
    ({"base": {"cache_bytes": True}}, ['base.cache_bytes "true": want 1048576 to 68719476736 bytes, or a unit']),
    ({"gc": {"grace_seconds": True}}, ['gc.grace_seconds "true": want 0 to']),
    ({"gc": {"compact_below": False}}, ['gc.compact_below "false": want a share from 0 to 0.95']),
    (
        {"retention": {"policies": [{"prefix": "x", "keep_last": True}]}},
        ['retention.policies.0.keep_last "true": want -1 to 1000000 (set by argument)'],
    ),
    ({"tenant": {"name": "x"}}, ["tenant"]),
]


def test_more_index_shards_than_64_are_refused() -> None:
    """64 are taken, also as text with commas."""
    urls = [f"http://a:{port}" for port in range(1, 66)]
    with pytest.raises(ConfigError, match="has 65 URLs; want at most 64"):
        load(None, {"index": {"backend": "shards", "shards": urls}})
    found, _ = load(None, {"index": {"backend": "shards", "shards": ",".join(urls[:64])}})
    assert found.index.shards == tuple(urls[:64])


@pytest.mark.parametrize(("given", "complaint"), WRONG, ids=lambda part: str(part)[:50])
def test_refusal_is_one_line_of_field_value_and_remedy(given: dict[str, Any], complaint: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, given)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 300
    assert [part for part in complaint if part not in text] == [], text


@pytest.mark.parametrize("name", REMOVED)
def test_removed_setting_is_refused_with_its_constant(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, _, field = name.partition(".")
    said = rf"^{name}: no longer a setting, but a constant \({REMOVED[name]}\); remove it \(set by "
    file = toml(tmp_path, f"[{section}]\n{field} = 1")
    with pytest.raises(ConfigError, match=rf"{said}file {file}\)$"):
        load(file)
    variable = f"NEARKIN_{section.upper()}__{field.upper()}"
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=rf"{said}environment {variable}\)$"):
        load()
    monkeypatch.delenv(variable)
    with pytest.raises(ConfigError, match=rf"{said}argument\)$"):
        load(None, {section: {field: 1}})


def test_constants_of_refused_settings_are_the_real_ones() -> None:
    """Compare those of the gateway that have a constant of their name, and those that stayed fields of Settings."""
    real: dict[str, object] = {f"gateway.{name.lower()}": value for name, value in vars(gateway_limits).items()}
    for section in SECTIONS:
        fields = asdict(getattr(Settings(), section))
        real |= {f"{section}.{name}": value for name, value in fields.items()}
    named = {name: _value_of(text.partition(";")[0]) for name, text in REMOVED.items() if name in real}
    assert named == {name: real[name] for name in named}
    assert set(named) >= FIXED_FIELDS | {"gateway.unacknowledged_bytes", "gateway.upload_unacknowledged_bytes"}


def _value_of(text: str) -> object:
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", text)
    if found is None:
        return text == "true"
    return float(found[1]) * UNITS.get(found[2].lower(), 1)


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_setting_is_refused_with_its_replacement(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, _, field = name.partition(".")
    expected = re.escape(f"{name}: no longer a setting; set {REPLACED[name]} instead (set by ")
    file = toml(tmp_path, f"[{section}]\n{field} = true")
    with pytest.raises(ConfigError, match=rf"^{expected}file {file}\)$"):
        load(file)
    variable = f"NEARKIN_{section.upper()}__{field.upper()}"
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ConfigError, match=rf"^{expected}environment {variable}\)$"):
        load()


def test_replacement_of_a_setting_is_a_setting() -> None:
    for text in REPLACED.values():
        assert text.partition(" ")[0] in {setting.name for setting in describe_settings()}, text


def test_misspelled_section_shows_no_secret() -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, {"objectstore": {"secret_access_key": "s3same"}})
    assert "s3same" not in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        {"redis": {"pasword": "s3same"}},
        {"tokn": "s3same"},
        {"object_store": {"secret_acess_key": "s3same"}},
        {"redis": {"urll": "redis://:pass@s3same@h:6379/0"}},
        {"redis": "redis://u:pass@s3same@h:6379/0"},
    ],
)
def test_misspelled_secret_is_not_shown(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"\*\*\*") as raised:
        load(None, given)
    assert "s3same" not in str(raised.value)


def test_refusal_names_the_origin_of_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path, "[delta]\nmax_depth = 64")
    with pytest.raises(ConfigError, match=rf"delta.max_depth .64.*set by file {file}"):
        load(file)
    monkeypatch.setenv("NEARKIN_DELTA__MAX_DEPTH", "65")
    with pytest.raises(ConfigError, match=r"delta.max_depth .65.*set by environment NEARKIN_DELTA__MAX_DEPTH"):
        load(file)


def test_variables_are_read_in_any_case_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("nearkin_store", "here")
    assert load()[0].store == "here"
    monkeypatch.setenv("NEARKIN_DELTA__MAX_DEPTH", "1")
    assert load()[0].store == "here"


@pytest.mark.parametrize("name", ["NEARKIN_STORE__FOLDER", "NEARKIN_SERVER__URL", "NEARKIN_TOKEN__"])
def test_variable_below_a_plain_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match=f"environment {name}: no such setting"):
        load()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NEARKIN_DELTA_MAX_DEPTH", "NEARKIN_DELTA__MAX_DEPTH"), ("NEARKIN_DELTTA__CODEC", "NEARKIN_DELTA__CODEC"),
        ("NEARKIN_TENNANT", "NEARKIN_TENANT"),
    ],
)  # fmt: skip
def test_misspelled_variable_is_refused_with_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=rf"environment {name}: no such setting; did you mean {meant}"):
        load()


@pytest.mark.parametrize(
    "text",
    [
        "[delta", "delta = 1\n[delta]", "\x00", "a = 1\na = 2", f"a = {'[' * 9000}", f"delta.max_depth = {'9' * 5000}",
        f"delta.{'a.' * 900}b = 1", f"# {'a' * (1 << 20)}",
    ],
)  # fmt: skip
def test_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"nearkin\.toml"):
        load(toml(tmp_path, text))


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml.*no such file"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match=rf'"{tmp_path}": Is a directory$'):
        load(tmp_path)


def test_broken_json_in_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARKIN_CHUNKER", "{broken")
    with pytest.raises(ConfigError, match=r"(?i)chunker"):
        load()
    with pytest.raises(ConfigError, match=r"environment NEARKIN_CHUNKER: not valid JSON; .*NEARKIN_CHUNKER__ALGORITHM"):
        load()


def test_section_without_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = r"no longer a section, its settings are constants \(runner\.batch_bytes = 16MiB.*\); remove it"
    file = toml(tmp_path, 'runner = "x"')
    with pytest.raises(ConfigError, match=rf'^runner "x": {refused} \(set by file {file}\)$'):
        load(file)
    monkeypatch.setenv("NEARKIN_RUNNER", "x")
    with pytest.raises(ConfigError, match=f"^environment NEARKIN_RUNNER: {refused}$"):
        load()


def test_edge_of_an_embedded_gateway_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'edge "true": with ingest "embedded" .*; remove edge'):
        load(None, {"gateway": {"ingest": "embedded", "edge": True}})
    assert load(None, {"gateway": {"edge": True}})[0].gateway.edge


def test_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert load(toml(tmp_path, "\ufeff[delta]\nmax_depth = 2"))[0].delta.max_depth == 2


def test_password_in_a_refused_url_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r'^server "http://\*\*\*@host/": want http') as raised:
        load(None, {"server": "http://kim:s3same@host/"})
    assert "s3same" not in str(raised.value)


def test_settings_are_immutable() -> None:
    with pytest.raises(AttributeError):
        Settings().tenant = "other"  # type: ignore[misc]


# --- the Redis index ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"url": "http://127.0.0.1"}, 'redis: url scheme "http": choose one of redis, rediss, unix'),
        ({"url": "redis://h", "ca_file": "ca.pem"}, "need rediss:// (TLS)"),
        ({"url": "rediss://h", "cert_file": "c.pem"}, "cert_file and key_file: give both or neither"),
        ({"prefix": "a{b}"}, 'prefix "a{b}": use no braces'),
        ({"timeout_seconds": 0}, "redis.timeout_seconds: no longer a setting, but a constant (5)"),
    ],
)
def test_redis_settings_that_cannot_work_are_refused(section: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, {"redis": section})
    assert complaint in str(refused.value)


def test_redis_password_is_read_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARKIN_REDIS__PASSWORD", "s3same")
    settings, origins = load(None, {"redis": {"url": "redis://user:op@n@h:6379/0"}})
    assert settings.redis.password == "s3same"
    assert origins["redis.password"] == ("***", "environment NEARKIN_REDIS__PASSWORD")
    assert origins["redis.url"].value == "redis://***@h:6379/0"
    assert "s3same" not in repr(settings)
    assert "op@n" not in repr(settings)


def test_undelete_seconds_are_bounded(tmp_path: Path) -> None:
    assert load()[0].deletion.undelete_seconds == 7 * 86_400
    assert load(toml(tmp_path, "[deletion]\nundelete_seconds = 0"))[0].deletion.undelete_seconds == 0
    with pytest.raises(ConfigError, match=r'deletion\.undelete_seconds "-1": .*0 to 315360000'):
        load(None, {"deletion": {"undelete_seconds": -1}})


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"encryption": "rot13"}, 'storage.encryption "rot13": choose aes-256-gcm or none'),
        ({"encryption": "aes-256-gcm"}, "encryption aes-256-gcm: want key_file or key, and neither is set"),
        ({"encryption": "aes-256-gcm", "key": "K" * 44, "key_file": "f"}, "want key_file or key, not both"),
        ({"key_file": "f"}, 'key_file is set but encryption is "none"; set encryption = "aes-256-gcm"'),
        ({"encryption": "aes-256-gcm", "key": "K" * 5000}, 'storage.key "***": want 1 to 4096 bytes'),
    ],
)
def test_invalid_encryption_settings_are_refused_unshown(section: dict[str, object], complaint: str) -> None:
    """No refusal shows the key."""
    with pytest.raises(ConfigError) as refused:
        load(None, {"storage": section})
    assert complaint in str(refused.value)
    assert "KKKK" not in str(refused.value)


def test_store_key_is_read_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARKIN_STORAGE__KEY", "bmVhcmtpbg==")
    settings, origins = load(None, {"storage": {"encryption": "aes-256-gcm"}})
    assert settings.storage.key == "bmVhcmtpbg=="
    assert origins["storage.key"] == ("***", "environment NEARKIN_STORAGE__KEY")
    assert "bmVhcmtpbg" not in repr(settings)


def test_each_promised_name_is_importable() -> None:
    for name in nearkin.__all__:
        assert getattr(nearkin, name) is not None, name


def test_settings_that_conflict_name_their_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARKIN_CHUNKER__TARGET_BYTES", "4096")
    file = toml(tmp_path, '[chunker]\nmin_bytes = 65536\n[redis]\nprefix = "x"')
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert str(refused.value).endswith(f"(set by file {file}, environment NEARKIN_CHUNKER__TARGET_BYTES)")
    monkeypatch.setenv("NEARKIN_REDIS__PREFIX", "{x}")
    monkeypatch.delenv("NEARKIN_CHUNKER__TARGET_BYTES")
    with pytest.raises(ConfigError, match=r"prefix .*: use no braces .* \(set by environment NEARKIN_REDIS__PREFIX\)$"):
        load()
