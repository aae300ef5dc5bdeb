// The option --adapter: an adapter that PEFT saved, for every token of a run.
#pragma once

#include "command_line.h"

#include "conclave/checkpoint.h"
#include "conclave/layer.h"
#include "conclave/lora.h"
#include "conclave/lora_checkpoint.h"

#include <cstdint>
#include <optional>
#include <string>

namespace conclave::tool {

void add_adapter_option(Command& command, std::string& directory);

class AdapterOption {
 public:
  // An empty directory is no adapter. Throws as LoraCheckpoint::open, and Error(kTensorMissing) if
  // it has nothing for experts.
  explicit AdapterOption(const std::string& directory);

  explicit operator bool() const { return adapters_.has_value(); }
  // With room for it.
  LayerOptions with_room(LayerOptions options) const;
  // Nothing for a layer that it does not change.
  std::optional<LoraAdapter> of_layer(int64_t index, const Checkpoint& model) const;
  // "DIR, rank 16, 48 layers"
  std::string describe() const;

 private:
  std::string directory_;
  std::optional<LoraCheckpoint> adapters_;
};

}  // namespace conclave::tool
