"""`python -m nearkin_janitor`: makes the index in Redis again when it was lost, and scrubs the object store."""

from __future__ import annotations

from collections.abc import Callable

from nearkin.fingerprints import Fingerprinter, domain_of
from nearkin.index.protocols import Index
from nearkin.index.redis import rebuild_in_background
from nearkin.local_index import super_features_of
from nearkin.runners.kafka.lag import LagWatch
from nearkin.runners.kafka.worker import Context, command
from nearkin.store.containers import ContainerStore
from nearkin.store.manifests import ManifestStore
from nearkin_janitor.rebuild import rebuild_index
from nearkin_janitor.scrubbing import BackgroundScrub
from nearkin_janitor.tenants import Tenants


def start(context: Context) -> Callable[[], None]:
    """Watch the index and the groups' lag; return what ends that.

    One janitor of the fleet rebuilds at a time (a lease in Redis).
    """
    manifests = ManifestStore(context.objects)

    def fingerprinter(tenant: str) -> Fingerprinter:
        return Fingerprinter(context.secret, tenant, context.found.fingerprint_bits)

    def rebuild(index: Index) -> object:
        settings = context.settings
        containers = ContainerStore(context.objects, domain_of(settings.tenant), int(settings.base.cache_bytes))
        tenants = Tenants(fingerprinter, [settings.tenant], manifests)
        return rebuild_index(containers, manifests, index, tenants, super_features_of)

    stop_rebuilding = rebuild_in_background(context.index, rebuild).stop
    stop_looking = LagWatch(context.settings).start()

    scrub = BackgroundScrub(context.objects, context.current, fingerprinter, context.index)
    scrub.start()

    def stop() -> None:
        scrub.stop()
        stop_looking()
        stop_rebuilding()

    return stop


if __name__ == "__main__":
    command("janitor", [], start)()
