"""Test the guarantees of corpora and generated data for benchmarks and other tests."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.lab import corpus_cache, generated_data
from nearkin_shared.errors import BadInput, Corrupt, RetryableError

Maker = Callable[..., bytes]
Pip = Callable[[str], None]
BLOCK = generated_data.BLOCK_BYTES
MAKERS: tuple[Maker, ...] = (generated_data.random_bytes, generated_data.text_like, generated_data.records_like)


def image(mebibytes: int = 8, seed: int = 0, generation: int = 0) -> bytes:
    return b"".join(generated_data.vm_image(mebibytes, seed, generation))


def blocks_of(data: bytes) -> list[bytes]:
    return [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]


# ------------------------------------------------------------------ generated data


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("byte_count", [0, 1, 7, 31, 4096, 100_001])
def test_generated_data_has_the_requested_length(maker: Maker, byte_count: int) -> None:
    assert len(maker(byte_count, 5)) == byte_count


@pytest.mark.parametrize("maker", MAKERS)
def test_longer_data_begin_with_the_shorter_ones(maker: Maker) -> None:
    assert maker(70_000, 3)[:1234] == maker(1234, 3)


@pytest.mark.parametrize("maker", MAKERS)
def test_another_seed_gives_other_bytes(maker: Maker) -> None:
    assert maker(4096, 1) != maker(4096, 2)


@pytest.mark.parametrize("maker", MAKERS)
def test_negative_length_is_refused_by_name(maker: Maker) -> None:
    with pytest.raises(BadInput, match="byte_count -1"):
        maker(-1)


def test_random_bytes_do_not_compress_and_text_does() -> None:
    count = 1 << 18
    assert len(zlib.compress(generated_data.random_bytes(count))) > count
    assert count / 6 < len(zlib.compress(generated_data.text_like(count))) < count / 2
    assert count / 10 < len(zlib.compress(generated_data.records_like(count))) < count / 2


def test_generated_bytes_are_frozen() -> None:
    digest = hashlib.sha256()
    for maker in MAKERS:
        digest.update(maker(100_000, 42))
    digest.update(generated_data.mutate(bytes(range(256)) * 64, 7, edits=20))
    digest.update(image(4, 1, 2))
    # else golden digests, and figures of earlier benchmarks, are of other bytes
    assert digest.hexdigest() == "5af6f39ad69602bf84ebd4301590c7a28a7132e04c2e8cb9334941462180a711"


# ------------------------------------------------------------------ mutations


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 1 << 40), st.integers(0, 6), st.integers(1, 20))
def test_mutation_changes_length_by_at_most_its_edits(data: bytes, seed: int, edits: int, edit_bytes_max: int) -> None:
    changed = generated_data.mutate(data, seed, edits, edit_bytes_max)
    assert abs(len(changed) - len(data)) <= edits * edit_bytes_max
    assert changed == generated_data.mutate(data, seed, edits, edit_bytes_max)


def test_no_edits_change_nothing() -> None:
    assert generated_data.mutate(b"abc" * 100, 1, edits=0) == b"abc" * 100


def test_few_edits_leave_most_blocks_findable() -> None:
    data = generated_data.random_bytes(1 << 18)
    changed = generated_data.mutate(data, 9, edits=4)
    assert changed != data
    found = sum(data[at : at + 64] in changed for at in range(0, len(data), 64))
    assert found >= len(data) // 64 - 4 * 3  # an edit of at most 64 bytes touches at most three pieces of 64


def test_edits_without_bytes_are_refused() -> None:
    with pytest.raises(BadInput, match="edit_bytes_max 0"):
        generated_data.mutate(b"abc", edit_bytes_max=0)
    with pytest.raises(BadInput, match="edits -1"):
        generated_data.mutate(b"abc", edits=-1)


# ------------------------------------------------------------------ images


@pytest.mark.parametrize("generation", [0, 1, 3])
@pytest.mark.parametrize("mebibytes", [2, 3, 9])
def test_image_has_its_size_in_bounded_pieces(mebibytes: int, generation: int) -> None:
    pieces = list(generated_data.vm_image(mebibytes, 4, generation))
    assert sum(map(len, pieces)) == mebibytes << 20
    assert max(map(len, pieces)) <= generated_data.PIECE_BYTES
    assert all(len(piece) % BLOCK == 0 for piece in pieces)


def test_image_begins_with_a_boot_record() -> None:
    assert image(2)[510:512] == b"\x55\xaa"


def test_image_generation_keeps_most_blocks() -> None:
    before, after = blocks_of(image(32)), blocks_of(image(32, generation=1))
    kept = sum(one == other for one, other in zip(before, after, strict=True))
    assert 0.6 * len(before) < kept < 0.99 * len(before)


def test_some_changed_blocks_differ_in_eight_bytes() -> None:
    pairs = zip(blocks_of(image(32)), blocks_of(image(32, generation=1)), strict=True)
    differing = [sum(a != b for a, b in zip(one, other, strict=True)) for one, other in pairs if one != other]
    assert any(count <= 8 for count in differing)
    assert any(count > BLOCK // 4 for count in differing)


def test_image_holds_free_space_and_copies() -> None:
    blocks = blocks_of(image(32))
    zeros = blocks.count(bytes(BLOCK))
    assert len(blocks) / 8 < zeros < len(blocks) / 2
    used = [block for block in blocks if any(block)]
    assert len(set(used)) < len(used)


def test_full_disk_still_has_its_size() -> None:
    assert len(image(2, generation=40)) == 2 << 20


def test_image_below_minimum_is_refused() -> None:
    with pytest.raises(BadInput, match="mebibytes 1"):
        generated_data.vm_image(1)
    with pytest.raises(BadInput, match="generation -1"):
        generated_data.vm_image(2, generation=-1)


def test_images_are_generated_once(tmp_path: Path) -> None:
    first = corpus_cache.vm_images(2, tmp_path, seed=3, mebibytes=2)
    times = [path.stat().st_mtime_ns for path in first]
    assert [path.read_bytes() for path in first] == [image(2, 3, 0), image(2, 3, 1)]
    assert corpus_cache.vm_images(2, tmp_path, seed=3, mebibytes=2) == first
    assert [path.stat().st_mtime_ns for path in first] == times
    assert sorted(path.name for path in first[0].parent.iterdir()) == ["00.img", "01.img"]


# ------------------------------------------------------------------ botocore, with a fake pip


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """Replace `python -m pip download` by a script; return a function that sets its output."""
    script = tmp_path / "python"

    def behave(body: str) -> None:
        script.write_text(f'#!/bin/sh\nfor last; do :; done\necho "$*" >> "{tmp_path}/calls"\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))

    return behave


def one_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> Path:
    import gzip

    sdist = tmp_path / "made.tar.gz"
    sdist.write_bytes(gzip.compress(content))
    release = corpus_cache.Release("9.9.9", hashlib.sha256(sdist.read_bytes()).hexdigest(), len(content))
    monkeypatch.setattr(corpus_cache, "BOTOCORE", (release,))
    return sdist


def test_release_is_downloaded_once_and_unpacked_exactly(
    pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = generated_data.text_like(3_000_000)
    sdist = one_release(monkeypatch, tmp_path, content)
    pip(f'cp "{sdist}" "$last/botocore-9.9.9.tar.gz"')
    cache = tmp_path / "cache"
    (tar,) = corpus_cache.botocore(1, cache)
    assert tar.read_bytes() == content
    assert corpus_cache.botocore(1, cache) == [tar]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert "botocore==9.9.9" in calls[0]
    assert "--no-deps" in calls[0]
    assert [path.name for path in tar.parent.iterdir()] == ["botocore-9.9.9.tar"]


def test_release_with_another_digest_is_not_kept(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sdist = one_release(monkeypatch, tmp_path, b"as recorded")
    sdist.write_bytes(b"something else")
    pip(f'cp "{sdist}" "$last/botocore-9.9.9.tar.gz"')
    with pytest.raises(Corrupt, match="SHA-256"):
        corpus_cache.botocore(1, tmp_path / "cache")
    assert list((tmp_path / "cache" / "botocore").iterdir()) == []


def test_failed_download_reports_output_and_remedy(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one_release(monkeypatch, tmp_path, b"as recorded")
    pip('echo "ERROR: no route to host" >&2; exit 1')
    with pytest.raises(RetryableError, match=r"no route to host.*check the network"):
        corpus_cache.botocore(1, tmp_path / "cache")


def test_cached_tar_of_another_length_is_corrupt(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one_release(monkeypatch, tmp_path, b"as recorded")
    pip("exit 1")
    folder = tmp_path / "cache" / "botocore"
    folder.mkdir(parents=True)
    (folder / "botocore-9.9.9.tar").write_bytes(b"cut")
    with pytest.raises(Corrupt, match="3 bytes, not 11"):
        corpus_cache.botocore(1, tmp_path / "cache")


def test_recorded_releases_are_consecutive() -> None:
    assert [release.version for release in corpus_cache.BOTOCORE] == [f"1.35.{number}" for number in range(10)]
    assert len({release.sdist_sha256 for release in corpus_cache.BOTOCORE}) == 10


@pytest.mark.parametrize("versions", [0, 11])
def test_more_releases_than_recorded_are_refused(versions: int, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="choose 1 to 10"):
        corpus_cache.botocore(versions, tmp_path)


# ------------------------------------------------------------------ Redis


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    try:
        return corpus_cache.redis_dumps(3, tmp_path_factory.mktemp("redis"), seed=1, keys=2000)
    except corpus_cache.MissingTool as missing:
        pytest.skip(str(missing))


def test_dumps_are_uncompressed_and_differ(dumps: list[Path]) -> None:
    contents = [path.read_bytes() for path in dumps]
    assert [path.name for path in dumps] == ["00.rdb", "01.rdb", "02.rdb"]
    assert all(content.startswith(b"REDIS00") for content in contents)
    assert all(b'"agent":"' in content for content in contents)  # readable, so not compressed
    assert len(set(contents)) == 3


def test_dump_generation_changes_few_per_cent(dumps: list[Path]) -> None:
    def tokens(path: Path) -> set[bytes]:
        return set(re.findall(rb'"token":"([0-9a-f]{16})"', path.read_bytes()))

    before, after = tokens(dumps[0]), tokens(dumps[1])
    assert len(before) == 400  # one key in five is a session
    assert 0.9 * len(before) < len(before & after) < len(before)


def test_dumps_are_reused_without_a_server(dumps: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert corpus_cache.redis_dumps(3, dumps[0].parent.parent, seed=1, keys=2000) == dumps


def test_dumps_stop_their_server(dumps: list[Path], tmp_path: Path) -> None:
    assert [path.name for path in dumps[0].parent.parent.iterdir()] == [dumps[0].parent.name]

    def children() -> set[str]:
        """Return the child processes of this process.

        Other tests may have started servers that still run.
        """
        found = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True)
        return {line for line in found.stdout.splitlines() if "redis-server" in line or "valkey-server" in line}

    before = children()
    corpus_cache.redis_dumps(1, tmp_path, keys=100)
    assert children() == before


def test_missing_server_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(corpus_cache.MissingTool, match="redis-server, valkey-server"):
        corpus_cache.redis_dumps(1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_commands_depend_on_the_seed_alone() -> None:
    def script(seed: int) -> bytes:
        changes = corpus_cache._RedisChanges(seed, 500)
        return b"".join([*changes.load(), *changes.change()])

    assert script(1) == script(1)
    assert script(1) != script(2)


# ------------------------------------------------------------------ names and folders


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))
    assert corpus_cache.cache_dir() == tmp_path
    monkeypatch.delenv("NEARKIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpus_cache.cache_dir() == tmp_path / ".cache" / "nearkin" / "corpora"


def test_command_prints_paths_and_refuses_unknown_corpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        corpus_cache.CORPORA, "vm", lambda count, cache: corpus_cache.vm_images(count, cache, mebibytes=2)
    )
    assert corpus_cache.main(["vm", "1", "--cache", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()).stat().st_size == 2 << 20
    assert corpus_cache.main(["wm", "1"]) == 1
    assert 'corpus "wm": choose botocore, rdb or vm' in capsys.readouterr().err
