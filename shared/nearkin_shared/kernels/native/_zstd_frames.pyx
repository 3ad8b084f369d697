"""zstd frames. Invariant: a frame is written or read in one call between the caller's own buffers; nothing is copied.

The functions are those of the libzstd that `backports.zstd` brings, found by name in its extension module.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

import numpy as np
from backports.zstd import _zstd as _library

from nearkin_shared.errors import Corrupt
from nearkin_shared.kernels.reference import zstd_frames_reference as reference
from nearkin_shared.kernels.native._scatter_copy cimport Sources, source

cdef extern from "dlfcn.h" nogil:
    void *dlopen(const char *path, int mode)
    void *dlsym(void *handle, const char *name)
    int RTLD_NOW

ctypedef void *(*create_function)() noexcept nogil
ctypedef size_t (*free_function)(void *) noexcept nogil
ctypedef size_t (*reset_function)(void *, int) noexcept nogil
ctypedef size_t (*set_function)(void *, int, int) noexcept nogil
ctypedef size_t (*prefix_function)(void *, const void *, size_t) noexcept nogil
ctypedef size_t (*code_function)(void *, void *, size_t, const void *, size_t) noexcept nogil
ctypedef size_t (*bound_function)(size_t) noexcept nogil
ctypedef size_t (*find_function)(const void *, size_t) noexcept nogil
ctypedef unsigned long long (*content_function)(const void *, size_t) noexcept nogil
ctypedef unsigned int (*is_error_function)(size_t) noexcept nogil
ctypedef const char *(*name_function)(size_t) noexcept nogil

cdef int RESET_SESSION = 1
cdef int RESET_SESSION_AND_PARAMETERS = 3
cdef Py_ssize_t CONTEXTS_KEPT = 4
# The room is made a sixteenth larger than is wanted: a block ends with the chunk that fills it, and the next one is some
# kilobytes longer. Without that one raw block in ten had 4 MiB of new pages touched for it.
cdef int ROOM_SPARE_LOG2 = 4

cdef void *_handle = NULL


cdef void *_function(str name) except NULL:
    """Return the address of one function of libzstd."""
    global _handle
    if _handle is NULL:
        path = _library.__file__.encode()
        _handle = dlopen(<const char *>path, RTLD_NOW)
        if _handle is NULL:
            raise ImportError(f"{_library.__file__}: cannot be opened as a library")
    encoded = name.encode()
    cdef void *found = dlsym(_handle, <const char *>encoded)
    if found is NULL:
        raise ImportError(f"{_library.__file__}: does not show {name}")
    return found


cdef create_function create_cctx = <create_function>_function("ZSTD_createCCtx")
cdef free_function free_cctx = <free_function>_function("ZSTD_freeCCtx")
cdef reset_function reset_cctx = <reset_function>_function("ZSTD_CCtx_reset")
cdef set_function set_parameter = <set_function>_function("ZSTD_CCtx_setParameter")
cdef prefix_function encoder_prefix = <prefix_function>_function("ZSTD_CCtx_refPrefix")
cdef code_function compress = <code_function>_function("ZSTD_compress2")
cdef bound_function compress_bound = <bound_function>_function("ZSTD_compressBound")
cdef create_function create_dctx = <create_function>_function("ZSTD_createDCtx")
cdef reset_function reset_dctx = <reset_function>_function("ZSTD_DCtx_reset")
cdef prefix_function decoder_prefix = <prefix_function>_function("ZSTD_DCtx_refPrefix")
cdef code_function decompress = <code_function>_function("ZSTD_decompressDCtx")
cdef free_function free_dctx = <free_function>_function("ZSTD_freeDCtx")
cdef find_function frame_bytes = <find_function>_function("ZSTD_findFrameCompressedSize")
cdef content_function content_bytes = <content_function>_function("ZSTD_getFrameContentSize")
cdef is_error_function is_error = <is_error_function>_function("ZSTD_isError")
cdef name_function error_name = <name_function>_function("ZSTD_getErrorName")


cdef class _View:
    """A caller's bytes, held from construction to destruction."""

    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, payload, bint writable=False):
        PyObject_GetBuffer(payload, &self.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef class _Decoder:
    """A decompression context."""

    cdef void *context

    def __cinit__(self):
        self.context = create_dctx()
        if self.context is NULL:
            raise MemoryError("no memory for a zstd decoder")

    def __dealloc__(self):
        if self.context is not NULL:
            free_dctx(self.context)

    cdef size_t decode(
        self,
        const void *frame,
        size_t frame_bytes,
        const uint8_t *prefix,
        size_t prefix_bytes,
        uint8_t *out,
        size_t out_bytes,
    ) noexcept nogil:
        cdef size_t result
        reset_dctx(self.context, RESET_SESSION_AND_PARAMETERS)
        result = decoder_prefix(self.context, prefix, prefix_bytes) if prefix_bytes else 0
        if is_error(result):
            return result
        return decompress(self.context, out, out_bytes, frame, frame_bytes)


_decoders = []


cdef _Decoder _decoder():
    try:
        return _decoders.pop()
    except IndexError:
        return _Decoder()


cdef object _give_back(_Decoder decoder):
    if len(_decoders) < CONTEXTS_KEPT:
        _decoders.append(decoder)


cdef str _said(size_t result):
    return error_name(result).decode()


def decode_frame(frame, out, str what, prefix=None):
    cdef _View source = _View(frame)
    cdef _View target = _View(out, True)
    cdef _View before = _View(b"" if prefix is None else prefix)
    cdef size_t out_bytes = <size_t>target.view.len
    cdef size_t source_bytes = <size_t>source.view.len
    cdef unsigned long long announced = content_bytes(source.view.buf, source_bytes)
    if announced != out_bytes:
        raise Corrupt(f"{what}: its frame does not hold the {out_bytes} bytes that were announced")
    cdef size_t found = frame_bytes(source.view.buf, source_bytes)
    if is_error(found):
        raise Corrupt(f"{what}: {_said(found)}")
    if found != source_bytes:
        raise Corrupt(f"{what}: {source_bytes - found} bytes follow its frame")
    cdef _Decoder decoder = _decoder()
    cdef size_t result
    with nogil:
        result = decoder.decode(
            source.view.buf,
            source_bytes,
            <const uint8_t *>before.view.buf,
            <size_t>before.view.len,
            <uint8_t *>target.view.buf,
            out_bytes,
        )
    _give_back(decoder)
    if is_error(result):
        raise Corrupt(f"{what}: {_said(result)}")
    if result != out_bytes:
        raise Corrupt(f"{what}: its frame does not hold the {out_bytes} bytes that were announced")


cdef struct frame_job:
    const void *frame
    size_t frame_bytes
    int32_t slot


cdef class _Jobs:
    """Frames and which buffers they fill, as a C table; it keeps both alive."""

    cdef list held
    cdef frame_job *table
    cdef Py_ssize_t count

    def __cinit__(self, frames, slots, buffers):
        cdef _View frame
        cdef const int32_t[::1] slot = slots
        self.held = [_View(a_frame) for a_frame in frames]
        self.count = len(self.held)
        self.table = <frame_job *>calloc(self.count + 1, sizeof(frame_job))
        if self.table is NULL:
            raise MemoryError("no memory to list the frames")
        for i in range(self.count):
            frame = self.held[i]
            self.table[i].frame, self.table[i].frame_bytes = frame.view.buf, <size_t>frame.view.len
            self.table[i].slot = slot[i]
        self.held += [_View(buffers[its_slot], True) for its_slot in slots]

    def __dealloc__(self):
        free(self.table)


cdef size_t _most_bytes(const uint32_t[::1] bounds, const uint32_t[::1] lengths) noexcept nogil:
    """Return the bytes of the longest prefix."""
    cdef size_t most = 0, total
    cdef Py_ssize_t i, row
    for i in range(bounds.shape[0] - 1):
        total = 0
        for row in range(bounds[i], bounds[i + 1]):
            total += lengths[row]
        most = max(most, total)
    return most


cdef extern from * nogil:
    """
    #include <pthread.h>

    typedef struct { pthread_mutex_t lock; pthread_cond_t changed; int64_t waiting; } meeting;

    static int64_t next_of(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
    static uint8_t state_of(const uint8_t *state) { return __atomic_load_n(state, __ATOMIC_SEQ_CST); }
    static int meet(meeting *where) {
        return pthread_mutex_init(&where->lock, NULL) || pthread_cond_init(&where->changed, NULL);
    }
    static void part(meeting *where) {
        pthread_cond_destroy(&where->changed);
        pthread_mutex_destroy(&where->lock);
    }
    static void become(uint8_t *state, uint8_t now, meeting *where) {
        __atomic_store_n(state, now, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&where->waiting, __ATOMIC_SEQ_CST)) return;  /* who counts itself later sees the state */
        pthread_mutex_lock(&where->lock);
        pthread_cond_broadcast(&where->changed);
        pthread_mutex_unlock(&where->lock);
    }
    static void wait_while(const uint8_t *state, uint8_t coming, meeting *where) {
        pthread_mutex_lock(&where->lock);
        __atomic_fetch_add(&where->waiting, 1, __ATOMIC_SEQ_CST);
        while (state_of(state) == coming) pthread_cond_wait(&where->changed, &where->lock);
        __atomic_fetch_sub(&where->waiting, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_unlock(&where->lock);
    }
    """
    ctypedef struct meeting:
        pass
    int64_t next_of(int64_t *counter)
    uint8_t state_of(const uint8_t *state)
    int meet(meeting *where)
    void part(meeting *where)
    void become(uint8_t *state, uint8_t now, meeting *where)
    void wait_while(const uint8_t *state, uint8_t coming, meeting *where)

# State of a buffer. Another thread waits while it is COMING: some thread fills it.
cdef uint8_t COMING = 0, THERE = 1, MISSING = 2
# Checks of a COMING buffer before the thread yields its core: a frame takes some 50 us. The filling thread may have
# lost its own core to a third thread, and gets this one.
cdef int LOOKS = 1000


cdef class _Decoding:
    """Frames that any number of threads decode together: each takes the first that no thread has.

    A frame refers to buffers that earlier frames fill, which threads have taken before: no threads wait in a circle.
    """

    cdef _Jobs jobs
    cdef Sources sources
    cdef const int32_t[::1] of
    cdef const uint64_t[::1] at
    cdef const uint32_t[::1] size, bound
    cdef uint8_t[::1] state, decoded
    cdef int32_t[::1] filler
    cdef int64_t begun
    cdef object found
    cdef meeting where
    cdef bint met

    def __cinit__(self, *_):
        self.met = meet(&self.where) == 0
        if not self.met:
            raise MemoryError("no memory for threads to wait for one another")

    def __dealloc__(self):
        if self.met:
            part(&self.where)

    def __init__(self, frames, slots, buffers, there, which, offsets, lengths, bounds):
        reference.check_slices(which, offsets, lengths, bounds, len(frames))
        reference.check_slots(slots, there, len(frames), len(buffers))
        looked_into = reference.slices_looked_into(slots, there, which)
        self.jobs = _Jobs(frames, np.ascontiguousarray(slots), buffers)
        self.sources = Sources(buffers)
        self.of, self.at = np.ascontiguousarray(which), np.ascontiguousarray(offsets)
        self.size, self.bound = np.ascontiguousarray(lengths), np.ascontiguousarray(bounds)
        self.sources.check(which[looked_into], offsets[looked_into], lengths[looked_into])
        state = np.where(there, THERE, MISSING).astype(np.uint8)
        state[slots] = COMING
        self.state = state
        filler = np.full(len(buffers), -1, np.int32)
        filler[slots] = np.arange(self.jobs.count, dtype=np.int32)
        self.filler = filler
        self.found = np.zeros(self.jobs.count, np.bool_)
        self.decoded = self.found.view(np.uint8)

    def work(self):
        """Decode frames until all have been taken."""
        cdef _Decoder decoder = _decoder()
        cdef uint8_t *room = <uint8_t *>malloc(_most_bytes(self.bound, self.size) + 1)
        if room is NULL:
            raise MemoryError("no memory for a prefix")
        cdef int64_t i
        with nogil:
            while True:
                i = next_of(&self.begun)
                if i >= self.jobs.count:
                    break
                self.decoded[i] = self.decode(decoder, <Py_ssize_t>i, room)
                become(&self.state[self.jobs.table[i].slot], THERE if self.decoded[i] else MISSING, &self.where)
        free(room)
        _give_back(decoder)

    cdef bint decode(self, _Decoder decoder, Py_ssize_t i, uint8_t *room) noexcept nogil:
        cdef frame_job *job = &self.jobs.table[i]
        cdef source *target = &self.sources.table[job.slot]
        cdef size_t out_bytes = <size_t>target.length, prefix_bytes
        cdef const uint8_t *prefix
        if not self.all_there(i):
            return False
        if content_bytes(job.frame, job.frame_bytes) != out_bytes:
            return False
        if frame_bytes(job.frame, job.frame_bytes) != job.frame_bytes:
            return False
        prefix = _prefix_of(
            self.sources, self.of, self.at, self.size, self.bound[i], self.bound[i + 1], room, &prefix_bytes
        )
        return out_bytes == decoder.decode(
            job.frame, job.frame_bytes, prefix, prefix_bytes, <uint8_t *>target.at, out_bytes
        )

    cdef bint all_there(self, Py_ssize_t i) noexcept nogil:
        """Return whether all that frame `i` refers to is there, once that is known."""
        cdef Py_ssize_t row
        cdef int32_t slot
        cdef int looks
        for row in range(self.bound[i], self.bound[i + 1]):
            slot, looks = self.of[row], 0
            if self.filler[slot] >= i:  # also if another thread has filled it by now: the result must not depend on timing
                return False
            while state_of(&self.state[slot]) == COMING and looks < LOOKS:
                looks += 1
            if looks == LOOKS:
                wait_while(&self.state[slot], COMING, &self.where)
            if state_of(&self.state[slot]) != THERE:
                return False
        return True


def decode_frames(frames, slots, buffers, there, which, offsets, lengths, bounds, share=None):
    cdef _Decoding decoding = _Decoding(frames, slots, buffers, there, which, offsets, lengths, bounds)
    if decoding.jobs.count:
        if share is None:
            decoding.work()
        else:
            share(decoding.work)
    return decoding.found


cdef const uint8_t *_prefix_of(
    Sources sources,
    const int32_t[::1] of,
    const uint64_t[::1] at,
    const uint32_t[::1] size,
    Py_ssize_t first,
    Py_ssize_t last,
    uint8_t *room,
    size_t *prefix_bytes,
) noexcept nogil:
    """Return where the slices lie one behind the other: in their buffer if they do so there, else copied to `room`."""
    cdef Py_ssize_t row = first, then
    cdef size_t run_bytes, used = 0
    cdef const uint8_t *run
    while row < last:
        run, run_bytes, then = sources.table[of[row]].at + at[row], size[row], row + 1
        while then < last and of[then] == of[row] and sources.table[of[row]].at + at[then] == run + run_bytes:
            run_bytes += size[then]
            then += 1
        if used == 0 and then == last:
            prefix_bytes[0] = run_bytes
            return run
        memcpy(room + used, run, run_bytes)
        used += run_bytes
        row = then
    prefix_bytes[0] = used
    return room


cdef class FrameEncoder:
    """Writes frames, each with a context and buffers that are used again."""

    cdef void *context
    cdef _Decoder decoder
    cdef dict options
    cdef object take
    cdef uint8_t *room
    cdef size_t room_bytes

    def __cinit__(self, options, take=None):
        self.options = dict(options)
        self.take = take
        self.context = create_cctx()
        self.decoder = _Decoder()
        if self.context is NULL:
            raise MemoryError("no memory for a zstd encoder")

    def __dealloc__(self):
        if self.context is not NULL:
            free_cctx(self.context)
        free(self.room)

    cdef int _reserve(self, size_t wanted) except -1:
        if wanted > self.room_bytes:
            wanted += wanted >> ROOM_SPARE_LOG2
            free(self.room)
            self.room_bytes = 0
            self.room = <uint8_t *>malloc(wanted)
            if self.room is NULL:
                raise MemoryError(f"no memory for {wanted} bytes of a zstd frame")
            self.room_bytes = wanted
        return 0

    def encode(self, raw, prefix=None, options=None):
        frame = self.unchecked(raw, prefix, options)
        cdef _View source = _View(raw)
        if prefix is not None or len(frame) < source.view.len:
            self._compare(frame, source, _View(b"" if prefix is None else prefix))
        return frame

    def unchecked(self, raw, prefix=None, options=None):
        return self._kept(self._written(raw, prefix, options))

    def encoded_bytes(self, raw, options=None):
        return self._written(raw, None, options)

    cdef size_t _written(self, raw, prefix, options) except? 0:
        """Write a frame into the room; return its bytes."""
        cdef _View source = _View(raw)
        cdef _View before = _View(b"" if prefix is None else prefix)
        cdef size_t source_bytes = <size_t>source.view.len
        cdef size_t before_bytes = <size_t>before.view.len
        cdef size_t result = reset_cctx(self.context, RESET_SESSION_AND_PARAMETERS)
        for parameter, value in (self.options if options is None else options).items():
            result = set_parameter(self.context, parameter, value)
            if is_error(result):
                raise ValueError(f"zstd parameter {parameter} = {value}: {_said(result)}")
        self._reserve(compress_bound(source_bytes))
        with nogil:
            if before_bytes:
                result = encoder_prefix(self.context, before.view.buf, before_bytes)
            if not is_error(result):
                result = compress(self.context, self.room, self.room_bytes, source.view.buf, source_bytes)
        if is_error(result):
            raise MemoryError(f"zstd could not encode {source_bytes} bytes: {_said(result)}")
        return result

    cdef object _kept(self, size_t frame_bytes):
        """Return the frame that is in the room, out of it."""
        cdef _View target
        if self.take is None:
            return PyBytes_FromStringAndSize(<const char *>self.room, <Py_ssize_t>frame_bytes)
        memory = memoryview(self.take(frame_bytes)).cast("B")
        target = _View(memory, True)
        if <size_t>target.view.len != frame_bytes:
            raise MemoryError(f"take({frame_bytes}) gave {target.view.len} bytes")
        memcpy(target.view.buf, self.room, frame_bytes)
        return memory

    cdef int _compare(self, frame, _View source, _View before) except -1:
        """Decode what was just written, and compare."""
        cdef _View written = _View(frame)
        cdef size_t source_bytes = <size_t>source.view.len
        self._reserve(source_bytes)
        cdef size_t result
        cdef bint same
        with nogil:
            result = self.decoder.decode(
                written.view.buf,
                <size_t>written.view.len,
                <const uint8_t *>before.view.buf,
                <size_t>before.view.len,
                self.room,
                source_bytes,
            )
            same = result == source_bytes and memcmp(self.room, source.view.buf, source_bytes) == 0
        if not same:
            raise Corrupt("a block just compressed does not decompress to what it was: check this machine's memory")
        return 0
