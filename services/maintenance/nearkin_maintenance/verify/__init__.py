"""Verification and scrub."""
