"""Sample data, stores and messages for tests."""
