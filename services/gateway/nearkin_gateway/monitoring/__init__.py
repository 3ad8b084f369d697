"""Audit log, usage, rolling statistics and state of the pipeline."""
