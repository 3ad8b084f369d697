"""Define fuzz targets: parsers of bytes that others may have made.

Invariant: a target accepts any bytes, and returns or refuses.

Checksums keep random bytes out of the parsers behind them, but an attacker writes valid checksums. So a target that
ends in `-sealed` inserts the right ones before it parses, and seeds hold tables in zstd frames of raw blocks, in
which a changed byte is a changed entry and not a broken frame.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_dedup import DedupStage
from nearkin_resemblance import ResemblanceStage
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import HOT_FIELDS, Settings
from nearkin_shared.errors import BadInput, ConfigError, Corrupt, FormatTooNew, NearkinError, NotFound
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats import columns, container_layout, message_batches, parity_object
from nearkin_shared.formats import message as message_format
from nearkin_shared.formats.block import decode_block
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.manifest import decode_manifest, encode_manifest
from nearkin_shared.formats.pending_delete_record import PendingDelete, decode_record, encode_record
from nearkin_shared.formats.tombstone import decode_mark, encode_mark
from nearkin_shared.kernels import xdelta3
from nearkin_shared.kernels.xdelta3 import PAIR_BYTES_MAX
from nearkin_shared.kernels.zstd_frames import decode_frame
from nearkin_shared.pipeline.stage import FoundBases, FoundLocations, LookupResults
from nearkin_shared.results import Ledger
from nearkin_shared.storage import descriptor
from nearkin_shared.types import Locations
from nearkin_shared.utils.frozen import frozen
from tests.support.data import samples
from tests.support.fuzzing import fuzz_gateway

INPUT_BYTES_MAX = 64 * 1024
MEMORY_BYTES_MAX = 768 << 20
"""Memory that an input may add to the process: the largest tables of the formats have 2^24 rows."""
OLDER_CONTAINER = Path(__file__).parents[2] / "golden" / "container_v4.bin"
"""A seed of a format that is read, but no longer written."""


@frozen
class Target:
    """`parse` receives any bytes; an exception that is not one of `refusals` is a fault."""

    parse: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    native: bool = False
    refusals: tuple[type[Exception], ...] = (Corrupt, FormatTooNew)
    close: Callable[[], None] = lambda: None
    """Releases the resources that `seeds` acquired."""


# --- seeds -----------------------------------------------------------------------------------------------------------


def raw_frame(data: bytes | memoryview, **_: object) -> bytes:
    """Return a zstd frame that holds `data` as it is: one segment, its size, raw blocks (RFC 8878, 3.1.1)."""
    view = memoryview(bytes(data))
    blocks = [view[at : at + (1 << 17)] for at in range(0, len(view), 1 << 17)] or [view]
    parts = [b"\x28\xb5\x2f\xfd\xa0", len(view).to_bytes(4, "little")]
    for number, block in enumerate(blocks):
        parts += [(int(number == len(blocks) - 1) | len(block) << 3).to_bytes(3, "little"), bytes(block)]
    return b"".join(parts)


@contextmanager
def _raw_tables() -> Iterator[None]:
    """Write tables in raw frames."""
    before = vars(columns)["compress"]
    vars(columns)["compress"] = lambda data, options=None: raw_frame(data)
    try:
        yield
    finally:
        vars(columns)["compress"] = before


def _both(*make: Callable[[], bytes]) -> list[bytes]:
    found = [one() for one in make]
    with _raw_tables():
        return found + [one() for one in make]


def _containers() -> list[bytes]:
    kinds = (
        samples.small_container,
        samples.rest_container,
        samples.patch_container,
        samples.merged_container,
        samples.empty_container,
    )
    return [*_both(*kinds), OLDER_CONTAINER.read_bytes()]


@cache
def _small_container() -> bytes:
    return samples.small_container()


def _record() -> bytes:
    some = np.array([1, 2, 3, 9], np.uint32)
    pending = {
        5: PendingDelete(1_764_000_000_000_000, some, some[:2], True),
        9: PendingDelete(7, some[:1], some, False),
    }
    return encode_record(3, pending)


@cache
def _messages() -> list[bytes]:
    """Return messages of every kind; the stages themselves make those with chunks."""
    namer, envelope = Fingerprinter(b"s" * 32, "tenant"), message_format.Envelope(bytes(range(16)), "tenant", "k", 0, 0)
    payload = np.concatenate([samples.noise(20_000, "payload"), np.zeros(20_000, np.uint8)])
    runs = FrameRuns(payload, (BlobRun(0, 0, len(payload), True),))
    segments = ChunkerStage(Settings(), namer).decide(runs, LookupResults()).segments
    unknown = FoundLocations(Locations.empty(segments.segments), np.zeros(segments.segments, np.bool_))
    request = DedupStage().reads(segments, LookupResults(segments=unknown))
    names = 0 if request is None or request.names is None else len(request.names)
    none = FoundLocations(Locations.empty(names), np.zeros(names, np.bool_))
    fresh = DedupStage().decide(segments, LookupResults(segments=unknown, chunks=none))
    resemblance = ResemblanceStage(Settings())
    sketched = resemblance.reads(fresh, LookupResults())
    found: list[message_format.Message] = [
        message_format.Frame(envelope, np.arange(50, dtype=np.uint8)),
        message_format.Placed(envelope, Locations.empty(3), np.zeros(3, np.bool_), np.zeros(3, np.uint32), Ledger()),
        message_format.End(envelope, 123, b"o" * 16, 10, b"b" * 32, None, 17, None, {"a": "b"}),
        message_format.Segments(envelope, segments),
        message_format.Fresh(envelope, fresh),
    ]
    if sketched is not None and sketched.super_features is not None:
        count = len(fresh.fresh)
        where = Locations(np.full(count, 5, np.uint64), np.arange(count, dtype=np.uint32))
        bases = FoundBases(sketched.super_features, where, np.zeros(count, np.uint8), np.ones(count, np.bool_))
        found.append(message_format.Paired(envelope, resemblance.decide(fresh, LookupResults(bases=bases))))
    return [message_format.encode(one) for one in found]


def _blocks() -> list[bytes]:
    """Return every block of the sample containers, header and payload."""
    found = []
    for data in (samples.small_container(), samples.patch_container()):
        blocks = decode_container(data, "sample").blocks
        for offset, stored in zip(blocks.offsets.tolist(), blocks.stored.tolist(), strict=True):
            found.append(data[offset - container_layout.BLOCK.size : offset + stored])
    return found


# --- parsers ---------------------------------------------------------------------------------------------------------


def _with_checksum(parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Return a parser that replaces the last 8 bytes by the right checksum before it parses."""

    def sealed(data: bytes) -> object:
        body = data[: -columns.CHECK_BYTES]
        return parse(body + columns.check_bytes(body))

    return sealed


