"""`python -m nearkin_gateway [--config FILE]` runs a gateway."""

from nearkin_gateway.command import main

main()
