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
// Takes a quantization_config, the tensors of a layer that it describes, and their bytes.
void fuzz_packed_weights(std::span<const std::byte> input);
// Takes GGUF blocks of any types, as rows and as the matrices of a layer.
void fuzz_gguf_blocks(std::span<const std::byte> input);
// Takes a tokenizer.model of SentencePiece.
void fuzz_sentencepiece_model(std::span<const std::byte> input);
// Takes a whole trace of routing.
void fuzz_routing_trace(std::span<const std::byte> input);

}  // namespace conclave::testing
