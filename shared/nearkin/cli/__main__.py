"""`python -m nearkin.cli` is the `nearkin` command."""

import sys

from nearkin.cli import main

sys.exit(main())
