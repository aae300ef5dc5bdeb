// Counts the load in a layer's part of a trace: placements are made from its first half and judged
// by the second, so that no rule is praised for what it has seen.
#pragma once

#include "plan/exchange_model.h"
#include "trace/routing_trace.h"

#include "conclave/balance.h"

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace conclave::tool {

// Tokens that pass a layer in one call of a group.
struct LoadBatch {
  double tokens = 0;
  std::vector<double> rows = {};  // [E] of each expert
  bool whole = true;              // rows are counted, and not a multiple of others
};

// Stands for a number of tokens: as many as each batch of the trace has.
inline constexpr int64_t kBatchesOfTrace = 0;

class LayerLoad {
 public:
  // `ids` [T, k] must outlive this.
  LayerLoad(std::span<const int32_t> ids, const TraceInfo& info);

  // Rows of each expert, [E]: all of the trace, and the first and the second half of its tokens. A
  // trace of one token has it in both halves.
  const std::vector<double>& all() const { return all_; }
  const std::vector<double>& first() const { return first_; }
  const std::vector<double>& second() const { return second_; }

  // Up to kMostBatches batches of `tokens` successive tokens, spread over the second half. A batch
  // that is longer than it is as many of it as it takes. With kBatchesOfTrace those that begin in
  // the second half, or all of it where none does.
  const std::vector<LoadBatch>& batches(int64_t tokens);

  // Copies of a token's row that go from its rank to others, the mean of a sample of tokens. Ranks
  // of `group` are numbered node by node; each is home to as many successive tokens.
  struct Copies {
    double to_ranks = 0;             // ranks other than its own
    double within_node = 0;          // those of to_ranks on its own node
    double to_nodes = 0;             // nodes other than its own
    double choices_elsewhere = 0;    // choices whose expert is on another rank
    double choices_within_node = 0;  // those of them on its own node
  };
  Copies copies(const ExpertSlots& slots, const GroupShape& group) const;

  static constexpr int64_t kMostBatches = 16;

 private:
  std::span<const int32_t> judged_tokens_ids(int64_t begin, int64_t count) const;
  LoadBatch batch_at(int64_t begin, int64_t tokens) const;
  std::vector<LoadBatch> cut(int64_t tokens) const;
  std::vector<LoadBatch> of_trace() const;

  std::span<const int32_t> ids_;
  int64_t num_experts_;
  int64_t top_k_;
  int64_t judged_begin_ = 0;
  int64_t judged_tokens_ = 0;
  std::vector<double> all_;
  std::vector<double> first_;
  std::vector<double> second_;
  std::vector<int64_t> batch_begin_;  // counted from the first judged token
  std::map<int64_t, std::vector<LoadBatch>> batches_;
};

// Rows of each slot, [P], of experts with `rows`: replicas share them as tokens are dealt out, one
// after the other. `whole` says that rows are whole numbers, which no share divides.
std::vector<double> slot_rows(const ExpertSlots& slots, std::span<const double> rows, bool whole);

}  // namespace conclave::tool
