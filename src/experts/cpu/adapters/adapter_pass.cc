#include "experts/cpu/adapters/adapter_pass.h"

#include "core/checked.h"
#include "core/dcheck.h"

#include <algorithm>

namespace conclave::inline v0::experts {

AdapterPass::AdapterPass(const ExpertsProblem& problem, cpu::Isa isa, DType row_dtype)
    : max_rank_(problem.max_adapter_rank),
      hidden_size_(problem.hidden_size),
      intermediate_size_(problem.intermediate_size),
      terms_per_row_(round_up(2 * problem.max_adapter_rank, 16)),
      row_dtype_(row_dtype),
      functions_{adapter_functions(isa, row_dtype, DType::kF32),
                 adapter_functions(isa, row_dtype, DType::kF16),
                 adapter_functions(isa, row_dtype, DType::kBF16)} {}

AdapterPass::Slices AdapterPass::book(WorkspaceLayout& workspace, int64_t num_rows) const {
  const int64_t rows = max_rank_ == 0 ? 0 : num_rows;
  return {.marks = workspace.book<uint32_t>(rows),
          .terms = workspace.book_bytes(rows, static_cast<size_t>(terms_per_row_) * sizeof(float))};
}

AdapterCall AdapterPass::call(std::span<const MlpAdapter* const> adapters,
                              std::span<std::byte> workspace, const Slices& slices) const {
  if (max_rank_ == 0 || adapters.empty()) return {};
  return {.adapters = adapters,
          .marks = slice_as<uint32_t>(workspace, slices.marks),
          .terms = slice_as<float>(workspace, slices.terms)};
}

uint32_t AdapterPass::own_mark(const AdapterCall& call, uint32_t mark, int64_t expert) {
  if (mark == 0) return 0;
  CONCLAVE_DCHECK(mark <= call.adapters.size());
  const ExpertFactors& factors = factors_of(call, mark, expert);
  return factors.gate_up.empty() && factors.down.empty() ? 0 : mark;
}

uint32_t AdapterPass::next_mark(const AdapterCall& call, const AdapterRows& rows, uint32_t mark) {
  uint32_t next = 0;
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const uint32_t own = call.marks[rows.first_row + i];
    if (own > mark && (next == 0 || own < next)) next = own;
  }
  return next;
}

void AdapterPass::run_tile(const AdapterCall& call, uint32_t mark, const ProductFactors& product,
                           int64_t k, int64_t block_bytes, Tile& tile) const {
  const MlpAdapter& adapter = *call.adapters[mark - 1];
  functions(adapter.dtype)
      .terms({.rows = tile.rows.data(),
              .terms = tile.terms.data(),
              .num_rows = tile.num_rows,
              .block_bytes = block_bytes,
              .k = k,
              .a = product.a.rows,
              .count = product.a.count});
  const int64_t second = std::min(product.first_of_second_scale, product.a.count);
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    float* const terms = tile.terms[static_cast<size_t>(i)];
    for (int64_t t = 0; t < second; ++t) terms[t] *= product.scales[0];
    for (int64_t t = second; t < product.a.count; ++t) terms[t] *= product.scales[1];
  }
  tile.num_rows = 0;
}

void AdapterPass::add_halves(const MlpAdapter& adapter, const ProductFactors& product,
                             int64_t panel, const float* terms, float* sums) const {
  const int64_t bytes = byte_size(adapter.dtype);
  const AdapterFunctions& use = functions(adapter.dtype);
  for (int half = 0; half < 2; ++half) {
    const HalfFactors& own = product.halves[static_cast<size_t>(half)];
    if (own.rank == 0) continue;
    use.add_delta({.terms = terms + own.first_term,
                   .rank = own.rank,
                   .b = product.b_of(panel, half, bytes),
                   .sums = sums + half * kHalfColumns});
  }
}

void AdapterPass::add_gate_up(const AdapterCall& call, const AdapterRows& rows, int64_t panel,
                              float* sums) const {
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const int64_t row = rows.first_row + i;
    const uint32_t mark = call.marks[row];
    if (mark == 0) continue;
    const ProductFactors& product = factors_of(call, mark, rows.expert).gate_up;
    if (product.empty()) continue;
    add_halves(*call.adapters[mark - 1], product, panel, terms_of(call, row),
               sums + i * 2 * kHalfColumns);
  }
}

void AdapterPass::add_down(const AdapterCall& call, const AdapterRows& rows, int64_t panel,
                           float* out, int64_t stride, int64_t valid) const {
  constexpr int64_t kColumns = 2 * kHalfColumns;
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const int64_t row = rows.first_row + i;
    const uint32_t mark = call.marks[row];
    if (mark == 0) continue;
    const ProductFactors& product = factors_of(call, mark, rows.expert).down;
    if (product.empty()) continue;
    float* const to = out + i * stride;
    const MlpAdapter& adapter = *call.adapters[mark - 1];
    if (valid == kColumns) {
      add_halves(adapter, product, panel, terms_of(call, row), to);
      continue;
    }
    // Memory behind the last column belongs to another row.
    std::array<float, kColumns> sums = {};
    std::copy_n(to, valid, sums.data());
    add_halves(adapter, product, panel, terms_of(call, row), sums.data());
    std::copy_n(sums.data(), valid, to);
  }
}

}  // namespace conclave::inline v0::experts
