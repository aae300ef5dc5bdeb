#include "checkpoint/code_words.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kWords = "_packed";
constexpr std::string_view kShape = "_shape";
constexpr int64_t kWordBits = 32;

bool in_words(const std::optional<QuantizedWeights>& quant) { return quant && quant->in_words; }

}  // namespace

std::string_view matrix_name(const std::optional<QuantizedWeights>& quant, std::string_view name) {
  if (in_words(quant) && name.ends_with(kWords)) name.remove_suffix(kWords.size());
  return name;
}

std::string words_name(std::string_view matrix) { return std::string(matrix).append(kWords); }

bool repeats_shape(const std::optional<QuantizedWeights>& quant, std::string_view name) {
  return in_words(quant) && name.ends_with(kShape);
}

TensorInfo as_codes(const std::optional<QuantizedWeights>& quant, TensorInfo info) {
  const bool are_words = info.dtype == DType::kI32 || info.dtype == DType::kU32;
  if (matrix_name(quant, info.name) == info.name || !are_words || info.shape.empty()) return info;
  info.dtype = quant->element;
  info.shape.back() *= kWordBits / bit_size(quant->element);
  return info;
}

void describe_codes(const std::optional<QuantizedWeights>& quant, TensorTable& table) {
  for (StoredTensor& tensor : table.tensors) {
    TensorInfo codes = as_codes(quant, *tensor.info);
    if (codes.dtype == tensor.info->dtype) continue;
    table.as_codes.push_back(std::move(codes));
    tensor.info = &table.as_codes.back();
  }
}

}  // namespace conclave::inline v0::checkpoint
