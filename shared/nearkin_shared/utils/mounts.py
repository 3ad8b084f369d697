# size: one reason to change, the kinds of filesystems
"""Find out the type of a folder's filesystem, and whether it is a network filesystem."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
MOUNTS_MAX = 1 << 16
MOUNT_SOURCE = "nearkin"
"""Source of a mount of a store, as `nearkin mount` names it."""
NETWORK_TYPES = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
        "ocfs2", "orangefs", "smb3", "smbfs", "virtiofs",
        "fuse.ceph", "fuse.ceph-fuse", "fuse.davfs", "fuse.glusterfs", "fuse.gcsfuse", "fuse.goofys", "fuse.juicefs",
        "fuse.mount.davfs", "fuse.rclone", "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs",
    }
)  # fmt: skip
"""Filesystems that another machine may change: a memory map of a file does not show such a change, or shows half."""


PSEUDO_TYPES = frozenset(
    {
        "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "fusectl",
        "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs",
    }
)  # fmt: skip
"""File systems whose files show the state of the kernel: a read of one may block, or never end."""


def filesystem_type(path: Path) -> str | None:
    """Return the type of the filesystem that a file or folder is on, None if it is not known."""
    try:
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with MOUNTS.open(errors="replace") as lines:
            for line in islice(lines, MOUNTS_MAX):
                # 36 35 98:0 /root /mount/point options [optional fields] - type source options
                fields, _, after = line.partition(" - ")
                if fields.split(" ")[2:3] == [wanted]:
                    return after.split(" ")[0] or None
    except OSError:
        pass
    return None


def network_type(path: Path) -> str | None:
    """Return the type of the network filesystem that a path is on, or None."""
    found = filesystem_type(path)
    return found if found in NETWORK_TYPES else None


def pseudo_devices() -> frozenset[int]:
    """Return the device numbers of mounted file systems of PSEUDO_TYPES."""
    return _devices_of(lambda kind, _: kind in PSEUDO_TYPES)


def store_mount_devices() -> frozenset[int]:
    """Return the device numbers of mounts of `nearkin mount`."""
    return _devices_of(lambda kind, source: kind.partition(".")[0] == "fuse" and source == MOUNT_SOURCE)


def _devices_of(is_wanted: Callable[[str, str], bool]) -> frozenset[int]:
    """Return the device numbers of mounted file systems of which type and source are wanted."""
    found = set[int]()
    try:
        with MOUNTS.open(errors="replace") as lines:
            for line in islice(lines, MOUNTS_MAX):
                fields, _, after = line.partition(" - ")
                kind, _, rest = after.partition(" ")
                if is_wanted(kind, rest.partition(" ")[0]):
                    major, _, minor = fields.split(" ")[2].partition(":")
                    found.add(os.makedev(int(major), int(minor)))
    except (OSError, ValueError, IndexError):
        pass
    return frozenset(found)
