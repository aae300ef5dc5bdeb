// Plan time of an expert-parallel dispatcher: who owns which expert, and bounds on all exchanges.
#pragma once

#include "dispatch/dispatcher.h"
#include "dispatch/ep_exchange.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0::dispatch {

// Words used throughout: a row travels once from its home rank to each rank that owns one of its
// experts; result rows travel back, one per (row, expert), or one per row if reduced there.
struct EpPlan {
  DispatchProblem problem;  // its epoch is never null
  bool fixed_slots = false;
  bool reduced = false;
  int64_t num_local_experts = 0;
  std::vector<int64_t> results_per_row;  // [ranks] most result rows per row from each rank
  int64_t terms = 0;                     // most result rows that combine adds for one token

  // Bounds over all inputs.
  int64_t max_send_rows = 0;
  int64_t max_received_rows = 0;
  int64_t slots_per_expert = 0;  // in the padded layout
  int64_t max_slots = 0;
  int64_t max_owed_rows = 0;  // result rows that this rank sends
  int64_t max_home_rows = 0;  // result rows that this rank gets

  int32_t ranks() const { return problem.ep_size; }
  static MovesBytes moves(bool in_background) {
    return in_background ? MovesBytes::kInBackground : MovesBytes::kInCalls;
  }
  MovesBytes moves_rows() const { return moves(problem.rows_in_background); }
  MovesBytes moves_results() const { return moves(problem.results_in_background); }
};

// a * b. Throws Error(kSizeOverflow) where that does not fit 63 bits.
int64_t bounded_product(int64_t a, int64_t b);

// Throws Error(kSizeOverflow).
EpPlan make_ep_plan(const DispatchProblem& problem);

}  // namespace conclave::inline v0::dispatch
