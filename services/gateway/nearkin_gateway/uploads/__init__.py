"""Uploads: plain and resumable (tus), from first byte to result."""
