"""Read the members of a tar archive that may be hostile as entries of a tree.

ustar, PAX (also SCHILY.xattr, SCHILY.acl, LIBARCHIVE.xattr) and GNU headers, sparse files of all formats.

Invariant: memory is bounded by HEADER_BYTES_MAX, and an archive that does not end with its end mark is refused.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tarfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from struct import Struct
from typing import BinaryIO, NamedTuple, Self, cast
from urllib.parse import unquote_to_bytes

import numpy as np

from nearkin.trees.tar_acl import encode_acl
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.tree_entry_group import EXTRAS_BYTES_MAX, ID_MAX, EntryKind, is_name

HEADER_BYTES_MAX = 8 << 20
"""Headers of one member: PAX records, long names and the map of a sparse file."""
GLOBAL_BYTES_MAX = 64 << 10
"""Records of all global headers: the library keeps them, and copies them for each member."""
GLOBAL_RECORDS_MAX = 256
"""Their number: they are counted and copied for each member; programs write one to five."""
SPARSE_BYTES_MAX = 16 << 40
"""Size of a file with holes: the largest file of ext4. An archive of 2 KB could name 8 EiB, which no reader can end."""
DIGIT_STEPS_MAX = 100_000_000
"""Of the library's search in PAX records, the square of each run of digits (CVE-2024-6232): 0.1 s."""
SEARCHES_SLOWLY = sys.version_info < (3, 11, 10) or (3, 12) <= sys.version_info < (3, 12, 6)
PATH_MAX = 4096
LINK_TARGET_MAX = 4095
XATTR_VALUE_MAX = 65_536
BLOCK_BYTES = 512
NOBODY = 65_534
"""Owner of an entry whose own number is out of range: number 0 would be root."""
_SECOND_NS = 1_000_000_000
_I64_MAX = (1 << 63) - 1
_MTIME_NS_MAX = (1 << 64) - 1
"""The last time that the sorted list of members holds, in 2554. ext4 has times up to 2446, XFS up to 2486."""
_ID = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_NUMBER = re.compile(r"(-?)([0-9]{1,19})(?:\.([0-9]{0,64}))?", re.ASCII)
_KINDS = {
    tarfile.REGTYPE: EntryKind.FILE,
    tarfile.AREGTYPE: EntryKind.FILE,
    tarfile.CONTTYPE: EntryKind.FILE,
    tarfile.GNUTYPE_SPARSE: EntryKind.FILE,
    tarfile.DIRTYPE: EntryKind.FOLDER,
    b"D": EntryKind.FOLDER,  # of an incremental archive of GNU tar
    tarfile.SYMTYPE: EntryKind.SYMLINK,
    tarfile.LNKTYPE: EntryKind.HARD_LINK,
    tarfile.FIFOTYPE: EntryKind.FIFO,
    tarfile.CHRTYPE: EntryKind.CHARACTER_DEVICE,
    tarfile.BLKTYPE: EntryKind.BLOCK_DEVICE,
}
_LABEL = b"V"
_TEXTS = Struct("100s56xc100s8x32s32s16x155s12x")
"""Name, type, link, user, group, prefix."""
_NUMBERS = Struct("100x8s8s8s12s12s8s173x8s8s167x")
"""Mode, owner, group, bytes, mtime, checksum, device."""
assert _TEXTS.size == _NUMBERS.size == BLOCK_BYTES
_UNUSUAL_TYPES = frozenset(tarfile.GNUTYPE_SPARSE + tarfile.GNUTYPE_LONGNAME + tarfile.GNUTYPE_LONGLINK)
"""Whose fields differ."""
_ACLS = {"SCHILY.acl.access": b"system.posix_acl_access", "SCHILY.acl.default": b"system.posix_acl_default"}
_MALFORMED = (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError, TypeError)


class TarMember(NamedTuple):
    """A member of an archive, without what a tree cannot hold."""

    path: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    user: str
    group: str
    mtime_ns: int
    size: int
    """Bytes of a file, holes included; the number of a device."""
    target: bytes
    """Of a symlink as it is; of a hard link the path of the other member."""
    xattrs: tuple[tuple[bytes, bytes], ...]
    extents: tuple[tuple[int, int], ...] | None
    start: int
    """Offset of the content in the archive."""
    content_bytes: int


class UnusableMember(Exception):
    """A member that is not an entry of a tree; the message is the reason."""


