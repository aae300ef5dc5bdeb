#include "experts/cuda/adapters/pack.h"

#include "core/checked.h"
#include "core/row_stride.h"
#include "experts/adapters/elements.h"

#include <cstring>

namespace conclave::inline v0::experts {
namespace {

int64_t padded(int64_t count) { return round_up(count, kFactorLanes); }

// One product: its halves, which may be one matrix given twice or have one A.
struct Product {
  const MatrixFactors* halves[2];
  int64_t columns = 0;  // rows of b
  int64_t k = 0;
  bool is_one = false;  // both halves are the same matrix
  bool one_a = false;   // both halves read the same terms

  int64_t rank(int half) const { return padded(halves[half]->rank()); }
  int64_t terms() const { return one_a ? rank(0) : rank(0) + rank(1); }
};

Product gate_up_of(const ExpertAdapter& expert, const AdapterShape& shape) {
  const bool gated = shape.gated;
  return {.halves = {gated ? &expert.gate : &expert.up, &expert.up},
          .columns = shape.intermediate_size,
          .k = shape.hidden_size,
          .is_one = !gated,
          .one_a = !gated || share_rows(expert.gate, expert.up)};
}

Product down_of(const ExpertAdapter& expert, const AdapterShape& shape) {
  return {.halves = {&expert.down, &expert.down},
          .columns = shape.hidden_size,
          .k = shape.intermediate_size,
          .is_one = true,
          .one_a = true};
}

size_t matrix_bytes(int64_t rows, int64_t columns, DType dtype) {
  return static_cast<size_t>(round_up(rows * padded(columns) * byte_size(dtype), 16));
}

size_t bytes_of(const Product& product, DType dtype) {
  if (product.terms() == 0) return 0;
  size_t bytes = matrix_bytes(product.terms(), product.k, dtype) +
                 matrix_bytes(product.columns, product.rank(0), dtype);
  if (!product.is_one) bytes += matrix_bytes(product.columns, product.rank(1), dtype);
  return bytes;
}

// Writes from `to` on what will be read from `place` on.
class Writer {
 public:
  Writer(DType dtype, std::byte* to, const std::byte* place)
      : dtype_(dtype), to_(to), place_(place) {}

  // A matrix whose rows and columns are filled up with zeros.
  const std::byte* matrix(const ConstTensorView& from, int64_t rows, int64_t columns) {
    const std::byte* const begin = place_;
    this->rows(from, rows, columns);
    return end_matrix(begin, rows, columns);
  }
  // The rows of two matrices, one below the other.
  const std::byte* stacked(const MatrixFactors& first, const MatrixFactors& second,
                           const Product& product) {
    const std::byte* const begin = place_;
    rows(first.a, product.rank(0), product.k);
    if (!product.one_a) rows(second.a, product.rank(1), product.k);
    return end_matrix(begin, product.terms(), product.k);
  }
  std::byte* to() const { return to_; }
  const std::byte* place() const { return place_; }

 private:
  void rows(const ConstTensorView& from, int64_t rows, int64_t columns) {
    const auto row_bytes = static_cast<size_t>(padded(columns) * byte_size(dtype_));
    for (int64_t row = 0; row < rows; ++row) {
      std::memset(to_, 0, row_bytes);
      if (!from.empty() && row < from.shape[0]) copy_row(from, row);
      to_ += row_bytes;
      place_ += row_bytes;
    }
  }
  void copy_row(const ConstTensorView& from, int64_t row) {
    const int64_t bytes = byte_size(dtype_);
    const int64_t columns = from.shape[1];
    if (from.dtype == dtype_) {
      const int64_t stride = row_stride(from);
      const auto* const begin = static_cast<const std::byte*>(from.data) + row * stride * bytes;
      std::memcpy(to_, begin, static_cast<size_t>(columns * bytes));
      return;
    }
    for (int64_t col = 0; col < columns; ++col) {
      store_factor(dtype_, factor_at(from, row, col), to_ + col * bytes);
    }
  }
  const std::byte* end_matrix(const std::byte* begin, int64_t rows, int64_t columns) {
    const size_t bytes = matrix_bytes(rows, columns, dtype_);
    const auto written = static_cast<size_t>(place_ - begin);
    to_ += bytes - written;
    place_ += bytes - written;
    return begin;
  }

  DType dtype_;
  std::byte* to_;
  const std::byte* place_;
};

DeviceFactors pack_product(const Product& product, DType dtype, Writer& writer) {
  DeviceFactors packed;
  if (product.terms() == 0) return packed;
  const auto& [first, second] = product.halves;
  packed.a = writer.stacked(*first, *second, product);
  packed.b[0] = writer.matrix(first->b, product.columns, product.rank(0));
  packed.b[1] =
      product.is_one ? packed.b[0] : writer.matrix(second->b, product.columns, product.rank(1));
  for (int half = 0; half < 2; ++half) {
    packed.rank[half] = static_cast<int32_t>(product.rank(half));
    packed.scale[half] = product.halves[half]->scale;
  }
  packed.first[1] = product.one_a ? 0 : packed.rank[0];
  packed.first_of_second_scale = packed.rank[0];
  packed.terms = static_cast<int32_t>(product.terms());
  packed.is_bf16 = dtype == DType::kBF16;
  return packed;
}

}  // namespace

size_t device_adapter_bytes(const ExpertAdapter& expert, const AdapterShape& shape) {
  return bytes_of(gate_up_of(expert, shape), shape.dtype) +
         bytes_of(down_of(expert, shape), shape.dtype);
}

DeviceExpertFactors pack_device_adapter(const ExpertAdapter& expert, const AdapterShape& shape,
                                        std::byte* to, const std::byte* place) {
  Writer writer(shape.dtype, to, place);
  DeviceExpertFactors packed;
  packed.gate_up = pack_product(gate_up_of(expert, shape), shape.dtype, writer);
  packed.down = pack_product(down_of(expert, shape), shape.dtype, writer);
  return packed;
}

}  // namespace conclave::inline v0::experts
