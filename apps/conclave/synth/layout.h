// The content of a synthetic checkpoint: its tensors under their family's names, distributed over
// shards, and its config.json.
#pragma once

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

struct SynthTensor {
  std::string name;
  int64_t layer = 0;
  WeightId id = weights::kGate;
  int64_t expert = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kBF16;  // as the file has it, with `shape`: codes may fill words or bytes
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  bool is_shape = false;    // holds rows and cols, as int64, instead of weights
  bool is_divisor = false;  // a number of float32 that the file has the inverse of
};

struct SynthShard {
  std::string file_name;
  std::vector<SynthTensor> tensors;
  uint64_t bytes = 0;
};

struct SynthModel {
  std::string model_type;
  int64_t num_layers = 1;
  MoeSpec spec;
};

// The families that synth writes.
std::vector<std::string> synth_model_types();

// Throws Error(kUnknownName), or Error(kUnsupported) if the family has no shared expert or requires
// one.
void check_family(const SynthModel& model);
// How published models of the family normalise weights, which their GGUF files do not say.
Renormalize usual_renormalize(const std::string& model_type);
// Tensors are in the family's order. Every shard but the last has at most `shard_bytes`, unless it
// holds a single tensor.
std::vector<SynthShard> plan_shards(const SynthModel& model, uint64_t shard_bytes);
nlohmann::ordered_json make_config(const SynthModel& model);
nlohmann::ordered_json make_index(const std::vector<SynthShard>& shards);

}  // namespace conclave::tool
