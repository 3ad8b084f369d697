"""Fuzz the parsers.

Invariant: any input ends in time and within memory, successfully or with the parser's refusal.

    python -m tests.support.fuzzing.fuzz                       every target, 2,000 random inputs each; prints the seed
    python -m tests.support.fuzzing.fuzz manifest --inputs 200000 --seed 7
    python -m tests.support.fuzzing.fuzz manifest --atheris    guided by coverage, where atheris is installed

A failing input is written to the folder that `--keep` names; inputs in tests/fuzz/<target>/ are tried first, every
time. Native parsers are fuzzed in C as well: tests/fuzz/vcdiff.c, `make fuzz`.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import click

from tests.support.fuzzing.fuzz_targets import INPUT_BYTES_MAX, MEMORY_BYTES_MAX, TARGETS, Target

SECONDS_MAX = 10
"""CPU time: an input that takes longer hangs, on a busy machine too."""
CHANGED_SECONDS_MAX = 0.01
STOPPED_SECONDS_MAX = 1200
"""Wall-clock time limit of libFuzzer."""
CHANGES_MAX = 8
KEPT_MAX = 400
"""Number of accepted inputs that are mutated further: the newest ones."""
INTERESTING = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    15,
    16,
    31,
    32,
    63,
    64,
    127,
    128,
    255,
    256,
    4095,
    65535,
    65536,
    (1 << 31) - 1,
    1 << 31,
)


class Fault(AssertionError):
    """A parser neither returned nor refused."""

    def __init__(self, target: str, data: bytes, what: str) -> None:
        super().__init__(f"{target}: {what} for {len(data)} bytes {data[:200]!r}")
        self.data = data


def try_input(name: str, target: Target, data: bytes) -> bool:
    """Run a target on one input; return whether it accepted the input. Raises Fault."""
    try:
        target.parse(data)
    except target.refusals:
        return False
    except Exception as err:
        raise Fault(name, data, f"{type(err).__name__}: {err}") from err
    return True


def try_input_in_time(name: str, target: Target, data: bytes) -> bool:
    """Run a target on one input as `try_input` does; an input that takes more CPU than SECONDS_MAX is a fault, too.

    `_hangs` handles SIGPROF meanwhile.
    """
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
        is_accepted = try_input(name, target, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except _Hangs as err:
        raise Fault(name, data, f"took more than {SECONDS_MAX} s of CPU") from err
    return is_accepted


def mutate_input(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return `data` after some changes: bits, bytes, numbers of 1 to 8 bytes, stretches copied, cut, joined."""
    made = bytearray(data)
    for _ in range(draw.randint(1, CHANGES_MAX)):
        if not made:
            made += draw.randbytes(8)
        at = draw.randrange(len(made))
        match draw.randrange(9):
            case 0:
                made[at] ^= 1 << draw.randrange(8)
            case 1:
                made[at] = draw.randrange(256)
            case 2 | 3:
                width = draw.choice((1, 2, 4, 8))
                number = draw.choice(INTERESTING) if draw.random() < 0.7 else draw.getrandbits(8 * width)
                made[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, draw.choice(("little", "big")))
            case 4:
                del made[at : at + draw.randint(1, 16)]
            case 5:
                made[at:at] = draw.randbytes(draw.randint(1, 16))
            case 6:
                start = draw.randrange(len(made))
                made[at:at] = made[start : start + draw.randint(1, 64)]
            case 7:
                other = draw.choice(others)
                start = draw.randrange(len(other) + 1)
                made[at : at + draw.randint(0, 64)] = other[start : start + draw.randint(0, 64)]
            case _:
                del made[at + 1 :]
        del made[INPUT_BYTES_MAX:]
    return bytes(made)


def run(name: str, inputs: int, seed: int, regressions: Path | None = None) -> tuple[int, int]:
    """Run a target on its seeds, kept inputs of earlier faults and `inputs` mutated ones; return (given, accepted).

    Call it in the main thread: a signal ends an input that hangs. Raises: Fault.
    """
    target, draw = TARGETS[name], random.Random(f"{seed} {name}")
    pool, accepted, given = target.seeds(), 0, 0
    fixed = [*pool, *kept_inputs(name, regressions)]
    before = signal.signal(signal.SIGPROF, _hangs)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES_MAX, limits[1]))
    try:
        for number in range(len(fixed) + inputs):
            data = fixed[number] if number < len(fixed) else mutate_input(draw, draw.choice(pool), pool)
            started = time.process_time()
            is_accepted = try_input_in_time(name, target, data)
            given, accepted = given + 1, accepted + is_accepted
            # Valid inputs that take long, such as a manifest of 2^23 segments in 352 bytes, are not mutated further.
            if is_accepted and number >= len(fixed) and time.process_time() - started < CHANGED_SECONDS_MAX:
                pool.append(data)
                if len(pool) > KEPT_MAX:
                    del pool[draw.randrange(len(fixed), len(pool))]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        target.close()
    return given, accepted


