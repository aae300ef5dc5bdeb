// Turns the weights of planned linear layers into the bytes of their tensors, a few rows at a time.
#pragma once

#include "convert/plan.h"

#include "conclave/context.h"
#include "conclave/quantise.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

namespace conclave::inline v0::conversion {

// Neighbouring rows of one matrix of a module; they fit memory and share no scale with others.
struct Strip {
  int32_t module = 0;
  size_t part = 0;
  int64_t row_begin = 0;  // within the part's matrix
  int64_t row_end = 0;
};

// Thread rule: strips are encoded from several threads; prepare is called from one, and not
// meanwhile.
class ModuleCodes {
 public:
  using Expert = std::tuple<int64_t, WeightMlp, int64_t>;  // layer, part, number

  // All arguments must outlive it.
  ModuleCodes(const Context& context, const SourceModel& source, const ConversionPlan& plan);

  std::vector<Strip> strips(int32_t module) const;
  // Finds the scales of whole matrices, which come before any of their codes.
  void prepare(std::span<const int32_t> modules);
  // The rows in the form of the module. Throws Error(kTensorValue) naming the tensor for a weight
  // that is not finite.
  QuantisedRows encode(const Strip& strip) const;
  // The number that the whole matrix of a module has, once it is prepared.
  float matrix_scale(int32_t module) const { return matrix_scales_[static_cast<size_t>(module)]; }

 private:
  const ConvertedModule& module_of(const Strip& strip) const;
  std::vector<float> read(const Strip& strip) const;
  void require_finite(const Strip& strip, std::span<const float> values) const;
  // A row of a strip comes from here.
  std::string origin_of(const Strip& strip, int64_t row) const;
  // The modules whose range counts for the scale of this one.
  std::vector<int32_t> in_one_range(int32_t module) const;
  float largest_of(int32_t module);
  float choose_scale(int32_t module, float largest) const;

  const Context& context_;
  const ConversionPlan& plan_;
  std::map<int64_t, std::unique_ptr<WeightSource>> sources_;  // by layer
  std::map<int64_t, QuantSpec> source_quant_;
  std::vector<std::optional<float>> largest_;  // by module
  std::vector<float> matrix_scales_;
  // Gate and up of each expert, where they have a number in common.
  std::map<Expert, std::vector<int32_t>> pairs_;
};

}  // namespace conclave::inline v0::conversion
