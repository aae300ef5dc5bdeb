// MXFP4 as gpt-oss has it: stacks of all experts, rows of gate and up in turn. Biases stay in their
// stacks.
#include "convert/forms/catalog.h"
#include "convert/forms/method_form.h"

#include "conclave/error.h"

namespace conclave::inline v0::conversion {
namespace {

constexpr const char* kMxfp4Method = "mxfp4";
constexpr const char* kModelType = "gpt_oss";

MethodForm form_of_blocks() {
  return {.method = kMxfp4Method,
          .codes = DType::kF4,
          .quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32},
          .scale_dtype = DType::kF8E8M0};
}

class GptOssForm final : public MethodTarget {
 public:
  explicit GptOssForm(ScaleRule rule) : MethodTarget("gpt-oss-mxfp4", form_of_blocks(), rule) {}

  ModulePlace place(const CheckpointLayer& layer, const StoredMatrix& matrix) const override {
    const bool down = matrix.id.matrix() == WeightMatrix::kDown;
    return {.module = layer.prefix + (down ? "experts.down_proj" : "experts.gate_up_proj"),
            .alternates = !down};
  }

  void check_model(const Checkpoint& model) const override {
    if (model.model_type() == kModelType) return;
    throw Error(ErrorCode::kUnsupported,
                {.what = "stacks of such blocks are read in gpt-oss models only",
                 .file = model.directory().string(),
                 .expected = kModelType,
                 .found = model.model_type(),
                 .hint = "mxfp4 writes the same codes for any model"});
  }

 protected:
  std::string matrix_of(const ConvertedModule& module) const override { return module.name; }
  int64_t stack_of(const ConvertedModule& module) const override {
    return static_cast<int64_t>(module.parts.size());
  }
};

}  // namespace

std::vector<FormRow> gpt_oss_forms() {
  return {{.name = "gpt-oss-mxfp4",
           .method = kMxfp4Method,
           .of_one_family = true,
           .make = [](FormOptions&, ScaleRule rule) -> FormPointer {
             return std::make_shared<GptOssForm>(rule);
           }}};
}

}  // namespace conclave::inline v0::conversion
