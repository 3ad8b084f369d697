# size: one command in a module of its own, imported when it is called
"""Run `nearkin webdav`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import click

from nearkin.cli.session import AsWritten, complete_file, current_session, shared_options
from nearkin_shared.errors import BadInput, ConfigError

PASSWORD_CHARACTERS_MIN = 12
PASSWORD_FILE_BYTES_MAX = 4096


@click.command(cls=AsWritten)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Listen here; other than loopback: with password.")
@click.option("--port", metavar="PORT", type=click.IntRange(0, 65_535), default=8081, help="[8081]; 0: any free port.")
@click.option("--user", metavar="NAME", default="nearkin", help="User name of clients [nearkin].")
@click.option(
    "--password-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    shell_complete=complete_file,
    help="File whose first line is the password of clients.",
)
@click.option("--certificate", metavar="FILE", type=click.Path(path_type=Path), help="TLS certificate, PEM.")
@click.option("--private-key", metavar="FILE", type=click.Path(path_type=Path), help="Its private key, PEM.")
@shared_options
def webdav(
    host: str,
    port: int,
    user: str,
    password_file: Path | None,
    certificate: Path | None,
    private_key: Path | None,
) -> None:
    """Serve the store by WebDAV, read-only, until Ctrl-C.

    nearkin webdav                           # http://127.0.0.1:8081/
    curl http://127.0.0.1:8081/home/latest/notes.txt -o notes.txt
    curl 'http://127.0.0.1:8081/home/3/mail/?archive=tar' | tar -x -C /tmp/mail
    curl 'http://127.0.0.1:8081/home/latest/?archive=zip' -o home.zip
    nearkin webdav --host 0.0.0.0 --password-file webdav.password --certificate cert.pem --private-key key.pem

    For machines without FUSE: file managers, rclone and browsers show the folders of `nearkin mount`. /KEY/7 is version
    7 of KEY: a folder for a tree, a file for a version of put; /KEY/latest and /KEY/2026-11-28T10:15:00Z are the same
    by name and time. New versions appear within 10 seconds.

    Ranges of files can be read; one with more than 1 TiB of holes is refused. ?archive=tar or ?archive=zip on a
    version, folder or file of a tree is its archive: tar has everything, as of `nearkin export`; zip has up to 100,000
    files, folders and symlinks, and up to 1 TiB. WebDAV shows a symlink to a file of its tree as that file. It does not
    show other symlinks, devices, FIFOs, and names that are not UTF-8.

    Without --password-file every user of this machine can read the store, and an address other than loopback is
    refused. A password without TLS can be read on the network. Damaged content breaks the connection.

    Needs: pip install 'nearkin[webdav]'.
    """
    import json

    from nearkin.cli.output import print_line, warn

    session = current_session()
    try:
        from nearkin.trees.webdav_server import WebdavOptions, check_webdav_address, serve_webdav
    except ModuleNotFoundError as err:
        raise ConfigError(f"webdav: {err.name} is not installed; pip install 'nearkin[webdav]'") from err
    if (certificate is None) != (private_key is None):
        raise BadInput("--certificate and --private-key: name both of them")
    password = None if password_file is None else read_password(password_file)
    options = WebdavOptions(host, port, user, password, certificate, private_key)
    check_webdav_address(options)
    if password is not None and certificate is None and host not in ("127.0.0.1", "::1", "localhost"):
        warn("webdav: without --certificate the password and all files can be read on the network")

    def announce(url: str) -> None:
        print_line(json.dumps({"url": url}) if session.as_json else url)
        if sys.stdout is not None:
            sys.stdout.flush()

    with session.open() as store, suppress(KeyboardInterrupt):  # Ctrl-C is how one ends it
        serve_webdav(store, options, announce)


def read_password(path: Path) -> str:
    """Return the first line of a file. Raises BadInput."""
    try:
        with path.open("rb") as file:
            line = file.read(PASSWORD_FILE_BYTES_MAX).partition(b"\n")[0].rstrip(b"\r")
        password = line.decode()
    except OSError as err:
        raise BadInput(f'--password-file "{path}": {(err.strerror or "cannot be read").lower()}') from err
    except UnicodeDecodeError as err:
        raise BadInput(f'--password-file "{path}": its first line is not UTF-8') from err
    if len(password) < PASSWORD_CHARACTERS_MIN:
        raise BadInput(f'--password-file "{path}": its first line has fewer than {PASSWORD_CHARACTERS_MIN} characters')
    return password