def read_members(
    file: BinaryIO, name: str, leave_out: Callable[[bytes, str], None], alter: Callable[[bytes, str], None]
) -> Iterator[TarMember]:
    """Yield the members of an archive without compression.

    `leave_out` gets the path and the reason of each member that no tree can hold, `alter` those of attributes that are
    not taken. Raises BadInput: no archive, damaged, or cut short.
    """
    headers = _HeaderFile(file)
    archive_bytes = headers.size_bytes
    try:
        archive = tarfile.TarFile(
            fileobj=headers,  # type: ignore[arg-type]  # it has the methods that are called
            tarinfo=_Header,
            encoding="utf-8",
            errors="surrogateescape",
        )
        position = -1
        while (info := archive.next()) is not None:
            vars(archive)["members"].clear()  # the library keeps all of them
            _check_globals(archive, name)
            _correct_sparse_end(archive, info)
            if archive.offset <= position:
                raise BadInput(f"{name}: member {info.name!r:.200} has a negative size; nothing was stored")
            position = archive.offset
            if position > archive_bytes:
                raise BadInput(f"{name}: is cut short within {info.name!r:.200}; nothing was stored")
            try:
                if info.type != _LABEL:
                    yield _member(info, position, alter)
            except UnusableMember as err:
                leave_out(_bytes(info.name), str(err))
            headers.restore_budget()
        _check_end(headers, archive.offset, name)
    except _MALFORMED as err:
        raise BadInput(f"{name}: is no tar archive, or damaged: {err}; nothing was stored") from err


def member_path(name: str, what: str = "its name") -> bytes:
    """Return the path in a tree: without leading slashes, `.` and empty parts.

    Raises UnusableMember.
    """
    path = _bytes(name)
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise UnusableMember(f"{what} has ..")
    if not all(map(is_name, parts)):
        raise UnusableMember(f"{what} has a part above 255 bytes, or a NUL")
    path = b"/".join(parts)
    if len(path) > PATH_MAX:
        raise UnusableMember(f"{what} has more than {PATH_MAX:,} bytes")
    return path


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _member(info: tarfile.TarInfo, end: int, alter: Callable[[bytes, str], None]) -> TarMember:
    kind = _KINDS.get(info.type)
    if kind is None:
        raise UnusableMember(f"members of type {info.type!r} are not supported")
    path = member_path(info.name)
    target = b""
    if kind == EntryKind.HARD_LINK:
        target = member_path(info.linkname, "the target of the hard link")
    elif kind == EntryKind.SYMLINK:
        target = _bytes(info.linkname)
        if not 0 < len(target) <= LINK_TARGET_MAX or b"\0" in target:
            raise UnusableMember(f"the target of the symlink has {len(target):,} bytes, or a NUL")
    size, extents, content_bytes = 0, None, 0
    if kind == EntryKind.FILE:
        size, extents = _file_size(info)
        content_bytes = size if extents is None else sum(length for _, length in extents)
        if info.offset_data + content_bytes > end:
            raise tarfile.ReadError(f"{info.name!r:.200} has {content_bytes:,} bytes, and fewer are there")
    elif kind in (EntryKind.CHARACTER_DEVICE, EntryKind.BLOCK_DEVICE):
        if not (0 <= info.devmajor <= ID_MAX and 0 <= info.devminor <= ID_MAX):
            raise UnusableMember(f"device {info.devmajor}, {info.devminor} is out of range")
        size = os.makedev(info.devmajor, info.devminor)
    uid = _owner("owner", info.uid, info.pax_headers.get("uid"), path, alter)
    gid = _owner("group", info.gid, info.pax_headers.get("gid"), path, alter)
    return TarMember(
        path,
        kind,
        info.mode & 0o7777,
        uid,
        gid,
        info.uname,
        info.gname,
        _mtime_ns(info, path, alter),
        size,
        target,
        () if kind == EntryKind.HARD_LINK else _xattrs(info, path, alter),
        extents,
        info.offset_data,
        content_bytes,
    )


def _check_globals(archive: tarfile.TarFile, name: str) -> None:
    """Raise BadInput if global headers have too many records."""
    records = archive.pax_headers
    if len(records) > GLOBAL_RECORDS_MAX:
        raise BadInput(
            f"{name}: its global PAX headers have more than {GLOBAL_RECORDS_MAX} records; nothing was stored"
        )
    if records and sum(len(record) + len(value) for record, value in records.items()) > GLOBAL_BYTES_MAX:
        raise BadInput(f"{name}: its global PAX headers have more than {GLOBAL_BYTES_MAX:,} bytes; nothing was stored")


def _owner(what: str, number: int, record: str | None, path: bytes, alter: Callable[[bytes, str], None]) -> int:
    """Return the number of an owner; the library takes a PAX record that is no number as 0."""
    is_number = record is None or _ID.fullmatch(record) is not None
    if is_number and 0 <= number < ID_MAX:
        return number
    shown = number if is_number else repr((record or "")[:40])
    alter(path, f"{what} {shown} is out of range, {NOBODY} is stored")
    return NOBODY


