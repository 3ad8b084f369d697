"""`nearkin serve` and `nearkin token`. Invariant: a token is shown once, when it is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import AsWritten, AsWrittenGroup, Session, current_session, services_extra, shared_options
from nearkin_shared.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from nearkin_shared.config.settings import Settings


@click.command(cls=AsWritten)
@click.argument("folder", metavar="[STORE]", required=False)
@click.option("--embedded", is_flag=True, help="Run a whole store in this process, regardless of gateway.ingest.")
@click.option("--host", metavar="ADDRESS", help="Listen here; anything but loopback needs auth.tokens_file.")
@click.option("--port", metavar="PORT", type=click.IntRange(0, 65_535), help="Listen here [8080]; 0 is any free port.")
@click.option("--no-token", is_flag=True, help="Require no token: any process that reaches this port has all rights.")
@shared_options
def serve(folder: str | None, embedded: bool, host: str | None, port: int | None, no_token: bool) -> None:
    """Serve a store over HTTP, with a dashboard at /.

    nearkin serve /var/lib/nearkin       # prints its URL and a token
    curl -H "Authorization: Bearer $TOKEN" -T dump.rdb http://127.0.0.1:8080/v1/blobs/db/dump

    Ctrl-C or SIGTERM end it. Without auth.tokens_file a token is made that counts until then. Where gateway.ingest is
    set to kafka, and no STORE is named, it serves in front of the pipeline.
    """
    import logging

    from nearkin_shared.config.loader import with_changes

    session = current_session()
    if folder is not None:
        if session.store is not None:
            raise BadInput(f"store {session.store!r} and {folder!r}: name one of them")
        session.store = folder
    settings, origins = session.load()
    chosen = origins["gateway.ingest"].source != "default"
    wants = {"host": host, "port": port}
    if embedded or folder is not None or not chosen:
        wants["ingest"] = "embedded"
    settings = with_changes(settings, {"gateway": {name: value for name, value in wants.items() if value is not None}})
    if settings.gateway.ingest == "embedded":
        from nearkin.cli.arguments import store_folder

        settings = with_changes(settings, {"store": str(store_folder(settings.store))})
    with services_extra("serve"):
        from nearkin.embedded.gateway_backend import embedded_gateway
        from nearkin_gateway.server import check_address
        from nearkin_gateway.server import serve as serve_gateway
        from nearkin_shared.observability import log_setup

        edge = None
        if settings.gateway.edge and settings.gateway.ingest != "embedded":
            from nearkin.workers.edge_dedup import connect_edge

            edge = connect_edge
    log_setup.start(settings, logging.INFO)
    check_address(settings)
    with ExitStack() as held:
        text = None
        if settings.auth.tokens_file is None and not no_token:
            settings, text = held.enter_context(_token_of_this_run(settings))
        with suppress(KeyboardInterrupt):  # Ctrl-C is how one ends it: uvicorn has stopped by then
            serve_gateway(
                settings,
                session.config,
                lambda url: _announce(url, text, as_json=session.as_json),
                session.wait,
                embedded_gateway,
                edge,
            )


@contextmanager
def _token_of_this_run(settings: Settings) -> Iterator[tuple[Settings, str]]:
    """Yield the settings with a temporary tokens file, and its one token."""
    import tempfile

    from nearkin_gateway.auth import tokens
    from nearkin_shared.config.loader import with_changes

    with tempfile.TemporaryDirectory(prefix="nearkin-serve-") as folder:
        file = Path(folder) / "tokens.json"
        text, _ = tokens.create(file, settings.tenant, tokens.SCOPES, days=None, note="nearkin serve")
        yield with_changes(settings, {"auth": {"tokens_file": str(file)}}), text


def _announce(url: str, token: str | None, *, as_json: bool) -> None:
    """Say where it listens, once it does."""
    import json

    from nearkin.cli.output import print_line

    if as_json:
        print_line(json.dumps({"url": url, "token": token}))  # one line, so that a waiting reader knows its end
    else:
        print_line(f"{url}/")
        if token is not None:
            print_line(f"token {token}")
    if sys.stdout is not None:
        sys.stdout.flush()


@click.group(cls=AsWrittenGroup)
@shared_options
def token() -> None:
    """Make, list and revoke the tokens of a gateway; set quotas.

    nearkin token create --file tokens.json --tenant shop --scope read --scope write
    NEARKIN_AUTH__TOKENS_FILE=tokens.json nearkin token list
    """


@token.command()
@click.option("--file", "file", metavar="FILE", type=click.Path(path_type=Path), help="[auth.tokens_file]")
@click.option("--tenant", metavar="NAME", help="Whose blobs it opens [tenant].")
@click.option(
    "--scope",
    "scopes",
    metavar="SCOPE",
    multiple=True,
    help="read, write, delete, admin or operator; repeatable [read].",
)
@click.option("--days", metavar="N", type=int, default=90, show_default=True, help="Taken for so long; 0: for ever.")
@click.option("--note", metavar="TEXT", default="", help="The purpose of the token.")
@shared_options
def create(file: Path | None, tenant: str | None, scopes: tuple[str, ...], days: int, note: str) -> None:
    """Make a token and print it; it is not shown again.

    nearkin token create --file tokens.json --tenant shop --scope read --scope write --days 30
    nearkin token create --file tokens.json --scope operator     # of no tenant: settings, gc, workers, scrub

    Data that do not belong to one tenant need the scope operator; admin shows the sums of its own tenant.
    """
    from nearkin.cli.output import print_json, print_line
    from nearkin_gateway.auth import tokens

    session = current_session()
    owner = tenant if tenant is not None else session.load()[0].tenant
    text, made = tokens.create(_file(session, file), owner, scopes or ("read",), days=days or None, note=note)
    if session.as_json:
        print_json({"token": text, **_token_json(made)})
    else:
        print_line(text)


@token.command("list")
@click.option("--file", "file", metavar="FILE", type=click.Path(path_type=Path), help="[auth.tokens_file]")
@shared_options
def list_tokens(file: Path | None) -> None:
    """List tokens: id, tenant, scopes, when they expire, note.

    nearkin token list --file tokens.json
    """
    from nearkin.cli.output import print_json, print_line
    from nearkin_gateway.auth import tokens
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    found = tokens.read_tokens(_file(session, file))
    if session.as_json:
        print_json([_token_json(entry) for entry in found])
        return
    for entry in found:
        row = _token_json(entry)
        scopes = ",".join(entry.scopes)
        names = f"{printable(entry.tenant)}  {printable(entry.note)}"
        print_line(f"{entry.id}  {row['expires'] or 'never':<20}  {scopes:<24}  {names}")


@token.command()
@click.argument("number", metavar="ID")
@click.option("--file", "file", metavar="FILE", type=click.Path(path_type=Path), help="[auth.tokens_file]")
@shared_options
def revoke(number: str, file: Path | None) -> None:
    """Revoke a token by its id; running gateways refuse it within a second.

    nearkin token revoke 7f3a9c0e --file tokens.json
    """
    from nearkin.cli.output import print_json, print_line
    from nearkin_gateway.auth import tokens

    session = current_session()
    gone = tokens.revoke(_file(session, file), number)
    if session.as_json:
        print_json(_token_json(gone))
    else:
        print_line(f"revoked {gone.id}")


@token.command()
@click.argument("tenant", metavar="TENANT", required=False)
@click.option("--file", "file", metavar="FILE", type=click.Path(path_type=Path), help="[auth.tokens_file]")
@click.option(
    "--logical", metavar="SIZE", help="Bytes of all visible versions together, such as 500GiB; none: no limit."
)
@click.option("--stored", metavar="SIZE", help="Bytes that the tenant takes in the object store; none: no limit.")
@click.option("--rate", metavar="SIZE", help="Bytes of uploads a second and gateway, 64KiB at least; none: no limit.")
@shared_options
def quota(tenant: str | None, file: Path | None, logical: str | None, stored: str | None, rate: str | None) -> None:
    """Set quotas of a tenant, or list those of all tenants.

    nearkin token quota shop --logical 1TiB --rate 50MiB --file tokens.json
    nearkin token quota shop --logical none --file tokens.json
    nearkin token quota --file tokens.json

    Running gateways apply them within a second. A limit that is not named stays.
    A put beyond a limit of bytes is 507, one beyond the rate 429.
    """
    from dataclasses import replace

    from nearkin.cli.output import print_json, print_line
    from nearkin_gateway.auth import tokens
    from nearkin_gateway.auth.tenant_quota import TenantQuota
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    path = _file(session, file)
    wanted = {"logical_bytes": logical, "stored_bytes": stored, "upload_bytes_per_second": rate}
    changes = {name: _quota_bytes(name, text) for name, text in wanted.items() if text is not None}
    if changes and tenant is None:
        raise BadInput("no tenant given: name the one whose quotas to set")
    found = tokens.read_tenant_quotas(path)
    if tenant is not None:
        found = {tenant: replace(found.get(tenant, TenantQuota()), **changes)}
        if changes:
            tokens.set_quota(path, tenant, found[tenant])
    if session.as_json:
        print_json({name: limits.to_json() for name, limits in sorted(found.items())})
        return
    for name, limits in sorted(found.items()):
        shown = "  ".join(f"{quota} {value}" for quota, value in limits.to_json().items())
        print_line(f"{printable(name)}  {shown or 'unlimited'}")


def _quota_bytes(name: str, text: str) -> int | None:
    """Return the bytes that a text such as `500GiB` means; None for `none`. Raises BadInput."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    if text == "none":
        return None
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as err:
        raise BadInput(f"{name} {text!r:.40}: want bytes, a unit after them (500GiB, 50MB), or none") from err


def _file(session: Session, given: Path | None) -> Path:
    if given is not None:
        return given
    named = session.load()[0].auth.tokens_file
    if named is None:
        raise ConfigError("no tokens file given: use --file FILE or set auth.tokens_file")
    return Path(named).expanduser()


def _token_json(found: object) -> dict[str, object]:
    from datetime import UTC, datetime

    from nearkin_gateway.auth.tokens import AccessToken

    assert isinstance(found, AccessToken)

    def time(seconds: int | None) -> str | None:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    return {
        "id": found.id,
        "tenant": found.tenant,
        "scopes": list(found.scopes),
        "created": time(found.created),
        "expires": time(found.expires),
        "note": found.note,
    }
