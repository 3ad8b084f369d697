"""LMDB index of one machine."""
