#include "layer/stages/finish.h"

#include "cpu/parallel.h"

#include <algorithm>
#include <cmath>

namespace conclave::inline v0 {
namespace {

constexpr int64_t kRowsPerTask = 16;

void rms_norm(const float* from, const std::vector<float>& weight, double epsilon, float* to) {
  double squares = 0;
  const size_t columns = weight.size();
  for (size_t col = 0; col < columns; ++col) squares += double{from[col]} * double{from[col]};
  const double mean = squares / static_cast<double>(columns);
  const auto factor = static_cast<float>(1.0 / std::sqrt(mean + epsilon));
  for (size_t col = 0; col < columns; ++col) to[col] = from[col] * factor * weight[col];
}

}  // namespace

void pad_sums(const SumRows& sums) {
  for (int64_t row = 0; row < sums.num_rows; ++row) {
    float* const begin = sums.rows + row * sums.stride;
    std::fill(begin + sums.columns, begin + sums.stride, 0.0F);
  }
}

void rms_norm_sums(const float* from, const std::vector<float>& weight, double epsilon,
                   const SumRows& to, Executor& executor) {
  cpu::parallel_for(
      executor, to.num_rows, kRowsPerTask, [&](int64_t begin, int64_t end, int32_t) noexcept {
        for (int64_t row = begin; row < end; ++row) {
          rms_norm(from + row * to.stride, weight, epsilon, to.rows + row * to.stride);
        }
      });
}

const float* sum_identity_weights(const Routing& routing, int64_t num_experts, float* sums) {
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    sums[token] = 0;
    for (int64_t at = token * routing.top_k; at < (token + 1) * routing.top_k; ++at) {
      if (routing.topk_ids[at] >= num_experts) sums[token] += routing.topk_weights[at];
    }
  }
  return sums;
}

}  // namespace conclave::inline v0
