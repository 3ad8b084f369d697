"""Requests to an index shard and its answers, as MessagePack.

    POST /v1/CALL, header `nearkin-shard: NUMBER/COUNT/STORE`, body: the request of CALL -> its answer

Invariant: the lengths in a decoded message agree; a reader need not check them again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from nearkin_shared.errors import BadInput
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.container_entries import FEATURE_KEY_BYTES
from nearkin_shared.index.protocols import CollectedVersion, ContainerSummary, MarkedVersion
from nearkin_shared.index.shards.state_messages import STATE_ANSWERS, STATE_REQUESTS
from nearkin_shared.limits import KIB, MIB
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, U32, U64, Bools, Locations

BODY_BYTES_MAX = 64 * MIB
KEYS_A_REQUEST = 1 << 17
ROWS_A_PAGE = 10_000
CARRIED_BYTES_MAX = 256 * KIB
"""Carried names of one answer: chunks of some 57 MiB."""
GRANT_BYTES_MAX = 64
SHARD_HEADER = "nearkin-shard"
KEY_BYTES = {"chunks": NAME_BYTES, "segments": SEGMENT_ID_BYTES, "features": FEATURE_KEY_BYTES}

Id = Annotated[int, Meta(ge=0)]  # MessagePack has no number of 65 bits
ChunkCount = Annotated[int, Meta(ge=0, le=1 << 24)]
Domain = Annotated[bytes, Meta(max_length=16)]
Table = Literal["chunks", "segments", "features"]
Name = Annotated[str, Meta(max_length=4096)]


class CarriedRows(NamedTuple):
    """Keys, the container of each, and its ordinal there; those of one container together."""

    keys: U8
    containers: U64
    ordinals: U32


class Lookup(Struct, frozen=True):
    """Keys of one table, one after another.

    `carry_bytes`: so many bytes of other names the answer may carry. A shard of an earlier release does not
    know it, and carries none.
    """

    table: Table
    keys: bytes
    carry_bytes: Id = 0

    @property
    def rows(self) -> U8:
        """Return uint8[n, width] keys. Raises BadInput."""
        width = KEY_BYTES[self.table]
        if len(self.keys) % width or len(self.keys) > KEYS_A_REQUEST * width:
            raise BadInput(f"keys: {len(self.keys)} bytes are not 0 to {KEYS_A_REQUEST} keys of {width} bytes")
        return np.frombuffer(self.keys, np.uint8).reshape(-1, width)


class Carried(Struct, frozen=True):
    """Grant of a shard, and names in the last hit's container and the next ones.

    `counts`: names of each container, 4 bytes each; `ordinals` and `keys` of all of them. While a shard gives the same
    grant, it has withdrawn nothing.
    """

    grant: Annotated[bytes, Meta(min_length=1, max_length=GRANT_BYTES_MAX)]
    containers: bytes = b""
    counts: bytes = b""
    ordinals: bytes = b""
    keys: bytes = b""

    def __post_init__(self) -> None:
        """Raise BadInput where lengths disagree."""
        if not (self.containers or self.counts or self.ordinals or self.keys):
            return
        if len(self.containers) != 2 * len(self.counts) or len(self.keys) > CARRIED_BYTES_MAX:
            raise BadInput(f"carried: {len(self.containers)} bytes of containers, {len(self.keys)} of names")
        if int(numbers_of(self.counts).sum(dtype=np.uint64)) != len(numbers_of(self.ordinals)):
            raise BadInput(f"carried: {len(self.ordinals)} bytes of ordinals are not those of its containers")

    @staticmethod
    def of(grant: bytes, rows: CarriedRows | None) -> Carried:
        """Return rows as a message; None is none."""
        if rows is None or not len(rows.keys):
            return Carried(grant)
        starts = np.flatnonzero(np.diff(rows.containers, prepend=~rows.containers[:1]))
        return Carried(
            grant,
            rows.containers[starts].astype("<u8").tobytes(),
            bytes_of(np.diff(starts, append=len(rows.keys)).astype(np.uint32)),
            bytes_of(rows.ordinals),
            rows.keys.tobytes(),
        )

    def rows(self, table: Table) -> CarriedRows:
        """Return the rows. Raises BadInput."""
        ordinals, width = numbers_of(self.ordinals), KEY_BYTES[table]
        if len(self.keys) != len(ordinals) * width:
            raise BadInput(f"carried: {len(self.keys)} bytes for {len(ordinals)} names of {width} bytes")
        containers = np.frombuffer(self.containers, "<u8").astype(np.uint64)
        keys = np.frombuffer(self.keys, np.uint8).reshape(-1, width)
        return CarriedRows(keys, np.repeat(containers, numbers_of(self.counts)), ordinals)


class Located(Struct, frozen=True, omit_defaults=True):
    """Locations of a lookup, row by row."""

    containers: bytes
    ordinals: bytes
    found: bytes
    carried: Carried | None = None

    @staticmethod
    def of(locations: Locations, found: Bools, carried: Carried | None = None) -> Located:
        """Return the answer of a lookup."""
        return Located(
            locations.containers.astype("<u8").tobytes(),
            locations.ordinals.astype("<u4").tobytes(),
            found.tobytes(),
            carried,
        )

    def columns(self, count: int) -> tuple[U64, U32, Bools]:
        """Return (containers, ordinals, found). Raises BadInput."""
        if (len(self.containers), len(self.ordinals), len(self.found)) != (8 * count, 4 * count, count):
            raise BadInput(f"located: {len(self.found)} rows are not the {count} keys of the request")
        columns = np.frombuffer(self.containers, "<u8"), np.frombuffer(self.ordinals, "<u4")
        return (*columns, np.frombuffer(self.found, np.bool_))


class FeatureRows(Struct, frozen=True):
    """Super-features of a sketch.

    Chunk ordinals of 4 bytes, and `ranks` values of 8 bytes a chunk.
    """

    ranks: Annotated[int, Meta(ge=1, le=255)]
    ordinals: bytes
    values: bytes

    @property
    def arrays(self) -> tuple[U32, U64]:
        """Return (ordinals, uint64[c, ranks]). Raises BadInput."""
        ordinals = numbers_of(self.ordinals)
        if len(self.values) != len(ordinals) * self.ranks * 8:
            raise BadInput(f"values: {len(self.values)} bytes for {len(ordinals)} chunks of {self.ranks} values")
        return ordinals, np.frombuffer(self.values, "<u8").reshape(-1, self.ranks).astype(np.uint64)


class ContainerPart(Struct, frozen=True):
    """Entries of a durable container that one shard keeps.

    `ordinals` and `names`: the chunks that are there and whose names are the shard's; `hidden`: ordinals of those that
    must not be found. `segment_ids` has zeros for the segments of other shards.
    """

    container: Id
    domain: Domain
    chunks: ChunkCount
    ordinals: bytes
    names: bytes
    hidden: bytes
    segment_ids: bytes
    features: dict[Name, FeatureRows]
    summary: ContainerSummary

    def __post_init__(self) -> None:
        """Raise BadInput where lengths disagree."""
        ordinals = numbers_of(self.ordinals)
        if len(self.names) != len(ordinals) * NAME_BYTES:
            raise BadInput(f"names: {len(self.names)} bytes for {len(ordinals)} chunks of {NAME_BYTES} bytes")
        if len(self.segment_ids) % SEGMENT_ID_BYTES:
            raise BadInput(f"segment_ids: {len(self.segment_ids)} bytes are not ids of {SEGMENT_ID_BYTES} bytes")
        for found in (ordinals, numbers_of(self.hidden), *(rows.arrays[0] for rows in self.features.values())):
            if len(found) and int(found.max()) >= self.chunks:
                raise BadInput(
                    f"ordinals: chunk {int(found.max())} of container {self.container:016x}, of {self.chunks}"
                )
        if self.summary.container != self.container:
            raise BadInput(f"summary: of container {self.summary.container:016x}, not {self.container:016x}")


class Publication(Struct, frozen=True):
    """Parts of durable containers, in order."""

    parts: list[ContainerPart]


class Withdrawal(Struct, frozen=True):
    """Entries to withdraw by container, and containers that were deleted.

    Ordinals have 4 bytes; None is all of them.
    """

    chunks: dict[Id, bytes | None]
    segments: dict[Id, bytes]
    containers: list[Id]


class Commits(Struct, frozen=True):
    """Versions: (tenant, entry without marks)."""

    versions: list[tuple[Name, CatalogEntry]]


class Marks(Struct, frozen=True):
    """Marks of versions."""

    marks: list[MarkedVersion]


class Collection(Struct, frozen=True):
    """Versions that leave the catalog."""

    versions: list[CollectedVersion]


class CatalogPage(Struct, frozen=True):
    """Asks for the versions after one, None for the first."""

    tenant: Name
    prefix: Name
    key: Name = ""
    version: Id | None = None
    count: Annotated[int, Meta(ge=1, le=ROWS_A_PAGE)] = ROWS_A_PAGE


class Versions(Struct, frozen=True):
    """Asks for the version numbers of a key."""

    tenant: Name
    key: Name


class ContainerPage(Struct, frozen=True):
    """Asks for the summaries of containers after one, None for the first."""

    after: Id | None = None


class Generation(Struct, frozen=True):
    """A GC generation to record; 0 only asks for the recorded one."""

    at_least: Id = 0


class MissingContainer(Struct, frozen=True):
    """Reports a container that an entry names and the store lacks."""

    container: Id


class ReadyRequest(Struct, frozen=True):
    """Asks whether the shard's index is complete."""


