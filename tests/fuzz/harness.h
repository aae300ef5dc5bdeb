// The harnesses that the fuzzers feed and that the corpus replay runs in every build. A harness
// takes any bytes; a broken promise ends the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::testing {

// Takes a whole safetensors file: parses the header and checks the layout.
void fuzz_safetensors_header(std::span<const std::byte> input);
// Takes a whole GGUF file: parses the header and checks the layout.
void fuzz_gguf_header(std::span<const std::byte> input);
// Takes model.safetensors.index.json.
void fuzz_index(std::span<const std::byte> input);
// Takes config.json and reads it through every architecture table.
void fuzz_config(std::span<const std::byte> input);

}  // namespace conclave::testing
