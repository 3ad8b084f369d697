"""Write the client for threads from the client for asyncio: one source, two modules that behave the same.

    python tools/make_sync_client.py            write app/nearkin/client/sync_calls.py
    python tools/make_sync_client.py --check    exit 1 if it is not up to date (`make check`)

`async` and `await` are left out, and the names of asyncio's interfaces become those for threads (NAMES).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "app" / "nearkin" / "client"
SOURCE, TARGET = CLIENT / "async_calls.py", CLIENT / "sync_calls.py"
HEAD = '''"""Send the requests of a store behind a gateway, from threads.

Written by tools/make_sync_client.py from async_calls.py: edit that module, then run it.
"""
'''
DOCSTRING = re.compile(r'\A""".*?"""\n', re.DOTALL)
NAMES = {
    "AsyncClient": "Client",
    "AsyncGatewayCalls": "GatewayCalls",
    "AsyncItems": "SyncItems",
    "AsyncIterator": "Iterator",
    "AsyncRetrying": "Retrying",
    "AsyncSource": "SyncSource",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclose": "close",
    "aiter_raw": "iter_raw",
    "anext": "next",
    "anyio": "time",
    "async_pieces": "pieces",
    "each_async": "iter",
}
KEYWORDS = re.compile(r"\b(?:async|await) ")
IMPORTED_BUILTIN = re.compile(r"(?m)^(from nearkin\.client\.streaming import .*), iter$")
ASYNC_LEFT = re.compile(r"\b(?:\w*[Aa]sync\w*|await|anyio)\b")


def to_sync(source: str) -> str:
    """Return a module for threads. Raises click.ClickException for a name that NAMES does not have."""
    text = KEYWORDS.sub("", DOCSTRING.sub(lambda _: HEAD, source))
    text = re.sub(r"\b\w+\b", lambda name: NAMES.get(name[0], name[0]), text)
    text = IMPORTED_BUILTIN.sub(r"\1", text)
    left = ASYNC_LEFT.search(text.removeprefix(HEAD))
    if left is not None:
        raise click.ClickException(f"{SOURCE.name}: {left[0]!r} has no name for threads; add it to NAMES of {__file__}")
    return tidy(text)


def tidy(source: str) -> str:
    """Return a source with its imports sorted, formatted as `make check` wants it."""
    name = ["--stdin-filename", str(TARGET), "-"]
    for arguments in (["check", "--quiet", "--select=I", "--fix", *name], ["format", "--quiet", *name]):
        command = [sys.executable, "-m", "ruff", *arguments]
        source = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return source


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="write nothing; exit 1 if the module is not up to date")
def main(*, check: bool) -> None:
    """Write the client for threads from the client for asyncio."""
    made = to_sync(SOURCE.read_text(encoding="utf-8"))
    if not check:
        TARGET.write_text(made, encoding="utf-8")
    elif not TARGET.exists() or TARGET.read_text(encoding="utf-8") != made:
        name, tool = TARGET.relative_to(ROOT), Path(__file__).relative_to(ROOT)
        raise click.ClickException(f"{name}: is not what {SOURCE.name} makes; run `python {tool}`")


if __name__ == "__main__":
    main()
