// Streams a planned checkpoint to disk: shards, then the index, then config.json.
#pragma once

#include "output/progress.h"
#include "synth/layout.h"

#include "conclave/context.h"

#include <cstdint>
#include <filesystem>
#include <vector>

namespace conclave::tool {

// Tensors are filled in parallel and written in order; memory stays at one tensor per thread.
// Throws Error(kFileWrite).
void write_checkpoint(const Context& context, const SynthModel& model,
                      const std::vector<SynthShard>& shards, const std::filesystem::path& directory,
                      uint64_t seed, Console& console);

}  // namespace conclave::tool
