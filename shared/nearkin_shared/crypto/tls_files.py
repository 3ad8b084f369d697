"""Files of certificates. Invariant: one that is of no use is told as the setting that names it, before any connection.

Met while connecting, it looks like a server that is away, and is waited for.
"""

from __future__ import annotations

import ssl

from nearkin_shared.errors import ConfigError


def check_certificates(setting: str, path: str) -> None:
    """Refuse a file of certificates that cannot be read as one. Raises ConfigError."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as err:
        raise ConfigError(f'{setting} "{path}": want certificates in PEM, and it holds none') from err
    except OSError as err:
        raise ConfigError(f'{setting} "{path}": {err.strerror}') from err


def check_key(setting: str, path: str) -> None:
    """Refuse a private key's file that cannot be read. Raises ConfigError."""
    try:
        with open(path, "rb"):
            pass
    except OSError as err:
        raise ConfigError(f'{setting} "{path}": {err.strerror}') from err