def _mtime_ns(info: tarfile.TarInfo, path: bytes, alter: Callable[[bytes, str], None]) -> int:
    text = info.pax_headers.get("mtime", "")
    match = _NUMBER.fullmatch(text)
    if match is not None:
        sign, whole, fraction = match[1], int(match[2]), match[3] or ""
        found = whole * _SECOND_NS + int(fraction[:9].ljust(9, "0"))
        found = -found if sign else found
    else:
        found = _MTIME_NS_MAX + 1 if text else int(info.mtime) * _SECOND_NS
    if not -_I64_MAX <= found <= _MTIME_NS_MAX:
        alter(path, f"its time {text[:40] or info.mtime} is out of range, 1970 is stored")
        return 0
    return found


# --- sparse files ----------------------------------------------------------------------------------------------------


def _sparse_map(info: tarfile.TarInfo) -> list[tuple[int, int]] | None:
    """Return offset and bytes of the data of a sparse file, None of any other.

    The library's stubs declare another type.
    """
    return cast("list[tuple[int, int]] | None", info.sparse)


def _real_size(info: tarfile.TarInfo) -> int:
    """Return the size with holes; the library takes that of the archive where both are stated."""
    records = info.pax_headers
    for name in ("GNU.sparse.realsize", "GNU.sparse.size"):
        if info.sparse is not None and name in records:
            return int(records[name])
    return info.size


def _file_size(info: tarfile.TarInfo) -> tuple[int, tuple[tuple[int, int], ...] | None]:
    """Return the size of a file, and its extents if it has holes.

    Raises ReadError, UnusableMember.
    """
    size = _real_size(info)
    if not 0 <= size <= _I64_MAX:
        raise tarfile.ReadError(f"{info.name!r:.200} has {size} bytes")
    stretches = _sparse_map(info)
    if stretches is None:
        return size, None
    if size > SPARSE_BYTES_MAX:
        raise UnusableMember(
            f"has {size:,} bytes with its holes, {SPARSE_BYTES_MAX:,} at most; back up the file itself, or use "
            "`nearkin copy` between stores"
        )
    extents, end = list[tuple[int, int]](), 0
    for offset, length in stretches:
        if not length:  # marks the end of the file, or is a slot that is not used
            continue
        if offset < end or length < 0 or offset + length > size:
            raise tarfile.ReadError(f"{info.name!r:.200}: {length} bytes at {offset} of {size}: a wrong sparse map")
        end = offset + length
        if extents and length and sum(extents[-1]) == offset:
            extents[-1] = (extents[-1][0], extents[-1][1] + length)
        else:
            extents.append((offset, length))
    return size, None if extents == [(0, size)] or not size else tuple(extents)


