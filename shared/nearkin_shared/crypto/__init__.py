"""Keys of encrypted stores: keyring, key wrapping, erasure records, TLS files."""
