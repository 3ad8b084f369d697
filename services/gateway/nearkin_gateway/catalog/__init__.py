"""Listings and versions for readers."""
