"""The dashboard.

Invariant: pages show the data of the API and change data through the API only.

browser --cookie--> pages (Jinja2, no inline script or style) --> the objects that /v1 uses
        --cookie, CSRF token, Origin--> /v1                       uploads by tus, deletions, settings, replays
"""

from nearkin_gateway.dashboard.pages import install

__all__ = ["install"]
