#include "choices.h"

#include "checks.h"
#include "input/tensor_file.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace conclave::tool {
namespace {

std::vector<int64_t> ids_of(const Tensor& ids, int64_t token) {
  const int64_t slots = ids.shape()[1];
  std::vector<int64_t> row;
  for (int64_t i = token * slots; i < (token + 1) * slots; ++i) {
    row.push_back(ids.dtype() == DType::kI64 ? ids.as<int64_t>()[i] : ids.as<int32_t>()[i]);
  }
  return row;
}

std::vector<int64_t> sorted(std::vector<int64_t> ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

std::vector<double> row_of(const Tensor& logits, int64_t token) {
  const int64_t cols = logits.shape()[1];
  const auto bytes = static_cast<size_t>(token * cols * byte_size(logits.dtype()));
  return to_float64({logits.as<std::byte>() + bytes, logits.dtype(), {1, cols}});
}

double largest_magnitude(const std::vector<double>& row) {
  double largest = 0;
  for (const double value : row) largest = std::max(largest, std::abs(value));
  return largest;
}

bool agree(const std::vector<double>& a, const std::vector<double>& b, double bar) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i] - b[i]) <= bar)) return false;
  }
  return true;
}

// Whether the logits of all experts that only one of the two has lie within `bar` of each other.
bool swapped_are_close(const std::vector<double>& logits, const std::vector<int64_t>& ours,
                       const std::vector<int64_t>& theirs, double bar) {
  std::vector<int64_t> swapped;
  std::set_symmetric_difference(ours.begin(), ours.end(), theirs.begin(), theirs.end(),
                                std::back_inserter(swapped));
  double lowest = INFINITY;
  double highest = -INFINITY;
  for (const int64_t expert : swapped) {
    if (expert < 0 || expert >= static_cast<int64_t>(logits.size())) return false;
    lowest = std::min(lowest, logits[static_cast<size_t>(expert)]);
    highest = std::max(highest, logits[static_cast<size_t>(expert)]);
  }
  return highest - lowest <= bar;
}

}  // namespace

bool router_weighs_shared(const MoeSpec& spec) {
  return num_logits(spec) > spec.num_experts + spec.num_zero_experts;
}

ChoiceDifferences compare_choices(const Tensor& actual, const Tensor& expected) {
  ChoiceDifferences differences;
  for (int64_t token = 0; token < actual.shape()[0]; ++token) {
    const std::vector<int64_t> ours = ids_of(actual, token);
    const std::vector<int64_t> theirs = ids_of(expected, token);
    if (ours == theirs) continue;
    if (sorted(ours) == sorted(theirs)) {
      ++differences.reordered;
    } else {
      differences.other_experts.push_back(token);
    }
  }
  return differences;
}

bool is_near_tie(const MoeSpec& spec, const LayerRun& run, const Tensor* file_logits,
                 const Tensor& file_ids, int64_t token) {
  if (!run.has_logits()) return false;
  const std::vector<double> ours = row_of(run.logits, token);
  const double bar = 2 * logit_bar(spec) * largest_magnitude(ours);
  const std::vector<double> theirs = file_logits == nullptr ? ours : row_of(*file_logits, token);
  if (!agree(ours, theirs, bar)) return false;
  if (spec.router.has_selection_bias || spec.router.num_groups > 1) return ours != theirs;
  return swapped_are_close(ours, sorted(ids_of(run.topk_ids, token)),
                           sorted(ids_of(file_ids, token)), bar);
}

}  // namespace conclave::tool
