// Adds the terms of adapters to the products of an expert's rows, in the regions that the products
// have anyway: terms of rows before each product, their contribution to a panel's finished sums.
#pragma once

#include "core/workspace_layout.h"
#include "experts/adapters/factors.h"
#include "experts/cpu/adapters/functions.h"
#include "experts/problem.h"
#include "gemm/cpu/panel_task.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0::experts {

// One run's adapters, and the marks and terms of its rows in the workspace.
struct AdapterCall {
  std::span<const MlpAdapter* const> adapters;
  uint32_t* marks = nullptr;  // [rows]
  float* terms = nullptr;     // [rows, terms of a row]

  explicit operator bool() const { return !adapters.empty(); }
};

// Some successive rows of one expert, the first being row `first_row` of the run.
struct AdapterRows {
  int64_t expert = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

class AdapterPass {
 public:
  AdapterPass(const ExpertsProblem& problem, cpu::Isa isa, DType row_dtype);

  // Bytes that each row of a bundle has for its mark.
  int64_t mark_bytes() const { return max_rank_ == 0 ? 0 : kMarkBytes; }

  struct Slices {
    WorkspaceSlice marks;
    WorkspaceSlice terms;
  };
  Slices book(WorkspaceLayout& workspace, int64_t num_rows) const;
  AdapterCall call(std::span<const MlpAdapter* const> adapters, std::span<std::byte> workspace,
                   const Slices& slices) const;

  // Notes the marks of rows and computes their terms for gate and up. `row_of(i)` is where row i
  // begins.
  template <class RowOf>
  void begin_gate_up(const AdapterCall& call, const AdapterRows& rows, int64_t row_bytes,
                     const RowOf& row_of) const {
    for (int64_t i = 0; i < rows.num_rows; ++i) {
      call.marks[rows.first_row + i] = own_mark(call, mark_of(row_of(i), row_bytes), rows.expert);
    }
    compute_terms(call, rows, &ExpertFactors::gate_up, hidden_size_,
                  kHalfColumns * byte_size(row_dtype_), row_of);
  }
  // Terms for down, from activated rows whose blocks of 32 columns lie `block_bytes` apart.
  template <class RowOf>
  void begin_down(const AdapterCall& call, const AdapterRows& rows, int64_t block_bytes,
                  const RowOf& row_of) const {
    compute_terms(call, rows, &ExpertFactors::down, intermediate_size_, block_bytes, row_of);
  }

  // Adds what rows' terms contribute to panel `panel` of gate and up: sums [num_rows, 64].
  void add_gate_up(const AdapterCall& call, const AdapterRows& rows, int64_t panel,
                   float* sums) const;
  // The same for down, whose finished rows lie `stride` numbers apart; `valid` of 64 columns exist.
  void add_down(const AdapterCall& call, const AdapterRows& rows, int64_t panel, float* out,
                int64_t stride, int64_t valid) const;

 private:
  using Product = ProductFactors ExpertFactors::*;

  // Rows of one adapter that wait for their terms.
  struct Tile {
    std::array<const std::byte*, kMostTermRows> rows = {};
    std::array<float*, kMostTermRows> terms = {};
    int64_t num_rows = 0;
  };

  static const ExpertFactors& factors_of(const AdapterCall& call, uint32_t mark, int64_t expert) {
    return call.adapters[mark - 1]->experts[static_cast<size_t>(expert)];
  }
  // The mark, or 0 where its adapter has nothing for this expert.
  static uint32_t own_mark(const AdapterCall& call, uint32_t mark, int64_t expert);
  // The least mark of the rows above `mark`; 0: there is none.
  static uint32_t next_mark(const AdapterCall& call, const AdapterRows& rows, uint32_t mark);
  float* terms_of(const AdapterCall& call, int64_t row) const {
    return call.terms + row * terms_per_row_;
  }
  const AdapterFunctions& functions(DType factors) const {
    return functions_[factors == DType::kF32 ? 0 : factors == DType::kF16 ? 1 : 2];
  }
  void run_tile(const AdapterCall& call, uint32_t mark, const ProductFactors& product, int64_t k,
                int64_t block_bytes, Tile& tile) const;
  void add_halves(const MlpAdapter& adapter, const ProductFactors& product, int64_t panel,
                  const float* terms, float* sums) const;

  // Rows of the same adapter are taken together, so that they share its factors.
  template <class RowOf>
  void compute_terms(const AdapterCall& call, const AdapterRows& rows, Product which, int64_t k,
                     int64_t block_bytes, const RowOf& row_of) const {
    for (uint32_t mark = next_mark(call, rows, 0); mark != 0; mark = next_mark(call, rows, mark)) {
      const ProductFactors& product = factors_of(call, mark, rows.expert).*which;
      if (product.empty()) continue;
      Tile tile;
      for (int64_t i = 0; i < rows.num_rows; ++i) {
        if (call.marks[rows.first_row + i] != mark) continue;
        const auto at = static_cast<size_t>(tile.num_rows++);
        tile.rows[at] = row_of(i);
        tile.terms[at] = terms_of(call, rows.first_row + i);
        if (tile.num_rows == kMostTermRows) run_tile(call, mark, product, k, block_bytes, tile);
      }
      if (tile.num_rows != 0) run_tile(call, mark, product, k, block_bytes, tile);
    }
  }

  int64_t max_rank_;
  int64_t hidden_size_;
  int64_t intermediate_size_;
  int64_t terms_per_row_;
  DType row_dtype_;
  std::array<AdapterFunctions, 3> functions_;
};

}  // namespace conclave::inline v0::experts
