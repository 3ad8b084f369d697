"""Types and contracts of the compiled hasher of contents."""

from typing_extensions import Buffer

class ContentHasher:
    """BLAKE3 of a stream of bytes, with a state that can be stored. Not to be shared between threads."""

    def __init__(self, state: bytes | None = None) -> None:
        """Begin, or continue from a stored state. Raises BadInput for bytes that are no state."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes so far."""

    def update(self, data: Buffer) -> None:
        """Add bytes. The GIL is released; the caller must not change them meanwhile. Raises BadInput."""

    def digest(self, length: int = 32) -> bytes:
        """Return the first `length` bytes of the BLAKE3 of the bytes so far. Raises BadInput."""

    def state(self) -> bytes:
        """Return the state, at most 2,760 bytes."""

def use_vectors(widest: int) -> int:
    """Use no wider vectors than these: 0 of 4 words, 1 AVX2, 2 AVX-512; return which are used."""
