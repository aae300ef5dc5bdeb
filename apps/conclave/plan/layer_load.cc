#include "plan/layer_load.h"

#include "conclave/placement.h"

#include <algorithm>
#include <cmath>

namespace conclave::tool {
namespace {

// Copies of more tokens change the mean by less than a hundredth.
constexpr int64_t kSampledTokens = 2048;

std::vector<double> counted(std::span<const int32_t> ids, int64_t num_experts) {
  const std::vector<int64_t> rows = expert_rows(ids, num_experts);
  return {rows.begin(), rows.end()};
}

// The rank of each slot.
std::vector<int32_t> ranks_of(const ExpertSlots& slots) {
  std::vector<int32_t> ranks;
  for (int32_t rank = 0; rank < slots.num_ranks(); ++rank) {
    ranks.insert(ranks.end(), slots.of_rank(rank).size(), rank);
  }
  return ranks;
}

// Counts distinct numbers of one token after the other.
class Distinct {
 public:
  explicit Distinct(int32_t limit) : seen_(static_cast<size_t>(limit), -1) {}
  bool is_new(int32_t number, int64_t token) {
    int64_t& seen = seen_[static_cast<size_t>(number)];
    const bool fresh = seen != token;
    seen = token;
    return fresh;
  }

 private:
  std::vector<int64_t> seen_;
};

}  // namespace

LayerLoad::LayerLoad(std::span<const int32_t> ids, const TraceInfo& info)
    : ids_(ids), num_experts_(info.num_experts), top_k_(info.top_k) {
  const int64_t half = info.num_tokens / 2;
  judged_begin_ = half;
  judged_tokens_ = info.num_tokens - half;
  for (const int64_t begin : info.batch_begin) {
    if (begin >= judged_begin_) batch_begin_.push_back(begin - judged_begin_);
  }
  if (batch_begin_.empty()) batch_begin_.push_back(0);
  all_ = counted(ids_, num_experts_);
  second_ = counted(judged_tokens_ids(0, judged_tokens_), num_experts_);
  first_ =
      half == 0 ? second_ : counted(ids_.first(static_cast<size_t>(half * top_k_)), num_experts_);
}

std::span<const int32_t> LayerLoad::judged_tokens_ids(int64_t begin, int64_t count) const {
  return ids_.subspan(static_cast<size_t>((judged_begin_ + begin) * top_k_),
                      static_cast<size_t>(count * top_k_));
}

LoadBatch LayerLoad::batch_at(int64_t begin, int64_t tokens) const {
  return {.tokens = static_cast<double>(tokens),
          .rows = counted(judged_tokens_ids(begin, tokens), num_experts_)};
}

std::vector<LoadBatch> LayerLoad::cut(int64_t tokens) const {
  std::vector<LoadBatch> batches;
  if (tokens > judged_tokens_) {
    batches.push_back({.tokens = static_cast<double>(tokens), .rows = second_, .whole = false});
    const double times = static_cast<double>(tokens) / static_cast<double>(judged_tokens_);
    for (double& rows : batches.back().rows) rows *= times;
    return batches;
  }
  const int64_t count = std::clamp<int64_t>(judged_tokens_ / tokens, 1, kMostBatches);
  const int64_t step = judged_tokens_ / count;
  for (int64_t batch = 0; batch < count; ++batch) batches.push_back(batch_at(batch * step, tokens));
  return batches;
}

std::vector<LoadBatch> LayerLoad::of_trace() const {
  std::vector<LoadBatch> batches;
  const auto all = static_cast<int64_t>(batch_begin_.size());
  const int64_t count = std::min(all, kMostBatches);
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i * all / count);
    const int64_t end = at + 1 < batch_begin_.size() ? batch_begin_[at + 1] : judged_tokens_;
    batches.push_back(batch_at(batch_begin_[at], end - batch_begin_[at]));
  }
  return batches;
}

const std::vector<LoadBatch>& LayerLoad::batches(int64_t tokens) {
  const auto [entry, is_new] = batches_.try_emplace(tokens);
  if (is_new) entry->second = tokens == kBatchesOfTrace ? of_trace() : cut(tokens);
  return entry->second;
}

LayerLoad::Copies LayerLoad::copies(const ExpertSlots& slots, const GroupShape& group) const {
  Copies sum;
  const ReplicaMap replicas = make_replica_map(slots.logical_of, slots.num_experts);
  const std::vector<int32_t> rank_of = ranks_of(slots);
  const int32_t ranks = slots.num_ranks();
  Distinct new_rank(ranks);
  Distinct new_node(ranks / group.per_node + 1);
  const int64_t tokens = std::min(judged_tokens_, kSampledTokens);
  const int64_t step = std::max<int64_t>(judged_tokens_ / std::max<int64_t>(tokens, 1), 1);
  for (int64_t token = 0; token < tokens; ++token) {
    // Neighbours are at home on one rank: the number that chooses replicas says nothing of it.
    const auto home = static_cast<int32_t>(token * ranks / tokens);
    const int32_t home_node = home / group.per_node;
    for (const int32_t id : judged_tokens_ids(token * step, 1)) {
      if (id < 0 || id >= num_experts_) continue;
      const int32_t rank = rank_of[static_cast<size_t>(physical_expert(replicas, id, token))];
      if (rank == home) continue;
      const int32_t node = rank / group.per_node;
      ++sum.choices_elsewhere;
      if (node == home_node) ++sum.choices_within_node;
      if (new_rank.is_new(rank, token)) {
        ++sum.to_ranks;
        if (node == home_node) ++sum.within_node;
      }
      if (node != home_node && new_node.is_new(node, token)) ++sum.to_nodes;
    }
  }
  const double share = tokens == 0 ? 0 : 1.0 / static_cast<double>(tokens);
  for (double* value : {&sum.to_ranks, &sum.within_node, &sum.to_nodes, &sum.choices_elsewhere,
                        &sum.choices_within_node}) {
    *value *= share;
  }
  return sum;
}

std::vector<double> slot_rows(const ExpertSlots& slots, std::span<const double> rows, bool whole) {
  std::vector<double> copies(static_cast<size_t>(slots.num_experts), 0);
  for (const int32_t expert : slots.logical_of) ++copies[static_cast<size_t>(expert)];
  std::vector<double> before(copies.size(), 0);
  std::vector<double> result;
  for (const int32_t expert : slots.logical_of) {
    const auto at = static_cast<size_t>(expert);
    const double share = rows[at] / copies[at];
    const double number = before[at]++;
    // The first replicas have the rows that are left over.
    const double left = rows[at] - std::floor(share) * copies[at];
    result.push_back(whole ? std::floor(share) + (number < left ? 1 : 0) : share);
  }
  return result;
}

}  // namespace conclave::tool
