"""Store folders as one version, and restore them."""
