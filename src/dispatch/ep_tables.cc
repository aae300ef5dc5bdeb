#include "dispatch/ep_tables.h"

#include "core/checked.h"

#include "conclave/error.h"

namespace conclave::inline v0::dispatch {
namespace {

constexpr int64_t kArraysPerRank = 11;

WorkspaceSlice book_rows(WorkspaceLayout& layout, int64_t rows, int64_t hidden_size) {
  const auto elements = checked_mul(rows, hidden_size);
  if (!elements) {
    throw Error(ErrorCode::kSizeOverflow,
                {.what = "result rows do not fit 63 bits",
                 .found = std::to_string(rows) + " x " + std::to_string(hidden_size)});
  }
  return layout.book<float>(*elements);
}

}  // namespace

EpTableLayout::EpTableLayout(const EpPlan& plan, WorkspaceLayout& layout)
    : ranks_(plan.ranks()),
      per_rank_(layout.book<int64_t>(kArraysPerRank * ranks_)),
      send_blocks_(layout.book<SendBlock>(ranks_)),
      received_(layout.book<ReceivedBlock>(ranks_)),
      expert_token_(layout.book<int64_t>(plan.problem.num_experts)),
      expert_slot_(layout.book<int64_t>(plan.problem.num_experts)),
      expert_begin_(layout.book<int64_t>(plan.num_local_experts)),
      expert_count_(layout.book<int64_t>(plan.num_local_experts)),
      expert_row_(layout.book<int64_t>(plan.num_local_experts)),
      source_row_(layout.book<int64_t>(plan.max_slots)),
      num_tokens_(layout.book<int64_t>(1)),
      epoch_(layout.book<uint64_t>(1)),
      send_token_(layout.book<int64_t>(plan.max_send_rows)),
      home_row_(layout.book<int64_t>(plan.problem.max_tokens * plan.terms)),
      first_owed_(layout.book<int64_t>(plan.max_received_rows)),
      slot_of_(layout.book<int64_t>(plan.max_received_rows * plan.problem.top_k)),
      owed_(book_rows(layout, plan.max_owed_rows, plan.problem.hidden_size)),
      home_(book_rows(layout, plan.max_home_rows, plan.problem.hidden_size)) {}

EpTables EpTableLayout::at(std::span<std::byte> workspace) const {
  int64_t* const arrays = slice_as<int64_t>(workspace, per_rank_);
  const auto array = [&](int64_t index) { return arrays + index * ranks_; };
  return {.send_rows = array(0),
          .send_base = array(1),
          .recv_rows = array(2),
          .recv_base = array(3),
          .owed_rows = array(4),
          .owed_base = array(5),
          .home_rows = array(6),
          .home_base = array(7),
          .last_token = array(8),
          .first_result = array(9),
          .next_result = array(10),
          .send_blocks = slice_as<SendBlock>(workspace, send_blocks_),
          .received = slice_as<ReceivedBlock>(workspace, received_),
          .expert_token = slice_as<int64_t>(workspace, expert_token_),
          .expert_slot = slice_as<int64_t>(workspace, expert_slot_),
          .expert_begin = slice_as<int64_t>(workspace, expert_begin_),
          .expert_count = slice_as<int64_t>(workspace, expert_count_),
          .expert_row = slice_as<int64_t>(workspace, expert_row_),
          .source_row = slice_as<int64_t>(workspace, source_row_),
          .num_tokens = slice_as<int64_t>(workspace, num_tokens_),
          .epoch = slice_as<uint64_t>(workspace, epoch_),
          .send_token = slice_as<int64_t>(workspace, send_token_),
          .home_row = slice_as<int64_t>(workspace, home_row_),
          .first_owed = slice_as<int64_t>(workspace, first_owed_),
          .slot_of = slice_as<int64_t>(workspace, slot_of_),
          .owed = slice_as<float>(workspace, owed_),
          .home = slice_as<float>(workspace, home_)};
}

}  // namespace conclave::inline v0::dispatch
