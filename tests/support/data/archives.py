# size: shared by the tests of imports, of WebDAV and of archives
"""Build tar archives, also those that no honest program writes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence


def member(name: str, **fields: object) -> tarfile.TarInfo:
    """Return the header of a member."""
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = 0o640, 1_000
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def sparse_member(
    name: str, size_bytes: int, extents: Sequence[tuple[int, int]], content: bytes
) -> tuple[tarfile.TarInfo, bytes]:
    """Return header and archived bytes of a file with holes, in GNU's format 1.0."""
    records = {"major": "1", "minor": "0", "name": name, "realsize": str(size_bytes)}
    numbers = [len(extents), *(number for extent in extents for number in extent)]
    lines = "".join(f"{number}\n" for number in numbers).encode()
    head = member("sparse", pax_headers={f"GNU.sparse.{key}": value for key, value in records.items()})
    return head, lines + bytes(-len(lines) % 512) + content


def archive_of(members: Sequence[tuple[object, bytes]], *, format: int = tarfile.PAX_FORMAT) -> bytes:
    """Return an archive; a member is a name, or a header."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as archive:
        for head, content in members:
            info = head if isinstance(head, tarfile.TarInfo) else member(str(head))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return output.getvalue()
