// MXFP4 as gpt-oss has it: stacks of all experts, rows of gate and up in turn, blocks of 32 codes
// and their exponents in tensors of their own. Biases stay in their stacks.
#include "convert/forms/catalog.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <utility>

namespace conclave::tool {
namespace {

constexpr int64_t kBlock = 32;
constexpr int64_t kBlockBytes = 16;
constexpr const char* kModelType = "gpt_oss";

class GptOssForm final : public TargetForm {
 public:
  explicit GptOssForm(ScaleRule rule)
      : quantiser_(
            {.codes = DType::kF4,
             .quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = kBlock},
             .scale_dtype = DType::kF8E8M0,
             .rule = rule}) {}

  std::string name() const override { return "gpt-oss-mxfp4"; }

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

  void check(const ConvertedModule& module) const override { require_whole_groups(module, kBlock); }

  std::vector<PlannedTensor> tensors(const ConvertedModule& module) const override {
    const auto experts = static_cast<int64_t>(module.parts.size());
    const std::vector<int64_t> scales = {experts, module.rows / experts, module.cols / kBlock};
    std::vector<int64_t> blocks = scales;
    blocks.push_back(kBlockBytes);
    std::vector<PlannedTensor> planned = {
        dense_tensor(module.name + "_blocks", DType::kU8, std::move(blocks)),
        dense_tensor(module.name + "_scales", DType::kU8, scales)};
    planned[0].streamed = true;
    planned[1].plane = WeightPlane::kScale;
    return planned;
  }

  QuantisedRows encode(std::span<const float> values, int64_t rows, int64_t cols,
                       float) const override {
    return quantiser_.quantise(values, rows, cols, 1);
  }

  std::vector<std::byte> finish(const ConvertedModule&, const PlannedTensor&,
                                const GatheredRows& rows) const override {
    return rows.scales;
  }

  nlohmann::ordered_json configuration(const std::vector<std::string>& kept) const override {
    return {{"quant_method", "mxfp4"}, {"modules_to_not_convert", kept}};
  }

 private:
  Quantiser quantiser_;
};

}  // namespace

std::vector<FormRow> gpt_oss_forms() {
  return {{.name = "gpt-oss-mxfp4", .make = [](FormOptions&, ScaleRule rule) -> FormPointer {
             return std::make_shared<GptOssForm>(rule);
           }}};
}

}  // namespace conclave::tool
