"""Test the quotas in the tokens file, the command that sets them, and the counts behind them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nearkin.cli import main
from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.tenant_quota import TenantQuota, read_quotas
from nearkin_gateway.http.request_limits import DEBT_SECONDS_MAX, RATE_WINDOW_SECONDS, ByteRates
from nearkin_gateway.uploads import in_flight
from nearkin_gateway.uploads.in_flight import InFlightUploads
from nearkin_gateway.uploads.tenant_usage import TenantUsages
from nearkin_shared.errors import BadInput, StoreUnavailable
from nearkin_shared.results import Ledger, Stats
from nearkin_shared.validation import checkpoint_key_of


def test_quota_command_sets_lists_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keep limits that are not named, tokens, and the order of nothing else."""
    file = tmp_path / "tokens.json"
    text, _ = tokens.create(file, "shop", ["read"])

    def run(*arguments: str) -> tuple[int, Any]:
        code = main(["--json", "token", "quota", *arguments, "--file", str(file)])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else None

    assert run("shop", "--logical", "1GiB", "--rate", "1MB") == (
        0,
        {"shop": {"logical_bytes": 1 << 30, "upload_bytes_per_second": 1_000_000}},
    )
    assert run("shop", "--stored", "5000", "--logical", "none")[1] == {
        "shop": {"stored_bytes": 5000, "upload_bytes_per_second": 1_000_000}
    }
    known = tokens.TokenFile(file)
    assert known.find(text) is not None
    assert known.quota("shop") == TenantQuota(None, 5000, 1_000_000)
    assert known.quota("other") is None
    assert run() == (0, {"shop": {"stored_bytes": 5000, "upload_bytes_per_second": 1_000_000}})
    tokens.create(file, "other", ["read"])
    assert tokens.read_tenant_quotas(file)["shop"].stored_bytes == 5000
    assert run("shop", "--stored", "none", "--rate", "none") == (0, {"shop": {}})
    assert "quotas" not in json.loads(file.read_text())
    for wrong in (
        ("--logical", "1GiB"),
        ("shop", "--rate", "1"),
        ("shop", "--stored", "many"),
        ("a\nb", "--rate", "none"),
    ):
        assert run(*wrong)[0] == 2, wrong


@pytest.mark.parametrize(
    "wrong",
    [[], {"t": []}, {"t": {"blobs": 1}}, {"t": {"logical_bytes": -1}}, {"t": {"logical_bytes": True}},
     {"t": {"stored_bytes": 1 << 61}}, {"t": {"upload_bytes_per_second": 10}}, {"": {}}],
)  # fmt: skip
def test_invalid_quotas_are_refused(wrong: object) -> None:
    with pytest.raises(BadInput):
        read_quotas(wrong)


def test_byte_rate_debt_shrinks_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rates = ByteRates()
    rates.add("a", 5000, 1000)
    assert rates.debt_seconds("a", 1000) == pytest.approx(5)
    assert rates.debt_seconds("b", 1000) == 0
    now += 3
    assert rates.debt_seconds("a", 1000) == pytest.approx(2)
    rates.add("a", 1000, 1000)
    assert rates.debt_seconds("a", 1000) == pytest.approx(3)
    now += 60
    assert rates.debt_seconds("a", 1000) == 0
    for _ in range(40):
        now += 1
        rates.add("a", 500, 1000)
    assert rates.rate("a") == pytest.approx(500, rel=0.2)
    now += 3 * RATE_WINDOW_SECONDS
    rates.add("a", 0, 1000)
    assert rates.rate("a") < 500 / 3


def test_in_flight_uploads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count by tenant; of too many the oldest is no longer counted, and ends count once."""
    monkeypatch.setattr(in_flight, "IN_FLIGHT_MAX", 3)
    uploads = InFlightUploads()
    for number in range(5):
        uploads.begin(bytes([number]), "a" if number % 2 else "b")
        uploads.grow(bytes([number]), 10, 4)
    assert len(uploads) == 3
    found = uploads.of("b")
    assert (found.blobs, found.logical_bytes, found.stored_bytes) == (2, 20, 8)
    for _ in range(2):
        uploads.end(bytes([4]))
    uploads.grow(bytes([4]), 1, 1)
    assert (uploads.of("b").blobs, uploads.of("a").blobs) == (1, 1)
    uploads.end(bytes([2]))
    uploads.end(bytes([3]))
    assert (len(uploads), uploads.of("a").blobs, uploads._sums) == (0, 0, {})


def sums(logical_bytes: int, stored_bytes: int, deleted_bytes: int = 0) -> Stats:
    ledger = Ledger(logical_bytes=logical_bytes, stored_bytes=stored_bytes)
    return cast(Stats, SimpleNamespace(ledger=ledger, deleted_bytes=deleted_bytes, checkpoint_bytes=0))


def test_usage_counts_commits_during_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the versions whose outcome arrived since the reading began, and no earlier ones."""
    found = [sums(100, 50, 20), sums(300, 90)]
    ledger = {"logical_bytes": 7, "stored_bytes": 3}
    began: list[str] = []
    release = asyncio.Event()

    async def read(tenant: str, _needs_whole: bool) -> tuple[Stats, bool]:
        began.append(tenant)
        await release.wait()
        return found.pop(0), True

    async def run() -> None:
        usages = TenantUsages(read)
        first = asyncio.create_task(usages.current("t"))
        while not began:
            await asyncio.sleep(0)
        usages.on_committed({"tenant": "t", "ledger": ledger})
        usages.on_committed({"tenant": "other", "ledger": ledger})
        release.set()
        usage = await first
        assert (usage.logical_bytes, usage.stored_bytes) == (87, 53)
        usages.on_committed({"tenant": "t", "ledger": ledger})
        usages.on_committed({"tenant": "t", "ledger": None})
        usages.on_committed({"tenant": "t", "key": checkpoint_key_of("home"), "ledger": ledger})
        usage = await usages.current("t")
        assert (usage.logical_bytes, usage.stored_bytes, usage.checkpoint_bytes) == (94, 59, 7)
        monkeypatch.setattr("nearkin_gateway.uploads.tenant_usage.REFUSED_SECONDS", 0.0)
        monkeypatch.setattr("nearkin_gateway.uploads.tenant_usage.COST_SHARE", 0)
        assert (await usages.current("t", refuses=True)).logical_bytes == 300

    asyncio.run(run())


def test_usage_that_was_never_read_is_an_error() -> None:
    """Refuse to guess: an upload of a tenant with quotas waits for its sums, and fails without them."""

    async def away(tenant: str, needs_whole: bool) -> tuple[Stats, bool]:
        assert needs_whole
        raise StoreUnavailable(f"{tenant}: redis is away")

    async def run() -> None:
        usages = TenantUsages(away)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await usages.current("t")
        assert usages.known("t") is None

    asyncio.run(run())


def test_usage_never_shrinks_during_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep each sum that is larger than one of an index that is being rebuilt; a whole index replaces both."""
    monkeypatch.setattr("nearkin_gateway.uploads.tenant_usage.REFUSED_SECONDS", 0.0)
    monkeypatch.setattr("nearkin_gateway.uploads.tenant_usage.COST_SHARE", 0)
    found = [(sums(100, 50), True), (sums(10, 70), False), (sums(120, 5), False), (sums(30, 20), True)]
    asked: list[bool] = []

    async def read(_tenant: str, needs_whole: bool) -> tuple[Stats, bool]:
        asked.append(needs_whole)
        return found.pop(0)

    async def run() -> list[tuple[int, int]]:
        usages = TenantUsages(read)
        seen = []
        for _ in range(4):
            usage = await usages.current("t", refuses=True)
            seen.append((usage.logical_bytes, usage.stored_bytes))
        return seen

    assert asyncio.run(run()) == [(100, 50), (100, 70), (120, 70), (30, 20)]
    assert asked == [True, False, False, False]


def test_byte_rate_debt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember ten minutes of debt at most, also after the rate was lowered; it shrinks from there."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rates = ByteRates()
    rates.add("a", 10**9, 1_000_000)
    assert rates.debt_seconds("a", 1_000_000) == DEBT_SECONDS_MAX
    assert rates.debt_seconds("a", 1000) == DEBT_SECONDS_MAX
    now += DEBT_SECONDS_MAX - 1
    assert rates.debt_seconds("a", 1000) == pytest.approx(1)
    rates.add("a", 0, 1000)
    assert rates.debt_seconds("a", 1000) <= DEBT_SECONDS_MAX
    now += DEBT_SECONDS_MAX
    assert rates.debt_seconds("a", 1000) == 0
