"""Kafka runtime of the workers. Invariant: an offset is committed only after its record's effects are durable (I4)."""
