// The workspace of an expert-parallel dispatcher: booked at plan time, sliced per call. It carries
// the state from dispatch to combine.
#pragma once

#include "core/workspace_layout.h"
#include "dispatch/ep_plan.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0::dispatch {

// Destination of the rows for one peer and of their ids and weights.
struct SendBlock {
  std::byte* rows;  // [rows, row_bytes]
  int32_t* ids;     // [rows, k] index among the peer's experts, -1 for none
  float* weights;   // [rows, k]; null unless the peer reduces
};

struct ReceivedBlock {
  int64_t num_rows;
  int64_t first_row;  // index in the bundle
  const int32_t* ids;
  const float* weights;
};

struct EpTables {
  // [ranks]
  int64_t* send_rows;  // rows going to each rank
  int64_t* send_base;  // their first index in send_token
  int64_t* recv_rows;  // rows received from each rank
  int64_t* recv_base;  // their first index in first_owed and slot_of
  int64_t* owed_rows;  // result rows going back to each rank
  int64_t* owed_base;
  int64_t* home_rows;  // result rows coming home from each rank
  int64_t* home_base;
  int64_t* last_token;    // scratch: the last token with a row for the rank
  int64_t* first_result;  // scratch: first result of that row
  int64_t* next_result;   // scratch
  SendBlock* send_blocks;
  ReceivedBlock* received;

  // [E], scratch
  int64_t* expert_token;  // the last token that named the expert
  int64_t* expert_slot;   // and the slot, of its k, that did so

  // The batch: [E_local], except source_row.
  int64_t* expert_begin;
  int64_t* expert_count;
  int64_t* expert_row;  // scratch: the last row that named the expert
  int64_t* source_row;  // [max_slots]

  int64_t* num_tokens;  // [1] tokens of the dispatch that combine completes
  uint64_t* epoch;      // [1] its PlacementEpoch::number
  int64_t* send_token;  // [max_send_rows]
  int64_t* home_row;    // [T, terms] row of `home`, -1 for none
  int64_t* first_owed;  // [max_received_rows] first result row among those owed to its rank
  int64_t* slot_of;     // [max_received_rows, k]
  float* owed;          // [max_owed_rows, H]
  float* home;          // [max_home_rows, H]
};

class EpTableLayout {
 public:
  EpTableLayout(const EpPlan& plan, WorkspaceLayout& layout);
  EpTables at(std::span<std::byte> workspace) const;

 private:
  int64_t ranks_;
  WorkspaceSlice per_rank_, send_blocks_, received_, expert_token_, expert_slot_, expert_begin_,
      expert_count_, expert_row_, source_row_, num_tokens_, epoch_, send_token_, home_row_,
      first_owed_, slot_of_, owed_, home_;
};

}  // namespace conclave::inline v0::dispatch