def _directory(data: bytes) -> object:
    """Read a container with this directory, in a valid frame."""
    return samples.read_all(samples.with_directory(_small_container(), data))


def _block(data: bytes) -> object:
    """Read a block with the given first bytes of its header and a valid check."""
    head = container_layout.BLOCK.size
    if len(data) < head:
        raise Corrupt("too short to be given a check")
    lead, payload = data[: head - 8], data[head:]
    record = lead + columns.check_bytes(lead, payload) + payload
    decode_block(record, "fuzz", take=_room)
    return decode_block(record, "fuzz", _BASE, take=_room)


def _room(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if count > container_layout.CONTAINER_BYTES_MAX * 64:
        raise MemoryError(f"{count} bytes for one block")
    return np.empty(count, np.uint8)


def _message(data: bytes) -> object:
    found = message_format.decode(data, "fuzz")
    opened = message_format.read_header(data, "fuzz")
    for read in (message_batches.read_segments, message_batches.read_fresh, message_batches.read_paired):
        try:
            read([opened, opened])
        except (BadInput, Corrupt, TypeError, ValueError) as err:
            if not isinstance(err, BadInput | Corrupt) and "kind" not in str(err):
                raise
    return found


def _columns(data: bytes) -> object:
    return columns.unpack(memoryview(data), [np.dtype(t) for t in ("u1", "<u2", "<u4", "<u8")], 1 << 16, "fuzz")


_BASE = bytes(samples.noise(4096, "base of deltas"))


def _delta(data: bytes) -> object:
    """Decode VCDIFF: the first three bytes determine the sizes of the base and of the target."""
    lengths = np.frombuffer(data[:3].ljust(3, b"\0"), np.uint8).astype(np.uint32)
    delta = np.frombuffer(data[3:], np.uint8)
    one = np.zeros(1, np.uint64)
    return xdelta3.decode_many(
        delta,
        one,
        np.array([len(delta)], np.uint32),
        np.frombuffer(_BASE, np.uint8),
        one,
        np.array([int(lengths[0]) * 16], np.uint32),
        np.array([(int(lengths[1]) << 8 | int(lengths[2])) % PAIR_BYTES_MAX], np.uint32),
    )


def _deltas() -> list[bytes]:
    base = np.frombuffer(_BASE, np.uint8)[:2048]
    targets = [base[:1000].tobytes() + b"new" + base[1000:].tobytes(), base[512:].tobytes(), bytes(300) + b"x"]
    found = []
    for target in targets:
        whole = np.frombuffer(target, np.uint8)
        size, zero = np.array([len(whole)], np.uint32), np.zeros(1, np.uint64)
        base_size, limit = np.array([len(base)], np.uint32), np.array([4096], np.uint32)
        payload = xdelta3.encode_many(whole, zero, size, base, zero, base_size, level=6, limit_bytes=limit)[0]
        found.append(bytes([128]) + len(whole).to_bytes(2, "big") + bytes(payload))
    return found


def _frame(data: bytes) -> object:
    """Decode a zstd frame into as many bytes as the first two state, with a prefix if the third is odd."""
    head = data[:3].ljust(3, b"\0")
    out = np.empty(int.from_bytes(head[:2], "little"), np.uint8)
    decode_frame(data[3:], out, "fuzz", _BASE if head[2] & 1 else None)
    return out


def _frames() -> list[bytes]:
    found = []
    for number, text in enumerate((b"The quick brown fox. " * 40, bytes(samples.noise(300, "f")), _BASE[100:900])):
        prefix = _BASE if number == 2 else None
        frame = samples.compressor().encode(text, prefix)
        found.append(len(text).to_bytes(2, "little") + bytes([number == 2]) + frame)
        found.append(len(text).to_bytes(2, "little") + b"\0" + raw_frame(text))
    return found


class _Memory:
    """An object store that holds one object under any name."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, _: str) -> bytes:
        return self._data


def _descriptors() -> list[bytes]:
    kept: list[bytes] = []

    class Keeps:
        def put_new(self, _: str, data: bytes) -> None:
            kept.append(data)

    descriptor.create(Keeps())  # type: ignore[arg-type]
    return kept


def _config(data: bytes) -> object:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        return load(file.name)


def _configs() -> list[bytes]:
    return [
        b'profile = "archive"\n[features]\nalgorithm = "odess"\n[gc]\ngrace_seconds = 86400\ncompact_below = 0.9\n',
        b'[kafka]\nbootstrap = "a:1"\n[[retention.policies]]\nprefix = "a/"\nkeep_last = 3\nkeep_within = "3d"\n',
        b'[container]\ntarget_bytes = "4MiB"\n[base]\ncache_bytes = 2097152\n[delta]\nmax_depth = 4\ncodec = "patch"\n',
    ]


def _patches() -> list[bytes]:
    """Return a change of each hot setting to its own value, and of all at once."""
    whole: dict[str, dict[str, object]] = {}
    found = []
    for name in sorted(HOT_FIELDS):
        section, _, field = name.partition(".")
        value = getattr(getattr(Settings(), section), field)
        if isinstance(value, bool | int | float | str):
            whole.setdefault(section, {})[field] = value
            found.append(json.dumps({section: {field: value}}).encode())
    return [*found, json.dumps(whole).encode(), b'{"features": {"algorithm": "odess"}, "delta": {"max_depth": 3}}']


def _patch(data: bytes) -> object:
    """Parse the body of PATCH /v1/admin/config as the gateway does."""
    from nearkin_shared.kafka.live_config import check_changes

    try:
        patch = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise BadInput(f"not JSON: {err}") from err
    if not isinstance(patch, dict):
        raise BadInput("not an object")
    return with_changes(Settings(), {section: fields for section, fields in check_changes(patch).items() if fields})


def _headers(data: bytes) -> object:
    """Parse a request's path and headers as the gateway does: lines, of which the first is the key as sent."""
    from starlette.datastructures import Headers

    from nearkin_gateway.http.digests import announced_sha256, metadata_of, wants_sha256
    from nearkin_gateway.http.ranges import not_modified, precondition_of_put, wanted_ranges
    from nearkin_gateway.http.url_keys import decode_key
    from nearkin_gateway.uploads.tus_headers import parse_concat, parse_metadata

    lines = data.split(b"\n")
    pairs = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines[1:])]
    headers, info = Headers(raw=pairs), samples.small_manifest().info
    steps: list[Callable[[], object]] = [
        lambda: decode_key(lines[0].decode("latin-1")),
        lambda: announced_sha256(headers),
        lambda: wants_sha256(headers),
        lambda: metadata_of(headers),
        lambda: wanted_ranges(headers, info),
        lambda: not_modified(headers, info, named=True),
        lambda: precondition_of_put(headers),
        lambda: parse_metadata(headers.get("upload-metadata", ""), needs_key=True),
        lambda: parse_concat(headers.get("upload-concat"), 16),
    ]
    for step in steps:
        try:
            step()
        except Exception as err:  # each is tried, whatever the result of the one before
            status = getattr(err, "status", 500)
            if not isinstance(err, BadInput | NotFound) and not 400 <= status < 500:
                raise
    return None


