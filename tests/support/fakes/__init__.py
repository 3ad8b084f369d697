"""Fakes with scripted faults."""
