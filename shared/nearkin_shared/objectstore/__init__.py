"""Object stores and their wrappers. Invariant: what `put_new` has returned for survives a crash."""
