// A layer made of stand-in experts, for dispatcher tests: expert e turns a row of floats x into
// x * (e + 1) / 8 + e, exactly reproducible, so that any misrouted, lost or stale row shows.
#pragma once

#include "core/checked.h"
#include "dispatch/dispatcher.h"
#include "support/executors.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace conclave::testing {

// One rank's tokens.
struct TokenInput {
  int64_t num_tokens = 0;
  std::vector<float> hidden = {};   // [T, H]
  std::vector<int32_t> ids = {};    // [T, k]
  std::vector<float> weights = {};  // [T, k]
};

inline int64_t float_row_bytes(int64_t hidden) { return round_up(hidden * 4, 64); }

inline TokenInput random_input(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden,
                               uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int32_t> expert(0, static_cast<int32_t>(experts) - 1);
  TokenInput input{.num_tokens = tokens};
  for (int64_t i = 0; i < tokens * hidden; ++i) input.hidden.push_back(normal(generator));
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    // One in eight is a sentinel; repeats within a token are likely, and legal.
    input.ids.push_back(generator() % 8 == 0 ? -1 : expert(generator));
    input.weights.push_back(normal(generator));
  }
  return input;
}

inline float expert_value(float x, int32_t expert) {
  return x * (static_cast<float>(expert + 1) * 0.125F) + static_cast<float>(expert);
}

// Computes the whole layer, token by token, in the arithmetic of the contract.
inline std::vector<float> plain_layer(const TokenInput& input, int64_t top_k, int64_t experts,
                                      int64_t hidden) {
  std::vector<float> out;
  for (int64_t t = 0; t < input.num_tokens; ++t) {
    for (int64_t c = 0; c < hidden; ++c) {
      float sum = 0.0F;
      for (int64_t j = 0; j < top_k; ++j) {
        const auto at = static_cast<size_t>(t * top_k + j);
        const int32_t id = input.ids[at];
        if (id < 0 || id >= experts) continue;
        sum +=
            input.weights[at] * expert_value(input.hidden[static_cast<size_t>(t * hidden + c)], id);
      }
      out.push_back(sum);
    }
  }
  return out;
}

// Rows padded to row_bytes; the padding holds NaN, which must never reach an output.
inline std::vector<float> bundle_rows(const TokenInput& input, int64_t hidden) {
  const int64_t stride = float_row_bytes(hidden) / 4;
  std::vector<float> rows(static_cast<size_t>(input.num_tokens * stride),
                          std::numeric_limits<float>::quiet_NaN());
  for (int64_t t = 0; t < input.num_tokens; ++t) {
    std::memcpy(rows.data() + t * stride, input.hidden.data() + t * hidden,
                static_cast<size_t>(hidden) * sizeof(float));
  }
  return rows;
}

// Runs the stand-in experts on a batch. `experts` are the logical ids of the local ones. Slots
// that no expert owns keep their NaN.
inline std::vector<float> run_experts(const ExpertBatch& batch, int64_t hidden,
                                      const std::vector<int32_t>& experts) {
  std::vector<float> rows(static_cast<size_t>(batch.num_slots * hidden),
                          std::numeric_limits<float>::quiet_NaN());
  for (int64_t e = 0; e < batch.num_local_experts; ++e) {
    for (int64_t i = 0; i < batch.expert_count[e]; ++i) {
      const int64_t slot = batch.expert_begin[e] + i;
      const auto* source = reinterpret_cast<const float*>(
          batch.bundle.rows + batch.source_row[slot] * batch.bundle.row_bytes);
      for (int64_t c = 0; c < hidden; ++c) {
        rows[static_cast<size_t>(slot * hidden + c)] =
            expert_value(source[c], experts[static_cast<size_t>(e)]);
      }
    }
  }
  return rows;
}

// A workspace whose every byte is poisoned: 0xff is NaN as a float and -1 as a signed index.
class PoisonedWorkspace {
 public:
  explicit PoisonedWorkspace(size_t bytes) : lines_((bytes + 63) / 64), bytes_(bytes) { poison(); }
  void poison() {
    if (!lines_.empty()) std::memset(lines_.data(), 0xff, lines_.size() * sizeof(Line));
  }
  std::span<std::byte> span() { return {reinterpret_cast<std::byte*>(lines_.data()), bytes_}; }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
  size_t bytes_;
};

// Runs one forward of one rank: dispatch, experts, combine to float32.
inline std::vector<float> run_layer(const dispatch::Dispatcher& dispatcher, const TokenInput& input,
                                    int64_t top_k, int64_t hidden,
                                    const std::vector<int32_t>& local_experts,
                                    std::span<std::byte> workspace, Executor& executor) {
  const std::vector<float> rows = bundle_rows(input, hidden);
  const Routing routing{input.num_tokens, top_k, input.ids.data(), input.weights.data()};
  const ExpertBatch batch =
      dispatcher.dispatch(routing,
                          {reinterpret_cast<const std::byte*>(rows.data()), input.num_tokens,
                           float_row_bytes(hidden), DType::kF32},
                          workspace, executor);
  std::vector<float> outputs = run_experts(batch, hidden, local_experts);
  std::vector<float> out(static_cast<size_t>(input.num_tokens * hidden), -77.0F);
  dispatcher.combine({.output = {OutputTag::kPerRow, outputs.data(), hidden},
                      .routing = routing,
                      .out = {out.data(), DType::kF32, Shape{input.num_tokens, hidden}, 0}},
                     workspace, executor);
  return out;
}

inline std::vector<int32_t> first_ids(int64_t count) {
  std::vector<int32_t> ids = {};
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(i));
  return ids;
}

}  // namespace conclave::testing
