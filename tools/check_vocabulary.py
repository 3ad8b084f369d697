"""Check that text uses the terms of the glossary (docs/internals/glossary.md).

    python tools/check_vocabulary.py                    the paths that vocabulary.toml lists
    python tools/check_vocabulary.py FILE ...           these files, or all files in these folders
    python tools/check_vocabulary.py --commits A..B     the subjects of these commits
    python tools/check_vocabulary.py --count            how often each word occurs in the whole repository

Text is Markdown, YAML, the docstrings, comments and strings of Python, the comments and strings of JavaScript, and the
text, titles and labels of HTML templates. Code in backticks, code fences, links, file names, dotted names and single
quoted words are skipped: they may be identifiers of other projects.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("vocabulary.toml")
PYTHON = frozenset({".py", ".pyi", ".pyx"})
SUFFIXES = PYTHON | {".html", ".js", ".md", ".yaml", ".yml"}
CODE = re.compile(
    r"(?ms)^ *(?P<fence>```|~~~).*?^ *(?P=fence)"  # Markdown code fence
    r"|(?P<ticks>`+)[^`\n]+(?:\n[^`\n]+)?(?P=ticks)"  # code in backticks, as in `name`, over two lines at most
    r"|\]\([^)\s]*\)|<?https?://[^\s>)]+>?"  # link target, address
    r"|[\w.-]*/\S*\.\w+|(?:[\w.-]+/){2,}[\w.-]*"  # path
    r"|\b\w+(?:\.\w+)+|\b\w*_\w*\b|\B--?\w[\w-]*"  # file name or dotted name; identifier; option
    r"|\{[^{}\s]+\}"  # field of a format string
    r"|\"[\w-]+\"|'[\w-]+'"  # one quoted word
)
SCRIPT = re.compile(
    r"(?ms)(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|(?P<quote>[\"'`])(?P<string>(?:\\.|(?!(?P=quote)).)*)(?P=quote)"  # string, or template of it
    r"|(?<=[=(,:])[ ]*/(?![/*])(?:\\.|\[(?:\\.|[^\]\n])*\]|[^/\n])+/\w*"  # pattern: its quotes begin no string
)
INSERTED = re.compile(r"\$\{[^{}]*\}")
TEMPLATE_CODE = re.compile(r"(?s)\{%.*?%\}|\{\{.*?\}\}|<(?:script|style)\b.*?</(?:script|style)>|&\w+;")
TAG = re.compile(r"(?s)<!?/?[a-z](?:\"[^\"]*\"|'[^']*'|[^'\">])*>")
SHOWN_ATTRIBUTE = re.compile(r"\b(?:aria-label|alt|content|data-label|label|placeholder|title)=\"([^\"]*)\"")
F_STRING_PARTS = frozenset(filter(None, (getattr(tokenize, "FSTRING_MIDDLE", None),)))
"""Since Python 3.12 an f-string is several tokens."""
NAME = re.compile(r"[\w.:/-]*")
LITERAL = re.compile(r"(?s)[rbuft]*(?P<quote>\"\"\"|'''|\"|')(?P<content>.*)(?P=quote)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Word:
    """One refused word: its pattern, what to use instead, and the phrases in which it is plain English."""

    name: str
    pattern: re.Pattern[str]
    use: str
    allow: re.Pattern[str] | None
    other_meaning: frozenset[str]
    """Files in which the word is a term of another field."""

    def find(self, text: str) -> Iterator[int]:
        """Yield the start of each occurrence that is not part of an allowed phrase."""
        allowed = [] if self.allow is None else [match.span() for match in self.allow.finditer(text)]
        for match in self.pattern.finditer(text):
            if not any(start <= match.start() and match.end() <= stop for start, stop in allowed):
                yield match.start()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words, and which files are checked without arguments."""

    words: tuple[Word, ...]
    paths: tuple[str, ...]
    exclude: frozenset[str]


class Finding(NamedTuple):
    """One refused word: file or commit, line (0 for a commit), and the word."""

    source: str
    line: int
    word: Word


def read_vocabulary(table: Path = TABLE) -> Vocabulary:
    """Return the content of the word table. Raises ValueError for a pattern that does not compile."""
    data = tomllib.loads(table.read_text(encoding="utf-8"))
    words = []
    for row in data["word"]:
        try:
            allow = _compile("|".join(row["allow"])) if row.get("allow") else None
            files = frozenset(row.get("other_meaning", ()))
            words.append(Word(row["name"], _compile(row["pattern"]), row["use"], allow, files))
        except re.error as err:
            raise ValueError(f"{table.name}: word {row['name']!r}: {err}; correct its pattern") from err
    return Vocabulary(tuple(words), tuple(data["paths"]), frozenset(data["exclude"]))


