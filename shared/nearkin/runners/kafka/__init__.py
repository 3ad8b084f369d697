"""The stages behind Kafka. Invariant: an offset is committed only after the effects of what lies before it (I4)."""
