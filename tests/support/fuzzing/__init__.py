"""Fuzzing engine and its targets."""
