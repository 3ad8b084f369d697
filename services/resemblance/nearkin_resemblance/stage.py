"""Resemblance stage. Invariant: every fresh chunk leaves with its sketch; a base is only a candidate until encoded."""

from __future__ import annotations

from nearkin.config import Settings
from nearkin.records import FreshBatch, PairedBatch
from nearkin.stage import Facts, Reads
from nearkin_resemblance.algorithms import sketcher


class ResemblanceStage:
    """FirstFit (Finesse, section 5.1): the SFs in order; the first chunk stored with one is the base."""

    name = "resemblance"

    def __init__(self, settings: Settings) -> None:
        self.sketch = sketcher(settings.features)

    def reads(self, batch: FreshBatch, facts: Facts) -> Reads | None:
        """Sketch the fresh chunks and ask for the first holder of each super-feature."""
        if facts.bases is not None:
            return None
        rows = batch.fresh
        super_features = self.sketch.super_features(
            batch.batch.payload, batch.batch.offsets[rows], batch.batch.lengths[rows]
        )
        return Reads(sketch=self.sketch.name, super_features=super_features)

    def decide(self, batch: FreshBatch, facts: Facts) -> PairedBatch:
        """Pair each fresh chunk with its candidate."""
        assert facts.bases is not None
        return PairedBatch(
            fresh=batch,
            sketch=self.sketch.name,
            super_features=facts.bases.super_features,
            base_found=facts.bases.found,
            bases=facts.bases.locations,
            base_rank=facts.bases.ranks,
        )
