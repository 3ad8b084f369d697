"""Make certificates for tests.

Invariant: openssl makes them on the spot, for this machine's loopback only.
"""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path) -> Path:
    """Write a self-signed `cert.pem` and its `key.pem` into a folder, and return the folder."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder
