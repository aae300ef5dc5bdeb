// Random adapters for layers that are timed with and without them.
#pragma once

#include "conclave/layer.h"
#include "conclave/lora.h"
#include "conclave/spec.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

struct AdapterLoad {
  int32_t rank = 0;   // 0: layers are timed without adapters alone
  int32_t count = 1;  // each layer has so many, which tokens take in turn
};

// Which tokens have them, in a word for records and in a line for people.
std::string adapted_tokens(const AdapterLoad& load);
std::string describe(const AdapterLoad& load);

// Bytes of one adapter of a layer, on all ranks together.
double adapter_bytes(const MoeSpec& spec, int32_t rank);

// Factors in bf16 of every matrix of every routed expert. All experts have the same values, of
// which a layer keeps a copy for each.
LoraAdapter random_adapter(const MoeSpec& spec, int32_t rank, uint64_t seed);

// Gives each layer `load.count` adapters; their ids are those that tokens have in turn [tokens].
void add_random_adapters(MoeLayer& layer, const AdapterLoad& load, uint64_t seed);
std::vector<int32_t> adapters_in_turn(const AdapterLoad& load, int64_t num_tokens);

}  // namespace conclave::tool
