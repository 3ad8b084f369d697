"""Test how a user's record becomes a blob.

The source of each field, and refusals with their message.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from nearkin_ingest import records
from nearkin_ingest.records import Intake, UserRecord, intake_of, origin_of, tenants_of
from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import STORE_FOLDERS
from nearkin_shared.errors import BadInput, ConfigError


def settings(**ingest: Any) -> Settings:
    return load(None, {"ingest": {"topics": ["users"], **ingest}, "object_store": {"url": "s3://bucket/all"}})[0]


def record(**fields: Any) -> UserRecord:
    return UserRecord(**{"topic": "users", "partition": 2, "offset": 7, "key": b"k", "value": b"bytes", **fields})


def taken(found: UserRecord, **ingest: Any) -> Intake:
    intake = intake_of(found, "t", settings(**ingest))
    assert intake is not None
    return intake


# --- accepted records ------------------------------------------------------------------------------------------------


def test_key_and_value_are_those_of_the_record() -> None:
    intake = taken(record(key="ä/b".encode(), value=b""))
    assert (intake.key, intake.value, intake.dataref, intake.tenant) == ("ä/b", b"", None, "t")
    assert intake.metadata == {"kafka": "users[2]@7"}


def test_headers_set_key_and_tenant_where_configured() -> None:
    found = record(all_headers=(("name", b"first"), ("name", b"last"), ("who", b"acme")))
    assert (taken(found).key, taken(found).tenant) == ("k", "t")
    intake = taken(found, key_header="name", tenant_header="who")
    assert (intake.key, intake.tenant) == ("last", "acme")
    without = taken(record(), key_header="name", tenant_header="who")
    assert (without.key, without.tenant) == ("k", "t")


def test_cloudevents_attributes_become_metadata() -> None:
    headers = (
        *(("ce_specversion", b"1.0"), ("ce_id", b"42"), ("ce_source", b"/dumps"), ("ce_subject", b"orders")),
        *(("ce_type", b"dump.made"), ("content-type", b"application/x-dump"), ("other", b"x"), ("ce_none", None)),
    )
    assert taken(record(all_headers=headers)).metadata == {
        "ce_id": "42",
        "ce_source": "/dumps",
        "ce_subject": "orders",
        "ce_type": "dump.made",
        "content-type": "application/x-dump",
        "kafka": "users[2]@7",
    }
    both = (("ce_datacontenttype", b"a/b"), ("content-type", b"c/d"))
    assert taken(record(all_headers=both)).metadata["content-type"] == "c/d"
    assert taken(record(all_headers=both[:1])).metadata["content-type"] == "a/b"


def test_valid_trace_continues_and_an_invalid_one_does_not() -> None:
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert taken(record(all_headers=(("traceparent", trace),))).traceparent == trace
    for wrong in (b"", b"00-xyz", trace + b"\n", b"\xff" * 55, None):
        assert taken(record(all_headers=(("traceparent", wrong),))).traceparent is None


def test_start_is_the_record_s_time_but_never_in_the_future() -> None:
    now_us = time.time_ns() // 1000
    assert taken(record(timestamp_ms=1_700_000_000_000)).began_us == 1_700_000_000_000_000
    for timestamp_ms in (None, 10**15):
        assert abs(taken(record(timestamp_ms=timestamp_ms)).began_us - now_us) < 60_000_000
    assert taken(record(timestamp_ms=-1)).began_us == 1


def test_origin_belongs_to_one_record() -> None:
    one = origin_of("cluster", "id", record())
    assert len(one) == 16
    assert origin_of("cluster", "id", record(key=b"other", value=None)) == one
    others = [
        origin_of("cluster2", "id", record()),
        origin_of("cluster", "id2", record()),
        origin_of("cluster", "id", record(topic="userz")),
        origin_of("cluster", "id", record(partition=3)),
        origin_of("cluster", "id", record(offset=8)),
        origin_of("cluster", "id", record(leader_epoch=3)),
        origin_of("clusteru", "id", record(topic="sers")),
    ]
    assert len({one, *others}) == 1 + len(others)


def test_topics_have_their_own_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = load(None, {"tenant": "mine", "ingest": {"topics": ["a", "b=team b"]}})[0]
    assert tenants_of(listed) == {"a": "mine", "b": "team b"}
    monkeypatch.setenv("NEARKIN_INGEST__TOPICS", "a, b=team b")
    assert load(None, {"tenant": "mine"})[0].ingest.topics == listed.ingest.topics
    monkeypatch.delenv("NEARKIN_INGEST__TOPICS")
    table, origins = load(None, {"ingest": {"topics": {"a": "x", "b": "y"}}})
    assert tenants_of(table) == {"a": "x", "b": "y"}
    assert origins["ingest.topics"] == (("a=x", "b=y"), "argument")


# --- claim checks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", STORE_FOLDERS)
def test_tenant_named_like_a_store_folder_reads_nothing(tenant: str) -> None:
    found = record(all_headers=(("dataref", f"{tenant}/a".encode()), ("who", tenant.encode())))
    with pytest.raises(BadInput, match="the store's own"):
        taken(found, dataref_prefix="{tenant}/", tenant_header="who")


@pytest.mark.parametrize("header", ["dataref", "ce_dataref"])
@pytest.mark.parametrize("text", ["in/t/a b+c=.d", "s3://bucket/all/in/t/a b+c=.d"])
def test_claim_check_names_an_object(header: str, text: str) -> None:
    intake = taken(record(value=None, all_headers=((header, text.encode()),)), dataref_prefix="in/{tenant}/")
    assert (intake.dataref, intake.value) == ("in/t/a b+c=.d", None)
    assert "dataref" not in str(intake.metadata)


@pytest.mark.parametrize(
    "text",
    [
        *("", "in/", "other/a", "in", "/in/a", "in//a", "in/../containers/x", "in/./a", "in/a/..", "in/..", "in/a/"),
        *(
            "s3://other/all/in/a",
            "s3://bucket/in/a",
            "http://h/in/a",
            "in/a\\..\\b",
            "in/%2e%2e/a",
            "in/a\n",
            "in/ä",
        ),
        *("in/a?x", "in/a#x", "in/" + "a" * 1100, "file:///in/a", "s3://bucket/all/in/../containers/x"),
    ],
    ids=ascii,
)
def test_claim_check_never_leaves_its_prefix(text: str) -> None:
    with pytest.raises(BadInput, match="dataref"):
        taken(record(value=None, all_headers=(("dataref", text.encode()),)), dataref_prefix="in/")


def test_claim_check_of_one_tenant_never_reads_another_s() -> None:
    for text in ("in/u/a", "in/t2/a", "in/{tenant}/a", "in/t/../u/a"):
        with pytest.raises(BadInput, match="below in/t/"):
            taken(record(value=None, all_headers=(("dataref", text.encode()),)), dataref_prefix="in/{tenant}/")
    for tenant in ("..", ".", "t/../u", "a b"):
        headers = (("dataref", f"in/{tenant}/a".encode()), ("who", tenant.encode()))
        with pytest.raises(BadInput, match="tenant"):
            taken(record(all_headers=headers), dataref_prefix="in/{tenant}/", tenant_header="who")


def test_claim_checks_are_off_unless_a_prefix_is_set() -> None:
    with pytest.raises(BadInput, match=r"ingest\.dataref_prefix"):
        taken(record(all_headers=(("dataref", b"in/a"),)))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"key": None}, "no key"),
        ({"key": b""}, "at least one character"),
        ({"key": b"\xff"}, "key: is not UTF-8"),
        ({"key": b"a\0b"}, "NUL"),
        ({"key": b"x" * 1025}, "1024"),
        ({"value": None}, "no value"),
        ({"value": b"x" * 101}, r"value of 101 bytes: want at most 100; send"),
        ({"all_headers": (("ce_id", b"\xff"),)}, "ce_id.*not UTF-8"),
        ({"all_headers": (("ce_a", b"x" * 70_000),)}, "metadata of"),
        ({"all_headers": (("who", b""),)}, "tenant '': want 1 to 128 bytes"),
        ({"all_headers": (("who", b"x" * 129),)}, "tenant 'x*': want 1 to 128 bytes"),
        ({"all_headers": (("who", b"a\nb"),)}, r"tenant 'a\\nb': want .* without line ends"),
        ({"all_headers": (("who", b"\xff"),)}, "tenant: is not UTF-8"),
        ({"unreadable": "its headers cannot be read"}, "headers cannot be read"),
    ],
    ids=str,
)
def test_invalid_record_is_refused_with_a_message(
    fields: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "VALUE_BYTES_MAX", 100)
    with pytest.raises(BadInput, match=complaint):
        taken(record(**fields), tenant_header="who")


def test_records_without_value_may_be_skipped() -> None:
    assert intake_of(record(value=None), "t", settings(null_values="skip")) is None
    assert intake_of(record(value=b""), "t", settings(null_values="skip")) is not None


@pytest.mark.parametrize(
    ("ingest", "complaint"),
    [
        ({"topics": ["a b"]}, "a topic's name, or topic=tenant"),
        ({"topics": ["a="]}, "a topic's name, or topic=tenant"),
        ({"topics": ["a", "a=t"]}, "twice"),
        ({"topics": [f"a={'x' * 129}"]}, "128 bytes"),
        ({"topics": ["nearkin.dead"]}, "reserved for Nearkin"),
        ({"dataref_prefix": "in"}, "ends in /"),
        ({"dataref_prefix": "../"}, "ends in /"),
        ({"dataref_prefix": "a/../b/"}, "ends in /"),
        ({"dataref_prefix": "/"}, "ends in /"),
        ({"dataref_prefix": "containers/"}, "belongs to the store"),
        ({"dataref_prefix": "uploads/"}, "belongs to the store"),
        ({"dataref_prefix": "{topic}/"}, "ends in /"),
        ({"null_values": "delete"}, "choose reject or skip"),
    ],
    ids=str,
)
def test_unsafe_settings_are_refused(ingest: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(None, {"ingest": ingest})


def test_worker_without_topics_reports_the_missing_setting() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nearkin_ingest"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    assert (done.returncode, done.stderr.startswith("nearkin: ingest.topics: is empty")) == (2, True)
