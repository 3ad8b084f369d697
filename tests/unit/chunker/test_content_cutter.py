"""Test the cutter by content kinds: borders, fall-backs, and states between batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes, text_like
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_chunker.content_cutter import LARGE_BYTES, ContentCutter
from nearkin_chunker.cut_state import ENCODED_BYTES, START, CutState, decode_state
from nearkin_chunker.splitter import CARRY_BYTES_MAX
from nearkin_shared.config.reduction import KINDS, RULED_KINDS
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.pipeline.stage import LookupResults
from tests.support.data import content_samples as samples
from tests.support.data.stores import settings

FINGERPRINTER = Fingerprinter(bytes(range(32)), "tenant")
RULED = settings({"chunker": {"rules": "all"}})
STAGE = ChunkerStage(RULED, FINGERPRINTER)
PLAIN = ChunkerStage(settings(), FINGERPRINTER)
KIB = 1024

Chunks = list[tuple[int, str]]


def cut_once(data: bytes, rules: frozenset[str] = frozenset(RULED_KINDS)) -> Chunks:
    """Return (bytes, kind) of each chunk of an item that arrives at once."""
    lengths, kinds = ContentCutter(rules, STAGE.cut, 0, None).cut(np.frombuffer(data, np.uint8), True)
    assert int(lengths.sum()) == len(data)
    return [(length, KINDS[kind]) for length, kind in zip(lengths.tolist(), kinds.tolist(), strict=True)]


def cut_in_pieces(data: bytes, sizes: list[int], resumed: bool) -> Chunks:
    """Return the same of an item in pieces; with `resumed` a new cutter, from an encoded state, for each piece."""
    whole = np.frombuffer(data, np.uint8)
    cutter, found, cut, arrived, size_at = ContentCutter(frozenset(RULED_KINDS), STAGE.cut, 0, None), Chunks(), 0, 0, 0
    while arrived < len(data):
        arrived = min(len(data), arrived + sizes[size_at % len(sizes)])
        size_at += 1
        lengths, kinds = cutter.cut(whole[cut:arrived], arrived == len(data))
        found += [(length, KINDS[kind]) for length, kind in zip(lengths.tolist(), kinds.tolist(), strict=True)]
        if resumed and len(lengths):
            kept = (len(lengths) + 1) // 2  # the chunks of a segment that is not complete are cut again
            back = cut + int(lengths[:kept].sum())
            del found[len(found) - (len(lengths) - kept) :]
            state = cutter.state_at(back)
            encoded = state.encode()
            if encoded is not None:
                assert len(encoded) == ENCODED_BYTES
                assert decode_state(encoded) == state
            cutter, cut = ContentCutter(frozenset(RULED_KINDS), STAGE.cut, back, state), back
            if arrived == len(data):  # no more pieces come, as at the end of a blob
                lengths, kinds = cutter.cut(whole[cut:], True)
                found += [(length, KINDS[kind]) for length, kind in zip(lengths.tolist(), kinds.tolist(), strict=True)]
        else:
            cut += int(lengths.sum())
        assert resumed or arrived - cut <= CARRY_BYTES_MAX - SEGMENT_BYTES_MAX + max(sizes)
    return found


def mixed_tar() -> bytes:
    """Return a tar with small and large members of several kinds, and something behind its end."""
    small = {f"small/{number}": text_like(50 + 400 * (number % 30), number) for number in range(300)}
    large = {
        "large/photo.txt": samples.jpeg(700_001, 11),
        "large/text": text_like(300_000, 12),
        "large/empty": b"",
        "large/backup.gz": samples.compressed(300_000, 13),
        "large/random": random_bytes(150_000, 14),
        "large/inner.tar": samples.tar_file({"x": text_like(70_000, 15)}),
    }
    return samples.tar_file({**small, **large, "last": b"z"}) + text_like(400_000, 16)


NAMES = (
    "media",
    "film",
    "small media",
    "magic but text",
    "compressed",
    "encrypted, then text",
    "database",
    "database, then text",
    "truncated database",
    "postgres, then text",
    "innodb",
    "tar",
    "truncated tar",
    "safetensors",
    "truncated safetensors",
    "text",
    "tiny",
)


def items(folder: Path) -> dict[str, bytes]:
    """Return an item of each kind, and hostile ones."""
    database = samples.sqlite_file(folder / "db", 12_000)
    tar = mixed_tar()
    weights = samples.safetensors_file({f"layer.{number}": random_bytes(150_000, number) for number in range(12)})
    return {
        "media": samples.jpeg(3_000_000),
        "film": samples.mp4(6_000_000, 1_300_000),
        "small media": samples.jpeg(30_000),
        "magic but text": samples.JPEG_HEAD + text_like(1_500_000, 1),
        "compressed": samples.compressed(1_500_000),
        "encrypted, then text": random_bytes(2_000_000, 5) + text_like(1_500_000, 2) + random_bytes(900_000, 6),
        "database": database,
        "database, then text": database + text_like(500_000, 3),
        "truncated database": database[:-10_000],
        "postgres, then text": samples.postgres_file(120) + text_like(300_000, 4),
        "innodb": samples.innodb_file(60),
        "tar": tar,
        "truncated tar": tar[:900_123],
        "safetensors": weights,
        "truncated safetensors": weights[:700_000],
        "text": text_like(500_000, 9),
        "tiny": b"x",
    }


@pytest.fixture(scope="module")
def samples_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return items(tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("sizes", [[900 * KIB], [200_000, 7, 65_536], [1_000_003, 511, 513]])
@pytest.mark.parametrize("name", NAMES)
def test_cutter_chunks_do_not_depend_on_pieces(
    samples_by_name: dict[str, bytes], name: str, sizes: list[int], resumed: bool
) -> None:
    data = samples_by_name[name]
    assert cut_in_pieces(data, sizes, resumed) == cut_once(data)


def bytes_by_kind(chunks: Chunks) -> dict[str, int]:
    """Return the bytes of each kind."""
    found: dict[str, int] = {}
    for length, kind in chunks:
        found[kind] = found.get(kind, 0) + length
    return found


def mean_bytes(chunks: Chunks) -> float:
    """Return the mean length of chunks."""
    return sum(length for length, _ in chunks) / len(chunks)


@pytest.mark.parametrize("name", ["media", "compressed"])
def test_cutter_dense_item_has_large_chunks(samples_by_name: dict[str, bytes], name: str) -> None:
    chunks = cut_once(samples_by_name[name])
    assert bytes_by_kind(chunks) == {name: len(samples_by_name[name])}
    assert all(LARGE_BYTES[0] <= length <= LARGE_BYTES[2] for length, _ in chunks[:-1])
    assert mean_bytes(chunks) > LARGE_BYTES[0]


def test_cutter_small_media_is_one_chunk(samples_by_name: dict[str, bytes]) -> None:
    assert cut_once(samples_by_name["small media"]) == [(30_000, "media")]


def test_cutter_film_index_in_front_is_other(samples_by_name: dict[str, bytes]) -> None:
    """Bytes that are not dense are cut like other content."""
    film = bytes_by_kind(cut_once(samples_by_name["film"]))
    assert film["other"] >= 1_000_000
    assert film["media"] >= 3_500_000


def test_cutter_signature_before_text_makes_no_large_chunks(samples_by_name: dict[str, bytes]) -> None:
    """A signature alone does not spoil deduplication."""
    chunks = cut_once(samples_by_name["magic but text"])
    assert bytes_by_kind(chunks) == {"other": 1_500_020}
    assert mean_bytes(chunks) < 16 * KIB


def test_cutter_text_after_encrypted_data_is_other(samples_by_name: dict[str, bytes]) -> None:
    found = bytes_by_kind(cut_once(samples_by_name["encrypted, then text"]))
    assert 2_000_000 <= found["encrypted"] <= 3_000_000
    assert found["other"] >= 1_000_000


def test_cutter_database_is_cut_at_pages(samples_by_name: dict[str, bytes]) -> None:
    chunks = cut_once(samples_by_name["database"])
    assert set(chunks) == {(4096, "database")}
    tail = cut_once(samples_by_name["database, then text"])[len(chunks) :]
    assert bytes_by_kind(tail) == {"other": 500_000}


def test_cutter_postgres_ends_at_first_other_page(samples_by_name: dict[str, bytes]) -> None:
    found = bytes_by_kind(cut_once(samples_by_name["postgres, then text"]))
    assert found == {"database": 120 * 8192, "other": 300_000}


def test_cutter_large_member_has_chunks_of_the_file(samples_by_name: dict[str, bytes]) -> None:
    """A member of a tar is cut as the same file alone, so that it deduplicates with it."""
    chunks, offset, starts = cut_once(samples_by_name["tar"]), 0, dict[int, int]()
    for number, (length, _) in enumerate(chunks):
        starts[offset] = number
        offset += length
    for content in (samples.jpeg(700_001, 11), text_like(300_000, 12), samples.compressed(300_000, 13)):
        alone = cut_once(content)
        first = starts[samples_by_name["tar"].index(content)]
        assert chunks[first : first + len(alone)] == alone


def test_cutter_nested_tar_is_other(samples_by_name: dict[str, bytes]) -> None:
    found = bytes_by_kind(cut_once(samples_by_name["tar"]))
    assert set(found) == {"tar", "media", "compressed", "encrypted", "other"}
    assert found["other"] >= 300_000 + 70_000 + 300_000


def test_cutter_tensor_has_the_same_chunks_in_another_file() -> None:
    """A file with one tensor changed and one added shares the chunks of all others."""
    tensors = {f"layer.{number}": random_bytes(300_000, number) for number in range(8)}
    other = {**tensors, "layer.3": random_bytes(280_000, 99), "head": random_bytes(70_000, 98)}

    def pieces(data: bytes) -> set[bytes]:
        ends = np.cumsum([length for length, _ in cut_once(data)]).tolist()
        return {data[start:stop] for start, stop in zip([0, *ends[:-1]], ends, strict=True)}

    shared = pieces(samples.safetensors_file(tensors)) & pieces(samples.safetensors_file(other))
    assert sum(map(len, shared)) == 7 * 300_000


@pytest.mark.parametrize("name", NAMES)
def test_cutter_without_rule_cuts_as_without_rules(samples_by_name: dict[str, bytes], name: str) -> None:
    whole = np.frombuffer(samples_by_name[name], np.uint8)
    expected = [(length, "other") for length in PLAIN.cut(whole, True).tolist()]
    assert cut_once(samples_by_name[name], frozenset()) == expected


@pytest.mark.parametrize("name", NAMES)
def test_stage_batches_give_segments_of_the_whole_item(samples_by_name: dict[str, bytes], name: str) -> None:
    """As the service does: bytes behind the last segment are carried on with the state there."""
    whole = np.frombuffer(samples_by_name[name], np.uint8)
    expected = STAGE.decide(FrameRuns(whole, (BlobRun(0, 0, len(whole), True),)), LookupResults()).segments
    found, at, arrived, state = list[bytes](), 0, 0, None
    while arrived < len(whole):
        arrived = min(len(whole), arrived + 1_500_000)
        runs = FrameRuns(whole[at:arrived], (BlobRun(0, 0, arrived - at, arrived == len(whole)),), state)
        chunked = STAGE.decide(runs, LookupResults())
        found += [name.tobytes() for name in chunked.segments.names]
        at, state = at + chunked.consumed, chunked.state
    assert found == [name.tobytes() for name in expected.names]


@pytest.mark.parametrize(
    "state",
    [
        START,
        CutState("media", left=1 << 40, plain_left=70_000, header_left=511),
        CutState("database", 65_536, 5),
        CutState("tar", left=512, header_left=0, borders=(1 << 61,)),
        CutState("tar", header_left=0),
    ],
)
def test_state_encoded_decodes(state: CutState) -> None:
    encoded = state.encode()
    assert encoded is not None
    assert decode_state(encoded) == state


def test_state_damaged_is_refused() -> None:
    encoded = CutState("media").encode()
    assert encoded is not None
    for damaged in (b"", encoded[:-1], b"\x20" + encoded[1:], encoded[:1] + b"\xff" + encoded[2:]):
        with pytest.raises(ValueError, match="want"):
            decode_state(damaged)
    assert CutState("safetensors", left=5, borders=(1, 2)).encode() is None
