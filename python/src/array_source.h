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

  WeightInfo describe(WeightId id) const override { return at(id).info; }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  ConstTensorView view(WeightId id, int64_t expert) const override;
  MemoryKind memory() const override {
    return device_.is_cuda ? MemoryKind::kDevice : MemoryKind::kHost;
  }
  std::string locate(WeightId id, int64_t expert) const override;

  // Whether the arrays have this expert's matrix.
  bool has(WeightId id, int64_t expert) const { return is_here(id, expert); }
  const ArrayDevice& device() const noexcept { return device_; }

 private:
  const MatrixArrays& at(WeightId id) const { return weights_.by_id[id]; }
  bool is_here(WeightId id, int64_t expert) const;
  const std::byte* matrix(WeightId id, int64_t expert) const;

  WeightArrays weights_;
  ArrayDevice device_;
};

}  // namespace conclave::python
