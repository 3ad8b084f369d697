"""Run workers on Kafka.

Invariant (I4): an offset is committed only after its record's effects are durable.
"""
