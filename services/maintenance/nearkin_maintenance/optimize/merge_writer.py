"""Containers with what was gathered. Invariant: each chunk stays where its number says, no deeper than before.

its own chunks of a stretch, then what that takes in: joined, behind all rows -> one block
beside each, for the container that it was taken from                         -> a block that refers to it
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.gc_plan import NUMBERS_MAX
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.retained_bytes import NAME_AND_ROW_BYTES, bytes_of_chunks
from nearkin_maintenance.optimize.block_writer import BlockWriter
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, VerifiedReader
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort, BlockSlice, EncodedResult
from nearkin_maintenance.optimize.merge_planner import NO_REGION, MergeBounds, MergePlan, plan_merge
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block_kinds import reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.limits import KIB, PREFIX_BYTES_MIN
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import Plan
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import I32, U8, Bools, ContainerId, Locations, group_by_container, offsets_of
from nearkin_shared.utils.frozen import frozen

REGION_SHARE = 8
"""A stretch of raw chunks is such a share of what a block holds at most: about so many versions of it fit."""
REGION_BYTES_MIN = 64 * KIB
JOINED_BYTES_MAX = 256 * KIB
"""Chunks are joined to one of as many bytes at most, or as a block of patches holds: as long as a chunk may be."""
PREFIX_BASES_MAX = 4096
PREFIX_SHARE_MAX = 2
"""What a block leans on is at most so many times as much as a block holds."""
SHALLOW_SHARE = 0.1
"""What is taken in may take so much more than it did. It lies less deep, and what leans on it tells less again: with
roots that are compressed further, 16 dumps gained nothing at once, and 2.6 of 38 MB all in all."""
REFERENCE_BYTES = 64
"""What a block of references takes about, besides its payload: its header, and its rows in the directory's tables."""


@frozen
class BlockReference:
    """A block that refers to what was taken in: `rows` of the container from which, ascending; `to` uint32: a row of
    `holder`.
    """

    rows: NDArray[np.intp]
    holder: ContainerId
    to: int
    recoded: EncodedResult


@frozen
class RewrittenContainer:
    """A container as it is to be written, and by container what is to refer to it then."""

    data: bytes
    references: dict[int, list[BlockReference]]
    grown: dict[int, NDArray[np.intp]]
    """Of each stretch that took something in the rows that this became."""