def _requests() -> list[bytes]:
    return [
        b'backups%2Fa\nrange: bytes=0-99\nif-range: "1-abc"\nx-nearkin-meta-host: db%201\nwant-repr-digest: sha-256',
        b'a\nrepr-digest: sha-256=:n4bQgYhMfWWaL+qgxVrQFaO/TxsrC4Is0V1sFbDwCgg=:\nif-none-match: *\nif-match: "3"',
        b"k\nupload-metadata: key YS9i,a ZGItMQ==\nif-modified-since: Mon, 24 Nov 2025 16:00:00 GMT\nrange: bytes=-5",
        b"k\ncontent-digest: sha-256=:AAAA:\nx-nearkin-sha256: 00\nrange: bytes=5-\nrange: bytes=1-2,3-4",
    ]


def _user_record(data: bytes) -> object:
    """Parse a record of a user's topic: key, then headers by line, then the value."""
    from nearkin_ingest.records import UserRecord, intake_of

    key, _, rest = data.partition(b"\n")
    head, _, value = rest.partition(b"\n\n")
    headers = tuple(
        (name.decode("latin-1"), given) for name, _, given in (line.partition(b":") for line in head.split(b"\n"))
    )
    stamp = int.from_bytes(value[:8], "little", signed=True)
    return intake_of(UserRecord("users", 0, 1, key, value, headers, stamp), "t", _ingest_settings())


