# size: one rule, used by settings, errors and log lines
"""Mask secrets in URLs: in displayed settings, in errors, and in log lines.

    redis://user:password@host      s3://id:secret@bucket      redis://host?password=secret
    redis://***@host                s3://***@bucket            redis://host?password=***

Invariant: the masked text has neither the user information of a URL nor the value of a query parameter whose name marks
it as a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

MASK = "***"
_USER_INFORMATION = re.compile(r"(?<=://)[^/\s]*@")
"""Up to the last @ before the path, as clients read it: a password may hold an @, a ? or a #."""
_SECRET_PARAMETER = re.compile(
    r"([?&;][^=&;#\s]*(?:pass|secret|token|key|credential|signature|auth)[^=&;#\s]*=)([^&;#\s]*)", re.IGNORECASE
)


def mask_urls(text: str) -> str:
    """Return `text` with the secrets of all URLs in it replaced by `MASK`."""
    if "://" not in text:
        return text
    return _SECRET_PARAMETER.sub(rf"\1{MASK}", _USER_INFORMATION.sub(f"{MASK}@", text))


def url_secrets(url: str) -> Iterator[str]:
    """Yield the secrets of a URL, as written and percent-decoded, to remove from log lines."""
    pairs = [match[0][:-1] for match in _USER_INFORMATION.finditer(url) if ":" in match[0]]
    written = [*pairs, *(pair.partition(":")[2] for pair in pairs)]
    written += [match[2] for match in _SECRET_PARAMETER.finditer(_USER_INFORMATION.sub("", url))]
    for secret in filter(None, written):
        yield secret
        if unquote(secret) != secret:
            yield unquote(secret)
