#include "input/tensor_file.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace conclave::tool {
namespace {

std::string dtype_names(const std::initializer_list<DType>& dtypes) {
  std::vector<std::string_view> names;
  for (const DType dtype : dtypes) names.push_back(to_string(dtype));
  return fmt::format("{}", fmt::join(names, " or "));
}

}  // namespace

LayerTensors::LayerTensors(const std::filesystem::path& path, std::string record)
    : file_(SafetensorsFile::open(path)), record_(std::move(record)) {}

std::string LayerTensors::tensor_name(int64_t layer, std::string_view key) const {
  return record_.empty() ? fmt::format("layers.{}.{}", layer, key)
                         : fmt::format("layers.{}.{}.{}", layer, record_, key);
}

void LayerTensors::missing(int64_t layer, const std::string& key, const std::string& hint) const {
  std::vector<std::string_view> names;
  constexpr size_t kNamesShown = 6;
  for (const TensorInfo& tensor : file_.tensors()) {
    if (names.size() < kNamesShown) names.push_back(tensor.name);
  }
  const std::string more = file_.tensors().size() > kNamesShown ? ", ..." : "";
  throw Error(ErrorCode::kTensorMissing,
              {.what = "the file does not hold a tensor that is needed",
               .file = file_name(),
               .tensor = tensor_name(layer, key),
               .found = fmt::format("{}{}", fmt::join(names, ", "), more),
               .hint = hint});
}

void LayerTensors::check(const TensorInfo& tensor, const Wanted& wanted) const {
  const std::vector<int64_t>& shape = tensor.shape;
  const bool is_vector = wanted.cols < 0;
  const bool fits = shape.size() == (is_vector ? 1 : 2) && (is_vector || shape[1] == wanted.cols) &&
                    (wanted.rows < 0 || shape[0] == wanted.rows);
  if (!fits) {
    const std::string rows = wanted.rows < 0 ? "*" : fmt::format("{}", wanted.rows);
    throw Error(
        ErrorCode::kTensorShape,
        {.what = "the tensor's shape does not fit the layer",
         .file = file_name(),
         .tensor = tensor.name,
         .expected = is_vector ? fmt::format("[{}] ({})", rows, wanted.letters)
                               : fmt::format("[{}, {}] ({})", rows, wanted.cols, wanted.letters),
         .found = fmt::format("[{}]", fmt::join(shape, ", "))});
  }
  if (std::find(wanted.dtypes.begin(), wanted.dtypes.end(), tensor.dtype) == wanted.dtypes.end()) {
    throw Error(ErrorCode::kTensorDType, {.what = "the tensor's type is not accepted here",
                                          .file = file_name(),
                                          .tensor = tensor.name,
                                          .expected = dtype_names(wanted.dtypes),
                                          .found = std::string(to_string(tensor.dtype))});
  }
}

std::optional<Tensor> LayerTensors::load(int64_t layer, const char* key,
                                         const Wanted& wanted) const {
  const TensorInfo* tensor = file_.find(tensor_name(layer, key));
  if (tensor == nullptr) return std::nullopt;
  check(*tensor, wanted);
  return file_.load(tensor->name);
}

const TensorInfo& LayerTensors::find_hidden_states(int64_t layer, const MoeSpec& spec) const {
  constexpr const char* kKey = "hidden_states";
  const TensorInfo* tensor = file_.find(tensor_name(layer, kKey));
  if (tensor == nullptr) tensor = file_.find(kKey);
  if (tensor == nullptr) missing(layer, kKey, "a tensor named hidden_states feeds every layer");
  check(*tensor, {.rows = -1,
                  .cols = spec.hidden_size,
                  .letters = "tokens x hidden size",
                  .dtypes = {DType::kF32, DType::kF16, DType::kBF16}});
  return *tensor;
}

Tensor LayerTensors::hidden_states(int64_t layer, const MoeSpec& spec) const {
  return file_.load(find_hidden_states(layer, spec).name);
}

bool LayerTensors::has(int64_t layer, const std::string& key) const {
  return file_.find(tensor_name(layer, key)) != nullptr;
}

std::optional<Tensor> LayerTensors::router_logits(int64_t layer, const MoeSpec& spec,
                                                  int64_t num_tokens) const {
  return load(layer, "router_logits",
              {.rows = num_tokens,
               .cols = num_logits(spec),
               .letters = "tokens x router logits",
               .dtypes = {DType::kF32, DType::kF16, DType::kBF16}});
}

std::optional<Tensor> LayerTensors::topk_ids(int64_t layer, const MoeSpec& spec,
                                             int64_t num_tokens) const {
  return load(layer, "topk_ids",
              {.rows = num_tokens,
               .cols = num_slots(spec),
               .letters = "tokens x slots",
               .dtypes = {DType::kI32, DType::kI64}});
}

std::optional<Tensor> LayerTensors::topk_weights(int64_t layer, const MoeSpec& spec,
                                                 int64_t num_tokens) const {
  return load(layer, "topk_weights",
              {.rows = num_tokens,
               .cols = num_slots(spec),
               .letters = "tokens x slots",
               .dtypes = {DType::kF32, DType::kF16, DType::kBF16}});
}

std::optional<Tensor> LayerTensors::router_input(int64_t layer, const MoeSpec& spec,
                                                 int64_t num_tokens) const {
  return load(layer, "router_input",
              {.rows = num_tokens,
               .cols = spec.hidden_size,
               .letters = "tokens x hidden size",
               .dtypes = {DType::kF32, DType::kF16, DType::kBF16}});
}

std::optional<Tensor> LayerTensors::residual_input(int64_t layer, const MoeSpec& spec,
                                                   int64_t num_tokens) const {
  return load(layer, "residual_input",
              {.rows = num_tokens,
               .cols = spec.hidden_size,
               .letters = "tokens x hidden size",
               .dtypes = {DType::kF32, DType::kF16, DType::kBF16}});
}

std::optional<Tensor> LayerTensors::token_ids(int64_t layer, int64_t num_tokens) const {
  return load(
      layer, "token_ids",
      {.rows = num_tokens, .cols = -1, .letters = "tokens", .dtypes = {DType::kI32, DType::kI64}});
}

const TensorInfo& LayerTensors::find_output(int64_t layer, const MoeSpec& spec,
                                            int64_t num_tokens) const {
  const TensorInfo* tensor = file_.find(tensor_name(layer, "float64.output"));
  if (tensor == nullptr) tensor = file_.find(tensor_name(layer, "output"));
  if (tensor == nullptr) missing(layer, "output", "without --reference, float64 is the reference");
  check(*tensor, {.rows = num_tokens,
                  .cols = spec.hidden_size,
                  .letters = "tokens x hidden size",
                  .dtypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}});
  return *tensor;
}

std::vector<double> LayerTensors::output(int64_t layer, const MoeSpec& spec,
                                         int64_t num_tokens) const {
  return to_float64(file_.load(find_output(layer, spec, num_tokens).name).const_view());
}

std::vector<double> to_float64(const ConstTensorView& tensor) {
  std::vector<double> values(static_cast<size_t>(tensor.shape.num_elements()));
  if (values.empty()) return values;
  convert(tensor, {.data = values.data(), .dtype = DType::kF64, .shape = tensor.shape});
  return values;
}

}  // namespace conclave::tool
