"""Translate patterns that name paths of the source, so that they count from the root.

    backup etc /usr/share/perl -e /usr/share/perl/5.36/unicore  ->  /5.36/unicore

A pattern counts from the root of the tree, as one in a .gitignore file from its folder. One that begins with a path
that was given, or with the path of the root, would match nothing. If the tree has an entry of that path itself, the
pattern stays as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from nearkin.trees.unmatched_patterns import PatternSource

_SPECIAL = re.compile(r"([\\*?\[])")


class SourcePrefix(NamedTuple):
    """A path of the source that a pattern may begin with."""

    text: str
    """Absolute, or as it was given; without a last slash, and escaped as in a pattern."""
    path: str
    """The same path in the tree; empty: the root."""


def source_prefixes(given: Sequence[tuple[str, bytes]], root: bytes, real_root: bytes) -> list[SourcePrefix]:
    """Return the prefixes of a backup, the longest first.

    `given`: each path as it was given, and absolute. `root`: contains all of them; `real_root`: without symlinks.
    """
    found = {os.fsdecode(root): "", os.fsdecode(real_root): ""}
    relative_root = os.path.relpath(os.fsdecode(root))
    if not relative_root.startswith("."):
        found[relative_root] = ""
    for text, absolute in given:
        path = os.fsdecode(os.path.relpath(absolute, root))
        for name in (os.fsdecode(absolute), text.rstrip("/"), os.path.normpath(text)):
            found.setdefault(name, "" if path == "." else path)
    return _sorted_prefixes(found)


def restored_prefixes(root: bytes, given: Sequence[str]) -> list[SourcePrefix]:
    """Return the prefixes of a stored tree.

    `root`: where it was; `given`: the absolute paths that its version names.
    """
    found = {os.fsdecode(root): ""}
    if given and all(path.startswith("/") for path in given):  # else the list was cut
        found.setdefault(os.path.commonpath(given), "")
    return _sorted_prefixes(found)


def translate_patterns(
    sources: Sequence[PatternSource], prefixes: Sequence[SourcePrefix], has_entry: Callable[[bytes], bool]
) -> list[PatternSource]:
    """Return the patterns as they count from the root.

    `has_entry`: whether the tree has a path.
    """
    known = dict[str, bool]()

    def is_in_tree(prefix: str) -> bool:
        if prefix not in known:
            path = re.sub(r"\\(.)", r"\1", prefix).strip("/")
            known[prefix] = path != "." and has_entry(os.fsencode(path))
        return known[prefix]

    def translate(source: PatternSource) -> PatternSource:
        sign = "!" if source.text.startswith("!") else ""
        text = source.text[len(sign) :]
        for prefix in prefixes:
            if text != prefix.text and not text.startswith(f"{prefix.text}/"):
                continue
            rest = text[len(prefix.text) :]
            is_name = "/" not in prefix.text and prefix.text != "." and not rest.strip("/")  # matches anywhere
            if is_name or is_in_tree(prefix.text) or not f"{prefix.path}{rest}".strip("/"):
                return source
            head = f"/{_escaped(prefix.path)}" if prefix.path else ""
            return source._replace(text=f"{sign}{head}{rest}", written=source.text)
        return source

    return [translate(source) for source in sources]


def _sorted_prefixes(paths: Mapping[str, str]) -> list[SourcePrefix]:
    found = dict[str, str]()
    for name, path in paths.items():
        if name not in ("", "/"):
            found[name] = path
            found.setdefault(_escaped(name), path)
    return [SourcePrefix(name, found[name]) for name in sorted(found, key=len, reverse=True)]


def _escaped(path: str) -> str:
    """Return a path as a pattern that matches it alone."""
    return _SPECIAL.sub(r"\\\1", path)
