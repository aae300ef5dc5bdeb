// A conversion makes these: linear layers that are written anew, and the tensors of the result.
#pragma once

#include "convert/source_model.h"

#include "conclave/model_trunk.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace conclave::inline v0::conversion {

class TargetForm;

// One matrix of the source; a module may hold several, their rows in turn.
struct ModulePart {
  WeightId id = weights::kGate;
  // A second matrix whose rows alternate with those of the first.
  std::optional<WeightId> other = {};
  int64_t expert = 0;
  int64_t rows = 0;                   // counting both
  std::optional<size_t> matrix = {};  // its place in the plan's list, for reports; none for values
};

// A linear layer that is written anew, or a stack of them.
struct ConvertedModule {
  std::string name;  // "model.layers.0.mlp.experts.3.down_proj"
  int64_t layer = 0;
  std::vector<ModulePart> parts = {};
  int64_t rows = 0;
  int64_t cols = 0;
  const TargetForm* form = nullptr;
  std::string tensor;               // for GGUF: the tensor that it becomes
  std::vector<int64_t> shape = {};  // its shape there
  bool is_stack = false;            // in a directory, a tensor of this name and shape
  uint64_t source_bytes = 0;        // weights and planes, by their share of a tensor
};

// A tensor that no layer reads, and whose values get another type or order.
struct MovedTensor {
  std::vector<const SourceTensor*> sources;
  TrunkOrder order = TrunkOrder::kSame;
  int64_t heads = 1;
  int64_t keys = 0;
  bool alternates = false;  // values of two sources in turn, in each head
};

struct PlannedTensor {
  std::string name;
  std::string type;  // as the container calls it: "BF16", "Q4_K"
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  const SourceTensor* copied = nullptr;
  std::optional<MovedTensor> moved = {};  // or a tensor of a module:
  int32_t module = -1;
  WeightPlane plane = WeightPlane::kWeights;
  bool streamed = false;  // it has the encoded rows as they come, and is the first of its module
};

// The bytes that encoded rows of a module leave for tensors that are not streamed.
struct GatheredRows {
  std::vector<std::byte> codes = {};  // unless they were streamed
  std::vector<std::byte> scales = {};
  std::vector<std::byte> zeros = {};
  float matrix_scale = 1;
};

}  // namespace conclave::inline v0::conversion
