"""Rebase: encode live chunks against other bases, so that dead bases can be deleted.

Worked example. A week of versions v1 to v7 of one chunk; the versions 1 to 4 were deleted, and an earlier GC run marked
their chunks for deletion:

    chunk   v1 raw <- v2 <- v3 <- v4 <- v5        v6 <- v4        v7 <- v4
    depth   0         1     2     3     4         4               4
    state   dead      dead  dead  dead  live      live            live

1 Trees (`base_trees.py`): all seven lead to the root v1 by their best bases, so they are one tree. It would shrink:
  v1 to v4 take one raw chunk and three deltas, and their replacement costs one raw chunk, v5. `bases_worth_dropping`
  returns v1 to v4. Chains of merged blocks are decided as a whole (`unreferenced_merged_blocks.py`).
2 Positions (`stream_positions.py`): v5, v6 and v7 are in three containers, at about the same position of the stream.
3 Batch (`rebase_batch.py`): the tasks of one position run in all three containers, oldest first, so that a base which
  several of them need is decoded once.
4 Container (`container_rebase.py`): v5 finds no live chunk before it (`replacement_bases.py`) and is stored raw, at
  depth 0. v6 is offered v5, whose new depth 0 is below the 4 of v6, and takes depth 1; v7 is offered both, with the
  same result.

    chunk   v5 raw <- v6        v7 <- v5
    depth   0         1         1

5 Each container gets its next generation. Nothing depends on v1 to v4 any more: the sweep can delete them.

Invariant: a chunk is offered only bases shallower than itself, so no chunk gets deeper, and its dependents stay
decodable whatever the order of writes.
"""
