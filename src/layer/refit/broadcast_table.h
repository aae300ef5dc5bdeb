// The tensors of a broadcast, and where their matrices lie in the bytes that travel.
#pragma once

#include "conclave/refit.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

struct BroadcastTensor {
  WeightId id = weights::kRouter;
  WeightInfo info = {};               // as the root's source has it, with all experts
  std::vector<int64_t> experts = {};  // those whose matrices travel, ascending
  size_t first = 0;                   // byte of the first of them

  size_t row_bytes() const;
  size_t matrix_bytes() const;  // without what pads it
  size_t step() const;          // from one matrix to the next
};

// Rows of one matrix that are read together.
struct BroadcastRows {
  const BroadcastTensor* tensor = nullptr;
  int64_t expert = 0;
  int64_t begin = 0;
  int64_t end = 0;
  size_t at = 0;  // byte
  size_t bytes() const { return static_cast<size_t>(end - begin) * tensor->row_bytes(); }
};

class BroadcastTable {
 public:
  BroadcastTable() = default;
  // Throws Error(kInvalidArgument) for an expert or tensor that the source does not have.
  BroadcastTable(const WeightSource& source, const RefitScope& part);
  // Reads the words that another rank has sent. Throws Error(kInvalidArgument) where these are
  // none.
  explicit BroadcastTable(std::span<const int64_t> words);
  std::vector<int64_t> words() const;

  size_t bytes() const { return bytes_; }
  // Null if it does not travel.
  const BroadcastTensor* find(WeightId id) const;
  // The byte at which a matrix begins. Throws Error(kTensorMissing).
  size_t place(const BroadcastTensor& tensor, int64_t expert) const;
  // All rows in their order, at most `most_bytes` in each entry, but for a longer row.
  std::vector<BroadcastRows> rows(size_t most_bytes) const;

 private:
  void lay_out();

  std::vector<BroadcastTensor> tensors_;
  size_t bytes_ = 0;
};

}  // namespace conclave::inline v0
