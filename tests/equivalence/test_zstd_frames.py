"""Compare both implementations of zstd frames.

Equal bytes written, each other's frames read, equal refusals.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from backports.zstd import CompressionParameter, compress
from hypothesis import given
from hypothesis import strategies as st

from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.kernels.native import _zstd_frames
from nearkin_shared.kernels.reference import zstd_frames_reference

OPTIONS: dict[int, int] = {CompressionParameter.compression_level: 3, CompressionParameter.content_size_flag: 1}
FAST: dict[int, int] = {**OPTIONS, CompressionParameter.compression_level: 1, CompressionParameter.hash_log: 18}
BOTH = [_zstd_frames, zstd_frames_reference]


@pytest.fixture(params=BOTH, ids=["cython", "python"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


def decoded(kernel: Any, frame: bytes, size_bytes: int, prefix: bytes | None = None) -> bytes:
    out = np.empty(size_bytes, np.uint8)
    kernel.decode_frame(frame, out, "a frame", prefix)
    return out.tobytes()


@given(
    raw=st.one_of(
        st.binary(max_size=300),
        st.builds(text_like, st.integers(0, 300_000), st.integers(0, 5)),
        st.builds(random_bytes, st.integers(1, 5000), st.integers(0, 5)),
    ),
    prefix=st.one_of(st.none(), st.builds(text_like, st.integers(8, 200_000), st.integers(0, 5))),
    options=st.sampled_from([OPTIONS, FAST]),
)
def test_both_kernels_write_and_read_equal_frames(raw: bytes, prefix: bytes | None, options: dict[int, int]) -> None:
    frames = [kernel.FrameEncoder(OPTIONS).encode(raw, prefix, options) for kernel in BOTH]
    assert frames[0] == frames[1]
    for kernel in BOTH:
        assert decoded(kernel, frames[0], len(raw), prefix) == raw


@pytest.mark.parametrize("prefix_bytes", [0, 1, 7, 8])
def test_prefix_below_zstd_minimum_is_ignored(kernel: Any, prefix_bytes: int) -> None:
    """A crafted container may have a block whose base is that short."""
    raw = text_like(3000, 1)
    frame = bytes(_zstd_frames.FrameEncoder(OPTIONS).unchecked(raw, raw[:prefix_bytes]))
    assert kernel.FrameEncoder(OPTIONS).unchecked(raw, raw[:prefix_bytes]) == frame
    assert decoded(kernel, frame, len(raw), raw[:prefix_bytes]) == raw
    slices = [np.array([number], kind) for number, kind in ((0, np.int32), (0, np.uint64), (prefix_bytes, np.uint32))]
    buffers, (slots, is_allocated) = [raw, np.empty(len(raw), np.uint8)], placed(1, 1)
    assert kernel.decode_frames([frame], slots, buffers, is_allocated, *slices, np.array([0, 1], np.uint32)).all()


def test_encoder_is_unchanged_by_any_frame(kernel: Any) -> None:
    base, used = text_like(200_000, 1), kernel.FrameEncoder(OPTIONS)
    raw = mutate(base, 2)
    first = used.encode(raw)
    patch = used.encode(raw, base, FAST)
    assert len(patch) * 5 < len(first)
    assert used.encode(raw) == first, "neither prefix nor options outlive their frame"
    assert decoded(kernel, patch, len(raw), base) == raw
    assert decoded(kernel, first, len(raw)) == raw, "nor does the prefix outlive its decoding"


def test_patch_longer_than_raw_is_still_verified(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that asks for a patch keeps it at any length.

    A raw frame that long is never kept, so it is not verified.
    """
    raw, base = random_bytes(5000, 1), random_bytes(5000, 2)
    decodings = list[int]()
    real = zstd_frames_reference.decode_frame

    def counted(frame: bytes, *more: Any) -> None:
        decodings.append(len(frame))
        real(frame, *more)

    monkeypatch.setattr(zstd_frames_reference, "decode_frame", counted)
    encoder = kernel.FrameEncoder(OPTIONS)
    frame = encoder.encode(raw, base)
    assert len(frame) > len(raw)
    assert decoded(kernel, frame, len(raw), base) == raw
    if kernel is zstd_frames_reference:  # the compiled one calls nothing that could be counted
        encoder.encode(raw)
        assert decodings == [len(frame)] * 2


