// Weights of a layer in arrays of Python, in whatever layout a framework has them.
#pragma once

#include "arrays.h"
#include "binding.h"

#include "conclave/weights.h"

#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace conclave::python {

// How the experts' matrices lie in `gate_up` and `down`.
struct ArrayLayout {
  GateUpOrder order = GateUpOrder::kConcatenated;
  GateUpOrder shared_order = GateUpOrder::kConcatenated;
  // [E, H, 2I] and [E, I, H] instead of [E, 2I, H] and [E, H, I].
  bool transposed = false;
  // [E]: which matrix of the arrays each expert is, -1 none; empty: all E, in order.
  std::vector<int32_t> local_of = {};
};

// One role: matrices of equal shape, whose rows and columns may lie apart. Strides in elements.
struct RoleArrays {
  std::vector<const std::byte*> matrices = {};  // null: not here
  WeightInfo info = {};
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  std::string argument = {};
};

// Reads from the arrays of a dictionary whose keys are the names of ExpertWeights' members, or
// gate and up (and shared_gate, shared_up, residual_gate, residual_up) apart; the experts' matrices
// may also be lists with an array for each. Keeps the memory. Made and destroyed with the GIL held.
class ArraySource final : public WeightSource {
 public:
  // Throws Error naming the key: kInvalidArgument for one that is none, kShape, kDType, kDevice.
  ArraySource(const nb::dict& arrays, const MoeSpec& spec, const ArrayLayout& layout);

  WeightInfo describe(WeightRole role) const override { return at(role).info; }
  void read(WeightRole role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  ConstTensorView view(WeightRole role, int64_t expert) const override;
  MemoryKind memory() const override {
    return device_.is_cuda ? MemoryKind::kDevice : MemoryKind::kHost;
  }
  std::string locate(WeightRole role, int64_t expert) const override;

  const ArrayDevice& device() const noexcept { return device_; }

 private:
  const RoleArrays& at(WeightRole role) const { return roles_[static_cast<size_t>(role)]; }
  const std::byte* matrix(WeightRole role, int64_t expert) const;

  std::set<std::string> names_;  // of arguments; kept_ points into it
  std::vector<Array> kept_;
  ArrayDevice device_;
  std::array<RoleArrays, kNumWeightRoles> roles_;
};

}  // namespace conclave::python
