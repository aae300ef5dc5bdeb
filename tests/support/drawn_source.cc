#include "support/drawn_source.h"

#include "core/weight_types.h"
#include "spec/layer_weights.h"

#include "conclave/synthetic.h"

#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

class DrawnSource final : public WeightSource {
 public:
  DrawnSource(std::unique_ptr<WeightSource> source, const std::vector<WeightShape>& shapes)
      : source_(std::move(source)) {
    for (const WeightShape& shape : shapes) {
      const WeightInfo info = source_->describe(shape.id);
      std::vector<Bytes>& matrices = matrices_[shape.id];
      for (int64_t expert = 0; expert < info.count; ++expert) {
        Bytes bytes(static_cast<size_t>(info.rows * packed_bytes(info.dtype, info.cols)));
        source_->read(shape.id, expert, {.row_end = info.rows, .col_end = info.cols}, bytes);
        matrices.push_back(std::move(bytes));
      }
    }
  }

  WeightInfo describe(WeightId id) const override { return source_->describe(id); }

  // Parts of rows, which may begin within a byte, and what is wrong are the source's own.
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const WeightInfo info = describe(id);
    const std::vector<Bytes>& matrices = matrices_[id];
    const bool has_whole_rows = block.col_begin == 0 && block.col_end == info.cols;
    if (!has_whole_rows || expert < 0 || expert >= std::ssize(matrices)) {
      return source_->read(id, expert, block, destination);
    }
    const auto row_bytes = static_cast<size_t>(packed_bytes(info.dtype, info.cols));
    const auto matrix = std::span(matrices[static_cast<size_t>(expert)]);
    const auto rows =
        matrix.subspan(static_cast<size_t>(block.row_begin) * row_bytes,
                       static_cast<size_t>(block.row_end - block.row_begin) * row_bytes);
    if (!rows.empty()) std::memcpy(destination.data(), rows.data(), rows.size());
  }

  std::string locate(WeightId id, int64_t expert) const override {
    return source_->locate(id, expert);
  }

 private:
  using Bytes = std::vector<std::byte>;

  std::unique_ptr<WeightSource> source_;
  WeightTable<std::vector<Bytes>> matrices_;
};

}  // namespace

std::unique_ptr<WeightSource> draw_source(const MoeSpec& spec, uint64_t seed) {
  constexpr int64_t kMostBytes = int64_t{16} << 20;
  auto source = make_synthetic_source(spec, seed);
  const std::vector<WeightShape> shapes = layer_weights(spec);
  int64_t bytes = 0;
  for (const WeightShape& shape : shapes) {
    const WeightInfo info = source->describe(shape.id);
    bytes += info.count * info.rows * packed_bytes(info.dtype, info.cols);
  }
  if (bytes > kMostBytes) return source;
  return std::make_unique<DrawnSource>(std::move(source), shapes);
}

}  // namespace conclave::testing
