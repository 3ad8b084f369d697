"""Service `index`: one shard of a fleet's index."""
