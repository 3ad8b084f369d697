"""The dashboard. Invariant: its pages show what the API answers, and change nothing but through the API.

browser --cookie--> pages (Jinja2, no inline script or style) --> the same parts that /v1 answers from
        --cookie, CSRF token, Origin--> /v1                       uploads by tus, deletions, settings, replays
"""

from nearkin_gateway.dashboard.pages import install

__all__ = ["install"]
