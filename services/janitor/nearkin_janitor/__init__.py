"""The janitor: rebuilds the index and verifies the store; works on containers and manifests, the truth."""

from nearkin_janitor.choosing import Choice
from nearkin_janitor.collect import Collector, Steps
from nearkin_janitor.heal import Healer
from nearkin_janitor.ledger import Ledger
from nearkin_janitor.purge import Purge
from nearkin_janitor.rebuild import claims_of, fill_catalog, rebuild_index
from nearkin_janitor.repair import Repairer
from nearkin_janitor.rewrite import Rewriter
from nearkin_janitor.scrub import Scrubber
from nearkin_janitor.soundness import Soundness, Unsound
from nearkin_janitor.tenants import Tenants
from nearkin_janitor.verify import Verifier

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
