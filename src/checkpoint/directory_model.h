// A directory of Hugging Face, config.json beside safetensors files, as a list of MoE layers.
#pragma once

#include "checkpoint/contents.h"

#include "conclave/checkpoint.h"

#include <filesystem>
#include <memory>

namespace conclave::inline v0::checkpoint {

// Throws as Checkpoint::open.
std::unique_ptr<Contents> open_directory(const std::filesystem::path& path,
                                         const CheckpointOptions& options);

}  // namespace conclave::inline v0::checkpoint
