"""Measure backups of a tree with millions of entries: processor seconds and peak memory of each command.

    python -m benchmarks.many_entries --entries 2000000 [--folder-entries 1000] [--links 0] [--work FOLDER] [--all]

Every eighth file has 100 bytes, the others are empty: the figures are the cost of entries, not of content. With
`--links N` each inode has N names more, in folders of their own. `--all` restores all entries as well.

Invariant: each command is a process of its own, so that no command is charged for the memory of another.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nearkin.lab.measure import Cost, run, stored_bytes

TINY_BYTES = 100
TINY_EACH = 8
"""Every so many files has content."""


def main() -> None:
    """Make the tree and print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=2_000_000)
    parser.add_argument("--folder-entries", type=int, default=1000)
    parser.add_argument("--links", type=int, default=0, help="names that each file has besides its first")
    parser.add_argument("--work", type=Path, help="a folder on the file system to use; default: the temporary folder")
    parser.add_argument("--all", action="store_true", help="restore all entries, too")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nearkin-entries-", dir=chosen.work) as folder:
        work = Path(folder)
        entries = make_tree(work / "tree", chosen.entries, chosen.folder_entries, chosen.links)
        print(f"{entries:,} entries in folders of {chosen.folder_entries:,}", flush=True)
        for name, cost in measure(work, is_whole=chosen.all):
            stored = stored_bytes(work / "store") - stored_bytes(work / "store" / "index")
            print(
                f"{name:<24} {cost.cpu_seconds:8.2f} CPU s {cost.seconds:8.1f} s {cost.peak_bytes / 1e6:7.0f} MB peak, "
                f"{stored / 1e6:.1f} MB stored",
                flush=True,
            )


def make_tree(root: Path, entries: int, folder_entries: int, links: int) -> int:
    """Make a tree of about `entries` entries; return how many it has, the root included."""
    made, number, tiny = 1, 0, os.urandom(TINY_BYTES)
    while made < entries:
        folders = [f"{number:06}", *(f"{number:06}-link-{link}" for link in range(links))]
        descriptors = []
        for name in folders:
            (root / name).mkdir(parents=True)
            descriptors.append(os.open(root / name, os.O_RDONLY | os.O_DIRECTORY))
        for index in range(folder_entries - 1):
            name = f"document-{index:05}.txt"
            file = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644, dir_fd=descriptors[0])
            if index % TINY_EACH == 0:
                os.write(file, b"%d %d" % (number, index) + tiny)
            os.close(file)
            for descriptor in descriptors[1:]:
                os.link(name, name, src_dir_fd=descriptors[0], dst_dir_fd=descriptor)
        for descriptor in descriptors:
            os.close(descriptor)
        made += folder_entries * len(folders)
        number += 1
    return made


def measure(work: Path, *, is_whole: bool) -> Iterator[tuple[str, Cost]]:
    """Yield (name, cost) of each command; all of them must end with 0."""
    tree, target = str(work / "tree"), str(work / "target")
    middle = sorted(os.listdir(tree))[len(os.listdir(tree)) // 2]
    nearkin = [sys.executable, "-m", "nearkin.cli", "-q", "--store", str(work / "store")]
    run([*nearkin, "init"], os.environ)
    yield "backup", run([*nearkin, "backup", "tree", tree], os.environ)
    yield "backup again", run([*nearkin, "backup", "tree", tree], os.environ)
    changed = Path(tree, middle, "document-00000.txt")
    changed.write_bytes(b"changed")
    yield "backup, one file changed", run([*nearkin, "backup", "tree", tree], os.environ)
    yield "backup --dry-run", run([*nearkin, "backup", "tree", tree, "--dry-run"], os.environ)
    yield "ls of a folder", run([*nearkin, "ls", f"tree:/{middle}"], os.environ)
    one = [*nearkin, "restore", f"tree:/{middle}/document-00000.txt", "-o", target]
    yield "restore of one file", run(one, os.environ)
    assert Path(target, "document-00000.txt").read_bytes() == b"changed"
    yield "diff of two versions", run([*nearkin, "diff", "tree@2", "tree@3"], os.environ)
    if is_whole:
        yield "restore of all", run([*nearkin, "restore", "tree", "-o", str(work / "all")], os.environ)


if __name__ == "__main__":
    main()
