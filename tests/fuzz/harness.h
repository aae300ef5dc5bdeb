// What the fuzzers feed, and what the corpus replay runs in every build. A harness takes any bytes;
// a broken promise ends the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::testing {

// A whole safetensors file: header parsed, layout checked.
void fuzz_safetensors_header(std::span<const std::byte> input);
// model.safetensors.index.json.
void fuzz_index(std::span<const std::byte> input);
// config.json, through every architecture table.
void fuzz_config(std::span<const std::byte> input);

}  // namespace conclave::testing
