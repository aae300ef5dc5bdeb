// A source of layers over several GPUs for benchmarks.
#pragma once

#include <conclave/conclave.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace conclave::bench {

// Every expert is the first one, so that sources of real sizes are there at once.
class OneExpertForAll final : public WeightSource {
 public:
  explicit OneExpertForAll(const MoeSpec& spec) : source_(make_synthetic_source(spec, 1)) {}

  WeightInfo describe(WeightId id) const override { return source_->describe(id); }
  void read(WeightId id, int64_t /*expert*/, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const WeightInfo info = describe(id);
    const bool whole_rows = block.col_begin == 0 && block.col_end == info.cols;
    if (!whole_rows) return source_->read(id, 0, block, destination);
    const std::vector<std::byte>& matrix = first(id, info);
    const size_t row = matrix.size() / static_cast<size_t>(info.rows);
    std::memcpy(destination.data(), matrix.data() + row * static_cast<size_t>(block.row_begin),
                destination.size());
  }

 private:
  const std::vector<std::byte>& first(WeightId id, const WeightInfo& info) const {
    const std::lock_guard lock(mutex_);
    std::vector<std::byte>& matrix = matrices_[id];
    if (matrix.empty()) {
      matrix.resize(dense_bytes(info.dtype, {info.rows, info.cols}));
      source_->read(id, 0, {0, info.rows, 0, info.cols}, matrix);
    }
    return matrix;
  }

  std::unique_ptr<WeightSource> source_;
  mutable std::mutex mutex_;
  mutable WeightTable<std::vector<std::byte>> matrices_;
};

}  // namespace conclave::bench
