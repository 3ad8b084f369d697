"""Test tools/check_vocabulary.py and the word table that it reads."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[3]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check = _load(ROOT / "tools" / "check_vocabulary.py")
VOCABULARY = check.read_vocabulary()


def found(text: str) -> list[str]:
    return [finding.word.name for finding in check.check_text("page", check.mask_code(text), VOCABULARY.words)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("A delta leans on its base.", "lean on"),
        ("The index is told of a container.", "tell, told"),
        ("A worker hears of the change.", "hear"),
        ("The record says what was stored.", "says"),
        ("The file beside it names the holder.", "beside"),
        ("The block lies in a container.", "lie, stand"),
        ("Containers are written anew.", "anew"),
        ("The cache lets blocks go.", "let go"),
        ("The cache lets go of a block.", "let go"),
        ("The next round frees it.", "round"),
        ("Each effect is a turn.", "turn"),
        ("What is stored stays.", "what, who (subject)"),
        ("One of two: who comes second waits", "what, who (subject)"),
        ("The process ends, whoever started it.", "what, who (subject)"),
        ("The entry goes first.", "go, come"),
        ("The file is gone.", "go, come"),
        ("A rewrite is worth it.", "worth it"),
        ("A message on its way is lost.", "on its way"),
        ("A young container stays.", "young"),
        ("A chunk less deep than that.", "deep"),
        ("Blocks at hand are used.", "at hand"),
        ("The place of a chunk in its block.", "place"),
        ("Nobody writes meanwhile.", "nobody, somebody, anybody"),
        ("The chunk is condemned.", "condemn"),
        ("Its heirs are tried.", "heir"),
        ("The container is healed.", "heal, mend"),
    ],
)
def test_check_text_with_dialect_word_finds_it(text: str, word: str) -> None:
    """Each word of the table is found in a sentence as the older text has it."""
    assert word in found(text)


@pytest.mark.parametrize(
    "text",
    [
        "A clean container; an earlier generation.",
        "Exit codes tell failures apart.",
        "RFC 9530 says so.",
        "A pattern stands for a set of keys.",
        "The second round of a cooperative rebalance.",
        "One round trip per batch; sizes round up to 4 KiB; `round` and round(x) are functions.",
        "Each file is read in turn, and a setting turns it off; the list turns into a tuple.",
        "What is a chunk? Who may read it?",
        "## What is stored",
        "The default comes from the profile and goes through validation.",
        "The commit takes place in place of the rename.",
        "A merge (`gathered.turn`, services/maintenance/turns.py, gc.round, told_lines, --beside) is code.",
        "The field \"place\" and the topic 'told' are names of other programs.",
        "See [the record](../adr/0028-rounds-beside-puts.md) and https://example.org/round/turn.",
        "```\nnearkin gc   the next round\n```",
    ],
)
def test_check_text_with_plain_english_finds_nothing(text: str) -> None:
    """Phrases in which a word is plain English, and identifiers of all kinds, are no findings."""
    assert found(text) == []


def test_check_text_with_phrase_over_two_lines_finds_it() -> None:
    """A line break counts as a space; the finding has the line on which the phrase starts."""
    (finding,) = check.check_text("page", "One line.\nBlocks are at\nhand.", VOCABULARY.words)
    assert (finding.line, finding.word.name) == (2, "at hand")


def test_read_text_of_python_is_comments_and_strings(tmp_path: Path) -> None:
    """Names and keywords of Python are skipped.

    Docstrings, comments and messages are read at their lines.
    """
    path = tmp_path / "module.py"
    path.write_text(
        '"""Write a block.\n\nIt is written anew.\n"""\n'
        "from nearkin import beside\n"
        "told = beside.turn(round(1.5))  # nobody waits\n"
        'state = "round"\n'
        'message = f"{told}: the container {state} is healed"\n'
    )
    findings = list(check.find_all([path], VOCABULARY))
    assert [(finding.line, finding.word.name) for finding in findings] == [
        (3, "anew"),
        (6, "nobody, somebody, anybody"),
        (8, "heal, mend"),
    ]


def findings_of(path: Path, source: str) -> list[tuple[int, str]]:
    """Write a file and return its refused words, each with its line."""
    path.write_text(source)
    return [(finding.line, finding.word.name) for finding in check.find_all([path], VOCABULARY)]


def test_read_text_with_unpaired_backtick_reads_on(tmp_path: Path) -> None:
    """A backtick without its pair hides nothing after it; code in backticks may end on the next line."""
    source = 'TICK = "`x"\n# nobody waits\nOTHER = 1\n# `a\n# round` is a name\n# written anew\n'
    assert findings_of(tmp_path / "module.py", source) == [(2, "nobody, somebody, anybody"), (6, "anew")]


def test_read_text_of_script_is_comments_and_strings(tmp_path: Path) -> None:
    """Names, patterns and inserted expressions of JavaScript are skipped; templates and comments are read."""
    source = (
        "// Written anew.\n"
        'import { beside } from "./place.js";\n'
        "const place = beside.round(`${place} is healed`);\n"
        "const quote = text.match(/[\"'`]/u); /* nobody\n"
        "   waits on its way */\n"
        "const state = 'round';\n"
        'say("The next round frees it.");\n'
    )
    assert findings_of(tmp_path / "script.js", source) == [
        (1, "anew"),
        (3, "heal, mend"),
        (4, "nobody, somebody, anybody"),
        (5, "on its way"),
        (7, "round"),
    ]


def test_read_text_of_page_is_shown_text(tmp_path: Path) -> None:
    """Tags, classes and template code of a page are skipped; text, titles and labels are read."""
    source = (
        '{% if place %}<p class="round" id="beside">Written anew.</p>\n'
        '<table aria-label="The heirs of a chunk">\n'
        "{% for round in rounds %}<td>{{ round.place }} &lt; healed</td>{% endfor %}\n"
        "</table>{# nobody reads this #}{% endif %}\n"
    )
    assert findings_of(tmp_path / "page.html", source) == [
        (1, "anew"),
        (2, "heir"),
        (3, "heal, mend"),
        (4, "nobody, somebody, anybody"),
    ]


def test_find_all_with_other_meaning_skips_word(tmp_path: Path) -> None:
    """A word is not refused in files where it is a term of another field.

    Other words still are.
    """
    page = tmp_path / "sha1.md"
    page.write_text("A round adds one word, and nobody waits.\n")
    words = [replace(word, other_meaning=frozenset({str(page)})) for word in VOCABULARY.words if word.name == "round"]
    others = [word for word in VOCABULARY.words if word.name != "round"]
    findings = check.find_all([page], replace(VOCABULARY, words=(*words, *others)))
    assert [finding.word.name for finding in findings] == ["nobody, somebody, anybody"]


def test_main_with_findings_prints_replacement_and_exits_1(tmp_path: Path) -> None:
    """The output names file, line, word and replacement; a clean file exits 0."""
    page, clean = tmp_path / "page.md", tmp_path / "clean.md"
    page.write_text("# Page\n\nWritten anew.\n")
    clean.write_text("# Page\n\nWritten again.\n")
    done = CliRunner().invoke(check.main, [str(page)])
    assert done.exit_code == 1
    assert done.output == f"{page}:3: anew -> use: again; re- (re-encode, rewrite, rebuild)\n"
    assert CliRunner().invoke(check.main, [str(clean)]).exit_code == 0


def test_main_with_commits_checks_their_subjects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subjects of the range are checked, earlier ones are not.

    An unknown range is a usage error.
    """
    monkeypatch.setattr(check, "ROOT", tmp_path)

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for subject in ("gc: a round more", "gc: free what lies there", "gc: delete expired versions"):
        git("commit", "-q", "--allow-empty", "-m", subject)
    done = CliRunner().invoke(check.main, ["--commits", "HEAD~2..HEAD"])
    assert done.exit_code == 1
    assert re.fullmatch(r"commit [0-9a-f]+: lie, stand -> use: .*\n", done.output)
    assert CliRunner().invoke(check.main, ["--commits", "HEAD~1..HEAD"]).exit_code == 0
    assert CliRunner().invoke(check.main, ["--commits", "no-such-branch..HEAD"]).exit_code == 2


def test_configured_paths_hold_the_glossary() -> None:
    """The paths that `make check` reads are not empty."""
    assert ROOT / "docs" / "internals" / "glossary.md" in check.list_files(VOCABULARY.paths)
