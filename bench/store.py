"""A store against its peers. Invariant: one run, one core, one file system; every version is read back and compared.

python bench/store.py --corpus botocore --versions 10 --peers restic,borg,kopia --core 1 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import CommandError, pin, read_through, same_bytes, sha1_megabytes_per_second, stored_bytes
from peers import PEERS, MissingPeerError, Peer

_SHARED = Path(__file__).resolve().parent.parent / "shared"


@dataclass(frozen=True, slots=True)
class Result:
    """One store's figures over one corpus. MB is 10^6 bytes; speeds are logical bytes over wall seconds."""

    name: str
    settings: str
    version: str
    first_put_mbps: float
    later_put_mbps: float
    put_mbps: float
    put_seconds: float
    sync_seconds: float
    duplicate_put_mbps: float
    get_newest_mbps: float
    get_oldest_mbps: float
    put_peak_bytes: int
    get_peak_bytes: int
    logical_bytes: int
    stored_bytes: int
    aside_bytes: int
    duplicate_stored_bytes: int

    @property
    def reduction(self) -> float:
        """Logical bytes by stored bytes."""
        return self.logical_bytes / self.stored_bytes


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Puts and gets versions with Nearkin and its peers, on one core.")
    parser.add_argument("--corpus", default="botocore", help="botocore, rdb, vm, or a folder of files in order of name")
    parser.add_argument(
        "--versions", type=int, help="how many; default: 10 of botocore, 5 of rdb, 2 of vm, all of a folder"
    )
    parser.add_argument(
        "--peers", default="nearkin,restic,borg,kopia", help="comma-separated; nearkin always comes along"
    )
    parser.add_argument("--only", help="comma-separated settings, such as nearkin,restic,borg-fine,kopia-fine")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1, help="whole rounds; every figure is the median")
    parser.add_argument("--work", type=Path, help="folder on the file system to measure; default: the temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    chosen = parser.parse_args()

    classes = _classes(parser, chosen.peers, chosen.only)
    try:
        sources = _sources(chosen.corpus, chosen.versions)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.core not in os.sched_getaffinity(0):
        parser.error(f"--core {chosen.core}: choose one of {sorted(os.sched_getaffinity(0))}")
    pin(chosen.core)
    logical_bytes = read_through(sources)
    print(
        f"{chosen.corpus}: {len(sources)} versions, {logical_bytes / 1e6:.0f} MB; core {chosen.core}", file=sys.stderr
    )

    sha1_mbps: list[float] = []
    rounds: dict[str, list[Result]] = {}
    for number in range(chosen.runs):  # round by round, so that a slow minute of the machine hits every store
        sha1_mbps.append(sha1_megabytes_per_second())
        for peer_class in classes:
            print(f"  {number + 1}/{chosen.runs} {peer_class.name}", file=sys.stderr, flush=True)
            try:
                rounds.setdefault(peer_class.name, []).append(_measure(peer_class, sources, logical_bytes, chosen.work))
            except (CommandError, MissingPeerError) as error:
                print(f"  {peer_class.name} is left out: {error}", file=sys.stderr)
    results = [_median(found) for found in rounds.values() if found]
    if not results:
        print("nothing was measured", file=sys.stderr)
        return 1
    text = _markdown(chosen.corpus, sources, results, statistics.median(sha1_mbps), chosen.runs)
    print(text)
    if chosen.markdown:
        chosen.markdown.write_text(text + "\n")
    if chosen.json:
        chosen.json.write_text(json.dumps(_record(chosen.corpus, sources, rounds, sha1_mbps), indent=1) + "\n")
    return 0


def _classes(parser: argparse.ArgumentParser, peers: str, only: str | None) -> list[type[Peer]]:
    """Return the settings to run; those whose command is missing are named and left out."""
    names = dict.fromkeys(["nearkin", *filter(None, peers.split(","))])
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"--peers {unknown[0]}: choose {', '.join(PEERS)}")
    classes = [peer_class for name in names for peer_class in PEERS[name]]
    if only is not None:
        known = {peer_class.name for peer_class in classes}
        if unknown := [name for name in only.split(",") if name not in known]:
            parser.error(f"--only {unknown[0]}: choose {', '.join(sorted(known))}")
        classes = [peer_class for peer_class in classes if peer_class.name in only.split(",")]
    found = []
    for peer_class in classes:
        try:
            peer_class.find()
        except MissingPeerError as missing:
            print(f"  left out: {missing}", file=sys.stderr)
        else:
            found.append(peer_class)
    return found


