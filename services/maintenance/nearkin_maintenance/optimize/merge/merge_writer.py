"""Write the containers of a merge plan.

own chunks of a region, then the merged chunks (joined, as appended rows)  -> one block
for each container from which chunks were merged                           -> a reference block to that block

Invariant: each chunk keeps its number and never gets deeper.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.gc_plan import NUMBERS_MAX
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.retained_bytes import NAME_AND_ROW_BYTES, bytes_of_chunks
from nearkin_maintenance.optimize.block_writer import BlockWriter
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, VerifiedReader
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort, BlockSlice, EncodedResult, PendingBlock
from nearkin_maintenance.optimize.merge.merge_planner import NO_REGION, MergeBounds, MergePlan, plan_merge
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import EncodedBlock
from nearkin_shared.formats.block_kinds import reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.limits import KIB, PREFIX_BYTES_MIN
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import ReadPlan
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import I32, U8, Bools, ContainerId, Locations, group_by_container, offsets_of
from nearkin_shared.utils.frozen import frozen

REGION_SHARE = 8
"""A region of raw chunks has this fraction of a block: about as many versions of it fit into one block."""
REGION_BYTES_MIN = 64 * KIB
JOINED_BYTES_MAX = 256 * KIB
"""Chunks are joined to one of at most this many bytes, or of a delta block's: the longest chunk that formats allow."""
PREFIX_BASES_MAX = 4096
PREFIX_SHARE_MAX = 2
"""The prefix of a merged block is at most this many blocks long."""
SHALLOW_SHARE = 0.1
"""A merge may cost this share of the merged bytes, since it reduces depth, and a later recompression regains less.

With recompressed roots, 16 dumps gained nothing at once, and 2.6 of 38 MB in the end.
"""
REFERENCE_BYTES = 64
"""Estimated size of a reference block without its payload: its header and its rows in the directory."""


@frozen
class BlockReference:
    """A block of `rows` of a source container, slices of the merged chunk `to` of `holder`."""

    rows: NDArray[np.intp]
    holder: ContainerId
    to: int
    result: EncodedResult


@frozen
class RewrittenContainer:
    """A container to write, and by source container the references to add once it is written."""

    data: bytes
    references: dict[int, list[BlockReference]]
    region_rows: dict[int, NDArray[np.intp]]
    """Rows of each region that received chunks, merged ones included."""


