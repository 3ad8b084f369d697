"""The janitor: rebuilds the index and verifies the store; works on containers and manifests, the truth."""

from nearkin_maintenance.domain_owners import Tenants
from nearkin_maintenance.gc.gc_run import Collector, Steps
from nearkin_maintenance.gc.purge import Purge
from nearkin_maintenance.gc.reference_counts import Ledger
from nearkin_maintenance.index_rebuild import claims_of, fill_catalog, rebuild_index
from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_maintenance.repair.container_repair import Healer
from nearkin_maintenance.repair.store_repair import Repairer
from nearkin_maintenance.verify.integrity import Soundness, Unsound
from nearkin_maintenance.verify.scope import Choice
from nearkin_maintenance.verify.scrubber import Scrubber
from nearkin_maintenance.verify.verifier import Verifier

__all__ = [
    "Choice",
    "Collector",
    "Healer",
    "Ledger",
    "Purge",
    "Repairer",
    "Rewriter",
    "Scrubber",
    "Soundness",
    "Steps",
    "Tenants",
    "Unsound",
    "Verifier",
    "claims_of",
    "fill_catalog",
    "rebuild_index",
]