def _correct_sparse_end(archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
    """Set where a sparse file of format 1.0 ends whose archived size is a PAX record.

    The library counts the size with holes there. Files with more than 8 GiB of data have such a record.
    """
    records, stretches = info.pax_headers, _sparse_map(info)
    if stretches is None or "size" not in records or records.get("GNU.sparse.major") != "1":
        return
    numbers = [len(stretches), *(number for extent in stretches for number in extent)]
    map_bytes = _blocks(sum(len(f"{number}\n") for number in numbers))
    archive.offset = info.offset_data - map_bytes + _blocks(int(records["size"]))


def _blocks(count: int) -> int:
    return -(-count // BLOCK_BYTES) * BLOCK_BYTES


# --- attributes ------------------------------------------------------------------------------------------------------


def _xattrs(info: tarfile.TarInfo, path: bytes, alter: Callable[[bytes, str], None]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the extended attributes, by name; ACLs and capabilities are among them."""
    found = dict[bytes, bytes]()
    for record, text in info.pax_headers.items():
        scheme, _, name = record.partition(".xattr.")
        try:
            if name and scheme == "SCHILY":
                plain = name.replace("%3D", "=").replace("%25", "%")
                found[_bytes(plain)] = _bytes(text)
            elif name and scheme == "LIBARCHIVE":
                found.setdefault(unquote_to_bytes(_bytes(name)), _unpadded(text))
            elif record == "RHT.security.selinux":
                found.setdefault(b"security.selinux", _bytes(text) + b"\0")
            elif record in _ACLS and (acl := encode_acl(text, _user_id, _group_id)):
                found.setdefault(_ACLS[record], acl)
        except ValueError as err:
            alter(path, f"{record[:80]} is not stored: {err}")
    total = 0
    for name_bytes, value in list(found.items()):
        total += len(name_bytes) + len(value)
        if not is_name(name_bytes) and (not 0 < len(name_bytes) <= 255 or b"\0" in name_bytes):
            alter(path, f"an attribute with a name of {len(name_bytes)} bytes is not stored")
        elif len(value) > XATTR_VALUE_MAX or total > EXTRAS_BYTES_MAX // 2:
            alter(path, f"{name_bytes[:80]!r} is not stored: {len(value):,} bytes")
        else:
            continue
        del found[name_bytes]
    return tuple(sorted(found.items()))


def _unpadded(text: str) -> bytes:
    """Decode base64, with or without padding. Raises ValueError."""
    return b64decode(_bytes(text) + b"=" * (-len(text) % 4), validate=True)


def _user_id(name: str) -> int | None:
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def _group_id(name: str) -> int | None:
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


# --- input -----------------------------------------------------------------------------------------------------------


def _check_end(headers: _HeaderFile, position: int, name: str) -> None:
    """Raise BadInput unless the end mark follows, and zeros alone behind it."""
    headers.restore_budget()
    headers.seek(position)
    mark = headers.read(BLOCK_BYTES)
    if len(mark) < BLOCK_BYTES:
        raise BadInput(f"{name}: is cut short: it has no end mark; nothing was stored")
    if any(mark):
        raise BadInput(f"{name}: is damaged at byte {position:,}: no header of a member; nothing was stored")
    while data := headers.read(HEADER_BYTES_MAX // 8):
        if data.strip(b"\0"):
            raise BadInput(f"{name}: data follow its end mark, such as a second archive; nothing was stored")
        headers.restore_budget()


class _Header(tarfile.TarInfo):
    """A header; the library's parser reads unusual ones.

    It takes most of the time of an import.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return a header. Raises as the library's method does."""
        if len(buf) != BLOCK_BYTES or buf[156] in _UNUSUAL_TYPES:
            return super().frombuf(buf, encoding, errors)
        texts, numbers = _TEXTS.unpack(buf), _NUMBERS.unpack(buf)
        try:
            mode, uid, gid, size, mtime, checksum, major, minor = [
                int(text.rstrip(b" \0") or b"0", 8) for text in numbers
            ]
        except ValueError:  # above eight octal digits, or damaged
            return super().frombuf(buf, encoding, errors)
        if sum(buf) - sum(buf[148:156]) + 256 != checksum or min(mode, uid, gid, size, mtime, major, minor) < 0:
            return super().frombuf(buf, encoding, errors)
        name, kind, link, user, group, prefix = [text.partition(b"\0")[0] for text in texts]
        info = cls(name.decode(encoding, errors))
        info.mode, info.uid, info.gid, info.size, info.mtime, info.chksum = mode, uid, gid, size, mtime, checksum
        info.devmajor, info.devminor, info.type = major, minor, kind or tarfile.AREGTYPE
        info.linkname, info.uname, info.gname = (text.decode(encoding, errors) for text in (link, user, group))
        if info.type == tarfile.AREGTYPE and info.name.endswith("/"):
            info.type = tarfile.DIRTYPE
        if info.type == tarfile.DIRTYPE:
            info.name = info.name.rstrip("/")
        if prefix:
            info.name = f"{prefix.decode(encoding, errors)}/{info.name}"
        return info


class _HeaderFile:
    """The file that the library reads headers from, a bounded number of bytes for one member."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = HEADER_BYTES_MAX
        self.size_bytes = file.seek(0, io.SEEK_END)
        self._position = file.seek(0)

    def restore_budget(self) -> None:
        """Begin the next member."""
        self._left = HEADER_BYTES_MAX

    def read(self, size: int) -> bytes:
        """Return the next bytes. Raises ReadError."""
        if not 0 <= size <= self._left:
            raise tarfile.ReadError(f"headers of more than {HEADER_BYTES_MAX:,} bytes")
        self._left -= size
        data = self._file.read(size)
        self._position += len(data)
        if SEARCHES_SLOWLY and size > BLOCK_BYTES:
            _check_digits(data)
        return data

    def seek(self, position: int) -> int:
        """Set the position. Raises ReadError."""
        if not 0 <= position <= self.size_bytes + BLOCK_BYTES:
            raise tarfile.ReadError(f"cut short: a member ends at byte {position:,} of {self.size_bytes:,}")
        self._position = self._file.seek(position)
        return position

    def tell(self) -> int:
        """Return the position."""
        return self._position


def _check_digits(data: bytes) -> None:
    """Refuse headers in which a search would take minutes. Raises ReadError."""
    values = np.frombuffer(data, np.uint8)
    others = np.flatnonzero((values < ord("0")) | (values > ord("9")))
    runs = np.diff(others, prepend=-1, append=len(values)).astype(np.float64) - 1
    if float(runs @ runs) > DIGIT_STEPS_MAX:
        raise tarfile.ReadError(
            f"headers with {int(runs.max()):,} digits in a row, which this release of Python reads too slowly; "
            "3.11.10, 3.12.6 and later read them"
        )
