"""Authentication and authorization: tokens, sessions, scopes."""
