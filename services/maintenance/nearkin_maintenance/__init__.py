"""Maintenance service: garbage collection, verify, scrub, repair and index rebuild."""

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.gc_context import Steps
from nearkin_maintenance.gc.gc_run import GcRun
from nearkin_maintenance.gc.purge import Purge
from nearkin_maintenance.gc.reference_counts import ReferenceCounts
from nearkin_maintenance.index_rebuild import KnownObjects, entries_of_container, fill_catalog, rebuild_index
from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_maintenance.repair.container_repair import ContainerRepairer
from nearkin_maintenance.repair.store_repair import Repairer
from nearkin_maintenance.verify.integrity import CorruptChunks, IntegrityChecker
from nearkin_maintenance.verify.scope import VerifyScope
from nearkin_maintenance.verify.scrubber import Scrubber
from nearkin_maintenance.verify.verifier import IndexedVersions, Verifier

__all__ = [
    "ContainerRepairer",
    "CorruptChunks",
    "DomainOwners",
    "GcRun",
    "IndexedVersions",
    "IntegrityChecker",
    "KnownObjects",
    "Purge",
    "ReferenceCounts",
    "Repairer",
    "Rewriter",
    "Scrubber",
    "Steps",
    "Verifier",
    "VerifyScope",
    "entries_of_container",
    "fill_catalog",
    "rebuild_index",
]
