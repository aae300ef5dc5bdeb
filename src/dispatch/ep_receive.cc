#include "dispatch/ep_receive.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace conclave::inline v0::dispatch {
namespace {

[[noreturn]] void reject(int32_t rank, std::string what) {
  throw CommError(ErrorCode::kCommMismatch, rank, "dispatch.rows", std::move(what));
}

// Counts the distinct experts that one received row names.
int64_t count_experts(const EpPlan& plan, const EpTables& tables, int32_t rank, int64_t row) {
  const ReceivedBlock& block = tables.received[rank];
  const int64_t top_k = plan.problem.top_k;
  int64_t experts = 0;
  for (int64_t slot = 0; slot < top_k; ++slot) {
    const int32_t id = block.ids[row * top_k + slot];
    if (id == -1) continue;
    if (id < 0 || id >= plan.num_local_experts) {
      reject(rank, fmt::format("row {} names expert {} of the {} on this rank", row, id,
                               plan.num_local_experts));
    }
    if (tables.expert_row[id] == tables.recv_base[rank] + row) {
      reject(rank, fmt::format("row {} names expert {} twice", row, id));
    }
    tables.expert_row[id] = tables.recv_base[rank] + row;
    ++experts;
  }
  return experts;
}

}  // namespace

void check_received(const EpPlan& plan, const EpTables& tables) {
  const int64_t results_per_row = plan.results_per_row[static_cast<size_t>(plan.problem.ep_rank)];
  std::fill_n(tables.expert_row, plan.num_local_experts, int64_t{-1});
  int64_t received = 0;
  int64_t owed = 0;
  for (int32_t rank = 0; rank < plan.ranks(); ++rank) {
    const int64_t rows = tables.received[rank].num_rows;
    tables.recv_rows[rank] = rows;
    tables.recv_base[rank] = received;
    int64_t next = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (plan.fixed_slots) next = row * results_per_row;
      tables.first_owed[received + row] = next;
      const int64_t experts = count_experts(plan, tables, rank, row);
      next += plan.reduced ? 1 : experts;
    }
    tables.owed_rows[rank] = plan.fixed_slots ? plan.problem.max_tokens * results_per_row : next;
    tables.owed_base[rank] = owed;
    received += rows;
    owed += tables.owed_rows[rank];
  }
}

}  // namespace conclave::inline v0::dispatch
