// Reads the factors of a layer's experts from an adapter's tensors.
#pragma once

#include "checkpoint/architecture.h"
#include "checkpoint/lora/lora_config.h"
#include "checkpoint/lora/lora_names.h"
#include "checkpoint/name_pattern.h"

#include "conclave/lora.h"
#include "conclave/safetensors.h"
#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// lora_A and lora_B of one module; null where the file lacks it.
struct LoraPair {
  LoraModule module;
  const TensorInfo* a = nullptr;
  const TensorInfo* b = nullptr;
};

// The largest rank that a matrix of the pair has. Stacked factors have as many rows as experts and
// ranks, so that theirs is the config's.
int64_t largest_rank(const LoraPair& pair, const LoraConfig& config);

// How a model's files have the stacks of its experts.
struct StackLayout {
  GateUpOrder order = GateUpOrder::kConcatenated;
  checkpoint::AxisOrder axes = checkpoint::AxisOrder::kRowsFirst;
  checkpoint::StackWords words = checkpoint::StackWords::kUnknown;
};

// Throws as LoraCheckpoint::layer.
LoraAdapter read_lora_factors(const SafetensorsFile& file, const LoraConfig& config,
                              std::span<const LoraPair> pairs, const MoeSpec& spec,
                              const StackLayout& layout);

}  // namespace conclave::inline v0
