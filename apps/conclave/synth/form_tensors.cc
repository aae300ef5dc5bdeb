#include "synth/form_tensors.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <utility>

namespace conclave::tool {
namespace {

// That method alone has schemes of types.
bool is_compressed_tensors(const WeightForm& form) { return !form.type.empty(); }

int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

std::vector<int64_t> scale_shape(const QuantSpec& quant, int64_t rows, int64_t cols) {
  if (quant.weights == WeightScale::kTensor) return {1, 1};
  if (quant.weights == WeightScale::kChannel) return {rows, 1};
  return {blocks(rows, quant.block_rows), blocks(cols, quant.block_cols)};
}

FormTensor make_tensor(std::string name, WeightPlane plane, DType dtype,
                       std::vector<int64_t> shape) {
  uint64_t rows = 1;
  for (size_t axis = 0; axis + 1 < shape.size(); ++axis) rows *= static_cast<uint64_t>(shape[axis]);
  const int64_t cols = shape.empty() ? 1 : shape.back();
  const uint64_t bytes = rows * static_cast<uint64_t>(blocks(cols * bit_size(dtype), 8));
  return {.name = std::move(name),
          .plane = plane,
          .dtype = dtype,
          .shape = std::move(shape),
          .bytes = bytes};
}

// The codes in elements that hold several, and for words the tensor that states their shape.
std::vector<FormTensor> packed_codes(DType codes, DType element, int64_t rows, int64_t cols,
                                     const std::string& layer) {
  const int64_t bits = cols * bit_size(codes);
  const int64_t element_bits = bit_size(element);
  if (bits % element_bits != 0) {
    throw Error(ErrorCode::kUnsupported,
                {.what = fmt::format("rows of codes do not fill elements of {} bits", element_bits),
                 .tensor = layer,
                 .found = fmt::format("{} columns of {}", cols, to_string(codes)),
                 .hint = fmt::format("choose sizes that are multiples of {}",
                                     element_bits / bit_size(codes))});
  }
  std::vector<FormTensor> tensors = {
      make_tensor("weight_packed", WeightPlane::kWeights, element, {rows, bits / element_bits})};
  if (element == DType::kU8) return tensors;
  tensors.push_back(make_tensor("weight_shape", WeightPlane::kWeights, DType::kI64, {2}));
  tensors.back().content = FormTensor::Content::kSizes;
  return tensors;
}

nlohmann::ordered_json fp8_config(const QuantSpec& quant, const std::vector<std::string>& kept) {
  nlohmann::ordered_json config = {
      {"quant_method", "fp8"},
      {"fmt", "e4m3"},
      {"activation_scheme",
       quant.activations == ActivationScale::kTensorStatic ? "static" : "dynamic"},
      {"weight_block_size", nullptr}};
  if (quant.weights == WeightScale::kBlock) {
    config["weight_block_size"] = {quant.block_rows, quant.block_cols};
  }
  if (quant.power_of_two_scales) config["scale_fmt"] = "ue8m0";
  if (!kept.empty()) config["modules_to_not_convert"] = kept;
  return config;
}

nlohmann::ordered_json compressed_tensors_config(const WeightForm& form,
                                                 const std::vector<std::string>& kept) {
  nlohmann::ordered_json weights = {
      {"num_bits", bit_size(form.dtype)}, {"type", form.type}, {"symmetric", true}};
  if (form.quant.weights == WeightScale::kBlock) {
    weights["strategy"] = form.quant.has_global_scale ? "tensor_group" : "group";
    weights["group_size"] = form.quant.block_cols;
  } else {
    weights["strategy"] = "channel";
  }
  nlohmann::ordered_json rows = nullptr;
  if (form.quant.activations == ActivationScale::kToken) {
    rows = {{"num_bits", 8},
            {"type", form.type},
            {"symmetric", true},
            {"strategy", "token"},
            {"dynamic", true}};
  }
  return {
      {"quant_method", form.method},
      {"format", form.format},
      {"config_groups",
       {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", rows}}}}},
      {"ignore", kept}};
}

}  // namespace

std::vector<FormTensor> form_tensors(const WeightForm& form, int64_t rows, int64_t cols,
                                     const std::string& layer) {
  std::vector<FormTensor> tensors;
  if (form.packed_in) {
    tensors = packed_codes(form.dtype, *form.packed_in, rows, cols, layer);
  } else {
    tensors = {make_tensor("weight", WeightPlane::kWeights, form.dtype, {rows, cols})};
  }
  if (form.quant.weights == WeightScale::kNone) return tensors;
  const bool compressed = is_compressed_tensors(form);
  const DType scales = form.scale_dtype == DType::kF8E8M0 ? DType::kU8 : form.scale_dtype;
  tensors.push_back(make_tensor(compressed ? "weight_scale" : "weight_scale_inv",
                                WeightPlane::kScale, scales, scale_shape(form.quant, rows, cols)));
  if (form.quant.has_global_scale) {
    // The method divides by the number that it stores.
    tensors.push_back(
        make_tensor("weight_global_scale", WeightPlane::kGlobalScale, DType::kF32, {1}));
    tensors.back().content = FormTensor::Content::kInverse;
  }
  if (form.quant.activations == ActivationScale::kTensorStatic) {
    tensors.push_back(make_tensor(compressed ? "input_scale" : "activation_scale",
                                  WeightPlane::kInputScale, DType::kF32, {1, 1}));
  }
  return tensors;
}

nlohmann::ordered_json quantization_config(const WeightForm& form,
                                           const std::vector<std::string>& kept) {
  return is_compressed_tensors(form) ? compressed_tensors_config(form, kept)
                                     : fp8_config(form.quant, kept);
}

}  // namespace conclave::tool
