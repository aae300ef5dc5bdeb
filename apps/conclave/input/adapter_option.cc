#include "input/adapter_option.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>

namespace conclave::tool {

void add_adapter_option(Command& command, std::string& directory) {
  command.text("--adapter", "DIR", directory,
               "Give every token the LoRA adapter that PEFT saved there");
}

AdapterOption::AdapterOption(const std::string& directory) : directory_(directory) {
  if (directory.empty()) return;
  adapters_.emplace(LoraCheckpoint::open(directory));
  if (!adapters_->layers().empty()) return;
  throw Error(ErrorCode::kTensorMissing,
              {.what = "the adapter changes no expert", .file = directory});
}

LayerOptions AdapterOption::with_room(LayerOptions options) const {
  if (adapters_) options.max_adapter_rank = static_cast<int32_t>(adapters_->max_rank());
  return options;
}

std::optional<LoraAdapter> AdapterOption::of_layer(int64_t index, const Checkpoint& model) const {
  if (!adapters_) return std::nullopt;
  const auto layers = adapters_->layers();
  if (std::find(layers.begin(), layers.end(), index) == layers.end()) return std::nullopt;
  return adapters_->layer(index, model);
}

std::string AdapterOption::describe() const {
  return fmt::format("{}, rank {}, {} layers", directory_, adapters_->max_rank(),
                     adapters_->layers().size());
}

}  // namespace conclave::tool
