// Random layers of real sizes, made in memory: for benchmarks, tests and `conclave synth`.
#pragma once

#include "conclave/spec.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

struct ModelPreset {
  std::string_view name;        // "qwen3-30b-a3b"
  std::string_view model_type;  // "qwen3_moe"
  int64_t num_hidden_layers = 0;
  MoeSpec spec;
  std::string_view note;  // e.g. "32 of 256 experts: one of 8 expert-parallel ranks"
};
CONCLAVE_API std::span<const ModelPreset> model_presets();
CONCLAVE_API const ModelPreset* find_preset(std::string_view name) noexcept;

// A source of every role that the spec has. Matrices hold normal-like values of standard deviation
// 1/sqrt(cols), never zeros; those of codes have codes and float32 scales whose products have that
// deviation. Biases have deviation 0.25, scales and norms lie around 1, tables hold distinct
// experts. A pure function of (seed, role, expert, element): any block in any order gives the same
// bytes. Thread-safe. Throws as validate.
CONCLAVE_API std::unique_ptr<WeightSource> make_synthetic_source(const MoeSpec& spec,
                                                                 uint64_t seed);
// Fills a [rows, cols] view of f32, f16 or bf16 with values of standard deviation 1. Throws
// Error(kDType).
CONCLAVE_API void fill_random(const TensorView& tensor, uint64_t seed);

}  // namespace conclave::inline v0
