// The experts of each kernel on this rank, and where their matrices lie in a source.
#pragma once

#include "experts/cuda/device_experts.h"
#include "experts/cuda/scale_bytes.h"
#include "layer/cuda/plan.h"

#include "conclave/error.h"
#include "conclave/placement.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// An expert of a kernel: its place in the source, and the columns of it that this rank holds.
struct LocalExpert {
  WeightMlp mlp = WeightMlp::kRouted;
  int32_t expert = 0;
  TensorSlice inner;
  bool has_bias = false;
  bool has_down_bias = false;  // only the first of an expert's slices, which are added up
  int64_t place = 0;           // in memory for several experts

  WeightId id(WeightMatrix matrix, WeightPlane plane = WeightPlane::kWeights) const {
    return {mlp, matrix, plane};
  }
  // The part of a matrix that the rank holds.
  WeightBlock block_of(WeightMatrix matrix, int64_t hidden) const {
    if (matrix == WeightMatrix::kDown) return {0, hidden, inner.begin, inner.end};
    return {inner.begin, inner.end, 0, hidden};
  }
};

// In which forms kernels read what belongs to codes.
struct CodeForms {
  bool floats = true;        // DeviceExpertMatrix::scale and offset
  bool factors = false;      // DeviceExpertMatrix::factors
  bool near_scales = false;  // kernels decode codes of lanes to bytes
};

// The matrices of an expert that are packed together.
enum class MlpHalf : uint8_t { kGateUp, kDown };

// Experts that one kernel runs, or some of them.
struct MlpSource {
  const experts::ExpertsProblem& problem;
  std::vector<LocalExpert> experts;
  bool adds_down_bias = true;
  CodeForms forms = {};
  std::optional<MlpHalf> only = {};  // the half that is held and filled; none: both
  // Scales of bytes take this form; none: the first that all of them have.
  std::optional<experts::ByteForm> byte_form = {};
  // Places in memory, of which some may be free; none: one for each expert.
  std::optional<int64_t> room = {};

  bool has(MlpHalf half) const { return !only || *only == half; }

  int64_t halves() const { return problem.activation.gated ? 2 : 1; }
  int64_t gate_up_rows() const { return halves() * problem.intermediate_size; }
  int64_t count() const { return static_cast<int64_t>(experts.size()); }
  int64_t places() const { return room.value_or(count()); }
};

// Routed experts, and the shared ones that run with them; the plan has the others. `places`: the
// expert in each place of this rank, -1 for a free one; the others are free.
MlpSource routed_source(const CudaPlan& plan, std::span<const int32_t> places);
// The same where they lie at first.
MlpSource routed_source(const CudaPlan& plan);
MlpSource shared_source(const CudaPlan& plan);
MlpSource residual_source(const CudaPlan& plan);

// The addresses at which matrices must lie to form one tensor.
struct InPlaceMatrix {
  const std::byte* data = nullptr;
  int64_t stride = 0;
};
struct InPlaceLayout {
  InPlaceMatrix gate_up;
  InPlaceMatrix down;
};

// Yes, with the layout, if the source has the experts in device memory as [E, 2I, H] and [E, H, I].
Support find_layout(const MlpSource& mlp, const WeightSource& source, InPlaceLayout& layout);

}  // namespace conclave::inline v0
