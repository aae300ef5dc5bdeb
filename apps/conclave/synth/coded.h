// A random checkpoint in a form of the converter's: random values become codes as a model's do.
#pragma once

#include "synth/layout.h"

#include "conclave/context.h"
#include "conclave/convert.h"

#include <cstdint>
#include <filesystem>
#include <string>

namespace conclave::tool {

struct CodedSynth {
  SynthModel model;    // has values
  std::string format;  // one of random_model_formats()
  ModelContainer container = ModelContainer::kSafetensors;
  std::filesystem::path destination;
  uint64_t shard_bytes = 0;
  uint64_t seed = 0;
};

struct WrittenModel {
  std::filesystem::path path;  // as Checkpoint::open takes it
  uint64_t bytes = 0;
  size_t shards = 0;
};

// The destination must be empty, absent or a model, which is replaced when all is written. Throws
// Error(kUnsupported) for sizes that the form does not have, and Error(kFileWrite).
WrittenModel write_coded_checkpoint(const Context& context, const CodedSynth& synth);

}  // namespace conclave::tool