@cache
def _ingest_settings() -> Settings:
    ingest = {"topics": ["users"], "key_header": "name", "tenant_header": "who"}
    return load(None, {"ingest": ingest, "object_store": {"url": "s3://bucket/all"}})[0]


def _manifests() -> list[bytes]:
    small = samples.small_manifest()
    measured = replace(samples.measured_manifest(), metadata={}, sha256=None)
    chained = replace(samples.manifest_with_chain(), metadata={})
    return [encode_manifest(chained), *_both(partial(encode_manifest, small), partial(encode_manifest, measured))]


def _parities() -> list[bytes]:
    scheme = parity_object.Scheme(4, 2)
    try:
        import pyeclib  # noqa: F401
    except ImportError:
        return [bytes(80)]
    return [parity_object.encode_parity("an object", samples.small_container(), scheme)]


def _parity(data: bytes) -> object:
    """Repair a damaged object by a parity object whose first header has a valid check."""
    head = data[: parity_object.HEAD.size - columns.CHECK_BYTES]
    data = head + columns.check_bytes(head) + data[parity_object.HEAD.size :]
    return parity_object.reconstruct("an object", _small_container()[:-1] + b"x", data)


_gateway = fuzz_gateway.Gateway()
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "message": Target(_message, _messages, refusals=(Corrupt, FormatTooNew, BadInput)),
        "container": Target(samples.read_all, _containers),
        "directory-sealed": Target(_directory, lambda: [samples.directory_of(data) for data in _containers()]),
        "block-sealed": Target(_block, _blocks),
        "manifest": Target(lambda data: decode_manifest(data, "fuzz"), _manifests),
        "manifest-sealed": Target(_with_checksum(lambda data: decode_manifest(data, "fuzz")), _manifests),
        "mark-sealed": Target(
            _with_checksum(lambda data: decode_mark(data, "fuzz")), lambda: [encode_mark(samples.small_mark())]
        ),
        "condemned-sealed": Target(_with_checksum(lambda data: decode_record(data, "fuzz")), lambda: _both(_record)),
        "columns": Target(_columns, lambda: _both(_some_columns)),
        "parity-sealed": Target(_parity, _parities, refusals=(Corrupt, FormatTooNew, ConfigError)),
        "descriptor": Target(lambda data: descriptor.read(_Memory(data)), _descriptors),  # type: ignore[arg-type]
        "config": Target(_config, _configs, refusals=(NearkinError,)),
        "config-patch": Target(
            _patch,
            _patches,
            refusals=(BadInput,),
        ),
        "headers": Target(_headers, _requests, refusals=()),
        "requests": Target(
            _gateway.answer, _gateway.ready, refusals=(fuzz_gateway.RequestRefused,), close=_gateway.close
        ),
        "user-record": Target(
            _user_record,
            lambda: [
                b"a key\nname:n\nwho:acme\nce_type:a.b\n\n\1\0\0\0\0\0\0\0rest",
                b"k\ndataref:s3://bucket/all/x\n\n",
            ],
            refusals=(NearkinError,),
        ),
        "vcdiff": Target(_delta, _deltas, native=True),
        "frame": Target(_frame, _frames, native=True),
    }
)


def _some_columns() -> bytes:
    rows = np.arange(40)
    return columns.pack([rows.astype(t) for t in ("u1", "<u2", "<u4", "<u8")])
