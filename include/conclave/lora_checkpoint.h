// Adapters as PEFT saves them: a directory with adapter_config.json and adapter_model.safetensors.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/lora.h"
#include "conclave/spec.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace conclave::inline v0 {

// Which adapters there are for the experts of which layers. Both of PEFT's forms are read:
// projections of single experts ("mlp.experts.3.gate_proj", "block_sparse_moe.experts.3.w1") and
// stacked parameters (target_parameters: "mlp.experts.gate_up_proj"), whose lora_A has the rows of
// all experts and lora_B their columns in turn; shared experts too. Immutable; safe to use from
// several threads.
class CONCLAVE_API LoraCheckpoint {
 public:
  // Reads the config and the header; no tensor data. Throws Error 2xx to 4xx for the files,
  // kConfigValue for a value that cannot be, and kUnsupported for variants that are more than two
  // factors (DoRA, biases, activated LoRA and others): each names file and key.
  static LoraCheckpoint open(const std::filesystem::path& directory);
  LoraCheckpoint(LoraCheckpoint&&) noexcept;
  LoraCheckpoint& operator=(LoraCheckpoint&&) noexcept;
  ~LoraCheckpoint();

  // The layers whose experts have factors, ascending: N of "layers.N.".
  std::span<const int64_t> layers() const noexcept;
  // The largest rank of these factors: LayerOptions::max_adapter_rank must be as much.
  int64_t max_rank() const noexcept;
  // Modules with adapters that are no part of a MoE block, such as
  // "model.layers.0.self_attn.q_proj".
  std::span<const std::string> others() const noexcept;

  // Reads the factors of a layer. `order`: how gate and up lie in a stacked gate_up_proj of its
  // model. Throws Error(kLayerNotFound); kTensorShape for factors of another model or another
  // number of experts; kTensorMissing for one of two factors; kUnsupported for other targets in the
  // MoE block, as its router; kConfigValue for a rank that the config does not have; each names
  // the tensor.
  LoraAdapter layer(int64_t index, const MoeSpec& spec,
                    GateUpOrder order = GateUpOrder::kConcatenated) const;
  // The same for a layer of a model's checkpoint. Throws also kLayerNotFound if the adapter has a
  // layer that the model lacks.
  LoraAdapter layer(int64_t index, const Checkpoint& model) const;

  struct Impl;

 private:
  explicit LoraCheckpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
