// Values of f32, f16 and bf16: what KeepRule asks for.
#include "convert/forms/catalog.h"

#include "conclave/tensor.h"

#include <array>
#include <string>

namespace conclave::inline v0::conversion {
namespace {

QuantisedRows rounded_rows(DType dtype, std::span<const float> values, int64_t rows, int64_t cols) {
  const Shape shape = {rows, cols};
  QuantisedRows result;
  result.codes.resize(dense_bytes(dtype, shape));
  const TensorView stored{.data = result.codes.data(), .dtype = dtype, .shape = shape};
  convert({.data = values.data(), .dtype = DType::kF32, .shape = shape}, stored);
  std::vector<float> rounded(values.size());
  convert(stored, {.data = rounded.data(), .dtype = DType::kF32, .shape = shape});
  for (size_t i = 0; i < values.size(); ++i) {
    const double off = double{values[i]} - double{rounded[i]};
    result.error.squared_error += off * off;
    result.error.squared_values += double{values[i]} * double{values[i]};
  }
  return result;
}

class PlainForm final : public TargetForm {
 public:
  PlainForm(std::string name, DType dtype, ModelContainer container)
      : name_(std::move(name)), dtype_(dtype), container_(container) {}

  std::string name() const override { return name_; }
  bool has_codes() const override { return false; }
  bool is_form_of(const SourceTensor& tensor) const override {
    return container_ == ModelContainer::kGguf && tensor.type == to_string(dtype_);
  }

  // A GGUF tensor keeps its shape; a linear layer is a matrix.
  std::vector<PlannedTensor> tensors(const ConvertedModule& module) const override {
    const bool is_gguf = container_ == ModelContainer::kGguf || module.is_stack;
    PlannedTensor tensor =
        is_gguf ? dense_tensor(module.tensor, dtype_, module.shape)
                : dense_tensor(module.name + ".weight", dtype_, {module.rows, module.cols});
    tensor.streamed = true;
    return {std::move(tensor)};
  }

  QuantisedRows encode(std::span<const float> values, int64_t rows, int64_t cols,
                       float) const override {
    return rounded_rows(dtype_, values, rows, cols);
  }

 private:
  std::string name_;
  DType dtype_;
  ModelContainer container_;
};

}  // namespace

std::vector<FormRow> plain_forms() {
  std::vector<FormRow> rows;
  for (const ModelContainer container : {ModelContainer::kSafetensors, ModelContainer::kGguf}) {
    for (const auto& [name, dtype] :
         {std::pair("f32", DType::kF32), {"f16", DType::kF16}, {"bf16", DType::kBF16}}) {
      rows.push_back({.name = name,
                      .container = container,
                      .has_codes = false,
                      .make = [=](FormOptions&, ScaleRule) -> FormPointer {
                        return std::make_shared<PlainForm>(name, dtype, container);
                      }});
    }
  }
  return rows;
}

}  // namespace conclave::inline v0::conversion
