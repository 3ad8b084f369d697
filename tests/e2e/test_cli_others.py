"""Test the commands that inspect a store.

These are ls, info, stats, verify, rebuild-index, explain, config and version.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.cli.output import print_stats
from tests.support.checks.commands import FIRST, SECOND, InProcess, answer, assert_refused, new_store, run

LEDGER = {
    "logical_bytes", "stored_bytes", "reduction_ratio", "chunks", "duplicate_chunks", "delta_chunks", "raw_chunks",
    "dedup_saved_bytes", "delta_saved_bytes", "compression_saved_bytes", "dcr", "dce", "seconds",
}  # fmt: skip


def test_ls_lists_readable_and_names_damaged(store_copy: Path, call: InProcess) -> None:
    """List readable versions and name the damaged ones."""
    (manifest,) = (store_copy / "manifests").rglob("*2.nkm")
    manifest.write_bytes(manifest.read_bytes()[:100])
    listed = call("--store", store_copy, "ls", "--versions")
    assert listed.returncode == 5
    lines = [line.partition("  # ")[0] for line in listed.stdout.decode().splitlines()]
    assert [line.split()[-2:] for line in lines] == [["v1", "db/dump"], ["v1", "notes"]]
    (line,) = listed.stderr.decode().splitlines()
    assert line.startswith("nearkin: 'db/dump' version 2 cannot be read: manifests/")
    as_json = call("--store", store_copy, "--json", "ls")
    assert as_json.returncode == 5
    assert [info["key"] for info in json.loads(as_json.stdout)] == ["notes"]
    assert json.loads(as_json.stderr)["error"]["kind"] == "Corrupt"


def test_ls_lists_newest_all_or_a_prefix(store: Path, call: InProcess) -> None:
    """List the newest versions, all of them, or those of a prefix."""
    newest = answer("--store", store, "ls")
    assert [(info["key"], info["version"]) for info in newest] == [("db/dump", 2), ("notes", 1)]
    assert newest[0].keys() >= {"key", "version", "size_bytes", "created", "digest"}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", newest[0]["created"])
    every = call.answer("ls", "db/", "--versions", "--store", store)
    assert sorted((info["key"], info["version"]) for info in every) == [("db/dump", 1), ("db/dump", 2)]
    assert call.answer("--store", store, "ls", "nothing/") == []
    lines = call("--store", store, "ls").stdout.decode().splitlines()
    assert [line.split()[-2:] for line in lines] == [["v2", "db/dump"], ["v1", "notes"]]


def test_ls_key_is_escaped_on_terminal(tmp_path: Path, call: InProcess) -> None:
    """Escape keys: they cannot control the terminal."""
    new_store(tmp_path)
    key = "red \x1b[31m\n[bold]"
    call.answer("put", key, "-", "--allow-empty", env={"NEARKIN_STORE": str(tmp_path)})
    assert call.answer("ls", env={"NEARKIN_STORE": str(tmp_path)})[0]["key"] == key
    for arguments in (["ls"], ["info", key], ["explain", key]):
        shown = call(*arguments, env={"NEARKIN_STORE": str(tmp_path)}).stdout.decode()
        assert r"red \x1b[31m\n[bold]" in shown
        assert "\x1b" not in shown


def test_info_shows_one_version(store: Path, call: InProcess) -> None:
    info = answer("--store", store, "info", "db/dump", "--version", "1")
    assert (info["size_bytes"], info["metadata"]) == (len(FIRST), {"host": "db1", "note": "a=b"})
    shown = call("--store", store, "info", "db/dump", "--version", "1").stdout.decode()
    assert info["digest"] in shown
    assert "note=a=b" in shown


def test_stats_add_up(store: Path, call: InProcess) -> None:
    stats = answer("--store", store, "stats")
    assert stats.keys() >= LEDGER | {"parts", "depths", "versions", "keys", "containers", "index_bytes"}
    assert (stats["versions"], stats["keys"]) == (3, 2)
    assert stats["logical_bytes"] == len(FIRST) + len(SECOND) + 5
    assert sum(stats["parts"].values()) == stats["stored_bytes"]
    assert stats["reduction_ratio"] == pytest.approx(stats["logical_bytes"] / stats["stored_bytes"])
    assert stats["metadata_bytes"] == stats["stored_bytes"] - stats["block_bytes"]
    fresh_chunks = stats["raw_chunks"] + stats["delta_chunks"]
    assert stats["metadata_bytes_per_chunk"] == stats["metadata_bytes"] / stats["chunks"]
    assert stats["metadata_bytes_per_fresh_chunk"] == stats["metadata_bytes"] / fresh_chunks
    shown = call("--store", store, "stats").stdout.decode()
    assert f"{stats['metadata_bytes_per_fresh_chunk']:.1f} B a fresh one\n" in shown
    assert shown.startswith("3 versions of 2 keys")
    assert "base cache" not in shown


def test_stats_count_zero_chunks_as_duplicates(tmp_path: Path, call: InProcess) -> None:
    """Mention that chunks of zeros count as duplicates."""
    new_store(tmp_path / "s")
    put = call("--store", tmp_path / "s", "put", "zeros", "-", stdin=bytes(100_000)).stdout.decode()
    shown = call("--store", tmp_path / "s", "stats").stdout.decode()
    assert [output.count("2 duplicate, 2 of them zero") for output in (put, shown)] == [1, 1]


def test_stats_omit_metadata_of_absent_kinds(tmp_path: Path, call: InProcess) -> None:
    """Show no metadata of a kind of chunk that does not occur."""
    new_store(tmp_path / "s")
    shown = []
    for name, content in (("empty", b""), ("zeros", bytes(100_000))):
        call("--store", tmp_path / "s", "put", name, "-", stdin=content)
        lines = call("--store", tmp_path / "s", "stats").stdout.decode().splitlines()
        shown.append(next(line for line in lines if line.startswith("metadata ")))
    assert ":" not in shown[0]
    assert shown[1].endswith(" B a logical chunk")


def test_stats_show_base_cache_after_lookups(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Show the base cache only where it was used."""
    with open_store(store, read_only=True) as opened:
        print_stats(replace(opened.stats(), base_cache_hits=1200, base_cache_misses=34))
    assert "base cache   1,200 of 1,234 lookups hit\n" in capsys.readouterr().out


