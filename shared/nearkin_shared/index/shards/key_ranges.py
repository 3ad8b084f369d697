"""Ranges of keys: which shard has an entry, and what of a container is one shard's.

    chunks, segments   the first 16 bits of the name, in `count` ranges of one size
    features           16 bits of a mix of the super-feature

Names are fingerprints, so that ranges of one size have one load: of n names a shard has n / count, and more than 1.1
times as many only where n is a few thousand.

Invariant: an entry belongs to one shard, the same in every process and release.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.index.catalog import summarise
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.shards.shard_messages import ContainerPart, FeatureRows, bytes_of
from nearkin_shared.types import U8, U64

SHARDS_MAX = 64
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FEATURE_AT = 9
Owners = NDArray[np.int64]


def owners_of_names(names: U8, count: int) -> Owners:
    """Return the shard of each chunk name or segment id, uint8[n, width]."""
    prefixes = names[:, 0].astype(np.int64) << 8 | names[:, 1]
    return prefixes * count >> 16


def owners_of_values(super_features: U64, count: int) -> Owners:
    """Return the shard of each super-feature, in the shape given."""
    mixed = (super_features * _MIX) >> np.uint64(48)
    return mixed.astype(np.int64) * count >> 16


def owners_of_keys(table: str, keys: U8, count: int) -> Owners:
    """Return the shard of each key of a table."""
    if table != "features":
        return owners_of_names(keys, count)
    values = np.ascontiguousarray(keys[:, _FEATURE_AT:]).view("<u8").ravel()
    return owners_of_values(values.astype(np.uint64), count)


def rows_by_owner(table: str, keys: U8, count: int) -> list[Owners]:
    """Return the rows of the keys of each shard, ascending."""
    if count == 1:
        return [np.arange(len(keys))]
    owners = owners_of_keys(table, keys, count).astype(np.uint8)
    rows = np.argsort(owners, kind="stable")
    return np.split(rows, np.cumsum(np.bincount(owners, minlength=count))[:-1])


def part_of(claims: ContainerEntries, number: int, count: int) -> ContainerPart:
    """Return what one shard of `count` keeps of a container."""
    chunks = claims.directory.chunks
    is_own = chunks.there & (owners_of_names(chunks.names, count) == number)
    is_hidden = is_own.copy()
    is_hidden[claims.findable] = False
    ids = claims.segment_ids.copy()
    ids[owners_of_names(ids, count) != number] = 0
    features = {}
    for sketch, (ordinals, super_features) in claims.super_features.items():
        values = np.where(owners_of_values(super_features, count) == number, super_features, np.uint64(0))
        rows = values.any(axis=1)
        if rows.any():
            packed = values[rows].astype("<u8").tobytes()
            features[sketch] = FeatureRows(values.shape[1], bytes_of(ordinals[rows]), packed)
    return ContainerPart(
        int(claims.directory.container),
        claims.directory.domain,
        len(chunks),
        bytes_of(np.flatnonzero(is_own).astype(np.uint32)),
        chunks.names[is_own].tobytes(),
        bytes_of(np.flatnonzero(is_hidden).astype(np.uint32)),
        ids.tobytes(),
        features,
        summarise(claims),
    )