def test_frames_are_written_to_memory_of_the_caller(kernel: Any) -> None:
    given: list[np.ndarray] = []

    def take(size_bytes: int) -> np.ndarray:
        given.append(np.empty(size_bytes, np.uint8))
        return given[-1]

    base, raw = text_like(100_000, 1), text_like(80_000, 2)
    encoder, other = kernel.FrameEncoder(OPTIONS, take), kernel.FrameEncoder(OPTIONS)
    for prefix in (None, base):
        frame = encoder.encode(raw, prefix)
        assert frame == other.encode(raw, prefix)
        assert np.shares_memory(np.frombuffer(frame, np.uint8), given[-1])


@pytest.mark.parametrize("raw", [b"", b"abc" * 5000, bytes(range(256)) * 300])
def test_frame_length_is_measured_without_keeping_it(kernel: Any, raw: bytes) -> None:
    taken: list[int] = []

    def take(size_bytes: int) -> bytearray:
        taken.append(size_bytes)
        return bytearray(size_bytes)

    encoder = kernel.FrameEncoder(OPTIONS, take)
    assert encoder.encoded_bytes(raw) == len(kernel.FrameEncoder(OPTIONS).unchecked(raw))
    fast = {CompressionParameter.compression_level: 1}
    assert encoder.encoded_bytes(raw, fast) == len(kernel.FrameEncoder(fast).unchecked(raw))
    assert not taken
    with pytest.raises(ValueError, match="parameter"):
        encoder.encoded_bytes(raw, {CompressionParameter.window_log: 99})


@pytest.mark.parametrize("more", [-1, 1])
def test_memory_of_another_size_is_refused(kernel: Any, more: int) -> None:
    with pytest.raises(MemoryError, match="gave"):
        kernel.FrameEncoder(OPTIONS, lambda size_bytes: bytearray(size_bytes + more)).encode(b"abc" * 100)


def test_patch_without_its_prefix_is_refused_or_differs(kernel: Any) -> None:
    base = text_like(100_000, 1)
    raw = mutate(base, 2)
    patch = kernel.FrameEncoder(OPTIONS).encode(raw, base)
    for wrong in (None, base[:-1], text_like(100_000, 3)):
        with contextlib.suppress(Corrupt):
            assert decoded(kernel, patch, len(raw), wrong) != raw


