#include "layer/refit/broadcast_table.h"

#include "core/checked.h"
#include "core/weight_types.h"
#include "layer/refit/refit_units.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0 {
namespace {

// Matrices begin where any kernel and any copy likes them to.
constexpr int64_t kAlignment = 256;
constexpr size_t kWordsOfTensor = 6;

bool has_experts(WeightId id) { return id.mlp() == WeightMlp::kRouted; }

int64_t experts_of(const WeightSource& source) {
  int64_t count = 0;
  for (const WeightId id : {weights::kGate, weights::kUp, weights::kDown}) {
    count = std::max(count, source.describe(id).count);
  }
  return count;
}

void check_part(const WeightSource& source, const RefitScope& part, int64_t num_experts) {
  for (const int32_t expert : part.experts) {
    if (expert >= 0 && expert < num_experts) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a broadcast names an expert that its source does not have",
                 .tensor = "BroadcastOptions.part.experts",
                 .found = std::to_string(expert),
                 .limit = std::to_string(num_experts - 1)});
  }
  for (const WeightId id : part.tensors) {
    if (source.describe(id).count > 0) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a broadcast names a tensor that its source does not have",
                 .tensor = "BroadcastOptions.part.tensors",
                 .found = to_string(id)});
  }
}

// The units that are named: what is packed together travels together.
RefitUnits units_of_part(const WeightSource& source, const RefitScope& part, int64_t num_experts) {
  RefitUnits units(num_experts);
  for (const WeightId id : weights::kAll) {
    if (source.describe(id).count == 0) continue;
    const bool is_named = part.tensors.empty()
                              ? part.experts.empty() || has_experts(id)
                              : std::ranges::find(part.tensors, id) != part.tensors.end();
    if (!is_named) continue;
    if (!has_experts(id)) {
      units.add(id, 0);
    } else if (part.experts.empty()) {
      for (int64_t expert = 0; expert < num_experts; ++expert) units.add(id, expert);
    } else {
      for (const int32_t expert : part.experts) units.add(id, expert);
    }
  }
  return units;
}

[[noreturn]] void refuse_words() {
  throw Error(ErrorCode::kInvalidArgument, {.what = "a list of tensors that was sent is damaged"});
}

}  // namespace

size_t BroadcastTensor::row_bytes() const {
  return static_cast<size_t>(packed_bytes(info.dtype, info.cols));
}
size_t BroadcastTensor::matrix_bytes() const {
  return static_cast<size_t>(info.rows) * row_bytes();
}
size_t BroadcastTensor::step() const {
  return static_cast<size_t>(round_up(static_cast<int64_t>(matrix_bytes()), kAlignment));
}

BroadcastTable::BroadcastTable(const WeightSource& source, const RefitScope& part) {
  const int64_t num_experts = experts_of(source);
  check_part(source, part, num_experts);
  const RefitUnits units = units_of_part(source, part, num_experts);
  for (const WeightId id : weights::kAll) {
    BroadcastTensor tensor{.id = id, .info = source.describe(id)};
    const bool comes_whole = id.plane() == WeightPlane::kInputScale && units.has_any(id);
    for (int64_t expert = 0; expert < tensor.info.count; ++expert) {
      if (comes_whole || units.has(id, has_experts(id) ? expert : 0)) {
        tensor.experts.push_back(expert);
      }
    }
    if (!tensor.experts.empty()) tensors_.push_back(std::move(tensor));
  }
  lay_out();
}

BroadcastTable::BroadcastTable(std::span<const int64_t> words) {
  for (size_t at = 0; at < words.size();) {
    if (words.size() - at < kWordsOfTensor) refuse_words();
    const auto own = words.subspan(at, kWordsOfTensor);
    const auto count = static_cast<size_t>(own[5]);
    const bool is_good = own[0] >= 0 && own[0] < std::ssize(weights::kAll) && own[1] > 0 &&
                         own[2] >= 0 && own[3] >= 0 && own[4] >= 0 && own[5] >= 0 &&
                         own[5] <= own[1] && count <= words.size() - at - kWordsOfTensor;
    if (!is_good) refuse_words();
    BroadcastTensor tensor{
        .id = WeightId::from_index(static_cast<size_t>(own[0])),
        .info = {
            .count = own[1], .rows = own[2], .cols = own[3], .dtype = static_cast<DType>(own[4])}};
    const auto experts = words.subspan(at + kWordsOfTensor, count);
    tensor.experts.assign(experts.begin(), experts.end());
    tensors_.push_back(std::move(tensor));
    at += kWordsOfTensor + count;
  }
  lay_out();
}

std::vector<int64_t> BroadcastTable::words() const {
  std::vector<int64_t> words;
  for (const BroadcastTensor& tensor : tensors_) {
    words.insert(
        words.end(),
        {static_cast<int64_t>(tensor.id.index()), tensor.info.count, tensor.info.rows,
         tensor.info.cols, static_cast<int64_t>(tensor.info.dtype), std::ssize(tensor.experts)});
    words.insert(words.end(), tensor.experts.begin(), tensor.experts.end());
  }
  return words;
}

void BroadcastTable::lay_out() {
  for (BroadcastTensor& tensor : tensors_) {
    tensor.first = bytes_;
    bytes_ += tensor.step() * tensor.experts.size();
  }
}

const BroadcastTensor* BroadcastTable::find(WeightId id) const {
  const auto found = std::ranges::find(tensors_, id, &BroadcastTensor::id);
  return found != tensors_.end() ? &*found : nullptr;
}

size_t BroadcastTable::place(const BroadcastTensor& tensor, int64_t expert) const {
  const auto found = std::ranges::lower_bound(tensor.experts, expert);
  if (found == tensor.experts.end() || *found != expert) {
    throw Error(ErrorCode::kTensorMissing,
                {.what = "an expert was not broadcast",
                 .tensor = to_string(tensor.id) + ", expert " + std::to_string(expert)});
  }
  return tensor.first + tensor.step() * static_cast<size_t>(found - tensor.experts.begin());
}

std::vector<BroadcastRows> BroadcastTable::rows(size_t most_bytes) const {
  std::vector<BroadcastRows> all;
  for (const BroadcastTensor& tensor : tensors_) {
    const size_t row_bytes = std::max<size_t>(tensor.row_bytes(), 1);
    const auto most = static_cast<int64_t>(std::max<size_t>(most_bytes / row_bytes, 1));
    size_t matrix = tensor.first;
    for (const int64_t expert : tensor.experts) {
      for (int64_t row = 0; row < tensor.info.rows; row += most) {
        all.push_back({.tensor = &tensor,
                       .expert = expert,
                       .begin = row,
                       .end = std::min(row + most, tensor.info.rows),
                       .at = matrix + static_cast<size_t>(row) * row_bytes});
      }
      matrix += tensor.step();
    }
  }
  return all;
}

}  // namespace conclave::inline v0
