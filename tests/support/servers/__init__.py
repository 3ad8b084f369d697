"""Real servers and processes for tests and for the local cluster."""
