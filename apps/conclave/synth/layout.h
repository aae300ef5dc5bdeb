// What a synthetic checkpoint consists of: its tensors under their family's names, dealt out to
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
  WeightRole role = WeightRole::kGate;
  int64_t expert = 0;
  DType dtype = DType::kBF16;
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
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

// Families that synth writes.
std::vector<std::string> synth_model_types();

// Throws Error(kUnknownName), or Error(kUnsupported) where the family has no shared expert, or
// none without.
void check_family(const SynthModel& model);
// In the family's order; every shard but the last reaches no further than `shard_bytes`, unless it
// holds a single tensor.
std::vector<SynthShard> plan_shards(const SynthModel& model, uint64_t shard_bytes);
nlohmann::ordered_json make_config(const SynthModel& model);
nlohmann::ordered_json make_index(const std::vector<SynthShard>& shards);

}  // namespace conclave::tool
