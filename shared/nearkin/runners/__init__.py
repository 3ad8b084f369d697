"""Runners: they answer what stages read and carry out what stages decide. Invariant: the stages are the same in all."""
