#include "dispatch/ep_send.h"

#include <algorithm>

namespace conclave::inline v0::dispatch {
namespace {

// Calls visit(token, slot, expert) for each assignment whose id is an expert of the layer.
template <class Visit>
void for_each_assignment(const EpPlan& plan, const Routing& routing, const Visit& visit) {
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    for (int64_t slot = 0; slot < routing.top_k; ++slot) {
      const int32_t expert = routing.topk_ids[token * routing.top_k + slot];
      if (expert < 0 || expert >= plan.problem.num_experts) continue;
      visit(token, slot, expert);
    }
  }
}

void reset_scratch(const EpPlan& plan, const EpTables& tables) {
  std::fill_n(tables.last_token, plan.ranks(), int64_t{-1});
  std::fill_n(tables.expert_token, plan.problem.num_experts, int64_t{-1});
}

// Opens the row of `token` for `rank` and returns its index among the rank's rows.
int64_t open_row(const EpPlan& plan, const EpTables& tables, int32_t rank, int64_t token) {
  const int64_t top_k = plan.problem.top_k;
  const int64_t row = tables.send_rows[rank]++;
  const SendBlock& block = tables.send_blocks[rank];
  std::fill_n(block.ids + row * top_k, top_k, -1);
  if (plan.reduced) std::fill_n(block.weights + row * top_k, top_k, 0.0F);
  tables.send_token[tables.send_base[rank] + row] = token;
  tables.last_token[rank] = token;
  // Fixed slots reserve room for every result a row may have, so that both ranks know the place.
  tables.first_result[rank] = plan.fixed_slots
                                  ? row * plan.results_per_row[static_cast<size_t>(rank)]
                                  : tables.next_result[rank];
  tables.next_result[rank] = tables.first_result[rank];
  if (plan.reduced) {
    tables.home_row[token * plan.terms + rank] =
        tables.home_base[rank] + tables.next_result[rank]++;
  }
  return row;
}

}  // namespace

void count_sends(const EpPlan& plan, const Routing& routing, const ExpertPlacement& placement,
                 const EpTables& tables) {
  const int32_t ranks = plan.ranks();
  reset_scratch(plan, tables);
  std::fill_n(tables.send_rows, ranks, int64_t{0});
  std::fill_n(tables.home_rows, ranks, int64_t{0});
  for_each_assignment(plan, routing, [&](int64_t token, int64_t, int32_t expert) {
    if (tables.expert_token[expert] == token) return;
    tables.expert_token[expert] = token;
    const int32_t rank = placement.rank_of[static_cast<size_t>(expert)];
    const bool new_row = tables.last_token[rank] != token;
    tables.last_token[rank] = token;
    if (new_row) ++tables.send_rows[rank];
    if (new_row || !plan.reduced) ++tables.home_rows[rank];
  });
  int64_t sent = 0;
  int64_t coming = 0;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (plan.fixed_slots) {
      tables.home_rows[rank] =
          plan.problem.max_tokens * plan.results_per_row[static_cast<size_t>(rank)];
    }
    tables.send_base[rank] = sent;
    tables.home_base[rank] = coming;
    sent += tables.send_rows[rank];
    coming += tables.home_rows[rank];
  }
}

void describe_sends(const EpPlan& plan, const Routing& routing, const ExpertPlacement& placement,
                    const EpTables& tables) {
  const int64_t top_k = plan.problem.top_k;
  reset_scratch(plan, tables);
  std::fill_n(tables.send_rows, plan.ranks(), int64_t{0});
  std::fill_n(tables.next_result, plan.ranks(), int64_t{0});
  std::fill_n(tables.home_row, routing.num_tokens * plan.terms, int64_t{-1});
  for_each_assignment(plan, routing, [&](int64_t token, int64_t slot, int32_t expert) {
    const int32_t rank = placement.rank_of[static_cast<size_t>(expert)];
    const SendBlock& block = tables.send_blocks[rank];
    if (tables.expert_token[expert] == token) {
      const int64_t first = tables.expert_slot[expert];
      if (plan.reduced) {
        const int64_t row = tables.send_rows[rank] - 1;
        block.weights[row * top_k + first] += routing.topk_weights[token * top_k + slot];
      } else {
        tables.home_row[token * top_k + slot] = tables.home_row[token * top_k + first];
      }
      return;
    }
    tables.expert_token[expert] = token;
    tables.expert_slot[expert] = slot;
    const int64_t row = tables.last_token[rank] == token ? tables.send_rows[rank] - 1
                                                         : open_row(plan, tables, rank, token);
    block.ids[row * top_k + slot] = placement.local_of[static_cast<size_t>(expert)];
    if (plan.reduced) {
      block.weights[row * top_k + slot] = routing.topk_weights[token * top_k + slot];
    } else {
      tables.home_row[token * top_k + slot] = tables.home_base[rank] + tables.next_result[rank]++;
    }
  });
}

}  // namespace conclave::inline v0::dispatch
