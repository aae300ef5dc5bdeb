// Layers over two GPUs whose experts move, and the ways that these go.
#pragma once

#include "coded_forms.h"
#include "expert_ranks.h"
#include "layer/moving_layers.h"
#include "refit_cases.h"

#include "conclave/migration.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {

// 10 experts, of which a token has one: its sum over ranks has one addend that is not 0, so that
// its bits are the same wherever the expert lies.
inline constexpr int64_t kMovingExperts = 10;
inline MoeSpec one_choice(DType dtype = DType::kBF16, const QuantSpec& quant = {}) {
  MoeSpec spec = make_spec(kMovingExperts, 1, 256, 256, dtype);
  spec.quant = quant;
  return spec;
}

struct MovingCase {
  std::string name;
  MoeSpec spec;
  DType rows = DType::kBF16;
};

// Every format of the catalog, and every part of a layer that an expert has planes for.
inline std::vector<MovingCase> moving_cases() {
  std::vector<MovingCase> cases;
  for (const NumberForm& form : number_forms()) {
    cases.push_back({form.name, with_form(one_choice(), form), row_dtype(form)});
  }
  cases.push_back({"f32", one_choice(DType::kF32), DType::kF32});
  for (const CodedForm& form : coded_forms()) {
    cases.push_back({form.name, one_choice(form.dtype, form.quant)});
  }
  MoeSpec everything = one_choice();
  everything.has_bias = true;
  everything.has_output_bias = true;
  everything.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 192};
  everything.residual = {.intermediate_size = 128};
  cases.push_back({"biases and shared experts", everything});
  QuantSpec factors{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  factors.has_column_factors = true;
  cases.push_back({"int4 with factors of columns", one_choice(DType::kI4, factors)});
  QuantSpec order{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  order.has_column_order = true;
  cases.push_back({"int4 with an order of columns", one_choice(DType::kI4, order)});
  return cases;
}

// A communicator for migrations beside forwards, between the ranks of `first`.
inline std::unique_ptr<Communicator> second_communicator(int32_t rank, Communicator& first,
                                                         std::chrono::milliseconds timeout) {
  return connect("nccl", {.rank = rank,
                          .size = first.size(),
                          .bootstrap = &first,
                          .device = "cuda:" + std::to_string(device_of(rank)),
                          .timeout = timeout});
}

// Slots in which the ranks have the experts of `first` and of all others.
inline ExpertSlots slots_with(const std::vector<int32_t>& first,
                              int64_t num_experts = kMovingExperts) {
  ExpertSlots slots{.num_experts = num_experts, .first_of = {0}};
  slots.logical_of = first;
  slots.first_of.push_back(static_cast<int32_t>(first.size()));
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    if (std::ranges::find(first, expert) == first.end()) slots.logical_of.push_back(expert);
  }
  slots.first_of.push_back(static_cast<int32_t>(slots.logical_of.size()));
  return slots;
}

// The same as a split that a layer can be created with.
inline ParallelSpec split_of(const ExpertSlots& slots) {
  ParallelSpec split{.placement = PlacementStrategy::kCustom};
  split.rank_of.assign(static_cast<size_t>(slots.num_experts), 1);
  for (const int32_t expert : slots.of_rank(0)) split.rank_of[static_cast<size_t>(expert)] = 0;
  return split;
}

}  // namespace conclave::testing
