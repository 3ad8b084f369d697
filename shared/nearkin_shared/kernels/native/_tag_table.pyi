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

class TagTable:
    """Bucketised cuckoo filter with 4 entries of 5 bytes a bucket, each with a container's number.

    At most 0.95 full; a partition that fills up grows by a twelfth, so an entry takes 5.3 to 5.7 bytes. `filter_bits`
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
    def save_partition(self, partition: int) -> bytes:
        """Return a partition's entries. Raises `BadInput`."""
    def load_partition(self, partition: int, data: bytes | memoryview) -> None:
        """Replace a partition by what `save_partition` returned.

        Raises `BadInput` for anything else, and `RetryableError` when memory is short.
        """
    def __len__(self) -> int: ...
