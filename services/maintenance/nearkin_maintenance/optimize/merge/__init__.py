"""Merge the chunks of many versions into one block, to shorten base chains.

Worked example. `merge_block_bytes` is 4 MiB and `delta.max_depth` is 4. A daily dump changes the same 64 KiB region
every day; each container C0 to C5 holds one version of it:

    day     0         1          2          3          4          5
    chunk   c0 raw    c1 <- c0   c2 <- c1   c3 <- c2   c4 <- c3   c5 <- c3
    depth   0         1          2          3          4          4

c4 is at the maximum depth, so c5 stores two days of changes, and a later cN all changes since day 3.

1 Plan (`merge_planner.py`): all of c1 to c5 lead to the region of c0 by their best bases. The region has room for them
  (6 x 64 KiB), enough versions depend on it, and more than CAPPED_SHARE of C0's bytes are at the maximum depth. So the
  plan merges c1, c2, ... into the region of c0, the oldest first.
2 Write C0 (`merge_writer.py`): its next generation has one raw block of c0, c1, ..., c5. Runs of merged chunks from one
  container are joined and appended as rows of their own; the rows of C0's own chunks keep their ordinals.
3 Write C1 to C5, after C0 is durable: in each, the block of the chunk becomes a reference block, a patch whose only
  base is the joined chunk in C0. The chunk keeps its ordinal and has depth 1.

    chunk   c0        c1         c2         c3         c4         c5
    stored  in M      -> M       -> M       -> M       -> M       -> M      M: merged block of C0, depth 0
    depth   0         1          1          1          1          1

When M is full, the next chunk starts a new region in its own container, whose block has the content of M as prefix and
depth 1; at the maximum depth, the region below M's is the parent. Recipes, manifests and the index do not change.

Invariant: no chunk gets deeper. A crash between 2 and 3 leaves chunks twice, and every version decodes.
"""
