"""Logs, traces, metrics and health of a process."""
