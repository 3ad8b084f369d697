"""Upload a file to a gateway in parts, continue after an interruption, and read the blob with the client.

python examples/resumable_upload.py URL KEY FILE        the token, if the gateway wants one, is in NEARKIN_TOKEN

The protocol is tus 1.0, so any tus client works as well. `client.put` needs no parts: it sends the whole source again.
"""

from __future__ import annotations

import argparse
import base64
import os
from pathlib import Path

import httpx

import nearkin

PART_BYTES = 1 << 20
"""Bytes per request; an interruption loses at most so many."""


def begin_upload(http: httpx.Client, key: str, size_bytes: int) -> str:
    """Create an upload and return its path."""
    metadata = f"key {base64.b64encode(key.encode()).decode()}"
    answer = http.post("/v1/uploads", headers={"Upload-Length": str(size_bytes), "Upload-Metadata": metadata})
    return str(answer.raise_for_status().headers["Location"])


def send_parts(http: httpx.Client, upload: str, file: Path, parts_max: int | None = None) -> int:
    """Send parts from the offset that the gateway has; return the next offset."""
    offset = int(http.head(upload).raise_for_status().headers["Upload-Offset"])
    print(f"the gateway has {offset:,} bytes")
    with file.open("rb") as source:
        source.seek(offset)
        while parts_max != 0 and (part := source.read(PART_BYTES)):
            headers = {"Upload-Offset": str(offset), "Content-Type": "application/offset+octet-stream"}
            answer = http.patch(upload, content=part, headers=headers).raise_for_status()
            offset = int(answer.headers["Upload-Offset"])
            parts_max = None if parts_max is None else parts_max - 1
    return offset


def main() -> None:
    """Upload one part, stop, continue, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the gateway")
    parser.add_argument("key")
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()

    token = os.environ.get("NEARKIN_TOKEN")
    headers = {"Tus-Resumable": "1.0.0"} | ({"Authorization": f"Bearer {token}"} if token else {})
    with httpx.Client(base_url=arguments.url, headers=headers, timeout=60) as http:
        upload = begin_upload(http, arguments.key, arguments.file.stat().st_size)
        send_parts(http, upload, arguments.file, parts_max=1)
        print("interrupted")
        sent_bytes = send_parts(http, upload, arguments.file)
        print(f"uploaded {sent_bytes:,} bytes")

    with nearkin.connect(arguments.url, token) as store:
        equal = store.get(arguments.key).read() == arguments.file.read_bytes()
        print(f"the blob equals the file: {equal}")


if __name__ == "__main__":
    main()