def test_verify_of_a_sound_store_finds_nothing(store: Path, call: InProcess) -> None:
    report = answer("--store", store, "verify")
    assert (report["ok"], report["damage"], report["sample"], report["versions"]) == (True, [], None, 3)
    sampled = call.answer("--store", store, "verify", "--sample", "50%")
    assert (sampled["ok"], sampled["sample"]) == (True, 0.5)
    assert call("--store", store, "verify").stdout.startswith(b"no damage")


def test_lost_index_is_rebuilt_from_the_store(store_copy: Path, call: InProcess) -> None:
    shutil.rmtree(store_copy / "index")
    report = answer("--store", store_copy, "rebuild-index")
    assert (report["versions"], report["skipped"]) == (3, [])
    assert call("--store", store_copy, "get", "db/dump").stdout == SECOND
    assert call.answer("--store", store_copy, "stats")["versions"] == 3


def test_index_rebuilt_by_itself_names_damage(
    store_copy: Path, call: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Name what an automatically rebuilt index lacks."""
    shutil.rmtree(store_copy / "index")
    manifest = max((store_copy / "manifests").rglob("*.nkm"))
    damaged = bytearray(manifest.read_bytes())
    damaged[50] ^= 1
    manifest.write_bytes(damaged)
    assert call("--store", store_copy, "ls").returncode == 0
    lacks = f"since it cannot be read: {manifest.relative_to(store_copy)}: run `nearkin verify`"
    assert lacks in caplog.text


def test_explain_counts_stored_raw_chunks(store: Path, call: InProcess) -> None:
    """Count raw chunks by their stored bytes, as deltas are, not by their logical bytes."""
    first = call.answer("--store", store, "explain", "db/dump", "--version", "1")["kinds"]["raw"]
    stats = call.answer("--store", store, "stats")
    assert 0 < first["stored_estimate_bytes"] <= stats["stored_bytes"]
    assert first["stored_estimate_bytes"] < first["bytes"]


def test_explain_accounts_for_every_byte(store: Path, call: InProcess) -> None:
    whole = answer("--store", store, "explain", "db/dump", "--segments")
    assert sum(segment["length_bytes"] for segment in whole["segments"]) == len(SECOND)
    assert sum(kind["bytes"] for kind in whole["kinds"].values()) == len(SECOND)
    for kind in ("duplicate", "zero", "delta", "raw"):
        assert whole["kinds"][kind]["chunks"] == whole[f"{kind}_chunks"]
    assert whole["segment_count"] == len(whole["segments"])
    assert "segments" not in call.answer("--store", store, "explain", "db/dump", "--version", "1")
    shown = call("--store", store, "explain", "db/dump", "--segments").stdout.decode()
    assert shown.startswith("segment ")
    assert "db/dump version 2" in shown


@pytest.mark.parametrize("policy", ["first-fit", "locality"])
def test_stats_and_explain_name_finders_alike(tmp_path: Path, call: InProcess, policy: str) -> None:
    """Name the source of bases alike in `stats` and `explain`."""
    new_store(tmp_path / "store")
    env = {"NEARKIN_BASE__POLICY": policy}
    for content in (FIRST, SECOND):
        (tmp_path / "file").write_bytes(content)
        call.answer("--store", tmp_path / "store", "put", "key", tmp_path / "file", env=env)
    stats = call.answer("--store", tmp_path / "store", "stats")
    explained = call.answer("--store", tmp_path / "store", "explain", "key", "--segments")
    assert stats["found_by"] == explained["found_by"] != {}
    assert stats["policies"] == explained["policies"] == {policy: {"chunks": stats["delta_chunks"], "share": 1.0}}
    assert {segment["sketch"] for segment in explained["segments"]} == set(stats["sketches"])
    deltas = [chunk for segment in explained["segments"] for chunk in segment["chunks"] if chunk["found_by"]]
    assert {chunk["policy"] for chunk in deltas} == {policy}
    lines = {
        next(line for line in call("--store", tmp_path / "store", *words).stdout.splitlines() if b"bases found" in line)
        for words in (["stats"], ["explain", "key"])
    }
    assert len(lines) == 1
    assert f"{policy} {stats['delta_chunks']:,} (100.0%" in lines.pop().decode()


def test_empty_store_has_all_figures(tmp_path: Path, call: InProcess) -> None:
    new_store(tmp_path / "store")
    (tmp_path / "file").write_bytes(b"")
    call.answer("--store", tmp_path / "store", "put", "key", tmp_path / "file")
    stats = call.answer("--store", tmp_path / "store", "stats")
    assert (stats["metadata_bytes_per_chunk"], stats["metadata_bytes_per_fresh_chunk"]) == (0.0, 0.0)
    assert "depths       -\n" in call("--store", tmp_path / "store", "stats").stdout.decode()


def test_config_shows_values_and_their_sources(tmp_path: Path, call: InProcess) -> None:
    file = tmp_path / "nearkin.toml"
    file.write_text("[delta]\nmax_depth = 3\n[block]\nlevel = 9\n")
    settings = call.answer("--config", file, "config", "--store", "here", env={"NEARKIN_BLOCK__LEVEL": "5"})
    assert settings["delta.max_depth"] == {"value": 3, "source": f"file {file}"}
    assert settings["block.level"] == {"value": 5, "source": "environment NEARKIN_BLOCK__LEVEL"}
    assert settings["store"] == {"value": "here", "source": "argument"}
    assert settings["chunker.algorithm"]["source"] == "default"
    shown = call("config", "--config", file).stdout.decode()
    assert re.search(r"delta\.max_depth +3 +file ", shown)
    assert re.search(r"storage\.create +false +default", shown)  # as a file has it
    file.write_text("[delta]\nmax_dept = 3\n")
    assert_refused(call("--config", file, "config"), 2, "delta.max_dept")
    file.write_text("[delta\n")
    assert_refused(call("--config", file, "config"), 2, "nearkin.toml")


def test_version_names_the_running_build() -> None:
    assert run("version").stdout.startswith(b"nearkin ")
    assert answer("version").keys() == {"version", "python", "kernels"}
    assert b"python kernels" in run("version", env={"NEARKIN_KERNELS": "python"}).stdout
    assert_refused(run("version", env={"NEARKIN_KERNELS": "foo"}), 2, 'NEARKIN_KERNELS "foo": choose')


def test_version_is_an_option_too_and_is_the_one_that_was_built(call: InProcess) -> None:
    import tomllib

    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        built = tomllib.load(file)["project"]["version"]
    assert call.answer("--version") == call.answer("version")
    assert call.answer("version")["version"] == built
    assert call("--version").stdout.startswith(f"nearkin {built} (Python ".encode())
    assert call("--version", "get", "k").stdout == call("version").stdout
