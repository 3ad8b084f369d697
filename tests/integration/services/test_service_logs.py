"""Test a gateway's own log lines as JSON: the upload's ids, and no token, name or bytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx

from nearkin_gateway.auth import tokens
from tests.support.checks.commands import new_store
from tests.support.checks.waiting import until

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_upload_is_logged_without_secrets(tmp_path: Path) -> None:
    """Log an upload with its blob, tenant and trace."""
    text, _ = tokens.create(tmp_path / "tokens.json", "default", ["read", "write"])
    (tmp_path / "nearkin.toml").write_text(
        f'[logs]\nformat = "json"\n[auth]\ntokens_file = "{tmp_path}/tokens.json"\n'
        '[redis]\npassword = "hidden-password"\n[gateway]\ningest = "embedded"\nport = 0\n[monitor]\nport = 0\n'
    )
    new_store(tmp_path / "store")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "nearkin.cli", "serve", str(tmp_path / "store"), "--config"]
    with log.open("w") as err, (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([*command, str(tmp_path / "nearkin.toml")], stdout=out, stderr=err)
    try:

        def find_url() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(r"http://127\.0\.0\.1:\d+(?=\D)", (tmp_path / "out").read_text())

        url = until(find_url, log.read_text)
        assert url is not None
        with httpx.Client(base_url=url[0], headers={"authorization": f"Bearer {text}"}, timeout=30) as client:
            trace = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            stored = client.put("/v1/blobs/secret-name", content=b"the contents " * 1000, headers=trace)
            assert stored.status_code == 201
            client.get("/v1/blobs/secret-name", headers={"authorization": f"Bearer {text}x"})
    finally:
        process.terminate()
        process.wait(60)
    written = log.read_text()
    records = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    # These name keys: each has a setting of its own.
    access = [line for line in records if line["logger"] in ("nearkin.access", "nearkin.audit")]
    assert any(line.get("trace_id") == TRACE for line in access)
    (about,) = (line for line in records if "blob" in line and line not in access)
    assert (about["tenant"], about["trace_id"], len(about["blob"])) == ("default", TRACE, 32)
    assert "13000 bytes taken" in about["event"]
    assert {"event", "level", "logger", "timestamp"} <= set(records[0])
    for hidden in (text, text[12:], "the contents", "hidden-password"):
        assert hidden not in written
    assert not [line for line in records if "secret-name" in str(line) and line not in access]
