// A Hugging Face model directory as a list of MoE layers: config.json, then model.safetensors or
// model.safetensors.index.json with its shards.
#pragma once

#include "conclave/error.h"
#include "conclave/safetensors.h"
#include "conclave/spec.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

struct CheckpointOptions {
  FileAccess access = FileAccess::kAuto;
  // Checks tensor data against conclave.manifest.json while reading; Error(kChecksum) on a flip.
  bool verify_manifest = false;
};

struct CheckpointLayer {
  int64_t index = 0;   // N of model.layers.N
  std::string prefix;  // "model.layers.0.mlp."
  std::string layout;  // "per_expert", "stacked", "stacked_transposed"
  MoeSpec spec;
  uint64_t bytes = 0;  // of the layer's tensors in the files
  ParameterCount parameters;
  Support support = Support::yes();  // whether MoeLayer can run it, else why not
};

// Immutable; safe to use from several threads.
class CONCLAVE_API Checkpoint {
 public:
  // Reads config, index and every shard header; no tensor data. Either the whole checkpoint is
  // consistent or an Error (2xx to 5xx) names file, tensor, expected and found.
  static Checkpoint open(const std::filesystem::path& directory,
                         const CheckpointOptions& options = {});
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::filesystem::path& directory() const noexcept;
  const std::string& model_type() const noexcept;    // "qwen3_moe"
  const std::string& architecture() const noexcept;  // row of the architecture catalog
  int64_t num_hidden_layers() const noexcept;
  uint64_t total_bytes() const noexcept;                     // of all tensors in all shards
  uint64_t total_parameters() const noexcept;                // elements of all tensors
  std::span<const CheckpointLayer> layers() const noexcept;  // MoE layers only, ascending
  const CheckpointLayer& layer(int64_t index) const;         // Error(kLayerNotFound)
  std::span<const std::string> notes() const noexcept;       // skipped parts, oddities

  // Reads through the checkpoint, which must outlive the source.
  std::unique_ptr<WeightSource> layer_source(int64_t index) const;

  // Hashes every tensor and writes conclave.manifest.json beside the model.
  static void write_manifest(const std::filesystem::path& directory);

  struct Impl;

 private:
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Names of the model types known, sorted.
CONCLAVE_API std::vector<std::string> known_model_types();

}  // namespace conclave::inline v0
