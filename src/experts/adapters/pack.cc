#include "experts/adapters/pack.h"

#include "core/checked.h"
#include "experts/adapters/elements.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::experts {
namespace {

constexpr int64_t kPanelColumns = 2 * kHalfColumns;

// One product's factors, and how its terms are numbered.
struct Product {
  std::array<const MatrixFactors*, 2> halves;  // the left and the right one of each panel
  int64_t columns = 0;                         // rows of b
  int64_t k = 0;
  bool one_a = false;       // both halves read the same terms
  bool alternates = false;  // halves are columns of one matrix in turn, not two matrices

  int64_t terms() const {
    return one_a ? halves[0]->rank() : halves[0]->rank() + halves[1]->rank();
  }
  int64_t panels() const { return ceil_div(columns, alternates ? kPanelColumns : kHalfColumns); }
};

Product gate_up_of(const ExpertAdapter& expert, const AdapterShape& shape) {
  Product product{.halves = {&expert.gate, &expert.up},
                  .columns = shape.intermediate_size,
                  .k = shape.hidden_size,
                  .one_a = share_rows(expert.gate, expert.up)};
  if (shape.gated) return product;
  product.halves[0] = &expert.up;
  product.one_a = product.alternates = true;
  return product;
}

Product down_of(const ExpertAdapter& expert, const AdapterShape& shape) {
  return {.halves = {&expert.down, &expert.down},
          .columns = shape.hidden_size,
          .k = shape.intermediate_size,
          .one_a = true,
          .alternates = true};
}

size_t a_bytes(const Product& product, DType dtype) {
  return static_cast<size_t>(
      round_up(product.terms() * round_up(product.k, kHalfColumns) * byte_size(dtype), 64));
}
size_t b_bytes(const Product& product, DType dtype) {
  const int64_t ranks = product.halves[0]->rank() + product.halves[1]->rank();
  return static_cast<size_t>(
      round_up(product.panels() * ranks * kHalfColumns * byte_size(dtype), 64));
}

void pack_a(const MatrixFactors& matrix, int64_t k, DType dtype, std::byte* to) {
  const int64_t bytes = byte_size(dtype);
  const int64_t padded = round_up(k, kHalfColumns);
  for (int64_t r = 0; r < matrix.rank(); ++r) {
    for (int64_t c = 0; c < padded; ++c) {
      store_factor(dtype, c < k ? factor_at(matrix.a, r, c) : 0.0F, to + (r * padded + c) * bytes);
    }
  }
}

// Columns first to first + 31 of b, transposed.
void pack_half(const MatrixFactors& matrix, int64_t first, DType dtype, std::byte* to) {
  const int64_t bytes = byte_size(dtype);
  const int64_t rank = matrix.rank();
  for (int64_t c = 0; rank > 0 && c < kHalfColumns; ++c) {
    const bool exists = first + c < matrix.b.shape[0];
    for (int64_t r = 0; r < rank; ++r) {
      store_factor(dtype, exists ? factor_at(matrix.b, first + c, r) : 0.0F,
                   to + (r * kHalfColumns + c) * bytes);
    }
  }
}

ProductFactors pack_product(const Product& product, DType dtype, std::byte*& to) {
  ProductFactors packed;
  if (product.terms() == 0) return packed;
  const auto& [left, right] = product.halves;
  packed.a = {.rows = to, .count = product.terms()};
  pack_a(*left, product.k, dtype, to);
  const int64_t first_right = product.one_a ? 0 : left->rank();
  if (!product.one_a) {
    pack_a(*right, product.k, dtype,
           to + first_right * round_up(product.k, kHalfColumns) * byte_size(dtype));
  }
  to += a_bytes(product, dtype);
  packed.b = to;
  packed.halves = {HalfFactors{.rank = left->rank()},
                   HalfFactors{.first_term = first_right, .rank = right->rank()}};
  packed.scales = {left->scale, right->scale};
  packed.first_of_second_scale = left->rank();
  const int64_t step = product.alternates ? kPanelColumns : kHalfColumns;
  for (int64_t panel = 0; panel < product.panels(); ++panel) {
    for (int half = 0; half < 2; ++half) {
      const int64_t within = product.alternates ? half * kHalfColumns : 0;
      pack_half(*product.halves[static_cast<size_t>(half)], panel * step + within, dtype,
                to + (packed.b_of(panel, half, byte_size(dtype)) - packed.b));
    }
  }
  to += b_bytes(product, dtype);
  return packed;
}

}  // namespace

size_t packed_adapter_bytes(const ExpertAdapter& expert, const AdapterShape& shape) {
  size_t bytes = 0;
  for (const Product& product : {gate_up_of(expert, shape), down_of(expert, shape)}) {
    if (product.terms() != 0)
      bytes += a_bytes(product, shape.dtype) + b_bytes(product, shape.dtype);
  }
  return bytes;
}

ExpertFactors pack_adapter(const ExpertAdapter& expert, const AdapterShape& shape, std::byte* to) {
  ExpertFactors packed;
  packed.gate_up = pack_product(gate_up_of(expert, shape), shape.dtype, to);
  packed.down = pack_product(down_of(expert, shape), shape.dtype, to);
  return packed;
}

}  // namespace conclave::inline v0::experts
