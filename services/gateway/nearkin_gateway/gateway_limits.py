# size: constants that modules of the gateway share, and that tests set
"""Define the bounds of the gateway that no setting changes.

Invariant (I10): read as `limits.NAME` of `gateway_limits as limits`, so that a test can set one in one place.
"""

from __future__ import annotations

from nearkin_shared.limits import KIB, MIB

HEADER_BYTES_MAX = 64 * KIB
"""Size of a request's head, metadata included: as much as metadata may take; a larger head is refused with 431."""
CONNECTIONS_MAX = 1024
"""Connections of one gateway; further ones are refused with 503. Idle ones make room; each takes one open file."""
UPLOADS_MAX = 128
"""Concurrent uploads; each buffers one frame of at most 900 KiB."""
DOWNLOADS_MAX = 32
"""Concurrent restores; each buffers at most four pieces of 4 MiB, and with S3 32 MiB of blocks in flight."""
IDLE_PER_ADDRESS_MAX = 256
"""Connections of one peer address without a complete request head; for one more the oldest is closed."""
TENANT_SHARE = 0.75
"""Share of uploads, downloads, explanations and open resumable uploads of one tenant: a quarter is left for others."""
TOKEN_SHARE = 0.5
"""The same share of one token: two tokens of a tenant do not starve a third one."""
SLOW_SECONDS = 30
"""Seconds over which a client's speed is measured, and that the head of a request may take."""
SLOW_BYTES_PER_SECOND = 1024
"""A client that sends or receives less is disconnected: the slowest modems are faster."""
BUSY_BYTES_PER_SECOND = 65_536
"""The same bound when all uploads, or downloads, are active; from half of them on the bound rises towards it."""
UPLOAD_UNACKNOWLEDGED_BYTES = 24 * MIB
"""Bytes of one upload that are received and not acknowledged: a pack that fills, and two that are being sent."""
UNACKNOWLEDGED_BYTES = 96 * MIB
"""The same bytes of all uploads: the memory that a slow broker or object store can take."""
UPLOAD_STATUS_BYTES = 64 * MIB
"""Memory for results of uploads, some 50,000; the oldest are removed first."""
UPLOAD_STATUS_SECONDS = 3600
"""How far back a starting gateway reads results of uploads: clients ask within minutes."""
RESUMABLE_EMPTY_SECONDS = 600
"""A resumable upload without any byte expires this long after its creation, so that creating costs others nothing."""
RESUMABLE_MAX = 10_000
"""Open resumable uploads of all tenants together: a sweep lists them all."""
PARTIAL_UPLOADS_MAX = 256
"""Partial uploads that one final upload may concatenate (tus `Upload-Concat`)."""
CHECKED_PATCH_BYTES = 64 * MIB
"""Largest PATCH with `Upload-Checksum`: it is kept on local disk until its checksum is verified."""
SESSION_SECONDS = 8 * 3600
"""Lifetime of a login, a working day; bounded by the lifetime of its token."""
AUDIT_RECORDS_PER_SECOND = 100
"""Audit records of one tenant and event, in bursts of as many; further ones are counted, changes always recorded."""
AUDIT_WINDOW_SECONDS = 60
"""Repeated use, and repeated failure, of one token from one address is combined into one record per window."""
