# size: a corpus in a module of its own, as each of them
"""Write versions of generated data that differ by small edits.

Version n + 1 is version n with some more of `generated_data.mutated`'s insertions, deletions and overwrites.

Invariant: the same arguments give the same bytes, everywhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from nearkin.lab.corpus_cache import cache_dir
from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like
from nearkin_shared.errors import BadInput

_PIECE_BYTES = 1 << 20
_MAKERS = (text_like, records_like, random_bytes)  # in rotation: a third compresses well, a third some, a third not


def mutated_files(
    count: int = 5, cache: Path | None = None, seed: int = 0, mebibytes: int = 24, edits: int = 400
) -> list[Path]:
    """Return `count` versions of `mebibytes` MiB of generated data, `edits` edits apart.

    Oldest first. Made once below `cache` (default: `corpus_cache.cache_dir()`). Raises BadInput for a count or size
    below 1.
    """
    if count < 1:
        raise BadInput(f"count {count}: must be at least 1")
    if mebibytes < 1:
        raise BadInput(f"mebibytes {mebibytes}: must be at least 1")
    folder = (cache or cache_dir()) / f"mutated-{mebibytes}-mebibytes-{edits}-edits-seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:04}.bin" for number in range(count)]
    if all(path.exists() for path in paths):
        return paths
    pieces = (_MAKERS[at % len(_MAKERS)](_PIECE_BYTES, seed + at) for at in range(mebibytes))
    data = b"".join(pieces)
    for number, path in enumerate(paths):
        if number:
            data = mutate(data, seed + number, edits)
        if not path.exists():
            _write(path, data)
    return paths


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as file:
        partial = Path(file.name)
        try:
            file.write(data)
        except BaseException:
            partial.unlink()
            raise
    partial.replace(path)
