# size: the entry point only
"""Run a gateway, with an embedded store or stages of its own if so configured.

python -m nearkin.workers.gateway [--config FILE]
"""

from nearkin.embedded.gateway_backend import embedded_gateway
from nearkin.workers.edge_dedup import connect_edge
from nearkin_gateway.command import AppFactories, main

if __name__ == "__main__":
    main(obj=AppFactories(embedded_gateway, connect_edge))
