"""Decide which entries of a folder are not stored.

Patterns are those of .gitignore files, matched by the library pathspec; paths count from the root of the tree.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from nearkin.trees.unmatched_patterns import Pattern, PatternSource, PatternUse, comparable
from nearkin_shared.errors import BadInput

PATTERNS_MAX = 100_000
PATTERN_FILE_BYTES_MAX = 16 << 20
_CLASS = re.compile(r"\[[^\]]*\[:[a-z]*:")
CACHE_TAG = "CACHEDIR.TAG"
CACHE_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
"""First bytes of the tag of a cache folder (https://bford.info/cachedir/)."""


class ExclusionOptions(NamedTuple):
    """Rules of a caller for entries that are not stored."""

    patterns: Sequence[str] = ()
    """As in .gitignore files: `*.o`, `/build/`, `!keep.o`; the last one that matches decides."""
    files: Sequence[Path] = ()
    """Files of such patterns, one a line."""
    if_present: Sequence[str] = ()
    """A folder that contains an entry of one of these names is stored without its content."""
    larger_than_bytes: int | None = None
    """Larger files are not stored."""
    caches: bool = False
    """Exclude the content of folders with a valid CACHEDIR.TAG, the tag apart."""


class Exclusions:
    """Compiled options."""

    def __init__(
        self,
        options: ExclusionOptions,
        translate: Callable[[Sequence[PatternSource]], Sequence[PatternSource]] | None = None,
    ) -> None:
        """Compile the patterns.

        `translate` returns patterns that name paths of the source as they count from the root of the tree.
        Raises BadInput for an unreadable file, a pattern that does not parse or can match nothing, and a name for
        `if_present` that no file has.
        """
        for marker in options.if_present:
            if not marker or "/" in marker:
                raise BadInput(f"--exclude-if-present {marker!r}: want the name of a file, without /")
        sources = [PatternSource(text) for text in options.patterns]
        for path in options.files:
            sources.extend(_read_patterns(path))
        if len(sources) > PATTERNS_MAX:
            raise BadInput(f"{len(sources):,} patterns: want at most {PATTERNS_MAX:,}")
        if translate is not None:
            sources = list(translate(sources))
        self._patterns = PathPatterns(sources) if sources else None
        self._options = options

    @property
    def has_no_rules(self) -> bool:
        """Whether neither patterns nor a size exclude single entries."""
        return self._patterns is None and self._options.larger_than_bytes is None

    def excludes(self, path: bytes, status: os.stat_result) -> bool:
        """Return whether an entry is excluded by a pattern or its size."""
        if self._patterns is not None and self._patterns.matches(path, is_folder=stat.S_ISDIR(status.st_mode)):
            return True
        bound = self._options.larger_than_bytes
        return bound is not None and stat.S_ISREG(status.st_mode) and status.st_size > bound

    def note_pruned(self, path: bytes, file_path: bytes = b"") -> None:
        """Note a folder whose content is left out.

        With `file_path` its names may be looked at later.
        """
        if self._patterns is not None:
            self._patterns.use.note_pruned(comparable(path), file_path)

    def unmatched(self) -> list[PatternSource]:
        """Return the patterns that match nothing; for the end of a walk."""
        return [] if self._patterns is None else self._patterns.use.unmatched()

    def kept_names(self, folder: int, names: Sequence[str]) -> Sequence[str]:
        """Return the names that the rules for whole folders keep; `folder` is its descriptor."""
        for marker in self._options.if_present:
            if marker in names:
                return [marker]
        if self._options.caches and CACHE_TAG in names and _has_cache_tag(folder):
            return [CACHE_TAG]
        return names


class PathPatterns:
    """Patterns of .gitignore files, for paths of a tree."""

    def __init__(self, sources: Sequence[PatternSource]) -> None:
        """Compile the patterns. Raises BadInput for one that does not parse, or can match nothing."""
        from pathspec import GitIgnoreSpec  # takes 20 ms, and most commands have no patterns

        for source in sources:
            _check_pattern(source)
        sources = [source for source in sources if source.text]  # the library drops empty lines
        texts = [comparable(source.text) for source in sources]
        with warnings.catch_warnings():  # of the regular expression for [[], which is what the caller wrote
            warnings.simplefilter("ignore", FutureWarning)
            try:
                self._spec = GitIgnoreSpec.from_lines(texts)
            except (ValueError, re.error):
                for source, text in zip(sources, texts, strict=True):
                    _check_parses(source, text)
                raise
        patterns = cast("Sequence[Pattern]", self._spec.patterns)
        for source, pattern in zip(sources, patterns, strict=True):
            if pattern.include is None and source.text.strip() and not source.text.startswith("#"):
                raise BadInput(f"{source.label}: {_problem(source.text)}")
        self.use = PatternUse(patterns, sources)

    def matches(self, path: bytes, *, is_folder: bool) -> bool:
        """Return whether a pattern matches the path or a folder that contains it."""
        name = comparable(path)
        found = self._spec.check_file(f"{name}/" if is_folder else name)
        if found.index is not None:
            self.use.note_match(found.index, found.file)
        return bool(found.include)


def _check_pattern(source: PatternSource) -> None:
    """Refuse an option without a pattern, and a class such as [:alpha:]. Raises BadInput."""
    text = source.text
    if not source.file and not text.strip():
        raise BadInput(f"{source.label}: is empty; give a pattern, or leave the option out")
    if not source.file and text.startswith("#"):
        raise BadInput(f"{source.label}: is a comment in .gitignore files; write \\{text} for such a name")
    if not text.startswith("#") and _CLASS.search(text):
        raise BadInput(f"{source.label}: classes such as [:alpha:] are not known; list the characters, as in [a-z]")


def _check_parses(source: PatternSource, text: str) -> None:
    """Refuse a pattern that the library does not parse. Raises BadInput."""
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([text])
    except (ValueError, re.error) as err:
        raise BadInput(f"{source.label}: {_problem(source.text, err)}") from err


def _problem(text: str, err: Exception | None = None) -> str:
    """Return why a pattern does not parse, or can match nothing, and the remedy."""
    if isinstance(err, re.error):
        return "a range in [ ] ends before it starts; write the lower character first, as in [a-z]"
    if text.rstrip().endswith("\\"):
        return "ends with \\, which escapes nothing; write \\\\ for the character itself"
    if "[" in text:
        return "a [ has no ] before the next /; write \\[ for the character itself"
    return "can match nothing; give the name or path of an entry, such as '*.o' or '/build/'"


def _read_patterns(path: Path) -> list[PatternSource]:
    try:
        with path.open("rb") as file:
            data = file.read(PATTERN_FILE_BYTES_MAX + 1)
    except OSError as err:
        raise BadInput(f'--exclude-file "{path}": {(err.strerror or str(err)).lower()}') from err
    if len(data) > PATTERN_FILE_BYTES_MAX:
        raise BadInput(f'--exclude-file "{path}": more than {PATTERN_FILE_BYTES_MAX:,} bytes')
    lines = os.fsdecode(data.removeprefix(codecs.BOM_UTF8)).split("\n")  # as git does: no other character ends a line
    return [PatternSource(text.removesuffix("\r"), str(path), line) for line, text in enumerate(lines, 1)]


def _has_cache_tag(folder: int) -> bool:
    try:
        file = os.open(CACHE_TAG, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.read(file, len(CACHE_SIGNATURE)) == CACHE_SIGNATURE
    except OSError:
        return False
    finally:
        os.close(file)
