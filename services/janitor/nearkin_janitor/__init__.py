"""The janitor: rebuilds the index and verifies the store; works on containers and manifests, the truth."""

from nearkin_janitor.rebuild import claims_of, rebuild_index
from nearkin_janitor.verify import verify_store

__all__ = ["claims_of", "rebuild_index", "verify_store"]
