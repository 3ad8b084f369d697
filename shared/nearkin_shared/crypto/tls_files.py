# size: checks of TLS files, shared by Kafka, Redis and S3 connections
"""Validate TLS files before a connection is opened.

While connecting, an invalid file would look like an unreachable server, and the client would wait.

Invariant: the error for an unusable file names the setting.
"""

from __future__ import annotations

import ssl

from nearkin_shared.errors import ConfigError


def check_certificates(setting: str, path: str) -> None:
    """Refuse a file without readable certificates. Raises ConfigError."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as err:
        raise ConfigError(f'{setting} "{path}": contains no certificates in PEM') from err
    except OSError as err:
        raise ConfigError(f'{setting} "{path}": {err.strerror}') from err


def check_key(setting: str, path: str) -> None:
    """Refuse an unreadable file of a private key. Raises ConfigError."""
    try:
        with open(path, "rb"):
            pass
    except OSError as err:
        raise ConfigError(f'{setting} "{path}": {err.strerror}') from err
