"""Committer: assembles the placed segments of a blob into a committed version."""
