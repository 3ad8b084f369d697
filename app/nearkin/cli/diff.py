"""`nearkin diff`: list the differences between two versions of trees."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import AsWritten, current_session, shared_options

if TYPE_CHECKING:
    from nearkin.trees.tree_diff import TreeChange
    from nearkin_shared.formats.tree_layout import TreeSummary

_NAMES = {"+": "added", "-": "removed", "M": "content", "H": "holes", "U": "metadata", "T": "type"}
"""Names of the kinds of changes in JSON."""


@click.command(cls=AsWritten)
@click.argument("before", metavar="KEY[@VERSION][:/PATH]")
@click.argument("after", metavar="KEY[@VERSION][:/PATH]")
@click.option("--no-metadata", is_flag=True, help="Leave out entries of which attributes alone changed.")
@shared_options
def diff(before: str, after: str, no_metadata: bool) -> None:
    """List the differences between two versions of trees.

    A line is: + added, - removed, M content changed, H the same content with other holes, T another kind of entry, U
    attributes alone changed (mode, owner, group, mtime, extended attributes); then the path. The last line has totals.
    With paths, folders are compared.

    nearkin diff home@3 home@4
    nearkin diff home@36h home                     # since 36 hours ago
    nearkin diff home@3:/thesis home:/thesis
    nearkin diff home@3 laptop@7 --no-metadata
    nearkin --json diff home@3 home@4 | jq -r '.changes[] | select(.change == "removed").path'

    Files are compared by digest; only of two files of one size with other holes content is read. Inodes and ctimes are
    not compared.
    """
    from nearkin.cli.output import print_line
    from nearkin.cli.tree_location import open_tree, parse_location, resolve_location
    from nearkin.cli.tree_output import print_json_lines, show_path
    from nearkin.trees.tree_diff import ChangeKind, TreeSide, compare_trees

    session = current_session()
    totals = _Totals()
    for text in (before, after):
        parse_location(text)
    with session.open() as store:
        first, second = (resolve_location(store, text) for text in (before, after))
        sides = [TreeSide(open_tree(store, found), found.path or b"") for found in (first, second)]
        summaries = sides[0].tree.summary, sides[1].tree.summary
        changes = totals.count(
            change for change in compare_trees(*sides) if not (no_metadata and change.kind == ChangeKind.METADATA)
        )
        if session.as_json:
            labels = {"before": first.label, "after": second.label}
            values = (_change_json(change, *summaries) for change in changes)
            print_json_lines(values, name="changes", end=lambda: {**labels, **totals.json()})
            return
        for change in changes:
            print_line(f"{change.kind}  /{show_path(change.path)}")
    print_line(totals.line())


class _Totals:
    """Counts of changes."""

    def __init__(self) -> None:
        self._changes: Counter[str] = Counter()
        self._added_bytes = self._removed_bytes = 0

    def count(self, changes: Iterator[TreeChange]) -> Iterator[TreeChange]:
        """Count the changes as they pass."""
        for change in changes:
            self._changes[_NAMES[change.kind]] += 1
            if change.kind not in ("U", "H"):
                self._removed_bytes += 0 if change.before is None else change.before.content_bytes
                self._added_bytes += 0 if change.after is None else change.after.content_bytes
            yield change

    def json(self) -> dict[str, object]:
        """Return the counts as JSON has them."""
        counts = {name: self._changes[name] for name in _NAMES.values()}
        return {"counts": counts, "added_bytes": self._added_bytes, "removed_bytes": self._removed_bytes}

    def line(self) -> str:
        """Return the counts for people."""
        from nearkin_shared.savings_table import human_bytes

        counts = self._changes
        holes = f"{counts['holes']:,} with other holes, " if counts["holes"] else ""
        return (
            f"{counts['added']:,} added, {counts['removed']:,} removed, {counts['content']:,} with other content, "
            f"{holes}{counts['type']:,} of another kind, {counts['metadata']:,} with other attributes; "
            f"+{human_bytes(self._added_bytes)}, -{human_bytes(self._removed_bytes)}"
        )


def _change_json(change: TreeChange, before: TreeSummary, after: TreeSummary) -> dict[str, object]:
    from nearkin.cli.tree_output import entry_json

    return {
        "change": _NAMES[change.kind],
        "path": os.fsdecode(b"/" + change.path),
        "before": None if change.before is None else entry_json(change.before, before),
        "after": None if change.after is None else entry_json(change.after, after),
    }
