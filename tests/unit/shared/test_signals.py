"""Test that a Ctrl-C during an import waits for its end and is not lost."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any, BinaryIO, cast
from weakref import WeakSet

import pytest

from nearkin import open_store
from nearkin.embedded import runner as embedded_runner
from nearkin.lab.generated_data import mutate, text_like
from nearkin_chunker import splitter
from nearkin_shared.pipeline.worker_thread import Worker
from nearkin_shared.reading.block_cache import ByteBoundedCache
from nearkin_shared.reading.read_stats import ActiveRestores
from nearkin_shared.utils import thread_pool
from nearkin_shared.utils.signals import interrupts_wait
from tests.support.checks.waiting import until
from tests.support.data.stores import process

IN_AN_IMPORT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Presses(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[3]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

from nearkin import open_store
sys.meta_path.insert(0, Presses())
try:
    with open_store(sys.argv[1], create=True) as store:
        store.put("k", open(sys.argv[2], "rb").read())
except KeyboardInterrupt:
    print("interrupted", sys.argv[3] in sys.modules)
"""


def test_deferred_signal_is_handled_after_the_block() -> None:
    reached, handler = list[bool](), signal.getsignal(signal.SIGINT)

    def block() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached
    assert signal.getsignal(signal.SIGINT) is handler


GIVEN_TO_ANOTHER = """
import signal, threading, time
from nearkin_shared.utils.signals import wait_for

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())

def take_it():
    time.sleep(0.5)  # the main thread waits by now
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(60)

threading.Thread(target=take_it, daemon=True).start()
wait_for(stop)
print("ended")
"""


def test_signal_to_another_thread_ends_the_main_wait() -> None:
    with process(GIVEN_TO_ANOTHER) as waiting:
        try:
            assert waiting.communicate(timeout=30) == ("ended\n", "")
        finally:
            waiting.kill()


@pytest.mark.parametrize("in_the_source", [False, True])
def test_ctrl_c_while_a_thread_is_awaited_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_the_source: bool
) -> None:
    """The interrupt arrives at the end of a put, or is the second one of a put."""
    stop, pressed = Worker.stop, list[bool]()

    def interrupted(worker: Worker[Any]) -> None:
        if worker._name == "cut" and not pressed:
            pressed.append(True)
            worker._items.put(None)
            raise KeyboardInterrupt
        stop(worker)

    class Source:
        def read(self, size_bytes: int) -> bytes:
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr(embedded_runner, "cores", lambda: 2)
    monkeypatch.setattr(Worker, "stop", interrupted)
    with open_store(tmp_path / "store", create=True) as store:
        with pytest.raises(KeyboardInterrupt):
            store.put("k", cast("BinaryIO", Source()) if in_the_source else text_like(100_000, 1))
        assert pressed

        def left() -> set[threading.Thread]:
            return {one for one in threading.enumerate() if one.name.startswith("nearkin-")} - before

        until(lambda: not left(), left)
        assert store.put("k", text_like(200_000, 2)).info.size_bytes == 200_000
        assert store.verify().damage == ()


def test_ctrl_c_while_a_put_starts_threads_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cutter, pressed = splitter.Cutter, list[bool]()

    def interrupted(*given: Any) -> Any:
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return cutter(*given)

    before = set(threading.enumerate())
    monkeypatch.setattr(embedded_runner, "Cutter", interrupted)
    with open_store(tmp_path / "store", create=True) as store:
        with pytest.raises(KeyboardInterrupt):
            store.put("k", text_like(100_000, 1))
        assert pressed
        assert {one for one in threading.enumerate() if one.name.startswith("nearkin-")} <= before
        assert store.put("k", text_like(200_000, 2)).info.version == 1


def test_ctrl_c_as_a_put_ends_leaves_the_store_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end a put resets the bound of the cache.

    An interrupt there must not block later puts.
    """
    bound, calls = ByteBoundedCache.bound, list[int]()

    def interrupted(cache: ByteBoundedCache[Any, Any], bytes_max: int) -> None:
        calls.append(bytes_max)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        bound(cache, bytes_max)

    with open_store(tmp_path / "store", create=True) as store:
        monkeypatch.setattr(ByteBoundedCache, "bound", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put("k", b"abc")
        assert len(calls) == 2
        assert store.put("k", b"abcd").info.version == 2
        assert store.gc().freed_bytes <= 0
        assert store.get("k").read() == b"abcd"


def test_ctrl_c_as_a_restore_begins_does_not_leak_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_given: Any) -> None:
        add(*_given)
        raise KeyboardInterrupt

    restores, add = ActiveRestores(), WeakSet.add
    monkeypatch.setattr(WeakSet, "add", interrupted)
    with pytest.raises(KeyboardInterrupt), restores.register():
        raise AssertionError
    monkeypatch.undo()
    assert restores.count == 0
    with restores.register():
        assert restores.count == 1
    assert restores.count == 0


def test_ctrl_c_while_a_restore_waits_leaves_no_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = text_like(6_000_000, 1)
    monkeypatch.setattr(thread_pool, "cores", lambda: 3)
    with open_store(tmp_path / "store", create=True) as store:
        store.put("k", content)
        store.put("k", mutate(content, 1))
        store._containers.evict()
        pieces = store.get("k").pieces()
        next(pieces)
        decoders = {one for one in threading.enumerate() if one.name.startswith("nearkin-decode")}
        assert decoders
        with monkeypatch.context() as interrupted:
            interrupted.setattr(threading.Event, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                pieces.close()
        until(lambda: not decoders & set(threading.enumerate()))
        until(lambda: store._containers.restores.count == 0)
        assert list(pieces) == []


@pytest.mark.parametrize(
    "module", ["nearkin.embedded.runner", "nearkin_delta.stage", "nearkin_shared.index.lmdb.lmdb_index"]
)
def test_ctrl_c_in_an_import_of_a_put_ends_the_put_after_it(module: str, tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.write_bytes(text_like(100_000, 1))
    with process(IN_AN_IMPORT, tmp_path / "store", first, module) as writer:
        output, errors = writer.communicate(timeout=60)
    assert (output, errors) == ("interrupted True\n", "")
