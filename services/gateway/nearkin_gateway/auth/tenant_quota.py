"""Define the quotas of a tenant, and read them from the tokens file.

    {"tokens": [...], "quotas": {"shop": {"logical_bytes": 1099511627776, "upload_bytes_per_second": 52428800}}}

Invariant: a tenant without an entry, and a quota that an entry leaves out, is unlimited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

from nearkin_shared.errors import BadInput
from nearkin_shared.limits import KIB
from nearkin_shared.tenant_names import tenant_problem
from nearkin_shared.utils.frozen import frozen

QUOTA_TENANTS_MAX = 10_000
QUOTA_BYTES_MAX = 1 << 60
"""1 EiB: no store is larger, and sums of such numbers fit into 64 bits."""
RATE_BYTES_MIN = 64 * KIB
"""Bytes a second: a body is read in pieces of this size, and a slower one would be cut as idle."""


@frozen
class TenantQuota:
    """The limits of one tenant; None: unlimited."""

    logical_bytes: int | None = None
    """Bytes of all visible versions together; while a checkpoint is stored, those of all checkpoints as well."""
    stored_bytes: int | None = None
    """Bytes below the object root that are the tenant's, deleted versions included until a GC run frees them."""
    upload_bytes_per_second: int | None = None
    """Bytes of request bodies that one gateway takes."""

    @property
    def limits_bytes(self) -> bool:
        """Return whether the bytes of the tenant have to be known."""
        return self.logical_bytes is not None or self.stored_bytes is not None

    def to_json(self) -> dict[str, int]:
        """Return the quotas that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


QUOTA_NAMES = tuple(field.name for field in fields(TenantQuota))


def check_quota(tenant: str, quota: TenantQuota) -> None:
    """Refuse a tenant or a limit that is not valid. Raises BadInput."""
    if (problem := tenant_problem(tenant)) is not None:
        raise BadInput(f"tenant {tenant!r:.200}: {problem}")
    for name, value in quota.to_json().items():
        least = RATE_BYTES_MIN if name == "upload_bytes_per_second" else 0
        if type(value) is not int or not least <= value <= QUOTA_BYTES_MAX:
            raise BadInput(f"quota {name} {value!r:.40} of tenant {tenant!r}: want {least} to {QUOTA_BYTES_MAX} bytes")


def read_quotas(found: object) -> dict[str, TenantQuota]:
    """Return the quotas by tenant, from the parsed JSON of a tokens file. Raises BadInput."""
    if not isinstance(found, Mapping):
        raise BadInput(f"quotas {type(found).__name__}: want an object of tenants")
    if len(found) > QUOTA_TENANTS_MAX:
        raise BadInput(f"quotas of {len(found)} tenants: want at most {QUOTA_TENANTS_MAX}")
    quotas = {}
    for tenant, limits in found.items():
        if not isinstance(limits, Mapping) or not set(limits) <= set(QUOTA_NAMES):
            raise BadInput(f"quotas of tenant {tenant!r:.200}: want an object of {', '.join(QUOTA_NAMES)}")
        quota = TenantQuota(**limits)
        check_quota(tenant, quota)
        quotas[tenant] = quota
    return quotas
