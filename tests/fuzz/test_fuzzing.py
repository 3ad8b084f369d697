"""Give changed bytes to the parsers.

A short random run of each, and all inputs that once caused a fault.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.fuzzing import fuzz
from tests.support.fuzzing.fuzz import Fault, kept_inputs, mutate_input, run, try_input
from tests.support.fuzzing.fuzz_targets import TARGETS, Target, raw_frame

ROOT = Path(__file__).parents[2]
REGRESSIONS = Path(__file__).parent
INPUTS = int(os.environ.get("FUZZ_INPUTS", "300"))


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_given_changed_bytes_succeed_or_refuse(name: str) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")  # pytest shows it where the test fails
    given, taken = run(name, INPUTS, seed, REGRESSIONS)
    assert given >= INPUTS
    assert taken >= 1 or TARGETS[name].refusals == ()


def test_stored_inputs_of_earlier_faults_are_found() -> None:
    assert list(kept_inputs("headers", REGRESSIONS))
    assert {path.name for path in REGRESSIONS.iterdir() if path.is_dir() and path.name != "__pycache__"} <= set(TARGETS)


def test_parser_that_raises_another_error_is_a_fault() -> None:
    def broken(data: bytes) -> None:
        if data[:1] == b"x":
            raise IndexError("out of range")

    target = Target(broken, lambda: [b"a"])
    assert try_input("t", target, b"a")
    with pytest.raises(Fault, match="IndexError: out of range for 2 bytes b'xy'"):
        try_input("t", target, b"xy")


def test_parser_that_hangs_or_takes_all_memory_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(data: bytes) -> None:
        while data:
            pass

    def greedy(data: bytes) -> int:
        return len(bytearray(4 << 30))

    monkeypatch.setattr(fuzz, "SECONDS_MAX", 1)
    monkeypatch.setattr(fuzz, "TARGETS", {"h": Target(hangs, lambda: [b"a"]), "g": Target(greedy, lambda: [b"a"])})
    with pytest.raises(Fault, match="took more than 1 s of CPU"):
        run("h", 1, 1)
    with pytest.raises(Fault, match="MemoryError"):
        run("g", 1, 1)


def test_mutator_with_equal_seed_gives_equal_bytes() -> None:
    seeds = [b"one thing", b"and another"]
    one, other = random.Random(5), random.Random(5)
    assert [mutate_input(one, seeds[0], seeds) for _ in range(50)] == [
        mutate_input(other, seeds[0], seeds) for _ in range(50)
    ]


def test_tables_in_raw_frames_are_read_as_packed_ones() -> None:
    from nearkin_shared.kernels.zstd_frames import decode_frame

    for data in (b"", b"short", bytes(range(256)) * 1200):
        out = bytearray(len(data))
        decode_frame(raw_frame(data), out, "test")
        assert out == data


def test_vcdiff_decoder_under_sanitizers_stays_in_buffers(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    found = find_spec("xdelta3")
    assert found is not None, "xdelta3 is a build requirement"
    (library,) = found.submodule_search_locations or [""]
    kernels = ROOT / "shared/nearkin_shared/kernels/native"
    words = [compiler, "-g", "-O1", "-w", "-fno-strict-aliasing", "-DNK_DRIVER", "-fsanitize=address,undefined"]
    words += ["-fno-sanitize-recover=undefined", f"-I{kernels}", f"-I{Path(library) / 'lib'}"]
    words += [str(REGRESSIONS / "vcdiff.c"), str(kernels / "xdelta3_impl.c"), "-o", str(tmp_path / "vcdiff")]
    built = subprocess.run(words, capture_output=True, text=True, check=False)
    if built.returncode and "asan" in built.stderr:
        pytest.skip("the compiler has no AddressSanitizer")
    assert built.returncode == 0, built.stderr
    names = []
    for number, data in enumerate([*TARGETS["vcdiff"].seeds(), *kept_inputs("vcdiff", REGRESSIONS)]):
        (tmp_path / str(number)).write_bytes(data)
        names.append(str(tmp_path / str(number)))
    seed = str(random.SystemRandom().randrange(1 << 31))
    done = subprocess.run([tmp_path / "vcdiff", "100000", seed, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert done.stdout.startswith("100000 inputs")
