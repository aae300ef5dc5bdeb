// Where matrices lie in a file of shared weights, by what it declares: no offset is stored, so that
// none has to be trusted.
#pragma once

#include "conclave/shared_weights.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The first bytes of a file. Rows of tensors and lists of experts follow, then the matrices.
struct SharedHeader {
  char magic[8] = {};
  uint32_t num_tensors = 0;
  uint32_t unused = 0;
  uint64_t num_experts = 0;  // all lists together have so many
  uint64_t file_bytes = 0;
  uint64_t layer = 0;
  uint64_t hash = 0;  // XXH3-64 of the rows and lists, with the fields above before them
  // Even: complete, and 0: never. A writer makes it odd while it writes.
  uint64_t sequence = 0;
  uint64_t version = 0;
  uint64_t checksum = 0;  // XXH3-64 of all matrices
};
inline constexpr char kSharedMagic[9] = "CNCLVSW1";

// Keeps what comes after from being read or written before what comes before. ThreadSanitizer knows
// no fences, and sees one process of the two.
inline void order_memory() {
#if defined(__SANITIZE_THREAD__)
  std::atomic_signal_fence(std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

struct SharedRow {
  char name[48] = {};   // to_string(id)
  char dtype[16] = {};  // to_string(dtype)
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t num_experts = 0;  // in the list; 0: all
};

struct SharedPlace {
  SharedTensor tensor;
  uint64_t first = 0;         // the first matrix, from the file's begin
  uint64_t matrix_bytes = 0;  // without what fills it up
  uint64_t stride = 0;

  int64_t num_matrices() const;
  // The place of an expert's matrix among those here, or -1.
  int64_t find(int64_t expert) const;
};

struct SharedLayout {
  std::vector<SharedPlace> places;
  uint64_t data_begin = 0;
  uint64_t file_bytes = 0;

  const SharedPlace* find(WeightId id) const;
};

// `file` is for messages. Throws Error(kInvalidArgument) naming the tensor, kSizeOverflow.
SharedLayout lay_out(std::span<const SharedTensor> tensors, const std::string& file);

// The rows and lists as bytes.
std::vector<std::byte> pack_rows(std::span<const SharedTensor> tensors);
// The inverse, for bytes that nobody has checked. Throws Error(kInvalidArgument).
std::vector<SharedTensor> parse_rows(const SharedHeader& header, std::span<const std::byte> bytes,
                                     const std::string& file);
// Bytes that a header says its rows and lists have. Throws Error(kInvalidArgument) for more tensors
// than there are ids, or more than the file has room for.
size_t bytes_of_rows(const SharedHeader& header, const std::string& file);
uint64_t hash_of(const SharedHeader& header, std::span<const std::byte> rows);

}  // namespace conclave::inline v0::checkpoint