Entries = list[CatalogEntry]
Summaries = list[ContainerSummary]
REQUESTS: dict[str, type[Any]] = {
    "locate": Lookup,
    "publish": Publication,
    "withdraw": Withdrawal,
    "renew": ContainerSummary,
    "commit": Commits,
    "mark": Marks,
    "collect": Collection,
    "versions": Versions,
    "catalog": CatalogPage,
    "containers": ContainerPage,
    "generation": Generation,
    "report": MissingContainer,
    "ready": ReadyRequest,
    **STATE_REQUESTS,
}
ANSWERS: dict[str, Any] = {
    "locate": Located,
    "versions": list[int],
    "catalog": Entries,
    "containers": Summaries,
    "generation": int,
    "ready": bool,
    **STATE_ANSWERS,
}
"""Answers that are not empty."""
_encode = msgspec.msgpack.Encoder().encode
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in REQUESTS.items()}
_ANSWER_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in ANSWERS.items()}


def encode(message: object) -> bytes:
    """Return a message's bytes."""
    return _encode(message)


def decode_request(call: str, data: bytes | bytearray) -> Any:
    """Return the request of a call. Raises BadInput."""
    return _decoded(f"request {call}", _DECODERS[call], data)


def decode_answer(call: str, data: bytes) -> Any:
    """Return the answer to a call, None for an empty one. Raises BadInput."""
    return _decoded(f"answer to {call}", _ANSWER_DECODERS[call], data) if call in _ANSWER_DECODERS else None


def _decoded(what: str, decoder: msgspec.msgpack.Decoder[Any], data: bytes | bytearray) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as err:
        raise BadInput(f"{what}: {err}; shards and workers need one release of Nearkin") from err


def numbers_of(data: bytes) -> U32:
    """Return the ordinals in 4 bytes each. Raises BadInput."""
    if len(data) % 4:
        raise BadInput(f"ordinals: {len(data)} bytes are not numbers of 4 bytes")
    return np.frombuffer(data, "<u4").astype(np.uint32)


def bytes_of(ordinals: U32) -> bytes:
    """Return ordinals in 4 bytes each."""
    return ordinals.astype("<u4").tobytes()
