"""Types and contracts of the compiled table from tags to container numbers.

Invariant: arguments are checked first; a call that lacks memory leaves the table usable.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

PARTITIONS: Final[int]
"""Number of partitions, by the first 8 bits of a tag."""
NUMBER_MAX: Final[int]
"""Highest container number."""
FILTER_BITS_MIN: Final[int]
FILTER_BITS_MAX: Final[int]
LEVEL_MAX: Final[int]
"""Highest level."""

def tag_mixes(tags: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return a number for each tag, spread evenly; a tag has level k if it is below 2^(32 - k).

    It depends on the first 28 bits of the tag, which the table can give back. Raises `BadInput`.
    """

class TagTable:
    """Bucketised cuckoo filter with 4 entries of 5 bytes a bucket, each with a container's number.

    At most 0.95 full; a partition that fills up grows by a sixteenth, so an entry takes 5.3 to 5.6 bytes. `filter_bits`
    (8 to 24) bounds the bits of a tag that are compared beyond its bucket; an entry has as many as its container's
    number leaves, 15 or more up to 10^9 entries of containers with 100 chunks or more.
    """

    def __init__(self, filter_bits: int = ...) -> None: ...
    @property
    def filter_bits(self) -> int:
        """Return the bound on the bits that are compared."""
    @property
    def nbytes(self) -> int:
        """Return the bytes allocated for entries."""
    @property
    def dropped(self) -> int:
        """Return the number of entries for which no slot was found: more than eight of one tag."""
    @property
    def tag_bits(self) -> int:
        """Return the fewest bits that an entry has beyond its bucket."""
    def put_many(self, tags: NDArray[np.uint64], number: int) -> None:
        """Add the tags of a container, uint64 (n,). A tag that the container has already is not added again.

        Raises `BadInput`, and `RetryableError` when memory is short: then some tags may have been added.
        """
    def candidates(self, tags: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return (rows, numbers): containers that may have a tag, at most 8 a row, by row and ascending number.

        Every container of a tag is among them, other containers with a probability of 8 / 2^bits. Raises `BadInput`.
        """
    def remove_many(self, tags: NDArray[np.uint64], number: int) -> int:
        """Remove tags of a container; return how many entries were removed. Raises `BadInput`."""
    def remove_containers(self, numbers: NDArray[np.uint32]) -> int:
        """Remove all entries of containers, in time proportional to the table; return how many. Raises `BadInput`."""
    def keep_levels(self, levels: NDArray[np.uint8]) -> int:
        """Remove each tag whose level is below that of its container, `levels` by number; return how many.

        In time proportional to the table, which shrinks where less than three quarters are used. Containers beyond
        `levels` keep all. Raises `BadInput`, and `RetryableError` when memory is short: the tags are removed then.
        """
    def save_partition(self, partition: int) -> bytes:
        """Return a partition's entries. Raises `BadInput`."""
    def load_partition(self, partition: int, data: bytes | memoryview) -> None:
        """Replace a partition by what `save_partition` returned.

        Raises `BadInput` for anything else, and `RetryableError` when memory is short.
        """
    def __len__(self) -> int: ...
