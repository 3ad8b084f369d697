"""BLAKE3 with a state that can be stored, compiled. Invariant: equal to `content_hasher_reference`, which checks states.

The loops are in content_hasher_impl.c.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.reference.content_hasher_reference import DIGEST_BYTES_MAX, check_digest_bytes, parse_state

cdef extern from "content_hasher_impl.h" nogil:
    ctypedef struct nk_content_hasher:
        uint64_t chunks
        uint32_t values[54][8]
        uint8_t tail[1024]
        size_t tail_bytes

    size_t nk_content_hasher_depth(uint64_t chunks)
    void nk_content_hasher_update(nk_content_hasher *hasher, const uint8_t *data, size_t total_bytes)
    void nk_content_hasher_digest(const nk_content_hasher *hasher, uint8_t *digest)
    int nk_content_hasher_use(int widest)


cdef class ContentHasher:
    cdef nk_content_hasher hasher

    def __cinit__(self, state=None):
        memset(&self.hasher, 0, sizeof(self.hasher))
        if state is None:
            return
        chunks, values, tail = parse_state(state)
        cdef const uint8_t[::1] stored_values = values, stored_tail = tail
        self.hasher.chunks = chunks
        self.hasher.tail_bytes = len(tail)
        if len(values):
            memcpy(self.hasher.values, &stored_values[0], len(values))
        if len(tail):
            memcpy(self.hasher.tail, &stored_tail[0], len(tail))

    @property
    def size_bytes(self):
        return self.hasher.chunks * 1024 + self.hasher.tail_bytes

    def update(self, data):
        cdef const uint8_t[::1] view
        try:
            view = memoryview(data).cast("B")
        except (TypeError, ValueError, BufferError) as err:
            raise BadInput(f"data of type {type(data).__name__}: want contiguous bytes") from err
        if not view.shape[0]:
            return
        cdef size_t total_bytes = view.shape[0]
        with nogil:
            nk_content_hasher_update(&self.hasher, &view[0], total_bytes)

    def digest(self, length=DIGEST_BYTES_MAX):
        cdef uint8_t found[32]
        check_digest_bytes(length)
        nk_content_hasher_digest(&self.hasher, found)
        return (<char *>found)[:32][:length]

    def state(self):
        cdef size_t depth = nk_content_hasher_depth(self.hasher.chunks)
        return b"".join((
            int(self.size_bytes).to_bytes(8, "little"),
            (<char *>self.hasher.values)[:32 * depth],
            (<char *>self.hasher.tail)[:self.hasher.tail_bytes],
        ))


def use_vectors(widest):
    return nk_content_hasher_use(widest)
