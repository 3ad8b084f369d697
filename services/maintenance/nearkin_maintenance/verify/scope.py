"""Choose the containers that verify reads completely.

Invariant: the same seed selects the same sample of the same containers.
"""

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
    """Selection of containers: all, a sample, or those written since a time.

    `sample`: a share above 0 and at most 1, drawn by `seed`. `since_us`: containers written at or after this time,
    microseconds since 1970, by their ids; a container that was rewritten counts as written, whenever that was. With
    both: a sample of these.
    """

    sample: float | None = None
    seed: int = 0
    since_us: int | None = None
    only: frozenset[int] | None = None
    """Exactly these containers, whatever the other fields select."""

    def __post_init__(self) -> None:
        """Raise BadInput for an invalid share or seed."""
        if self.sample is not None and not 0 < self.sample <= 1:
            raise BadInput(f"sample {self.sample}: want a share above 0 and at most 1, such as 0.01")
        if not 0 <= self.seed < SEED_MAX:
            raise BadInput(f"seed {self.seed}: want 0 to {SEED_MAX - 1}")

    @property
    def is_full(self) -> bool:
        """Return whether all containers are selected."""
        return self.sample is None and self.since_us is None and self.only is None

    def of(self, ids: Sequence[ContainerId], rewritten: frozenset[ContainerId]) -> set[ContainerId]:
        """Return the selected ones of `ids`, which ascend; a sample has at least one."""
        if self.only is not None:
            return set(ids) & self.only
        selected = list(ids)
        if self.since_us is not None:
            since = self.since_us
            selected = [c for c in ids if c in rewritten or ((c >> _ID_RANDOM_BITS) + 1) * 1000 > since]
        if self.sample is not None and selected:
            draw = random.Random(self.seed)  # noqa: S311 - no secret
            selected = draw.sample(selected, max(1, round(len(selected) * self.sample)))
        return set(selected)


EVERYTHING = VerifyScope()
