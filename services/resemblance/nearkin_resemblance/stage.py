"""Resemblance stage: sketch fresh chunks and find a base candidate for each.

Invariant: every fresh chunk leaves the stage with its sketch; a candidate becomes a base only when it is encoded.
"""

from __future__ import annotations

import numpy as np

from nearkin_resemblance.feature_algorithms import sketcher
from nearkin_shared.config.settings import Settings
from nearkin_shared.pipeline.stage import LookupRequest, LookupResults
from nearkin_shared.types import U64, FreshBatch, Locations, PairedBatch
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool


class ResemblanceStage:
    """FirstFit (Finesse, section 5.1): the base is the first chunk with a super-feature.

    Super-features are tried in order.
    """

    name = "resemblance"

    def __init__(self, settings: Settings, *, looks_up: bool = True, helpers: ThreadPool = SERIAL) -> None:
        """Without `looks_up`, the delta stage requests candidates, for chunks that still need one.

        `helpers` sketch concurrently with the caller.
        """
        self.sketch = sketcher(settings.features)
        self._looks_up = looks_up
        self._helpers = helpers

    def reads(self, batch: FreshBatch, facts: LookupResults) -> LookupRequest | None:
        """Sketch the fresh chunks and request the first holder of each super-feature."""
        if facts.bases is not None or not self._looks_up:
            return None
        return LookupRequest(sketch=self.sketch.name, super_features=self._super_features(batch))

    def _super_features(self, batch: FreshBatch) -> U64:
        rows, segments = batch.fresh, batch.batch
        offsets, lengths = segments.offsets[rows], segments.lengths[rows]

        def sketched(part: slice) -> U64:
            return self.sketch.super_features(segments.payload, offsets[part], lengths[part])

        return np.concatenate(self._helpers.map(sketched, self._helpers.parts(lengths)))

    def decide(self, batch: FreshBatch, facts: LookupResults) -> PairedBatch:
        """Pair each fresh chunk with its candidate."""
        if facts.bases is None:
            count = len(batch.fresh)
            return PairedBatch(
                fresh=batch,
                sketch=self.sketch.name,
                super_features=self._super_features(batch),
                base_found=np.zeros(count, np.bool_),
                bases=Locations.empty(count),
                base_rank=np.zeros(count, np.uint8),
            )
        return PairedBatch(
            fresh=batch,
            sketch=self.sketch.name,
            super_features=facts.bases.super_features,
            base_found=facts.bases.found,
            bases=facts.bases.locations,
            base_rank=facts.bases.ranks,
        )