def _sources(corpus: str, versions: int | None) -> list[Path]:
    """Return the corpus's files, oldest first, made by a process of its own: this one must stay small."""
    if Path(corpus).is_dir():
        return sorted(path for path in Path(corpus).iterdir() if path.is_file())[:versions]
    count = versions or {"botocore": 10, "rdb": 5, "vm": 2}.get(corpus, 1)
    path = os.pathsep.join(filter(None, [str(_SHARED), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "nearkin.testing.corpora", corpus, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    if done.returncode != 0:
        raise CommandError((done.stderr.strip() or "no corpus").splitlines()[-1])
    return [Path(line) for line in done.stdout.splitlines()]


def _measure(peer_class: type[Peer], sources: list[Path], logical_bytes: int, work: Path | None) -> Result:
    """Put every version, get the newest and the oldest, put the newest again, and read every version back."""
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{peer_class.name}-", dir=work))
    ends = ExitStack()
    try:
        peer = peer_class(folder)
        peer.create()
        ends.callback(peer.close)
        puts = [peer.put(number, source) for number, source in enumerate(sources, start=1)]
        inside = sum(stored_bytes(peer.repository / name) for name in peer.inside)
        stored = stored_bytes(peer.repository) - inside
        target = folder / "restored"
        gets = {}
        for number in dict.fromkeys([len(sources), 1]):  # the newest, then the oldest
            gets[number] = peer.get(number, target)
            if not same_bytes(sources[number - 1], target):
                raise CommandError(f"{peer.name}: version {number} came back changed")
            target.unlink()
        aside = stored_bytes(folder) - stored
        again = peer.put(len(sources) + 1, sources[-1])
        inside_after = sum(stored_bytes(peer.repository / name) for name in peer.inside)
        duplicate_stored = stored_bytes(peer.repository) - inside_after - stored
        for number in range(2, len(sources)):
            peer.get(number, target)
            if not same_bytes(sources[number - 1], target):
                raise CommandError(f"{peer.name}: version {number} came back changed")
    finally:
        ends.close()
        shutil.rmtree(folder, ignore_errors=True)
    sizes = [source.stat().st_size for source in sources]
    later_seconds = sum(cost.seconds for cost in puts[1:])
    return Result(
        name=peer.name,
        settings=peer.settings,
        version=peer.version(),
        first_put_mbps=sizes[0] / puts[0].seconds / 1e6,
        later_put_mbps=sum(sizes[1:]) / later_seconds / 1e6 if later_seconds else 0.0,
        put_mbps=logical_bytes / sum(cost.seconds for cost in puts) / 1e6,
        put_seconds=sum(cost.seconds for cost in puts),
        sync_seconds=sum(cost.sync_seconds for cost in puts),
        duplicate_put_mbps=sizes[-1] / again.seconds / 1e6,
        get_newest_mbps=sizes[-1] / gets[len(sources)].seconds / 1e6,
        get_oldest_mbps=sizes[0] / gets[1].seconds / 1e6,
        put_peak_bytes=max(cost.peak_bytes for cost in puts),
        get_peak_bytes=max(cost.peak_bytes for cost in gets.values()),
        logical_bytes=logical_bytes,
        stored_bytes=stored,
        aside_bytes=aside,
        duplicate_stored_bytes=duplicate_stored,
    )


def _as_dict(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Result.__slots__}


def _median(results: list[Result]) -> Result:
    """Return the median of every figure."""
    tables = [_as_dict(result) for result in results]
    merged: dict[str, Any] = {}
    for name, value in tables[0].items():
        # a middle one of an even number: the type stays, and bytes stay whole
        merged[name] = value if isinstance(value, str) else statistics.median_low(table[name] for table in tables)
    return Result(**merged)


def _markdown(corpus: str, sources: list[Path], results: list[Result], sha1_mbps: float, runs: int) -> str:
    """Return the tables, and Nearkin's figures by the best peer's."""
    lines = [
        f"## {corpus}: {len(sources)} versions, {results[0].logical_bytes / 1e6:.0f} MB; one core, median of {runs}",
        "",
        "Speeds in MB/s of logical data (10^6 bytes), file system synced; memory is the peak of one process, MB.",
        "",
        "| store | put, first | put, later | put, all | put again | get newest | get oldest | memory put / get"
        " | stored MB | aside MB | reduction |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        lines.append(
            f"| {one.name} | {one.first_put_mbps:.0f} | {one.later_put_mbps:.0f} | {one.put_mbps:.0f}"
            f" | {one.duplicate_put_mbps:.0f} | {one.get_newest_mbps:.0f} | {one.get_oldest_mbps:.0f}"
            f" | {one.put_peak_bytes / 1e6:.0f} / {one.get_peak_bytes / 1e6:.0f}"
            f" | {one.stored_bytes / 1e6:.1f} | {one.aside_bytes / 1e6:.1f} | {one.reduction:.1f} |"
        )
    lines += ["", *(f"- {one.name}: {one.version}; {one.settings}" for one in results)]
    mine = [one for one in results if one.name.startswith("nearkin")]
    others = [one for one in results if not one.name.startswith("nearkin")]
    again = "; ".join(f"{one.name} {one.duplicate_put_mbps / sha1_mbps:.2f}" for one in mine)
    lines += [
        "",
        f"SHA-1, one stream, 8 KiB blocks (OpenSSL through hashlib): {sha1_mbps:.0f} MB/s. Put again by it: {again}.",
    ]
    if mine and others:
        titles = [f"{one.name} | by best" for one in mine]
        lines += ["", f"| | best peer | {' | '.join(titles)} |", f"|{'---|' * (2 + 2 * len(mine))}"]
        for title, field in (
            ("put, all, MB/s", "put_mbps"),
            ("put, later, MB/s", "later_put_mbps"),
            ("put again, MB/s", "duplicate_put_mbps"),
            ("get newest, MB/s", "get_newest_mbps"),
            ("get oldest, MB/s", "get_oldest_mbps"),
            ("reduction", "reduction"),
        ):
            best = max(others, key=lambda one: float(getattr(one, field)))
            theirs = float(getattr(best, field))
            cells = [f"{getattr(one, field):.1f} | {getattr(one, field) / theirs:.2f}" for one in mine if theirs]
            lines.append(f"| {title} | {theirs:.1f} ({best.name}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def _record(corpus: str, sources: list[Path], rounds: dict[str, list[Result]], sha1: list[float]) -> dict[str, object]:
    return {
        "corpus": corpus,
        "versions": [source.name for source in sources],
        "machine": platform.machine(),
        "sha1_8k_mbps": sha1,
        "rounds": {name: [_as_dict(result) for result in results] for name, results in rounds.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