@frozen
class MergePlanner:
    """Plans what is gathered, and makes the generations that hold it."""

    containers: ContainerStore
    tenants: DomainOwners
    verified: VerifiedReader
    recode: BlockEncoderPort

    def plan(
        self, reach: LiveSet, ids: Collection[int], young: Collection[int], block_bytes: int, versions_min: int
    ) -> MergePlan | None:
        """Return what it is worth to gather into blocks of up to `block_bytes`, None: nothing. Raises Corrupt.

        Of what fewer than `versions_min` have changed nothing is.
        """
        if not self.recode.can_merge:
            return None
        stretch_bytes = max(block_bytes // REGION_SHARE, REGION_BYTES_MIN)
        joined_bytes = min(self.recode.delta_bytes, JOINED_BYTES_MAX)
        bounds = MergeBounds(self.recode.depth_max, block_bytes, stretch_bytes, joined_bytes, versions_min)
        return plan_merge(reach, ids, young, bounds)

    def executor(self, gathering: MergePlan) -> MergeExecutor:
        """Return what makes the containers, the oldest first."""
        return MergeExecutor(self, gathering)


class MergeExecutor:
    """Makes generations with gathered blocks, and with references to them, in the order of the plan."""

    def __init__(self, gatherer: MergePlanner, gathering: MergePlan) -> None:
        self._containers, self._tenants, self._recode = gatherer.containers, gatherer.tenants, gatherer.recode
        self._gathering = gathering
        self._bounds = gathering.bounds
        self._reader = ChunkReader(self._containers, self._recode.helpers)
        self._verified = gatherer.verified
        self._laying = BlockWriter(self._containers, self._verified, self._recode)
        self._waiting: dict[int, list[BlockReference]] = {}
        self._grown: dict[int, Locations] = {}
        """Of each stretch that took something in what it holds by now."""
        self._made: RewrittenContainer | None = None

    def data(self, container: ContainerId) -> bytes | None:
        """Return the next generation of a container, None where it stays as it is.

        Raises Corrupt where what it holds, or is to take in, is not what its name says.
        """
        directory, references = self._containers.directory(container), self._waiting.pop(container, [])
        fingerprinter = self._tenants.fingerprinter(directory.domain)
        self._made = None
        if fingerprinter is None or len(directory.blocks) > NUMBERS_MAX:
            return None
        if taking := self._gathering.merge_targets(container):
            made = self._rewrite(directory, references, taking, fingerprinter)
            if made is not None and self._saves_bytes(directory, made):
                self._made = made
        if self._made is None and references:
            self._made = self._rewrite(directory, references, [], fingerprinter)
        return None if self._made is None else self._made.data

    def on_container_rewritten(self, container: ContainerId) -> None:
        """Hear that what was made last is there: others may refer to it."""
        assert self._made is not None
        for source, references in self._made.references.items():
            self._waiting.setdefault(source, []).extend(references)
        for stretch, rows in self._made.grown.items():
            here = np.full(len(rows), container, np.uint64)
            self._grown[stretch] = Locations(here, rows.astype(np.uint32))

    def _saves_bytes(self, directory: Directory, made: RewrittenContainer) -> bool:
        """Return whether what is taken in takes less from then on, or little more: it lies less deep."""
        gained, taken = float(directory.container_bytes - len(made.data)), 0.0
        for source, references in made.references.items():
            shares = bytes_of_chunks(self._containers.directory(ContainerId(source)))
            for reference in references:
                taken += float(np.maximum(shares[reference.rows] - NAME_AND_ROW_BYTES, 0).sum())
                gained -= len(reference.recoded.block.payload) + REFERENCE_BYTES
        return gained + taken >= -SHALLOW_SHARE * taken

    def _rewrite(
        self, directory: Directory, references: list[BlockReference], taking: list[int], fingerprinter: Fingerprinter
    ) -> RewrittenContainer | None:
        """Return the next generation, None: nothing is another."""
        old, container = directory.chunks, directory.container
        new, made = NewGeneration(self._containers, directory, old.there, self._recode), RewrittenContainer(b"", {}, {})
        laid = np.zeros(len(old), np.bool_)
        for reference in references:
            self._write_reference(new, reference)
            laid[reference.rows] = True
        stretches = self._gathering.regions[container]
        for stretch in taking:
            rows = np.flatnonzero(old.there & (stretches == stretch) & ~laid)
            if len(rows) and self._write_region(new, directory, stretch, rows, fingerprinter, made):
                laid[rows] = True
        if not laid.any():
            return None
        self._write_remaining(new, directory, laid)
        if new.blocks_used > container_layout.BLOCKS_MAX:
            return None
        return RewrittenContainer(new.encode(np.zeros(0, np.uint32)), made.references, made.grown)

    def _write_remaining(self, new: NewGeneration, directory: Directory, laid: Bools) -> None:
        """Copy blocks of which nothing is laid, and lay what is left of the others."""
        old, raw = directory.chunks, [np.zeros(0, np.intp)]
        again = np.zeros(len(directory.blocks), np.bool_)
        again[old.blocks[laid]] = True
        for number in np.flatnonzero(directory.blocks.raw > 0).tolist():
            if not again[number]:
                new.copy(number)
                continue
            rows = np.flatnonzero(old.there & (old.blocks == number) & ~laid)
            if directory.blocks.kinds[number] == container_layout.RAW:
                raw.append(rows)
            elif len(rows):
                self._laying.some_of(new, directory, number, rows)
        self._laying.raw(new, directory, np.sort(np.concatenate(raw)))  # a row lies where those before it end

    def _write_region(
        self,
        new: NewGeneration,
        directory: Directory,
        stretch: int,
        rows: NDArray[np.intp],
        fingerprinter: Fingerprinter,
        made: RewrittenContainer,
    ) -> bool:
        """Lay a stretch and behind it what it takes in, if that lies no deeper so; return whether it did."""
        old, parent = directory.chunks, int(self._gathering.parents[stretch])
        begun, number = bool(self._gathering.begun[stretch]), int(old.blocks[rows[0]])
        prefix = self._content(parent) if begun else directory.prefixes.of(number)
        depth = int(self._reader.plan(prefix).depths.max(initial=0)) + 1 if len(prefix) else 0
        taken = self._gathering.chunks_merged_into(stretch)
        taken = taken.take(self._reader.plan(taken).depths > depth)
        if not len(taken) or depth > int(old.depths[rows].min()):
            return False
        if depth:
            here = Locations(np.full(len(rows), directory.container, np.uint64), rows.astype(np.uint32))
            prefix = self._with_bases(stretch, prefix, Locations.join([here, taken]), depth)
        plan = self._reader.plan(prefix)
        base_payload = self._reader.fetch(plan)
        if len(prefix) and len(base_payload) < PREFIX_BYTES_MIN:
            return False
        more, parts = self._verified.read(directory.domain, taken), self._merged_ranges(taken)
        lengths = np.diff([offset for offset, _, _ in parts] + [len(more)]).astype(np.uint32)
        behind = new.append(fingerprinter.name_chunks(more, offsets_of(lengths), lengths), lengths)
        payload = np.concatenate([self._laying.read_verified(directory, rows), more])
        block = self._recode.encode_merged(payload, prefix, base_payload, depth)
        all_rows, all_lengths = np.concatenate([rows, behind]), np.concatenate([old.lengths[rows], lengths])
        new.write_pending(all_rows, block, depth, prefix, all_lengths)
        if not len(prefix):
            new.clear_bases(all_rows)
        else:  # what is at about the same place counts as the best base
            ranks = np.where(all_rows < len(old), container_layout.LOCALITY_RANK, container_layout.MERGED_RANK).astype(
                np.uint8
            )
            new.set_bases(all_rows, prefix.take(_aligned_bases(all_lengths, plan.lengths)), ranks)
            if not begun:
                new.keep_bases(rows)
        made.grown[stretch] = all_rows
        for (offset, first, last), row, length in zip(parts, behind.tolist(), lengths.tolist(), strict=True):
            source = int(taken.containers[first])
            of = taken.ordinals[first:last].astype(np.intp)
            content = more[offset : offset + length]
            refers = self._with_references(directory.container, row, content, ContainerId(source), of, depth + 1)
            made.references.setdefault(source, []).append(refers)
        return True

    def _content(self, stretch: int) -> Locations:
        """Return what a stretch holds by now: what one begun beside it leans on."""
        content = self._grown.get(stretch)
        if content is None:
            content = self._gathering.own_chunks(stretch)
            there = self._containers.directory(ContainerId(int(content.containers[0]))).chunks.there
            content = content.take(there[content.ordinals])
        return content

    def _with_bases(self, stretch: int, prefix: Locations, chunks: Locations, depth: int) -> Locations:
        """Return a prefix with those best bases of chunks that lie in stretches further up.

        What has not changed since long before lies in none of those that newer ones lean on.
        """
        bases = self._reader.plan(chunks).bases.distinct()
        bases = bases.take(bases.containers != 0)
        plan = self._reader.plan(bases)
        found = plan.depths < depth
        found &= np.isin(self._regions_of(plan), self._ancestor_regions(stretch)) & ~bases.is_in(prefix)
        bases = bases.take(found)
        held_bytes = int(self._reader.plan(prefix).lengths.sum(dtype=np.int64))
        room_bytes = PREFIX_SHARE_MAX * self._bounds.block_bytes - held_bytes
        fits = np.cumsum(self._reader.plan(bases).lengths, dtype=np.int64) <= room_bytes
        return Locations.join([prefix, bases.take(fits)]).take(slice(0, PREFIX_BASES_MAX))

    def _ancestor_regions(self, stretch: int) -> list[int]:
        """Return the stretches on which the parent of one leans, and those below them."""
        parents, found = self._gathering.parents, list[int]()
        above = int(parents[stretch])
        while above != NO_REGION and (above := int(parents[above])) != NO_REGION:
            found.append(above)
        return found

    def _regions_of(self, plan: Plan) -> I32:
        """Return where chunks lay before this round, or what they refer to; NOWHERE what it appended."""
        bases = plan.bases
        refers = np.zeros(len(plan), np.bool_)
        for container, rows in group_by_container(plan.locations.containers):
            refers[rows] = reference_blocks(self._containers.directory(ContainerId(container)))[plan.blocks[rows]]
        found = np.full(len(plan), NO_REGION, np.int32)
        containers = np.where(refers, bases.containers, plan.locations.containers)
        ordinals = np.where(refers, bases.ordinals, plan.locations.ordinals)
        for container, rows in group_by_container(containers):
            known = self._gathering.regions.get(container)
            if known is not None:
                mine = ordinals[rows] < len(known)
                found[rows[mine]] = known[ordinals[rows[mine]]]
        return found

    def _merged_ranges(self, taken: Locations) -> list[tuple[int, int, int]]:
        """Return what is to be one chunk each of what is taken in: its offset, and from and to which row it goes.

        Chunks of one container in their order, as many as fit: a name takes 28 bytes.
        """
        lengths = self._reader.plan(taken).lengths.tolist()
        parts, offset, held_bytes = list[tuple[int, int, int]](), 0, 0
        bounds = [0]
        for row, (source, length) in enumerate(zip(taken.containers.tolist(), lengths, strict=True)):
            if row and (source != taken.containers[row - 1] or held_bytes + length > self._bounds.joined_bytes):
                bounds.append(row)
                held_bytes = 0
            held_bytes += length
        bounds.append(len(taken))
        for first, last in pairwise(bounds):
            parts.append((offset, first, last))
            offset += sum(lengths[first:last])
        return parts

    def _with_references(
        self, holder: ContainerId, to: int, content: U8, source: ContainerId, rows: NDArray[np.intp], depth: int
    ) -> BlockReference:
        base = Locations(np.array([holder], np.uint64), np.array([to], np.uint32))
        lengths = self._containers.directory(source).chunks.lengths[rows]
        best, size = base.take(np.zeros(len(rows), np.intp)), np.array([len(content)], np.uint32)
        part = BlockSlice(container_layout.PATCH, depth, content, lengths, best, base, content, size)
        recoded = self._recode(part)
        return BlockReference(rows, holder, to, recoded)

    def _write_reference(self, new: NewGeneration, reference: BlockReference) -> None:
        rows, recoded = reference.rows, reference.recoded
        new.write(rows, recoded, new.lengths[rows] if recoded.encoded is None else recoded.encoded)
        if recoded.block.kind == container_layout.RAW:
            new.clear_bases(rows)
            return
        to = Locations(np.full(len(rows), reference.holder, np.uint64), np.full(len(rows), reference.to, np.uint32))
        new.set_bases(rows, to, container_layout.REFERENCE_RANK)


def _aligned_bases(lengths: NDArray[np.uint32], base_lengths: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return for each chunk the base that stands at about the same place of the prefix as it of the block."""
    at, ends = offsets_of(lengths).astype(np.float64), np.cumsum(base_lengths, dtype=np.float64)
    total = max(1.0, float(lengths.sum(dtype=np.float64)))
    found: NDArray[np.intp] = np.searchsorted(ends, at / total * float(ends[-1]), side="right")
    return np.minimum(found, len(base_lengths) - 1)
