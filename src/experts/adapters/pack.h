// Packs the factors of an expert's adapter for kernels of the CPU.
#pragma once

#include "experts/adapters/factors.h"

#include "conclave/tensor.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

// Factors of one matrix: a [r, in], b [out, r], f32, f16 or bf16; empty: it has none.
struct MatrixFactors {
  ConstTensorView a;
  ConstTensorView b;
  float scale = 1;

  bool empty() const { return a.empty(); }
  int64_t rank() const { return empty() ? 0 : a.shape[0]; }
};

// One expert's, or a slice of it: `a` of gate and up [r, H], `b` [I, r]; of down [r, I] and [H, r].
struct ExpertAdapter {
  MatrixFactors gate;
  MatrixFactors up;
  MatrixFactors down;
};

struct AdapterShape {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  bool gated = true;
  DType dtype = DType::kF32;  // what the factors become: one type for all of an adapter
};

// Bytes that pack_adapter writes for an expert, a multiple of 64.
size_t packed_adapter_bytes(const ExpertAdapter& expert, const AdapterShape& shape);

// Writes them at `to`, 64-byte aligned, and returns where they lie.
ExpertFactors pack_adapter(const ExpertAdapter& expert, const AdapterShape& shape, std::byte* to);

}  // namespace conclave::inline v0::experts
