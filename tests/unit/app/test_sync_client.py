"""Test tools/make_sync_client.py, which writes the client for threads from the one for asyncio."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nearkin.client.aio import AsyncRemoteStore
from nearkin.client.sync import RemoteStore

TOOL = Path(__file__).parents[3] / "tools" / "make_sync_client.py"
spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
assert spec is not None
assert spec.loader is not None
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def test_check_passes_for_the_module_in_the_repository() -> None:
    assert CliRunner().invoke(make.main, ["--check"]).output == ""


def test_check_refuses_a_module_that_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited = tmp_path / "sync_calls.py"
    edited.write_text(make.TARGET.read_text() + "\nEDITED = True\n")
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(make, "TARGET", edited)
    monkeypatch.setattr(make, "__file__", str(tmp_path / "make_sync_client.py"))
    done = CliRunner().invoke(make.main, ["--check"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: sync_calls.py: is not what async_calls.py makes; run `python ")
    assert edited.read_text().endswith("EDITED = True\n")


def test_to_sync_leaves_out_async_and_await() -> None:
    source = (
        '"""Do it."""\n\nimport anyio\n\n\nasync def wait(client: AsyncClient) -> None:\n'
        "    async with client:\n        await anyio.sleep(1)\n"
    )
    assert make.to_sync(source).removeprefix(make.HEAD) == (
        "\nimport time\n\n\ndef wait(client: Client) -> None:\n    with client:\n        time.sleep(1)\n"
    )


@pytest.mark.parametrize("name", ["AsyncLock", "asynccontextmanager_Async", "async"])
def test_to_sync_with_unknown_name_refuses_it(name: str) -> None:
    with pytest.raises(click.ClickException, match=f"'{name}' has no name for threads"):
        make.to_sync(f'"""Do it."""\n\nlock = "{name}"\n')


def test_clients_have_the_same_methods_and_parameters() -> None:
    """All but trees, their checkpoints, and the close of each kind, exist in both with the same parameters."""
    trees = {"backup", "import_tar", "tree", "restore", "newest_base", "put_parts", "open_range"}
    checkpoints = {"checkpoints", "put_checkpoint", "open_checkpoint", "delete_checkpoints"}
    closes = {"close", "aclose"}

    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in trees | checkpoints | closes
        }

    assert methods(AsyncRemoteStore) == methods(RemoteStore)
    assert len(methods(RemoteStore)) > 15
