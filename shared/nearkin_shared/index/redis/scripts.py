# size: the Lua sources and their loader have a reason to change of their own.
"""Lua scripts of the Redis index.

Invariant: each script accesses one Cluster slot, may be repeated, and changes nothing if its epoch has ended.

A table is stored in partitions; a partition is one Redis hash that contains a linear hash table (Litwin, VLDB 1980):

    field ""   "level split entries": there are 2^level + split buckets
    field n    n as 3 bytes, bucket n: entries of one width, key then value, in order of insertion
    field g    GC generation: every entry withdrawn by the GC runs up to this one has been removed
    field r    run_id of the server when the partition was created, adopted or last settled
    field f    exists while entries of published containers may be missing: the partition was created empty
    field m    highest number ever inserted

    h = the first 24 bits of an entry's key, little-endian; the entry is in bucket h mod 2^level or, if that is below
    `split`, in bucket h mod 2^(level + 1)

When entries outgrow buckets x `bucket_entries` the bucket at `split` is split in two. The hash's name contains the
epoch, so that a client with another epoch finds no state.

The sources are in `lua/`: each begins with a comment on its reply, KEYS and ARGV. "nil" as a reply means that the
partition has no state, or that the epoch ended. A line `--include NAME` is replaced by `lua/include/NAME.lua`.
"""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

DAMAGED = "NEARKIN-DAMAGED"
"""Start of an error reply; the key with an unexpected value follows."""
LEVEL_MAX = 24
"""Bits of a key that choose its bucket: with 40 entries each, 2^29 entries per partition; then buckets grow longer."""
BUCKET_ENTRIES_MAX = 2048
"""Limit of a bucket: crafted super-features that share a bucket must not slow down every call that reads it."""
HASHED_BYTES = 3
"""Bytes at the start of a key that choose its bucket (LEVEL_MAX bits)."""
_INCLUDE = re.compile(r"^--include (\w+)$", re.MULTILINE)
_FOLDER = files(__package__) / "lua"


def _read(folder: Traversable, name: str) -> str:
    """Return a Lua source with its includes."""
    source = (folder / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: _read(_FOLDER / "include", match[1]).rstrip("\n"), source)


def _read_all() -> dict[str, str]:
    """Return all scripts by name, each after the constants that it may use."""
    numbers = {"LEVEL_MAX": LEVEL_MAX, "BUCKET_ENTRIES_MAX": BUCKET_ENTRIES_MAX, "HASHED_BYTES": HASHED_BYTES}
    constants = f"local DAMAGED, {', '.join(numbers)} = '{DAMAGED}', {', '.join(map(str, numbers.values()))}\n"
    names = sorted(path.name.removesuffix(".lua") for path in _FOLDER.iterdir() if path.name.endswith(".lua"))
    return {name: constants + _read(_FOLDER, name) for name in names}


SOURCES = _read_all()
"""All scripts by name."""
