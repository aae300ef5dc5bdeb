// The Hugging Face families that llama.cpp's converter makes GGUF files of.
#pragma once

#include "checkpoint/gguf/trunk/trunk_table.h"

#include <cstdint>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// The key that llama.cpp takes the width of routed experts from.
enum class WidthKey : uint8_t { kOfExperts, kOfFeedForward };

struct WrittenFamily {
  std::string_view model_type;
  std::string_view architecture;  // general.architecture
  WidthKey width = WidthKey::kOfExperts;
  const TrunkTable* trunk = nullptr;  // null: only MoE layers have names
  std::string_view model_class = {};  // as transformers calls it, where there is a trunk
  bool has_no_shared = false;         // that class has no shared experts
};

// Sorted by model_type.
std::span<const WrittenFamily> written_families() noexcept;
const WrittenFamily* find_written_family(std::string_view model_type) noexcept;

}  // namespace conclave::inline v0::checkpoint
