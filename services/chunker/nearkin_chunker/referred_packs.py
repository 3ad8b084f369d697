# size: one data structure, separate from the handler of messages
"""Choose the packs to which the segments of a blob refer.

    pack | pack | frame | pack    ->    segments of packs alone: references; segments with bytes of a frame: bytes

A pack to which no segment refers is unknown to the later stages: the chunker deletes it.

Invariant: a pack is returned as unreferred only if no segment of this worker or of an earlier one refers to it.
"""

from __future__ import annotations

from nearkin_shared.formats.message_layout import Pack

REFERENCES_MAX = 64
"""Packs of one message. A slow client fills a pack of some bytes each second: to send those bytes costs less."""


class ReferredPacks:
    """Packs that have bytes of a blob which are not sent yet, in their order."""

    def __init__(self) -> None:
        self._packs: dict[Pack, bool] = {}
        """Whether a segment refers to it."""

    def add(self, pack: Pack, *, is_referred: bool) -> None:
        """Add the next pack; `is_referred`: segments of another worker may refer to it."""
        self._packs[pack] = is_referred

    def refer(self, start: int, stop: int) -> list[Pack]:
        """Return the packs that have the bytes from `start` to `stop`.

        None if frames have some of them, or if the packs are more than REFERENCES_MAX.
        """
        found: list[Pack] = []
        for pack in self._packs:
            if start < stop and pack.position <= start < pack.end:
                found.append(pack)
                start = pack.end
        if start < stop or len(found) > REFERENCES_MAX:
            return []
        self._packs.update(dict.fromkeys(found, True))
        return found

    def pop_sent(self, position: int) -> list[Pack]:
        """Forget the packs that end at or before a position; return the unreferred ones."""
        return self._pop([pack for pack in self._packs if pack.end <= position])

    def pop_all(self) -> list[Pack]:
        """Forget all packs; return the unreferred ones."""
        return self._pop(list(self._packs))

    def _pop(self, packs: list[Pack]) -> list[Pack]:
        return [pack for pack in packs if not self._packs.pop(pack)]