@pytest.mark.parametrize(
    ("frame", "size_bytes", "message"),
    [
        (b"", 10, "announced|frame"),
        (b"no frame at all", 10, "announced|frame|descriptor"),
        (compress(b"a" * 1000), 999, "announced"),
        (compress(b"a" * 1000), 1001, "announced"),
        (compress(b"a" * 1000)[:-1], 1000, "a frame: "),
        (compress(b"a" * 1000) + b"x", 1000, "1 bytes follow"),
        (compress(b"a" * 500) * 2, 1000, "announced"),
    ],
)
def test_incomplete_or_extended_frame_is_refused(kernel: Any, frame: bytes, size_bytes: int, message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        decoded(kernel, frame, size_bytes)


@given(at=st.integers(0, 2000), bit=st.integers(0, 7))
def test_flipped_bit_never_writes_beyond_the_buffer(at: int, bit: int) -> None:
    raw = text_like(20_000, 4)
    frame = bytearray(_zstd_frames.FrameEncoder(OPTIONS).encode(raw))
    frame[at % len(frame)] ^= 1 << bit
    room = np.full(20_000 + 64, 0xA5, np.uint8)
    with contextlib.suppress(Corrupt):
        _zstd_frames.decode_frame(frame, room[32:-32], "a frame")
    assert (room[:32] == 0xA5).all()
    assert (room[-32:] == 0xA5).all()


def placed(frames: int, sources: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (slots of frames in buffers behind the sources, mask of buffers)."""
    return np.arange(sources, sources + frames, dtype=np.int32), np.arange(sources + frames) < sources


@given(st.data())
def test_many_frames_are_decoded_as_one_by_one(data: st.DataObject) -> None:
    sources = [
        text_like(size, seed) for seed, size in enumerate(data.draw(st.lists(st.integers(1, 60_000), max_size=3)))
    ]
    which, offsets, lengths, counts = list[int](), list[int](), list[int](), list[int]()
    frames, raws = list[bytes](), list[bytes]()
    for seed in range(data.draw(st.integers(0, 4))):
        counts.append(data.draw(st.integers(0, 4)) if sources else 0)
        prefix = b""
        for _ in range(counts[-1]):
            buffer = data.draw(st.integers(0, len(sources) - 1))
            joins = which[-1:] == [buffer] and data.draw(st.booleans(), "goes on where the last one ended")
            offset = offsets[-1] + lengths[-1] if joins else data.draw(st.integers(0, len(sources[buffer])))
            length = data.draw(st.integers(0, len(sources[buffer]) - offset))
            prefix += sources[buffer][offset : offset + length]
            which.append(buffer)
            offsets.append(offset)
            lengths.append(length)
        raws.append(mutate(prefix[-30_000:] + text_like(3000, seed + 9), seed))
        frames.append(
            bytes(_zstd_frames.FrameEncoder(OPTIONS).unchecked(raws[-1], prefix if len(prefix) >= 8 else None, FAST))
        )
        if len(prefix) < 8:  # zstd ignores a prefix that short
            counts[-1] = 0
            which, offsets, lengths = (some[: sum(counts)] for some in (which, offsets, lengths))
    broken = data.draw(st.sampled_from([None, *range(len(frames))]))
    if broken is not None:
        frames[broken] = data.draw(st.sampled_from([b"", frames[broken][:-1], frames[broken] + b"x", compress(b"a")]))
    slices = np.array(which, np.int32), np.array(offsets, np.uint64), np.array(lengths, np.uint32)
    bounds = np.append(0, np.cumsum(counts)).astype(np.uint32)
    for kernel in BOTH:
        outs = [np.full(len(raw), 0xA5, np.uint8) for raw in raws]
        slots, is_allocated = placed(len(frames), len(sources))
        done = kernel.decode_frames(frames, slots, [*sources, *outs], is_allocated, *slices, bounds)
        assert done.tolist() == [number != broken for number in range(len(frames))]
        assert [out.tobytes() for out, good in zip(outs, done, strict=True) if good] == [
            raw for number, raw in enumerate(raws) if number != broken
        ]


def test_patch_with_another_prefix_is_refused_or_differs(kernel: Any) -> None:
    base = text_like(100_000, 1)
    raw = mutate(base, 2)
    patch, out = kernel.FrameEncoder(OPTIONS).encode(raw, base), np.zeros(len(raw), np.uint8)
    one, none = np.ones(1, np.uint32), np.zeros(1, np.uint64)
    slices = one.astype(np.int32) * 0, none, one * 90_000, np.arange(2, dtype=np.uint32)
    slots, is_allocated = placed(1, 1)
    found = kernel.decode_frames([patch], slots, [base, out], is_allocated, *slices)
    assert not found[0] or out.tobytes() != raw


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"which": np.array([2], np.int32)}, "names buffer 2: there are 2"),
        ({"which": np.array([-1], np.int32)}, "names buffer -1"),
        ({"offsets": np.array([95], np.uint64)}, "leaves buffer 0 of 100 bytes"),
        ({"lengths": np.array([101], np.uint32)}, "leaves buffer 0 of 100 bytes"),
        ({"lengths": np.array([10, 10], np.uint32)}, "lengths has 2 entries"),
        ({"which": np.array([0], np.int64)}, "int32"),
        ({"bounds": np.array([0, 1], np.int64)}, "uint32"),
        ({"bounds": np.array([0, 2], np.uint32)}, "ascending from 0 to 1"),
        ({"bounds": np.array([1, 1], np.uint32)}, "ascending from 0 to 1"),
        ({"bounds": np.array([0, 1, 1], np.uint32)}, "want 2"),
        ({"bounds": np.zeros(0, np.uint32)}, "want 2"),
        ({"slots": np.array([2], np.int32)}, "slots 2 to 2: there are 2 buffers"),
        ({"slots": np.array([-1], np.int32)}, "slots -1 to -1"),
        ({"slots": np.array([0], np.int32)}, "is there already"),
        ({"slots": np.array([1, 1], np.int32)}, "2 slots for 1 frames"),
        ({"slots": np.array([1], np.int64)}, "int32"),
        ({"there": np.array([True])}, "1 entries for 2 buffers"),
        ({"there": np.array([1, 0], np.uint8)}, "bool"),
    ],
)
def test_slices_outside_their_buffers_are_refused(kernel: Any, change: dict[str, np.ndarray], message: str) -> None:
    slices = {
        "which": np.zeros(1, np.int32),
        "offsets": np.zeros(1, np.uint64),
        "lengths": np.full(1, 10, np.uint32),
        "bounds": np.array([0, 1], np.uint32),
    }
    slices["slots"], slices["there"] = placed(1, 1)
    frame, buffers = compress(b"abc" * 9), [bytes(100), np.zeros(27, np.uint8)]
    assert kernel.decode_frames([frame], buffers=buffers, **slices).all()
    with pytest.raises(BadInput, match=message):
        kernel.decode_frames([frame], buffers=buffers, **(slices | change))


def test_frame_depends_on_earlier_frames_only(kernel: Any) -> None:
    """Invariant: a chain decodes in one call; frames whose base did not decode are left out."""
    raws = [text_like(30_000, 1)]
    for seed in range(2, 6):
        raws.append(mutate(raws[-1], seed))
    frames = [kernel.FrameEncoder(OPTIONS).encode(raw, base) for raw, base in zip(raws, [None, *raws], strict=False)]
    slices = (
        np.arange(4, dtype=np.int32),
        np.zeros(4, np.uint64),
        np.array([len(raw) for raw in raws[:4]], np.uint32),
        np.array([0, 0, 1, 2, 3, 4], np.uint32),
    )
    slots, is_allocated = np.arange(5, dtype=np.int32), np.zeros(5, np.bool_)

    def decoded_frames(order: list[int], some: list[bytes]) -> tuple[list[bool], list[np.ndarray]]:
        outs = [np.zeros(len(raw), np.uint8) for raw in raws]
        bounds = np.append(0, np.cumsum([int(number > 0) for number in order])).astype(np.uint32)
        rows = [number - 1 for number in order if number]
        mine = [column[rows] for column in slices[:3]]
        done = kernel.decode_frames([some[number] for number in order], slots[order], outs, is_allocated, *mine, bounds)
        return done.tolist(), outs

    done, outs = decoded_frames([0, 1, 2, 3, 4], frames)
    assert done == [True] * 5
    assert [out.tobytes() for out in outs] == raws
    assert decoded_frames([4, 3, 2, 1, 0], frames)[0] == [False, False, False, False, True]
    frames[2] = frames[2][:-1]
    done, outs = decoded_frames([0, 1, 2, 3, 4], frames)
    assert done == [True, True, False, False, False]
    assert not outs[3].any(), "a frame was decoded against a missing base"
    outs, one = [np.zeros(len(raws[2]), np.uint8), np.zeros(0, np.uint8)], np.ones(1, np.int32)
    mine = one, np.zeros(1, np.uint64), np.full(1, 30_000, np.uint32), np.array([0, 1], np.uint32)
    lost = kernel.decode_frames([frames[1]], 0 * one, outs, np.zeros(2, np.bool_), *mine)
    assert not lost.any(), "a frame was decoded against a missing buffer"


@pytest.mark.parametrize("broken", [None, 0, 40, 150])
def test_frames_decoded_by_several_threads_are_equal(broken: int | None) -> None:
    """The result depends on the frames alone.

    Invariant: the order of decoding depends on free threads only.
    """
    rng, count = np.random.default_rng(3), 300
    bases_of = [
        sorted(rng.integers(0, number, min(number, int(rng.integers(0, 4)))).tolist()) for number in range(count)
    ]
    bases_of[5] = [9]  # a base behind it, which is decoded later
    raws = [text_like(int(size), seed) for seed, size in enumerate(rng.integers(100, 20_000, count))]
    encoder = _zstd_frames.FrameEncoder(OPTIONS)
    frames = [
        encoder.unchecked(raw, b"".join(raws[base] for base in mine)) for raw, mine in zip(raws, bases_of, strict=True)
    ]
    if broken is not None:
        frames[broken] = frames[broken][:-1]
    which = np.array([base for mine in bases_of for base in mine], np.int32)
    bounds = np.append(0, np.cumsum([len(mine) for mine in bases_of])).astype(np.uint32)
    slices = which, np.zeros(len(which), np.uint64), np.array([len(raws[base]) for base in which], np.uint32), bounds
    good = list[bool]()
    for number, mine in enumerate(bases_of):
        good.append(number not in (5, broken) and all(good[base] for base in mine))
    assert sum(good) < count - 20, "frames that depend on the fifth must fail with it"

    with ThreadPoolExecutor(4) as threads:

        def share(work: Callable[[], None]) -> None:
            for done in [threads.submit(work) for _ in range(4)]:
                done.result()

        for kernel, times in ((_zstd_frames, 20), (zstd_frames_reference, 1)):
            for _ in range(times):
                outs = [np.full(len(raw), 0xA5, np.uint8) for raw in raws]
                slots, is_allocated = placed(count, 0)
                done = kernel.decode_frames(frames, slots, outs, is_allocated, *slices, share)
                assert done.tolist() == good
                assert all(out.tobytes() == raw for out, raw, fine in zip(outs, raws, done, strict=True) if fine)


def test_frame_with_a_later_base_is_left_out() -> None:
    """The second waits for the first, which takes long.

    Meanwhile another thread decodes the third, its base.
    """
    raws = [text_like(3_000_000, 1), text_like(5000, 2), text_like(5000, 3)]
    encoder = _zstd_frames.FrameEncoder(OPTIONS)
    frames = [encoder.unchecked(raws[0]), encoder.unchecked(raws[1], raws[0] + raws[2]), encoder.unchecked(raws[2])]
    which, bounds = np.array([0, 2], np.int32), np.array([0, 0, 2, 2], np.uint32)
    slices = which, np.zeros(2, np.uint64), np.array([len(raws[0]), len(raws[2])], np.uint32), bounds
    with ThreadPoolExecutor(3) as threads:

        def share(work: Callable[[], None]) -> None:
            for done in [threads.submit(work) for _ in range(3)]:
                done.result()

        for _ in range(60):
            outs = [np.empty(len(raw), np.uint8) for raw in raws]
            slots, is_allocated = placed(3, 0)
            done = _zstd_frames.decode_frames(frames, slots, outs, is_allocated, *slices, share)
            assert done.tolist() == [True, False, True], "the result must be that of one thread"


def test_two_frames_for_one_buffer_are_refused(kernel: Any) -> None:
    none = np.zeros(0, np.int32), np.zeros(0, np.uint64), np.zeros(0, np.uint32), np.zeros(3, np.uint32)
    with pytest.raises(BadInput, match="filled twice"):
        kernel.decode_frames(
            [compress(b"abc")] * 2, np.zeros(2, np.int32), [np.zeros(3, np.uint8)], np.zeros(1, np.bool_), *none
        )


def test_options_refused_by_zstd_are_named(kernel: Any) -> None:
    with pytest.raises(ValueError, match="parameter"):
        kernel.FrameEncoder({CompressionParameter.window_log: 99}).encode(b"abc" * 100)


def test_arguments_that_are_not_bytes_are_refused(kernel: Any) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        kernel.decode_frame(compress(b"abc"), b"abc", "a frame")  # not writable
    with pytest.raises((TypeError, ValueError, BufferError)):
        kernel.FrameEncoder(OPTIONS).encode("text")


def test_threads_decode_concurrently() -> None:
    raws = [text_like(300_000, seed) for seed in range(6)]
    frames = [bytes(_zstd_frames.FrameEncoder(OPTIONS).encode(raw)) for raw in raws]
    wrong: list[int] = []

    def check(number: int) -> None:
        for _ in range(20):
            if decoded(_zstd_frames, frames[number], len(raws[number])) != raws[number]:
                wrong.append(number)

    threads = [threading.Thread(target=check, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
