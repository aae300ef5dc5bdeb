// A ConversionRequest with its names and defaults resolved.
#pragma once

#include "convert/forms/catalog.h"

#include "conclave/checkpoint.h"
#include "conclave/convert.h"
#include "conclave/quantise.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::conversion {

struct KeptForm {
  std::string pattern;
  FormPointer form;  // null: the tensors stay
};

struct ResolvedRequest {
  std::filesystem::path source;
  FormPointer form;
  ModelContainer container = ModelContainer::kSafetensors;  // the result's
  std::vector<int64_t> layers;                              // ascending
  std::vector<KeptForm> keep;                               // the first that matches counts
  ScaleRule rule = ScaleRule::kAmax;
  uint64_t shard_bytes = 0;
};

// The container of the model at a path.
ModelContainer container_of(const std::filesystem::path& path);
// Throws Error(kInvalidArgument, kUnknownName, kLayerNotFound, kUnsupported).
ResolvedRequest resolve(const ConversionRequest& request, const Checkpoint& source);

bool matches(std::string_view pattern, std::string_view name);

}  // namespace conclave::inline v0::conversion
