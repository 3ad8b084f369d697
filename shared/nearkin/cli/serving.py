"""`nearkin serve` and `nearkin token`. Invariant: a token is shown once, when it is made."""

from __future__ import annotations

from pathlib import Path

import click

from nearkin.cli.session import AsWritten, AsWrittenGroup, Session, current_session, shared_options
from nearkin.errors import ConfigError


@click.command(cls=AsWritten)
@click.option("--embedded", is_flag=True, help="A whole store in this process: no Kafka, no workers.")
@click.option("--host", metavar="ADDRESS", help="Listen here; anything but loopback needs tokens.")
@click.option("--port", metavar="PORT", type=click.IntRange(0, 65_535), help="Listen here; 0 is any free port.")
@shared_options
def serve(embedded: bool, host: str | None, port: int | None) -> None:
    """Answer over HTTP until it is stopped (Ctrl-C, SIGTERM).

    nearkin --store /var/lib/nearkin serve --embedded
    curl -T dump.rdb http://127.0.0.1:8080/v1/blobs/db/dump
    curl http://127.0.0.1:8080/v1/blobs/db/dump -o restored.rdb
    """
    import logging

    from nearkin.config import with_changes

    session = current_session()
    settings = session.load()[0]
    given = {"host": host, "port": port, "ingest": "embedded" if embedded else None}
    settings = with_changes(settings, {"gateway": {name: value for name, value in given.items() if value is not None}})
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    from nearkin_gateway.server import serve as serve_gateway

    serve_gateway(settings, session.config)


@click.group(cls=AsWrittenGroup)
@shared_options
def token() -> None:
    """Make, list and revoke the tokens of a gateway.

    nearkin token create --file tokens.json --tenant shop --scope read --scope write
    NEARKIN_AUTH__TOKENS_FILE=tokens.json nearkin token list
    """


@token.command()
@click.option("--file", "file", metavar="FILE", type=click.Path(path_type=Path), help="[auth.tokens_file]")
@click.option("--tenant", metavar="NAME", help="Whose blobs it opens [tenant].")
@click.option(
    "--scope", "scopes", metavar="SCOPE", multiple=True, help="read, write, delete or admin; repeatable [read]."
)
@click.option("--days", metavar="N", type=int, default=90, show_default=True, help="Taken for so long; 0: for ever.")
@click.option("--note", metavar="TEXT", default="", help="What it is for.")
@shared_options
def create(file: Path | None, tenant: str | None, scopes: tuple[str, ...], days: int, note: str) -> None:
    """Make a token and print it: this once.

    nearkin token create --file tokens.json --tenant shop --scope read --scope write --days 30
    """
    from nearkin.cli.output import print_json, say
    from nearkin_gateway import tokens

    session = current_session()
    owner = tenant if tenant is not None else session.load()[0].tenant
    text, made = tokens.create(_file(session, file), owner, scopes or ("read",), days=days or None, note=note)
    if session.as_json:
        print_json({"token": text, **_token_json(made)})
    else:
        say(text)


@token.command("list")
@click.option("--file", "file", metavar="FILE", type=click.Path(path_type=Path), help="[auth.tokens_file]")
@shared_options
def list_tokens(file: Path | None) -> None:
    """List tokens: id, tenant, scopes, when they expire, note.

    nearkin token list --file tokens.json
    """
    from nearkin.cli.output import print_json, printable, say
    from nearkin_gateway import tokens

    session = current_session()
    found = tokens.listed(_file(session, file))
    if session.as_json:
        print_json([_token_json(entry) for entry in found])
        return
    for entry in found:
        told = _token_json(entry)
        scopes = ",".join(entry.scopes)
        names = f"{printable(entry.tenant)}  {printable(entry.note)}"
        say(f"{entry.id}  {told['expires'] or 'never':<20}  {scopes:<24}  {names}")


@token.command()
@click.argument("number", metavar="ID")
@click.option("--file", "file", metavar="FILE", type=click.Path(path_type=Path), help="[auth.tokens_file]")
@shared_options
def revoke(number: str, file: Path | None) -> None:
    """Revoke a token by its id; running gateways refuse it within a second.

    nearkin token revoke 7f3a9c0e --file tokens.json
    """
    from nearkin.cli.output import print_json, say
    from nearkin_gateway import tokens

    session = current_session()
    gone = tokens.revoke(_file(session, file), number)
    if session.as_json:
        print_json(_token_json(gone))
    else:
        say(f"revoked {gone.id}")


def _file(session: Session, given: Path | None) -> Path:
    if given is not None:
        return given
    named = session.load()[0].auth.tokens_file
    if named is None:
        raise ConfigError("no tokens file given: use --file FILE or set auth.tokens_file")
    return Path(named).expanduser()


def _token_json(found: object) -> dict[str, object]:
    from datetime import UTC, datetime

    from nearkin_gateway.tokens import Token

    assert isinstance(found, Token)

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