def kept_inputs(name: str, regressions: Path | None) -> Iterator[bytes]:
    """Yield the stored inputs of a target."""
    for path in sorted((regressions / name).iterdir()) if regressions and (regressions / name).is_dir() else ():
        yield path.read_bytes()


class _Hangs(BaseException):
    """Not an Exception, so that no parser mistakes it for a refusal."""


def _hangs(_number: int, _frame: FrameType | None) -> None:
    raise _Hangs


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def run_guided(name: str, inputs: int, seed: int, regressions: Path | None, seconds: int) -> None:
    """Let atheris choose the inputs by coverage, for `seconds` (0: until all are done).

    Does not return.
    """
    atheris = import_module("atheris")  # no requirement: a wheel of 35 MB that few developers need

    target = TARGETS[name]

    def one(data: bytes) -> None:
        try_input_in_time(name, target, data)

    signal.signal(signal.SIGPROF, _hangs)
    corpus = Path(f"corpus-{name}")
    corpus.mkdir(exist_ok=True)
    for data in (*target.seeds(), *kept_inputs(name, regressions)):
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    options: list[Any] = [sys.argv[0], f"-runs={inputs}", f"-seed={seed % (1 << 31)}", f"-max_len={INPUT_BYTES_MAX}"]
    options += [f"-max_total_time={seconds}"] if seconds else []
    # Its clock includes the time in which the machine is suspended; the CPU limit ends a hang earlier.
    options += [f"-timeout={STOPPED_SECONDS_MAX}", f"-rss_limit_mb={(MEMORY_BYTES_MAX >> 20) + 512}", str(corpus)]
    for function in [one for one in gc.get_objects() if isinstance(one, FunctionType)]:
        if (function.__module__ or "").startswith("nearkin"):  # all functions of the process take a minute and a half
            atheris.instrument_func(function)
    atheris.Setup(options, one)
    atheris.Fuzz()


@click.command()
@click.argument("names", nargs=-1)
@click.option("--inputs", default=2000, show_default=True, help="for each target")
@click.option("--seed", type=int, help="of an earlier run; by lot")
@click.option("--atheris", "by_coverage", is_flag=True, help="one target, guided by coverage")
@click.option("--seconds", default=0, help="with --atheris: the time limit; 0 for as many inputs as --inputs")
@click.option("--regressions", type=click.Path(path_type=Path), help="folder of inputs to try first, by target")
@click.option("--keep", type=click.Path(path_type=Path), help="folder for the input that is at fault")
def main(
    names: tuple[str, ...],
    inputs: int,
    seed: int | None,
    regressions: Path | None,
    keep: Path | None,
    seconds: int,
    *,
    by_coverage: bool,
) -> None:
    """Run targets on mutated inputs until one has a fault, or all are done."""
    unknown = set(names) - TARGETS.keys()
    if unknown:
        raise click.UsageError(f"no such target: {', '.join(sorted(unknown))}; choose of {', '.join(TARGETS)}")
    logging.getLogger("nearkin").setLevel(logging.ERROR)  # each setting that a request changes would be logged
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    click.echo(f"seed {seed}")
    if by_coverage:
        if len(names) != 1:
            raise click.UsageError("--atheris takes one target")
        run_guided(names[0], inputs, seed, regressions, seconds)
    for name in names or TARGETS:
        started = time.perf_counter()
        try:
            given, accepted = run(name, inputs, seed, regressions)
        except Fault as err:
            if keep is not None:
                (keep / name).mkdir(parents=True, exist_ok=True)
                (keep / name / hashlib.sha256(err.data).hexdigest()[:16]).write_bytes(err.data)
            click.echo(f"seed {seed}: {err}", err=True)
            raise SystemExit(1) from err
        took = time.perf_counter() - started
        click.echo(f"{name}: {given} inputs, {accepted} taken, {took:.1f} s, {given / took:.0f} a second")


if __name__ == "__main__":
    main()
