"""Point links of the documentation site that leave docs/ at the repository (a hook of mkdocs)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?P<target>\.\.?/[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace each relative link to an existing file outside docs/; others stay, and mkdocs reports them."""
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match["target"]))
        if path.is_relative_to(config.docs_dir) or not path.exists():
            return match[0]
        repository = (config.repo_url or "https://example.org/nearkin/").rstrip("/")
        return f"]({repository}/blob/main/{path.relative_to(ROOT).as_posix()}{match['anchor'] or ''})"

    return LINK.sub(replace, markdown)
