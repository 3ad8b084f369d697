"""Repair of damaged containers."""
