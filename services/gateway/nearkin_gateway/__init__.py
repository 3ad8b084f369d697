"""Gateway. Invariant: nothing is acknowledged before it is durable (I3)."""
