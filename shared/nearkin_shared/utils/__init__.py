"""Helpers without knowledge of stores: memory, threads, files, signals, terminal."""
