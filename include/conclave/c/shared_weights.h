// C interface: weights in memory that processes share. A trainer writes them, layers of other
// processes read them as a source, without a copy between.
#pragma once

#include "conclave/c/source.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Writes one file, best in /dev/shm, with room for the weights of one layer. Versions follow each
// other: begin, the memory of each matrix, publish. From begin to publish readers are told that the
// weights are incomplete, and so they are where a writer dies meanwhile. One thread at a time may
// use it, but for conclave_shared_writer_memory. No other process may write the file.
typedef struct conclave_shared_writer conclave_shared_writer;

typedef struct conclave_shared_writer_options {
  size_t struct_size;
  uint64_t layer;  // any number that tells layers apart
  // The routed experts that the file has, in this order; none: all of the layer.
  const int32_t* experts;  // [experts_count]
  size_t experts_count;
} conclave_shared_writer_options;

// Makes the file, or replaces what has its name: readers of an old one keep that. It has room for
// every tensor of `source`, by shape and type; values are not read. `options` may be NULL.
// CONCLAVE_ERROR_INVALID_ARGUMENT naming an expert; _SIZE_OVERFLOW; _FILE_ACCESS, and _FILE_WRITE
// where there is no room, or a folder, a device, a pipe or a socket has the name.
CONCLAVE_C_API conclave_status conclave_shared_writer_create(
    const char* path, const conclave_source* source, const conclave_shared_writer_options* options,
    conclave_shared_writer** out) CONCLAVE_C_NOTHROW;
// Leaves the file, in whatever state it is; whoever no longer needs it removes it.
CONCLAVE_C_API void conclave_shared_writer_destroy(conclave_shared_writer* writer)
    CONCLAVE_C_NOTHROW;

// Marks the contents as incomplete. CONCLAVE_ERROR_STATE if that has begun already.
CONCLAVE_C_API conclave_status conclave_shared_writer_begin(conclave_shared_writer* writer)
    CONCLAVE_C_NOTHROW;
// Sets *data to the memory of one matrix and *bytes to its size: dense rows, 64-byte aligned, to be
// written before publish. `tensor` is "gate", "up", "down", "down_scale", "shared_up", "router",
// ... (conclave_source_shared_tensors_json lists those of a file), `expert` its number in the
// layer; 0 for what is there once. CONCLAVE_ERROR_INVALID_ARGUMENT for a matrix that the file has
// not, _STATE before begin.
CONCLAVE_C_API conclave_status conclave_shared_writer_memory(conclave_shared_writer* writer,
                                                             const char* tensor, int64_t expert,
                                                             void** data,
                                                             size_t* bytes) CONCLAVE_C_NOTHROW;
// Computes the checksum of all matrices and marks them as complete. `version` is larger than the
// last one; 0: one more. Sets *published to it, which may be NULL. CONCLAVE_ERROR_STATE before
// begin, _INVALID_ARGUMENT; the version is then still to be published.
CONCLAVE_C_API conclave_status conclave_shared_writer_publish(
    conclave_shared_writer* writer, uint64_t version, uint64_t* published) CONCLAVE_C_NOTHROW;
// All three at once: copies every matrix from a source in host memory with the same tensors. What
// has begun already goes on. CONCLAVE_ERROR_INVALID_ARGUMENT naming a tensor that differs, _DEVICE,
// before anything is marked; what the source meets later leaves the version begun, and the same
// call may try again.
CONCLAVE_C_API conclave_status
conclave_shared_writer_publish_source(conclave_shared_writer* writer, const conclave_source* source,
                                      uint64_t version, uint64_t* published) CONCLAVE_C_NOTHROW;

enum { CONCLAVE_SHARED_SKIP_CHECKSUM = 1 };  // relies on the marks of begin and publish alone

// The weights of such a file at the version that it has now, for layers, reloads and refits. The
// header is checked against the file's size before it is used. A layer asks, after it has read and
// before it uses anything, whether a writer has begun meanwhile, and is then
// CONCLAVE_ERROR_FILE_CHANGED. No process may truncate the file. `flags` are CONCLAVE_SHARED_*.
// CONCLAVE_ERROR_FILE_NOT_FOUND, _FILE_ACCESS, _FILE_NOT_REGULAR; _INVALID_ARGUMENT naming the
// field of a header that is none of these; _FILE_CHANGED if a writer is at work or died, or the
// checksum differs.
CONCLAVE_C_API conclave_status conclave_source_from_shared(
    const char* path, uint32_t flags, conclave_source** out) CONCLAVE_C_NOTHROW;

typedef struct conclave_shared_info {
  size_t struct_size;
  uint64_t version;
  uint64_t layer;  // the writer's number
  size_t num_tensors;
} conclave_shared_info;
// These two are CONCLAVE_ERROR_INVALID_ARGUMENT for a source of anything else.
CONCLAVE_C_API conclave_status conclave_source_get_shared_info(
    const conclave_source* source, conclave_shared_info* info) CONCLAVE_C_NOTHROW;
// A JSON list of the tensors in the order of the file, of which scopes of a refit can be made:
// [{"name": "gate", "experts": [0, 3]}]; without experts: all. Free it with conclave_text_free.
CONCLAVE_C_API conclave_status conclave_source_shared_tensors_json(const conclave_source* source,
                                                                   char** json) CONCLAVE_C_NOTHROW;
// CONCLAVE_ERROR_FILE_CHANGED if a writer has begun another version since the source was made. Any
// other source is unchanged.
CONCLAVE_C_API conclave_status conclave_source_check_unchanged(const conclave_source* source)
    CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
