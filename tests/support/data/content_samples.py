"""Make content of each kind that `chunker.rules` knows, by the programs and libraries that write such files.

Invariant: the same arguments give the same bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import tarfile
from collections.abc import Mapping
from pathlib import Path

from nearkin.lab.generated_data import random_bytes, text_like

KIB = 1024
JPEG_HEAD = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x01\x00H\x00H\x00\x00"


def jpeg(size: int, seed: int = 1) -> bytes:
    """Return a JPEG head and what its entropy-coded data look like."""
    return (JPEG_HEAD + random_bytes(size, seed))[:size]


def mp4(size: int, index_bytes: int, seed: int = 2) -> bytes:
    """Return a film with its index in front: a part that is not dense."""
    head = b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41"
    index = b"".join(number.to_bytes(4, "big") for number in range(index_bytes // 4))
    return (head + index + random_bytes(size, seed))[:size]


def compressed(size: int, seed: int = 3) -> bytes:
    """Return a gzip stream of about `size` bytes."""
    return gzip.compress(text_like(size * 3, seed), 6, mtime=0)


def sqlite_file(path: Path, rows: int, page_bytes: int = 4096, seed: int = 4) -> bytes:
    """Create a database of `rows` rows; return its bytes."""
    base = sqlite3.connect(path)
    base.execute(f"PRAGMA page_size = {page_bytes}")
    base.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, name TEXT, note BLOB)")
    notes = random_bytes(rows * 150, seed)
    base.executemany(
        "INSERT INTO entries VALUES (?, ?, ?)",
        ((number, f"name {number}", notes[number * 150 : number * 150 + 150]) for number in range(rows)),
    )
    base.commit()
    base.close()
    return path.read_bytes()


def tar_file(members: Mapping[str, bytes], format_: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format_) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def safetensors_file(tensors: Mapping[str, bytes]) -> bytes:
    """Return a safetensors file of tensors of 16-bit floats."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, content in tensors.items():
        header[name] = {"dtype": "F16", "shape": [len(content) // 2], "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def postgres_file(pages: int, seed: int = 5) -> bytes:
    """Return pages of a PostgreSQL relation."""
    found = []
    for number in range(pages):
        head = number.to_bytes(8, "little") + bytes(4)
        head += b"".join(value.to_bytes(2, "little") for value in (60, 4000, 8192, 0x2004)) + bytes(4)
        found.append(head + bytes(4000 - len(head)) + text_like(4192, seed + number))
    return b"".join(found)


def innodb_file(pages: int, page_bytes: int = 16 * KIB, seed: int = 6) -> bytes:
    """Return a tablespace of InnoDB: page numbers, page types and the size as its pages have them."""
    found = []
    for number in range(pages):
        kind = {0: 8, 1: 5}.get(number, 17855)
        head = bytes(4) + number.to_bytes(4, "big") + bytes(16) + kind.to_bytes(2, "big") + bytes(20)
        head += (pages if number == 0 else 0).to_bytes(4, "big")
        found.append(head + text_like(page_bytes - len(head), seed + number))
    return b"".join(found)
