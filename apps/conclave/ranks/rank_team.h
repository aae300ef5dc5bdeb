// The ranks over which a command runs, as one of them sees them. Rank 0 leads: it alone prints,
// checks and writes files.
#pragma once

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/spec.h"

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::tool {

struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

class RankTeam {
 public:
  // One rank, which exchanges nothing.
  RankTeam() = default;
  // Ranks are numbered tensor group by tensor group. `experts` connects those with the same place
  // in their tensor group, `slices` those of a tensor group.
  RankTeam(Communicator& all, Communicator& experts, Communicator& slices);
  // The device of this rank; empty: what the user says.
  const std::string& device() const { return device_; }
  void use_device(std::string device) { device_ = std::move(device); }

  int32_t size() const { return all_ == nullptr ? 1 : all_->size(); }
  bool alone() const { return size() == 1; }
  bool leads() const { return all_ == nullptr || all_->rank() == 0; }
  // Ranks that share this machine's threads; 1 where a launcher has bound each to its own.
  int32_t ranks_here() const { return ranks_here_; }
  void share_machine(int32_t ranks) { ranks_here_ = ranks; }

  ParallelSpec parallel() const;
  void connect(ContextOptions& options) const;
  // "4 ranks by mpi: EP 2 x TP 2".
  std::string describe() const;

  // Rank 0's is stdout; what others write there is dropped.
  std::FILE* out() const;

  // The tokens of a batch that a rank brings: tensor-parallel ranks bring the same ones.
  RowRange share_of(int64_t num_tokens) const { return share_of(num_tokens, rank()); }
  RowRange share_of(int64_t num_tokens, int32_t rank) const;
  // Whether this rank speaks for its tensor group.
  bool speaks() const { return tp_rank() == 0; }
  bool speaks(int32_t rank) const { return rank % tp_size() == 0; }

  // Collective: returns when every rank has come, however long one works before.
  void meet(std::string_view phase) const;
  // Throws the CommError of work on a device that has ended since: its results are none.
  void check(std::string_view phase) const;
  double largest(double value, std::string_view phase) const;
  int64_t largest(int64_t value, std::string_view phase) const;
  void take_largest(std::span<int32_t> values, std::string_view phase) const;
  void add_up(std::span<int64_t> values, std::string_view phase) const;
  // Collective: the rows of rank 0 are those of all tensor groups, in order. `mine` are this
  // rank's, `all` has room for num_tokens rows and is read on rank 0 only.
  void gather_rows(std::span<const std::byte> mine, std::span<std::byte> all, int64_t num_tokens,
                   std::string_view phase) const;

  int32_t rank() const { return all_ == nullptr ? 0 : all_->rank(); }
  int32_t ep_size() const { return experts_ == nullptr ? 1 : experts_->size(); }
  int32_t tp_size() const { return slices_ == nullptr ? 1 : slices_->size(); }
  int32_t ep_rank() const { return experts_ == nullptr ? 0 : experts_->rank(); }
  int32_t tp_rank() const { return slices_ == nullptr ? 0 : slices_->rank(); }
  std::string_view transport() const { return all_ == nullptr ? "" : experts_->name(); }

 private:
  Communicator* all_ = nullptr;
  Communicator* experts_ = nullptr;
  Communicator* slices_ = nullptr;
  int32_t ranks_here_ = 1;
  std::string device_;
};

}  // namespace conclave::tool
