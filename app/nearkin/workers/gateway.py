# size: the entry point only
"""Run a gateway, with an embedded store if so configured.

python -m nearkin.workers.gateway [--config FILE]
"""

from nearkin.embedded.gateway_backend import embedded_gateway
from nearkin_gateway.command import main

if __name__ == "__main__":
    main(obj=embedded_gateway)
