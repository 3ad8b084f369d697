"""Run `nearkin keys`.

generate -> key-encryption keys, in a file      list, rotate, rewrap, erase -> data keys, in the store

Invariant: a key is shown by its id, never by its bytes; an irrevocable action requires the name of its object.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import AsWrittenGroup, current_session, json_option, shared_options
from nearkin_shared.errors import BadInput
from nearkin_shared.limits import ERASE_GRACE_SECONDS
from nearkin_shared.tenant_names import tenant_problem

if TYPE_CHECKING:
    from nearkin_shared.config.settings import Settings
    from nearkin_shared.crypto.keyring import KeyInfo, Keyring


@click.group(cls=AsWrittenGroup)
def keys() -> None:
    """Manage the keys of an encrypted store.

    nearkin keys generate /etc/nearkin/store.key     # before a store with storage.encryption is made
    nearkin keys list
    nearkin keys rotate db                           # tenant db gets a new data key for its next writes
    nearkin keys generate /etc/nearkin/store.key     # add a new key-encryption key before the current one
    nearkin keys rewrap                              # afterwards the old one may be deleted
    nearkin keys erase db --yes                      # makes all data of tenant db unreadable, for ever

    Data are encrypted with data keys, one or more per tenant. The store holds them, wrapped by a key-encryption key
    that the store does not hold: storage.key_file or NEARKIN_STORAGE__KEY. Without it nothing can be read: keep a
    copy elsewhere.
    """


@keys.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@json_option
def generate(file: Path) -> None:
    """Make a key-encryption key: the first in FILE, before those that are in it.

    nearkin keys generate /etc/nearkin/store.key
    nearkin keys generate new.key && cat new.key     # for a secret store, as NEARKIN_STORAGE__KEY
    """
    from nearkin.cli.output import print_json, print_line
    from nearkin_shared.crypto.key_wrapping import generate as generate_key

    made = generate_key(file)
    if current_session().as_json:
        print_json({"key_id": made, "file": str(file)})
    else:
        print_line(f"key-encryption key {made}: the first in {file}; keep a copy where the store is not")


@keys.command("list")
@shared_options
def list_() -> None:
    """List the data keys: whose they are, and which key-encryption key has wrapped each.

    nearkin keys list --json | jq '.[] | select(.newest)'
    """
    from nearkin.cli.output import print_json, print_table
    from nearkin_shared.utils.terminal import printable

    with _open_keyring(read_only=True) as (keyring, _):
        listed = keyring.list_keys()
    if current_session().as_json:
        print_json([_json(key) for key in listed])
        return
    lines = []
    for key in listed:
        made = "" if key.created is None else f"{key.created:%Y-%m-%dT%H:%M:%SZ}"
        note = key.problem or ("seals what is written now" if key.newest else "")
        tenant = "(the store's own)" if not int(key.owner, 16) else key.tenant or ""
        lines.append((key.owner, printable(tenant), str(key.number), made, key.wrapped_by, printable(note)))
    names = ("owner", "tenant", "number", "made", "wrapped by", "")
    print_table(names, lines, whole=("owner", "number", "made", "wrapped by"))


@keys.command()
@click.argument("tenant", metavar="[TENANT]", required=False)
@click.option("--store-key", is_flag=True, help="The store's own key instead: of the maintenance service's records.")
@shared_options
def rotate(tenant: str | None, store_key: bool) -> None:
    """Make a new data key for a tenant (NEARKIN_TENANT by default).

    nearkin keys rotate db

    Writes use it after a minute at most; older data stay readable with the keys that they have, until garbage
    collection rewrites them.
    """
    from nearkin.cli.output import print_json, print_line
    from nearkin_shared.fingerprints import domain_of

    if tenant is not None and store_key:
        raise BadInput(f"keys rotate {tenant!r} --store-key: give one of them")
    problem = None if tenant is None else tenant_problem(tenant)
    if problem is not None:
        raise BadInput(f"keys rotate {tenant!r:.200}: {problem}")
    with _open_keyring() as (keyring, settings):
        whose = None if store_key else tenant or settings.tenant
        if whose is not None and not keyring.has_keys(keyring.owner_of(domain_of(whose))):
            raise BadInput(
                f"keys rotate {whose!r}: the tenant has no data keys (its first put makes one); is that its name? "
                "`nearkin keys list` lists the tenants with keys"
            )
        number = keyring.rotate(whose)
    if current_session().as_json:
        print_json({"tenant": whose, "number": number})
    else:
        print_line(
            f"key {number} of {'the store' if whose is None else f'tenant {whose}'} seals what is written from now on"
        )


@keys.command()
@shared_options
def rewrap() -> None:
    """Wrap all data keys with the newest key-encryption key; no data are rewritten.

    nearkin keys generate /etc/nearkin/store.key && nearkin keys rewrap

    When it has ended, and all services have the new file, the older key-encryption keys may be taken out of it.
    """
    from nearkin.cli.output import print_json, print_line

    with _open_keyring() as (keyring, _):
        count = keyring.rewrap()
    if current_session().as_json:
        print_json({"rewrapped": count})
    else:
        print_line(f"{count:,} data keys rewrapped; all are wrapped by the newest key-encryption key")


@keys.command()
@click.argument("tenant", metavar="TENANT")
@click.option("--yes", is_flag=True, help="Do not ask for the tenant's name again.")
@click.option("--now", is_flag=True, help="Remove the keys now, without a day to cancel: final.")
@click.option("--cancel", is_flag=True, help="Cancel an erasure whose grace is not over.")
@click.option("--despite-retention", is_flag=True, help="Erase versions that must be retained, too.")
@shared_options
def erase(tenant: str, yes: bool, now: bool, cancel: bool, despite_retention: bool) -> None:
    """Erase a tenant: remove its data keys, so that its data can never be read again.

    nearkin keys erase db
    nearkin keys erase db --cancel       # within a day
    nearkin keys erase db --now --yes    # no grace, no way back

    The tenant is closed at once: none of its data is read or written, services stop within a minute. The first
    `nearkin gc` after the grace removes its keys and frees the bytes. While a version of the tenant is retained
    (`nearkin retain`, retention.min_age_seconds) nothing is erased, unless --despite-retention is given. Copies that
    the erasure does not reach are listed with their times: Kafka, backups, copies of the folder keys/ and others.
    """
    from nearkin.cli.gc import remaining_lines
    from nearkin.cli.output import notice, print_json, print_line
    from nearkin_maintenance.gc.tenant_erasure import remaining_copies
    from nearkin_shared.results_json import remaining_json

    session = current_session()
    if cancel:
        _cancel(tenant)
        return
    if not yes:
        if session.as_json:
            raise BadInput(f"keys erase {tenant!r}: with --json pass --yes, there is no prompt")
        try:
            typed = click.prompt(
                f"All data of tenant {tenant} become unreadable for good. Type the tenant's name", err=True
            )
        except click.Abort:  # a script, or Ctrl-C
            raise BadInput(f"keys erase {tenant!r}: no name was typed, nothing was erased; scripts say --yes") from None
        if typed != tenant:
            raise BadInput(f"keys erase {tenant!r}: {typed!r} was typed; nothing was erased")
    settings, _ = session.load()
    grace_seconds = 0 if now else ERASE_GRACE_SECONDS
    if settings.object_store.url is None:
        with session.open_local(read_only=False) as store:
            count = store.erase_tenant(tenant, grace_seconds, despite_retention=despite_retention)
    else:
        count = _erase_in_services(settings, tenant, grace_seconds, despite_retention=despite_retention)
    closed = datetime.now(UTC)
    remaining = remaining_json(remaining_copies(settings, closed, closed + timedelta(seconds=grace_seconds)))
    if session.as_json:
        print_json({"tenant": tenant, "keys": count, "grace_seconds": grace_seconds, "remaining": remaining})
    else:
        for line in (*_erased_lines(tenant, count, grace_seconds), *remaining_lines(remaining)):
            print_line(line)
    if not count:
        notice(f"tenant {tenant} had none: is that the name? The store takes nothing from it from now on")


def _erased_lines(tenant: str, count: int, grace_seconds: int) -> Iterator[str]:
    if grace_seconds:
        yield f"tenant {tenant}: closed; its {count:,} data keys are removed by the first gc after {grace_seconds:,} s"
        yield f"until then `nearkin keys erase {tenant} --cancel` opens it again"
    else:
        yield f"tenant {tenant}: {count:,} data keys erased; `nearkin gc` or maintenance deletes their objects"


def _erase_in_services(settings: Settings, tenant: str, grace_seconds: int, *, despite_retention: bool) -> int:
    """Erase a tenant of a store that services write; return the number of its keys.

    Raises RetentionActive.
    """
    import time

    from nearkin_maintenance.gc.tenant_erasure import find_retained
    from nearkin_shared.objectstore.factory import open_encrypted

    _check_encrypted(settings)
    objects = open_encrypted(settings)
    if not despite_retention:
        find_retained(objects, tenant, settings, time.time()).check_none(tenant)
    return objects.keyring.erase(tenant, grace_seconds)


def _check_encrypted(settings: Settings) -> None:
    if settings.storage.encryption == "none":
        raise BadInput('keys: storage.encryption is "none": name the settings of an encrypted store')


def _cancel(tenant: str) -> None:
    """Cancel the erasure of a tenant, and say so."""
    from nearkin.cli.output import print_json, print_line

    with _open_keyring() as (keyring, _):
        keyring.cancel_erasure(tenant)
    if current_session().as_json:
        print_json({"tenant": tenant, "cancelled": True})
    else:
        print_line(
            f"tenant {tenant}: erasure cancelled; if the index was rebuilt meanwhile run `nearkin rebuild-index`"
        )


@contextmanager
def _open_keyring(*, read_only: bool = False) -> Iterator[tuple[Keyring, Settings]]:
    """Open the keys of the store that the settings name, in a folder or in S3, for a block."""
    session = current_session()
    settings, _ = session.load()
    if settings.object_store.url is None:
        with session.open_local(read_only=read_only) as store:
            yield store.keyring, settings
        return
    _check_encrypted(settings)
    from nearkin_shared.objectstore.factory import open_keys

    yield open_keys(settings), settings


def _json(key: KeyInfo) -> dict[str, object]:
    return {
        "owner": key.owner,
        "tenant": key.tenant,
        "number": key.number,
        "created": None if key.created is None else key.created.isoformat(),
        "wrapped_by": key.wrapped_by,
        "newest": key.newest,
        "problem": key.problem,
    }
