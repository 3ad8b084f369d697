"""Which containers a verification reads in whole. Invariant: of the same containers the same seed draws the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

from nearkin_shared.errors import BadInput
from nearkin_shared.types import ContainerId
from nearkin_shared.utils.frozen import frozen

_ID_RANDOM_BITS = 20
SEED_MAX = 1 << 63


@frozen
class VerifyScope:
    """All of them, or fewer.

    `sample`: a share above 0 and at most 1, drawn by `seed`. `since_us`: those written at or after this time,
    microseconds since 1970, by their ids; one that was written anew since counts as written, whenever that was. Both:
    a share of these.
    """

    sample: float | None = None
    seed: int = 0
    since_us: int | None = None
    only: frozenset[int] | None = None
    """Of all of them these alone, whatever the rest says."""

    def __post_init__(self) -> None:
        """Raise BadInput for what is no share, seed or time."""
        if self.sample is not None and not 0 < self.sample <= 1:
            raise BadInput(f"sample {self.sample}: want a share above 0 and at most 1, such as 0.01")
        if not 0 <= self.seed < SEED_MAX:
            raise BadInput(f"seed {self.seed}: want 0 to {SEED_MAX - 1}")

    @property
    def is_full(self) -> bool:
        """Return whether nothing is left out."""
        return self.sample is None and self.since_us is None and self.only is None

    def of(self, ids: Sequence[ContainerId], rewritten: frozenset[ContainerId]) -> set[ContainerId]:
        """Return which of `ids`, ascending, are read in whole; a sample is at least one."""
        if self.only is not None:
            return set(ids) & self.only
        wanted = list(ids)
        if self.since_us is not None:
            since = self.since_us
            wanted = [c for c in ids if c in rewritten or ((c >> _ID_RANDOM_BITS) + 1) * 1000 > since]
        if self.sample is not None and wanted:
            draw = random.Random(self.seed)  # noqa: S311 - no secret
            wanted = draw.sample(wanted, max(1, round(len(wanted) * self.sample)))
        return set(wanted)


EVERYTHING = VerifyScope()
