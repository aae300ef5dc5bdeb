// Experts that a layer reads where their source has them (WeightUse::kInPlace): which parts of a
// layer can be, and their matrices.
#pragma once

#include "experts/kernel.h"
#include "layer/rank_part.h"

#include "conclave/error.h"
#include "conclave/layer.h"
#include "conclave/placement.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Says for each part whether it is read in place; nothing where nobody wished it or there is none.
struct InPlaceParts {
  std::optional<Support> routed = {};
  std::optional<Support> shared = {};
  std::optional<Support> residual = {};

  static bool is(const std::optional<Support>& part) { return part && *part; }
};

// Without a source, parts whose weights are values count as in place.
InPlaceParts find_in_place(const MoeSpec& spec, const LayerOptions& options, const RankPart& part,
                           const WeightSource* source);

// Bytes of the matrices that a rank reads in place.
size_t in_place_bytes(const MoeSpec& spec, const RankPart& part, const InPlaceParts& parts);

// Local experts of one kind. Their matrices lie in the source, their biases here.
struct LentExperts {
  std::vector<experts::ExpertMatrices> matrices;
  std::vector<Tensor> biases;
};

struct LentMlp {
  WeightMlp mlp = WeightMlp::kRouted;
  TensorSlice inner = {};  // this rank's columns
  bool gated = true;
  bool has_bias = false;
  bool adds_down_bias = true;
};

// Throws Error(kState) if the source does not have a matrix in memory.
LentExperts lend_experts(const LentMlp& mlp, const WeightSource& source,
                         std::span<const int32_t> source_experts);
// Throws Error(kState) unless both have their matrices at the same place.
void check_same_place(const LentExperts& have, const LentExperts& given);

}  // namespace conclave::inline v0
