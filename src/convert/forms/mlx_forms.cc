// MLX's affine codes: scale and bias for groups of columns, experts in stacks.
#include "convert/forms/catalog.h"
#include "convert/forms/method_form.h"
#include "convert/forms/method_options.h"

#include <fmt/format.h>

namespace conclave::inline v0::conversion {
namespace {

constexpr const char* kMlxMethod = "mlx";

MethodForm form_of(int64_t bits, int64_t group) {
  QuantSpec spec{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = group};
  spec.zeros = WeightZero::kOffset;
  spec.signed_scales = true;
  return {.method = kMlxMethod,
          .codes = bits > 4 ? DType::kI8 : DType::kI4,
          .code_bits = bits,
          .quant = spec,
          .scale_dtype = DType::kBF16};
}

class MlxForm final : public MethodTarget {
 public:
  MlxForm(std::string name, const MethodForm& form, ScaleRule rule)
      : MethodTarget(std::move(name), form, rule) {}

  // Routed experts are stacks, whatever the family calls theirs.
  ModulePlace place(const CheckpointLayer& layer, const StoredMatrix& matrix) const override {
    if (matrix.id.mlp() != WeightMlp::kRouted) return {.module = matrix.module};
    const WeightId codes = matrix.id.with(WeightPlane::kWeights);
    return {.module = fmt::format("{}switch_mlp.{}_proj", layer.prefix, to_string(codes))};
  }

 protected:
  int64_t stack_of(const ConvertedModule& module) const override {
    const bool routed = module.parts.front().id.mlp() == WeightMlp::kRouted;
    return routed ? static_cast<int64_t>(module.parts.size()) : 0;
  }
};

}  // namespace

std::vector<FormRow> mlx_forms() {
  std::vector<FormRow> rows;
  for (const int64_t bits : {4, 8, 2, 3, 5, 6}) {
    const std::string name = fmt::format("mlx-int{}", bits);
    rows.push_back({.name = name,
                    .method = kMlxMethod,
                    .options = "group=N",
                    .make = [=](FormOptions& options, ScaleRule rule) -> FormPointer {
                      OptionTaker taker(options, name);
                      int64_t group = 64;
                      taker.take_group(group);
                      return std::make_shared<MlxForm>(taker.name(), form_of(bits, group), rule);
                    }});
  }
  return rows;
}

}  // namespace conclave::inline v0::conversion
