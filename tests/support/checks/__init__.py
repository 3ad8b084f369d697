"""Checks and inspections that tests share."""