@frozen
class MergePlanner:
    """Plans merges and writes the generations that hold them."""

    containers: ContainerStore
    tenants: DomainOwners
    verified: VerifiedReader
    encoder: BlockEncoderPort

    def plan(
        self, live_set: LiveSet, ids: Collection[int], recent: Collection[int], block_bytes: int, versions_min: int
    ) -> MergePlan | None:
        """Return the merges into blocks of up to `block_bytes` that save bytes, or None.

        Regions that fewer than `versions_min` versions have changed stay.

        Raises: Corrupt.
        """
        if not self.encoder.can_merge:
            return None
        region_bytes = max(block_bytes // REGION_SHARE, REGION_BYTES_MIN)
        joined_bytes = min(self.encoder.delta_bytes, JOINED_BYTES_MAX)
        bounds = MergeBounds(self.encoder.depth_max, block_bytes, region_bytes, joined_bytes, versions_min)
        return plan_merge(live_set, ids, recent, bounds)

    def executor(self, plan: MergePlan) -> MergeExecutor:
        """Return an executor of a plan."""
        return MergeExecutor(self, plan)


class MergeExecutor:
    """Makes generations with merged blocks and references, in the order of the plan."""

    def __init__(self, planner: MergePlanner, plan: MergePlan) -> None:
        self._containers, self._tenants, self._encoder = planner.containers, planner.tenants, planner.encoder
        self._plan = plan
        self._bounds = plan.bounds
        self._reader = ChunkReader(self._containers, self._encoder.helpers)
        self._verified = planner.verified
        self._block_writer = BlockWriter(self._containers, self._verified, self._encoder)
        self._pending_references: dict[int, list[BlockReference]] = {}
        self._region_chunks: dict[int, Locations] = {}
        """Chunks of each region that received chunks so far."""
        self._rewritten: RewrittenContainer | None = None

    def data(self, container: ContainerId) -> bytes | None:
        """Return the next generation of a container, or None if it stays.

        Raises: Corrupt if a chunk to keep or to merge fails fingerprint verification.
        """
        directory, references = self._containers.directory(container), self._pending_references.pop(container, [])
        fingerprinter = self._tenants.fingerprinter(directory.domain)
        self._rewritten = None
        if fingerprinter is None or len(directory.blocks) > NUMBERS_MAX:
            return None
        if targets := self._plan.merge_targets(container):
            rewritten = self._rewrite(directory, references, targets, fingerprinter)
            if rewritten is not None and self._saves_bytes(directory, rewritten):
                self._rewritten = rewritten
        if self._rewritten is None and references:
            self._rewritten = self._rewrite(directory, references, [], fingerprinter)
        return None if self._rewritten is None else self._rewritten.data

    def on_container_rewritten(self, container: ContainerId) -> None:
        """Record that the last returned generation is durable: other containers may refer to it."""
        assert self._rewritten is not None
        for source, references in self._rewritten.references.items():
            self._pending_references.setdefault(source, []).extend(references)
        for region, rows in self._rewritten.region_rows.items():
            here = np.full(len(rows), container, np.uint64)
            self._region_chunks[region] = Locations(here, rows.astype(np.uint32))

    def _saves_bytes(self, directory: Directory, rewritten: RewrittenContainer) -> bool:
        """Return whether merged chunks take less than before, or little more at a lower depth."""
        gained, merged = float(directory.container_bytes - len(rewritten.data)), 0.0
        for source, references in rewritten.references.items():
            shares = bytes_of_chunks(self._containers.directory(ContainerId(source)))
            for reference in references:
                merged += float(np.maximum(shares[reference.rows] - NAME_AND_ROW_BYTES, 0).sum())
                gained -= len(reference.result.block.payload) + REFERENCE_BYTES
        return gained + merged >= -SHALLOW_SHARE * merged

    def _rewrite(
        self, directory: Directory, references: list[BlockReference], targets: list[int], fingerprinter: Fingerprinter
    ) -> RewrittenContainer | None:
        """Return the next generation, or None if nothing changes."""
        old, container = directory.chunks, directory.container
        new, rewritten = (
            NewGeneration(self._containers, directory, old.there, self._encoder),
            RewrittenContainer(b"", {}, {}),
        )
        is_written = np.zeros(len(old), np.bool_)
        for reference in references:
            self._write_reference(new, reference)
            is_written[reference.rows] = True
        regions = self._plan.regions[container]
        for region in targets:
            rows = np.flatnonzero(old.there & (regions == region) & ~is_written)
            if len(rows) and self._write_region(new, directory, region, rows, fingerprinter, rewritten):
                is_written[rows] = True
        if not is_written.any():
            return None
        self._write_remaining(new, directory, is_written)
        if new.blocks_used > container_layout.BLOCKS_MAX:
            return None
        return RewrittenContainer(new.encode(np.zeros(0, np.uint32)), rewritten.references, rewritten.region_rows)

    def _write_remaining(self, new: NewGeneration, directory: Directory, is_written: Bools) -> None:
        """Copy untouched blocks, and write the remaining chunks of all others."""
        old, raw = directory.chunks, [np.zeros(0, np.intp)]
        is_rewritten = np.zeros(len(directory.blocks), np.bool_)
        is_rewritten[old.blocks[is_written]] = True
        for number in np.flatnonzero(directory.blocks.raw > 0).tolist():
            if not is_rewritten[number]:
                new.copy(number)
                continue
            rows = np.flatnonzero(old.there & (old.blocks == number) & ~is_written)
            if directory.blocks.kinds[number] == container_layout.RAW:
                raw.append(rows)
            elif len(rows):
                self._block_writer.write_some(new, directory, number, rows)
        self._block_writer.write_raw(
            new, directory, np.sort(np.concatenate(raw))
        )  # a row's offset is the end of the row before

    def _write_region(
        self,
        new: NewGeneration,
        directory: Directory,
        region: int,
        rows: NDArray[np.intp],
        fingerprinter: Fingerprinter,
        rewritten: RewrittenContainer,
    ) -> bool:
        """Write a region with its merged chunks unless that deepens one.

        Return whether it was written.
        """
        old, parent = directory.chunks, int(self._plan.parents[region])
        is_new, number = bool(self._plan.new_regions[region]), int(old.blocks[rows[0]])
        prefix = self._content(parent) if is_new else directory.prefixes.of(number)
        depth = int(self._reader.plan(prefix).depths.max(initial=0)) + 1 if len(prefix) else 0
        merged = self._plan.chunks_merged_into(region)
        merged = merged.take(self._reader.plan(merged).depths > depth)
        if not len(merged) or depth > int(old.depths[rows].min()):
            return False
        if depth:
            here = Locations(np.full(len(rows), directory.container, np.uint64), rows.astype(np.uint32))
            prefix = self._with_bases(region, prefix, Locations.join([here, merged]), depth)
        plan = self._reader.plan(prefix)
        base_payload = self._reader.fetch(plan)
        if len(prefix) and len(base_payload) < PREFIX_BYTES_MIN:
            return False
        merged_payload, ranges = self._verified.read(directory.domain, merged), self._merged_ranges(merged)
        lengths = np.diff([offset for offset, _, _ in ranges] + [len(merged_payload)]).astype(np.uint32)
        merged_rows = new.append(fingerprinter.name_chunks(merged_payload, offsets_of(lengths), lengths), lengths)
        payload = np.concatenate([self._block_writer.read_verified(directory, rows), merged_payload])
        block = self._encoder.encode_merged(payload, prefix, base_payload, depth)
        all_rows, all_lengths = np.concatenate([rows, merged_rows]), np.concatenate([old.lengths[rows], lengths])
        new.write_pending(all_rows, partial(_wait_for_merged, block), depth, prefix, all_lengths)
        if not len(prefix):
            new.clear_bases(all_rows)
        else:  # the base at about the same stream position counts as the best one
            ranks = np.where(all_rows < len(old), container_layout.LOCALITY_RANK, container_layout.MERGED_RANK).astype(
                np.uint8
            )
            new.set_bases(all_rows, prefix.take(_aligned_bases(all_lengths, plan.lengths)), ranks)
            if not is_new:
                new.keep_bases(rows)
        rewritten.region_rows[region] = all_rows
        for (offset, first, last), row, length in zip(ranges, merged_rows.tolist(), lengths.tolist(), strict=True):
            source = int(merged.containers[first])
            of = merged.ordinals[first:last].astype(np.intp)
            content = merged_payload[offset : offset + length]
            is_reference = self._reference_to(directory.container, row, content, ContainerId(source), of, depth + 1)
            rewritten.references.setdefault(source, []).append(is_reference)
        return True

    def _content(self, region: int) -> Locations:
        """Return the current chunks of a region: the bases of the region that succeeds it."""
        content = self._region_chunks.get(region)
        if content is None:
            content = self._plan.own_chunks(region)
            there = self._containers.directory(ContainerId(int(content.containers[0]))).chunks.there
            content = content.take(there[content.ordinals])
        return content

    def _with_bases(self, region: int, prefix: Locations, chunks: Locations, depth: int) -> Locations:
        """Add to a prefix the best bases of chunks that are stored in ancestor regions.

        A chunk that has not changed for many versions is in none of the regions that later ones depend on.
        """
        bases = self._reader.plan(chunks).bases.distinct()
        bases = bases.take(bases.containers != 0)
        plan = self._reader.plan(bases)
        found = plan.depths < depth
        found &= np.isin(self._regions_of(plan), self._ancestor_regions(region)) & ~bases.is_in(prefix)
        bases = bases.take(found)
        held_bytes = int(self._reader.plan(prefix).lengths.sum(dtype=np.int64))
        room_bytes = PREFIX_SHARE_MAX * self._bounds.block_bytes - held_bytes
        fits = np.cumsum(self._reader.plan(bases).lengths, dtype=np.int64) <= room_bytes
        return Locations.join([prefix, bases.take(fits)]).take(slice(0, PREFIX_BASES_MAX))

    def _ancestor_regions(self, region: int) -> list[int]:
        """Return the regions on which the parent of a region depends, transitively."""
        parents, found = self._plan.parents, list[int]()
        ancestor = int(parents[region])
        while ancestor != NO_REGION and (ancestor := int(parents[ancestor])) != NO_REGION:
            found.append(ancestor)
        return found

    def _regions_of(self, plan: ReadPlan) -> I32:
        """Return the region of chunks before this GC run, or of their reference.

        NO_REGION for appended ones.
        """
        bases = plan.bases
        is_reference = np.zeros(len(plan), np.bool_)
        for container, rows in group_by_container(plan.locations.containers):
            is_reference[rows] = reference_blocks(self._containers.directory(ContainerId(container)))[plan.blocks[rows]]
        found = np.full(len(plan), NO_REGION, np.int32)
        containers = np.where(is_reference, bases.containers, plan.locations.containers)
        ordinals = np.where(is_reference, bases.ordinals, plan.locations.ordinals)
        for container, rows in group_by_container(containers):
            known = self._plan.regions.get(container)
            if known is not None:
                mine = ordinals[rows] < len(known)
                found[rows[mine]] = known[ordinals[rows[mine]]]
        return found

    def _merged_ranges(self, merged: Locations) -> list[tuple[int, int, int]]:
        """Return (offset, first, end) of each joined chunk: payload offset and rows of `merged`.

        As many consecutive chunks of one container as fit: each fingerprint takes 28 bytes.
        """
        lengths = self._reader.plan(merged).lengths.tolist()
        ranges, offset, held_bytes = list[tuple[int, int, int]](), 0, 0
        bounds = [0]
        for row, (source, length) in enumerate(zip(merged.containers.tolist(), lengths, strict=True)):
            if row and (source != merged.containers[row - 1] or held_bytes + length > self._bounds.joined_bytes):
                bounds.append(row)
                held_bytes = 0
            held_bytes += length
        bounds.append(len(merged))
        for first, last in pairwise(bounds):
            ranges.append((offset, first, last))
            offset += sum(lengths[first:last])
        return ranges

    def _reference_to(
        self, holder: ContainerId, to: int, content: U8, source: ContainerId, rows: NDArray[np.intp], depth: int
    ) -> BlockReference:
        base = Locations(np.array([holder], np.uint64), np.array([to], np.uint32))
        lengths = self._containers.directory(source).chunks.lengths[rows]
        best, size = base.take(np.zeros(len(rows), np.intp)), np.array([len(content)], np.uint32)
        block_slice = BlockSlice(container_layout.PATCH, depth, content, lengths, best, base, content, size)
        result = self._encoder(block_slice)
        return BlockReference(rows, holder, to, result)

    def _write_reference(self, new: NewGeneration, reference: BlockReference) -> None:
        rows, result = reference.rows, reference.result
        encoded = new.lengths[rows] if result.encoded is None else result.encoded
        new.write(rows, result, encoded, container_layout.REFERENCE)
        if result.block.kind == container_layout.RAW:
            new.clear_bases(rows)
            return
        to = Locations(np.full(len(rows), reference.holder, np.uint64), np.full(len(rows), reference.to, np.uint32))
        new.set_bases(rows, to, container_layout.REFERENCE_RANK)


def _wait_for_merged(block: PendingBlock) -> EncodedBlock:
    return replace(block(), role=container_layout.MERGED)


def _aligned_bases(lengths: NDArray[np.uint32], base_lengths: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return for each chunk the base at about the same relative offset of the prefix."""
    starts, ends = offsets_of(lengths).astype(np.float64), np.cumsum(base_lengths, dtype=np.float64)
    total = max(1.0, float(lengths.sum(dtype=np.float64)))
    found: NDArray[np.intp] = np.searchsorted(ends, starts / total * float(ends[-1]), side="right")
    return np.minimum(found, len(base_lengths) - 1)