def _compile(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; a space in it matches a line break too."""
    return re.compile(pattern.replace(" ", r"\s+"), re.MULTILINE)


def read_text(path: Path) -> str:
    """Return the prose of a file at its lines and columns, everything else as spaces."""
    source = path.read_text(encoding="utf-8")
    if path.suffix in PYTHON:
        source = _python_text(source)
    elif path.suffix == ".js":
        source = script_text(source)
    elif path.suffix == ".html":
        source = page_text(source)
    return mask_code(source)


def mask_code(text: str) -> str:
    """Replace code by spaces; line breaks stay."""
    return CODE.sub(lambda match: _blank(match[0]), text)


def _blank(text: str) -> str:
    """Return spaces in place of a text; line breaks stay."""
    return re.sub(r"\S", " ", text)


def script_text(source: str) -> str:
    """Return comments and strings of JavaScript at their lines; a string that is one name is left out."""
    kept, end = [], 0
    for match in SCRIPT.finditer(source):
        text = match["comment"] or match["string"] or ""
        if match["comment"] is None and NAME.fullmatch(text):
            text = ""
        text = INSERTED.sub(lambda inserted: _blank(inserted[0]), text)
        kept += [_blank(source[end : match.start()]), text or _blank(match[0]), "" if match["comment"] else " "]
        end = match.end()
    return "".join([*kept, _blank(source[end:])])


def page_text(source: str) -> str:
    """Return the text of an HTML template, and the attributes that a reader sees, at their lines."""
    text = TEMPLATE_CODE.sub(lambda match: _blank(match[0]), source)
    return TAG.sub(_shown_attributes, text)


def _shown_attributes(tag: re.Match[str]) -> str:
    """Return a tag as spaces, except for the values of attributes that a reader sees."""
    text = tag[0]
    shown = _blank(text)
    for attribute in SHOWN_ATTRIBUTE.finditer(text):
        start, end = attribute.span(1)
        shown = shown[:start] + attribute[1] + shown[end:]
    return shown


def _python_text(source: str) -> str:
    """Return comments, docstrings and strings of Python at their lines; a string that is one name is left out."""
    lines = [" " * len(line) for line in source.splitlines()]
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            literal = LITERAL.fullmatch(token.string) if token.type == tokenize.STRING else None
            if token.type == tokenize.COMMENT:
                _copy(lines, token.start, " " + token.string[1:])
            elif literal is not None and not NAME.fullmatch(literal["content"]):
                content = " " * literal.start("content") + literal["content"]
                _copy(lines, token.start, content)
            elif token.type in F_STRING_PARTS:
                _copy(lines, token.start, token.string)
    except (tokenize.TokenError, IndentationError) as err:
        raise ValueError(f"not Python: {err}") from err
    return "\n".join(lines)


def _copy(lines: list[str], start: tuple[int, int], text: str) -> None:
    """Write text over the lines, from the row and column of a token."""
    row, column = start[0] - 1, start[1]
    for part in text.split("\n"):
        lines[row] = lines[row][:column] + part + lines[row][column + len(part) :]
        row, column = row + 1, 0


def check_text(source: str, text: str, words: Sequence[Word]) -> Iterator[Finding]:
    """Yield the refused words of a text, in no order."""
    for word in words:
        for start in word.find(text):
            yield Finding(source, text.count("\n", 0, start) + 1, word)


def list_files(paths: Sequence[str]) -> list[Path]:
    """Return the files under these paths that Git tracks or would track, of the types that are checked."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S603
    files = sorted({ROOT / name for name in listed.split("\0") if name})
    return [file for file in files if file.suffix in SUFFIXES and file.is_file()]


def check_commits(commits: str, words: Sequence[Word]) -> Iterator[Finding]:
    """Yield the refused words in the subjects of a range of commits. Raises click.UsageError for an unknown range."""
    command = ["git", "log", "--format=%h %s", "--end-of-options", commits, "--"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise click.UsageError(f"commits {commits!r}: {done.stderr.strip()}; give a range such as main..HEAD")
    for line in done.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        for finding in check_text(f"commit {commit}", mask_code(subject), words):
            yield finding._replace(line=0)


def find_all(files: Sequence[Path], vocabulary: Vocabulary) -> Iterator[Finding]:
    """Yield the refused words of files, in order of lines."""
    for file in files:
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
        if name in vocabulary.exclude:
            continue
        try:
            text = read_text(file)
        except ValueError as err:
            raise click.UsageError(f"{name}: {err}") from err
        words = [word for word in vocabulary.words if name not in word.other_meaning]
        yield from sorted(check_text(name, text, words), key=lambda finding: finding.line)


def print_counts(findings: Iterator[Finding], words: Sequence[Word]) -> None:
    """Print how often each word occurs, and in how many files."""
    found = list(findings)
    counts = Counter(finding.word.name for finding in found)
    for word in words:
        files = len({finding.source for finding in found if finding.word is word})
        click.echo(f"{counts[word.name]:6}  {files:4} files  {word.name} -> {word.use}")
    click.echo(f"{len(found):6}  {len({finding.source for finding in found}):4} files  in all")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--commits", metavar="RANGE", help="check the subjects of these commits, such as main..HEAD")
@click.option("--count", is_flag=True, help="print how often each word occurs in the whole repository; exit 0")
def main(paths: tuple[Path, ...], commits: str | None, *, count: bool) -> None:
    """Report words that the glossary has a term for; exit 1 if there are any."""
    vocabulary = read_vocabulary()
    if count:
        print_counts(find_all(list_files(["."]), vocabulary), vocabulary.words)
        return
    findings: list[Finding] = []
    if commits is not None:
        findings += check_commits(commits, vocabulary.words)
    if paths or commits is None:
        findings += find_all(_files_of(paths) if paths else list_files(vocabulary.paths), vocabulary)
    for finding in findings:
        where = f"{finding.source}:{finding.line}" if finding.line else finding.source
        click.echo(f"{where}: {finding.word.name} -> use: {finding.word.use}")
    sys.exit(1 if findings else 0)


def _files_of(paths: Sequence[Path]) -> list[Path]:
    """Return files as given, and of each folder the files in it."""
    files: list[Path] = []
    for path in paths:
        files += list_files([str(path.resolve())]) if path.is_dir() else [path.resolve()]
    return files


if __name__ == "__main__":
    main()
