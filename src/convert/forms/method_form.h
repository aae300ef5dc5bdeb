// Weights as a method of checkpoints stores them: which tensors there are and what bytes they have
// says the library's writer of the method.
#pragma once

#include "convert/forms/target_form.h"

#include "conclave/methods.h"
#include "conclave/quantise.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0::conversion {

class MethodTarget : public TargetForm {
 public:
  MethodTarget(std::string name, const MethodForm& form, ScaleRule rule)
      : MethodTarget(std::move(name), form, form, rule) {}

  std::string name() const override { return name_; }
  void check(const ConvertedModule& module) const override;
  std::vector<PlannedTensor> tensors(const ConvertedModule& module) const override;

  int64_t block_rows() const override { return quantiser_.block_rows(); }
  const Quantiser* matrix_quantiser() const override {
    return quantiser_.needs_matrix_scale() ? &quantiser_ : nullptr;
  }
  // Kernels multiply gate and up as one matrix, whose global scale is one number.
  bool pairs_share_scale() const override { return writer_.form().quant.has_global_scale; }
  float as_read(float matrix_scale) const override { return writer_.as_read(matrix_scale); }

  QuantisedRows encode(std::span<const float> values, int64_t rows, int64_t cols,
                       float matrix_scale) const override {
    return quantiser_.quantise(values, rows, cols, matrix_scale);
  }
  std::vector<std::byte> finish(const ConvertedModule& module, const PlannedTensor& tensor,
                                const GatheredRows& rows) const override;

  nlohmann::ordered_json configuration(const std::vector<std::string>& kept) const override;
  std::string own_key() const override { return std::string(writer_.own_key()); }
  std::vector<TextFile> files(const std::vector<std::string>& kept) const override;

 protected:
  // Rows are quantised as another form than the written one says.
  MethodTarget(std::string name, const MethodForm& written, const MethodForm& quantised,
               ScaleRule rule);

  const MethodForm& form() const { return writer_.form(); }
  // The group of each of so many columns, for forms with an order.
  virtual std::vector<int32_t> order_of(int64_t) const { return {}; }
  // The name of the matrix that a module is, and the matrices above each other in its tensors,
  // which have an axis for them; 0: it is one matrix.
  virtual std::string matrix_of(const ConvertedModule& module) const {
    return module.name + ".weight";
  }
  virtual int64_t stack_of(const ConvertedModule&) const { return 0; }

 private:
  std::vector<WrittenTensor> written(const ConvertedModule& module) const;

  std::string name_;
  MethodWriter writer_;
  Quantiser quantiser_;
};

}  // namespace conclave::inline v0::conversion
