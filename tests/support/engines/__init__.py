"""Test engines: crash, power cut, races, mutations, chaos."""
