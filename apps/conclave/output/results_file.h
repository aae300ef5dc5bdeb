// --output: writes every layer's results to one safetensors file, which appears only when complete.
#pragma once

#include "layer_run.h"

#include "conclave/safetensors.h"

#include <filesystem>
#include <vector>

namespace conclave::tool {

// The shapes of one layer's results.
struct ResultShape {
  int64_t layer = 0;
  int64_t num_tokens = 0;
  MoeSpec spec;
  DType output_dtype = DType::kF32;
  bool has_logits = true;
};

class ResultsFile {
 public:
  // Throws Error(kFileWrite) at once if the file cannot be made.
  ResultsFile(const std::filesystem::path& path, const std::vector<ResultShape>& layers);

  // Layers must come in the order of `layers`.
  void write(const LayerRun& run);
  void finish() { writer_.finish(); }

 private:
  SafetensorsWriter writer_;
};

}  // namespace conclave::tool
