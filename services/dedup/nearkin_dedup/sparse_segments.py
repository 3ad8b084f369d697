"""Check sparse segments, from which their sender left out the bytes of known chunks.

    claim of the sender          -> the index has the name -> its location
    "container 7, ordinal 12"    -> the index lacks it     -> container 7 has this name at 12, and keeps it: the claim
                                 -> neither                -> the blob fails; its sender uploads it again

A GC run may withdraw an entry after the sender's lookup. The chunk itself stays for a grace, and for good if a version
that names it is committed by then: the location that the lookup returned is the lease (I6).

Invariants: no claim is believed. Names are computed again from bytes that were sent, or found in the store. The
claims of a message name at most CLAIMED_CONTAINERS_MAX containers that are read (I10).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt, NotFound, PermanentError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.message_batches import JoinedFresh
from nearkin_shared.kafka.tenant_context import TenantContext
from nearkin_shared.kernels.fingerprint_table import first_occurrence
from nearkin_shared.pipeline.stage import FoundLocations, LookupRequest, LookupResults
from nearkin_shared.storage.pending_delete_watch import is_listed
from nearkin_shared.types import U8, ZERO, Bools, ContainerId, FreshBatch, Locations, group_by_container

CLAIMED_CONTAINERS_MAX = 64
"""Containers that claims of a message may name: at 100 ms for a directory the other uploads wait for 6 s. A GC run
withdraws entries of few containers while an upload is in flight; a message has room for claims of 50,000."""
Rows = NDArray[np.intp]


def check_names(sparse: JoinedFresh, fingerprinter: Fingerprinter, what: str) -> None:
    """Refuse wrong names of segments and of all-zero chunks.

    Both would be stored under the name of another content. The delta stage checks the chunks with bytes.

    Raises: Corrupt.
    """
    batch = sparse.joined.batch
    wrong = np.any(fingerprinter.name_segments(batch.names, batch.chunk_bounds) != batch.segment_ids)
    if wrong or (
        batch.zero.any() and np.any(fingerprinter.name_zeros(batch.lengths[batch.zero]) != batch.names[batch.zero])
    ):
        raise Corrupt(f"{what}: a segment or an all-zero chunk fails fingerprint verification: check its sender")


def check_complete(sparse: JoinedFresh, found: FreshBatch, what: str) -> None:
    """Refuse chunks that are neither stored nor sent. Raises PermanentError."""
    missing = int(np.count_nonzero(~sparse.carried[found.fresh]))
    if missing:
        raise PermanentError(
            f"{what}: {missing} chunks are not in the store any more, and were left out as known; upload the blob again"
        )


class ClaimedLookups:
    """Lookups of names: the index, then the claims in sparse segments."""

    def __init__(self, sparse: JoinedFresh, lane: TenantContext, what: str) -> None:
        """`what` names the messages in errors."""
        self._sparse, self._lane, self._what = sparse, lane, what
        self._read: set[int] = set()
        """Containers that claims name, whose directories were read: those last used are cached."""
        self._unreadable: set[int] = set()

    def answer(self, reads: LookupRequest, facts: LookupResults) -> LookupResults:
        """Return `facts` with the answers added.

        Raises StoreUnavailable, PermanentError beyond CLAIMED_CONTAINERS_MAX.
        """
        facts = self._lane.facts.answer(reads, facts)
        if reads.names is None or facts.chunks is None or facts.chunks.found.all():
            return facts
        return replace(facts, chunks=self._with_claims(reads.names, facts.chunks))

    def _with_claims(self, names: U8, found: FoundLocations) -> FoundLocations:
        """Return the answer, with the claims that are true for names that the index lacks."""
        batch, sparse = self._sparse.joined.batch, self._sparse
        claimed = np.flatnonzero(sparse.chunk_known & ~batch.zero)
        if not len(claimed):
            return found
        unknown, sent = np.flatnonzero(~found.found), batch.names[sparse.carried]
        first = first_occurrence(np.concatenate([sent, batch.names[claimed], names[unknown]]))[-len(unknown) :]
        first -= len(sent)
        is_claimed = (first >= 0) & (first < len(claimed))
        rows, wanted = claimed[first[is_claimed]], unknown[is_claimed]
        locations = self._claims_of(rows)
        true = self._are_true(locations, batch.names[rows])
        result = Locations(found.locations.containers.copy(), found.locations.ordinals.copy())
        result.containers[wanted[true]] = locations.containers[true]
        result.ordinals[wanted[true]] = locations.ordinals[true]
        is_found = found.found.copy()
        is_found[wanted[true]] = True
        return FoundLocations(result, is_found)

    def _claims_of(self, rows: Rows) -> Locations:
        """Return the claimed locations of chunks; in a known segment by its recipe."""
        sparse, bounds = self._sparse, self._sparse.joined.batch.chunk_bounds
        result = Locations(sparse.chunk_locations.containers[rows], sparse.chunk_locations.ordinals[rows])
        of_segment = np.searchsorted(bounds, rows, side="right") - 1
        is_by_segment = (result.containers == 0) & sparse.segment_known[of_segment]
        for segment in np.unique(of_segment[is_by_segment]).tolist():
            mine = np.flatnonzero(is_by_segment & (of_segment == segment))
            recipe = self._recipe(sparse.segment_locations.take(slice(segment, segment + 1)))
            if len(recipe) == int(bounds[segment + 1]) - int(bounds[segment]):
                chosen = recipe.take(rows[mine] - int(bounds[segment]))
                result.containers[mine], result.ordinals[mine] = chosen.containers, chosen.ordinals
        return result

    def _recipe(self, segment: Locations) -> Locations:
        """Return the chunks of a stored segment; none if it is not there."""
        directory = self._directory(int(segment.containers[0]))
        if directory is None:
            return Locations.empty()
        recipes, ordinal = directory.segments, int(segment.ordinals[0])
        if ordinal >= len(recipes):
            return Locations.empty()
        return recipes.chunks.take(slice(int(recipes.bounds[ordinal]), int(recipes.bounds[ordinal + 1])))

    def _are_true(self, locations: Locations, names: U8) -> Bools:
        """Return which chunks are where they are claimed to be, intact, for half a grace."""
        self._lane.collected.refresh()
        true = ~self._lane.collected.is_expiring(locations)
        true &= ~is_listed(self._lane.quarantine.read(), locations)
        for container, rows in group_by_container(locations.containers):
            if container in (0, ZERO):
                true[rows] = False
                continue
            directory = self._directory(int(container))
            if directory is None:
                true[rows] = False
                continue
            chunks = directory.chunks
            ordinals = locations.ordinals[rows]
            beyond = ordinals >= len(chunks)
            at = np.where(beyond, 0, ordinals)
            true[rows] &= ~beyond & chunks.there[at] & np.all(chunks.names[at] == names[rows], axis=1)
        return true

    def _directory(self, container: int) -> Directory | None:
        """Return the directory of a claimed container, None if it cannot be read.

        Raises StoreUnavailable, PermanentError.
        """
        if container in self._unreadable:
            return None
        if container not in self._read and len(self._read) == CLAIMED_CONTAINERS_MAX:
            raise PermanentError(
                f"{self._what}: chunks left out as known are not in the index, and their claims name more than "
                f"{CLAIMED_CONTAINERS_MAX} containers; upload the blob again"
            )
        self._read.add(container)
        try:
            return self._lane.containers.directory(ContainerId(container))
        except (Corrupt, NotFound):
            self._unreadable.add(container)
            return None
