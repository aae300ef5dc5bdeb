// Weights of a layer in Python arrays, in whatever layout a framework has them.
#pragma once

#include "arrays.h"
#include "weight_arrays.h"

#include "conclave/weights.h"

#include <cstddef>
#include <span>
#include <string>

namespace conclave::python {

// Reads from arrays and keeps their memory alive. Created and destroyed with the GIL held.
class ArraySource final : public WeightSource {
 public:
  // Throws as cut_weights, and Error(kDevice) if the arrays lie on several devices.
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
  const RoleArrays& at(WeightRole role) const { return weights_.roles[static_cast<size_t>(role)]; }
  bool is_here(WeightRole role, int64_t expert) const;
  const std::byte* matrix(WeightRole role, int64_t expert) const;

  WeightArrays weights_;
  ArrayDevice device_;
};

}  // namespace conclave::python
