#include "ranks/rank_team.h"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <memory>
#include <vector>

namespace conclave::tool {
namespace {

// Loading a layer and checking it in float64 take as long as they take; a rank that dies meanwhile
// is still noticed.
constexpr std::chrono::hours kLongWork{24};

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

template <class T>
void reduce(Communicator& all, std::span<T> values, DType dtype, ReduceOp op,
            std::string_view phase) {
  const std::vector<T> mine(values.begin(), values.end());
  all.all_reduce(std::as_bytes(std::span(mine)), std::as_writable_bytes(values), dtype, op, phase);
}

}  // namespace

RankTeam::RankTeam(Communicator& all, Communicator& experts, Communicator& slices)
    : all_(&all), experts_(&experts), slices_(&slices) {}

ParallelSpec RankTeam::parallel() const {
  return {.ep_size = ep_size(), .ep_rank = ep_rank(), .tp_size = tp_size(), .tp_rank = tp_rank()};
}

void RankTeam::connect(ContextOptions& options) const {
  if (ep_size() > 1) options.communicator = experts_;
  if (tp_size() > 1) options.tensor_communicator = slices_;
}

std::string RankTeam::describe() const {
  return fmt::format("{} ranks by {}: EP {} x TP {}", size(), transport(), ep_size(), tp_size());
}

std::FILE* RankTeam::out() const {
  static const std::unique_ptr<std::FILE, CloseFile> nowhere(std::fopen("/dev/null", "we"));
  return leads() ? stdout : nowhere.get();
}

RowRange RankTeam::share_of(int64_t num_tokens, int32_t rank) const {
  const int64_t group = rank / tp_size();
  return {.begin = num_tokens * group / ep_size(), .end = num_tokens * (group + 1) / ep_size()};
}

void RankTeam::meet(std::string_view phase) const {
  if (!alone()) all_->wait(all_->begin_barrier(), kLongWork, phase);
}

void RankTeam::check(std::string_view phase) const {
  for (Communicator* const group : {experts_, slices_}) {
    if (group != nullptr) group->check(phase);
  }
}

double RankTeam::largest(double value, std::string_view phase) const {
  if (!alone()) reduce(*all_, std::span(&value, 1), DType::kF64, ReduceOp::kMax, phase);
  return value;
}

int64_t RankTeam::largest(int64_t value, std::string_view phase) const {
  if (!alone()) reduce(*all_, std::span(&value, 1), DType::kI64, ReduceOp::kMax, phase);
  return value;
}

void RankTeam::take_largest(std::span<int32_t> values, std::string_view phase) const {
  if (!alone()) reduce(*all_, values, DType::kI32, ReduceOp::kMax, phase);
}

void RankTeam::add_up(std::span<int64_t> values, std::string_view phase) const {
  if (!alone()) reduce(*all_, values, DType::kI64, ReduceOp::kSum, phase);
}

void RankTeam::gather_rows(std::span<const std::byte> mine, std::span<std::byte> all,
                           int64_t num_tokens, std::string_view phase) const {
  const auto ranks = static_cast<size_t>(size());
  const int64_t rows = share_of(num_tokens).size();
  // A rank without rows cannot tell how long one is, and need not.
  const int64_t row_bytes = leads() && num_tokens > 0
                                ? static_cast<int64_t>(all.size()) / num_tokens
                                : static_cast<int64_t>(mine.size()) / std::max<int64_t>(rows, 1);
  std::vector<int64_t> send_bytes(ranks, 0);
  std::vector<int64_t> recv_bytes(ranks, 0);
  std::vector<int64_t> recv_offsets(ranks, 0);
  const std::vector<int64_t> send_offsets(ranks, 0);
  if (speaks()) send_bytes[0] = static_cast<int64_t>(mine.size());
  for (size_t from = 0; leads() && from < ranks; ++from) {
    if (!speaks(static_cast<int32_t>(from))) continue;
    const RowRange range = share_of(num_tokens, static_cast<int32_t>(from));
    recv_bytes[from] = range.size() * row_bytes;
    recv_offsets[from] = range.begin * row_bytes;
  }
  all_->all_to_all_v({.send = mine.data(),
                      .send_bytes = send_bytes,
                      .send_offsets = send_offsets,
                      .recv = all.data(),
                      .recv_bytes = recv_bytes,
                      .recv_offsets = recv_offsets},
                     phase);
}

}  // namespace conclave::tool
