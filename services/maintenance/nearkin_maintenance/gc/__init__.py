"""Garbage collection: mark, plan, sweep, pending deletes, schedule."""
