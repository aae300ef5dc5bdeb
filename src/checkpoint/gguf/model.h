// A GGUF file, or all parts of one, as a list of MoE layers.
#pragma once

#include "checkpoint/contents.h"

#include "conclave/checkpoint.h"

#include <filesystem>
#include <memory>

namespace conclave::inline v0::checkpoint {

// Throws Error: 2xx for the file, 35x for its header, kUnknownArchitecture, and those of keys and
// tensors; Error(kInvalidArgument) for options that GGUF files have no meaning for.
std::unique_ptr<Contents> open_gguf(const std::filesystem::path& path,
                                    const CheckpointOptions& options);

}  // namespace conclave::inline v0::checkpoint
