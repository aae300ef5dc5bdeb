// A model of one layer whose experts some method has packed: the configuration, what each tensor
// is, and the bytes are the fuzzer's; the tensors that the method would store are where it begins.
#include "checkpoint/describe_layer.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/tensor_rows.h"
#include "checkpoint/mixed_source.h"
#include "checkpoint/model_config.h"
#include "checkpoint/model_layers.h"
#include "checkpoint/module_names.h"
#include "checkpoint/quantization.h"
#include "core/weight_types.h"
#include "fuzz/fuzz_input.h"
#include "fuzz/harness.h"
#include "fuzz/packed_models.h"
#include "fuzz/promises.h"
#include "fuzz/weight_walk.h"
#include "io/json.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 17;

// How the bytes of a tensor come from the input's.
enum class Filling : uint8_t { kPool, kZeros, kSmall, kSteps };
constexpr size_t kFillings = 4;

struct FuzzTensor {
  TensorInfo info;
  Filling filling = Filling::kPool;
};

FuzzTensor plain_tensor(const Matrix& matrix) {
  FuzzTensor tensor{.info = {.name = matrix.name, .dtype = DType::kBF16, .shape = {}}};
  if (matrix.is_stack) tensor.info.shape.push_back(kExperts);
  if (matrix.rows > 0) tensor.info.shape.push_back(matrix.rows);
  tensor.info.shape.push_back(matrix.cols);
  return tensor;
}

// The form of a matrix by the configuration; null: it stays as it is.
const checkpoint::QuantizedWeights* form_of(const checkpoint::QuantizedWeights& quant,
                                            const Matrix& matrix) {
  if (!quant.by_module) return &quant;
  const checkpoint::ModuleScheme* scheme = nullptr;
  try {
    scheme = checkpoint::scheme_of_tensor(quant, matrix.name);
  } catch (const checkpoint::NotRead&) {
    return nullptr;
  }
  return scheme != nullptr && scheme->weights ? &*scheme->weights : nullptr;
}

void add_tensors(const Matrix& matrix, const checkpoint::Quantization& found, bool router_too,
                 std::vector<FuzzTensor>& tensors) {
  const bool is_router = matrix.name.ends_with(".gate.weight");
  const bool packed = matrix.is_module && (!is_router || router_too);
  const checkpoint::QuantizedWeights* form =
      packed && found.weights ? form_of(*found.weights, matrix) : nullptr;
  if (form == nullptr) {
    tensors.push_back(plain_tensor(matrix));
    return;
  }
  const checkpoint::MatrixForm shape = checkpoint::matrix_form(*form, matrix.rows, matrix.cols);
  for (const checkpoint::TensorRow& row :
       checkpoint::tensor_rows(*form, found.method, matrix.name)) {
    FuzzTensor tensor{.info = {.name = row.name, .shape = checkpoint::shape_of(row, shape)}};
    const std::vector<DType> types = checkpoint::types_of(row, shape);
    tensor.info.dtype = types.empty() ? DType::kU8 : types.front();
    if (matrix.is_stack) tensor.info.shape.insert(tensor.info.shape.begin(), kExperts);
    const bool counts = tensor.info.dtype == DType::kI32 && tensor.info.shape.size() == 1;
    if (counts) tensor.filling = Filling::kSteps;
    tensors.push_back(std::move(tensor));
  }
}

void edit_shape(FuzzInput& input, std::vector<int64_t>& shape) {
  const size_t axis = shape.empty() ? 0 : input.below(shape.size());
  switch (input.below(4)) {
    case 0:
      if (!shape.empty()) shape[axis] = input.byte();
      break;
    case 1:
      shape.insert(shape.begin() + static_cast<std::ptrdiff_t>(axis), 1 + input.byte() % 4);
      break;
    case 2:
      if (!shape.empty()) shape.erase(shape.begin() + static_cast<std::ptrdiff_t>(axis));
      break;
    default:
      if (!shape.empty()) std::swap(shape[axis], shape.front());
      break;
  }
}

// The input's changes of the list: how many, then for each the tensor, the kind and what it takes.
void edit(FuzzInput& input, std::vector<FuzzTensor>& tensors) {
  for (size_t edits = input.below(32); edits > 0 && !tensors.empty(); --edits) {
    const size_t at = input.below(tensors.size());
    FuzzTensor& tensor = tensors[at];
    switch (input.below(6)) {
      case 0:
        tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      case 1:
        tensor.info.dtype = static_cast<DType>(input.below(static_cast<size_t>(DType::kI4)));
        break;
      case 2:
        edit_shape(input, tensor.info.shape);
        break;
      case 3:
        tensor.info.name = input.text();
        break;
      case 4:
        tensor.filling = static_cast<Filling>(input.below(kFillings));
        break;
      default:
        if (tensors.size() < 64) tensors.push_back(FuzzTensor(tensor));
        break;
    }
  }
}

// Containers refuse other names.
bool is_plain_name(std::string_view name) {
  return !name.empty() && !io::find_invalid_utf8(name) && std::ranges::all_of(name, [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F;
  });
}

// Sizes what a container could hold: whole bytes, unique names; the others go.
void keep_storable(std::vector<FuzzTensor>& tensors) {
  std::vector<std::string> names;
  std::erase_if(tensors, [&](FuzzTensor& tensor) {
    const int64_t bits = bit_size(tensor.info.dtype);
    int64_t elements = 1;
    for (const int64_t size : tensor.info.shape) {
      if (size < 0 || size > kMaxElements) return true;
      elements *= size;
      if (elements > kMaxElements) return true;
    }
    if (elements * bits % 8 != 0 || tensor.info.shape.size() > size_t{kMaxRank}) return true;
    if (!is_plain_name(tensor.info.name)) return true;
    const bool known = std::ranges::find(names, tensor.info.name) != names.end();
    names.push_back(tensor.info.name);
    tensor.info.bytes = static_cast<uint64_t>(elements * bits / 8);
    return known;
  });
}

class PoolData final : public checkpoint::TensorData {
 public:
  PoolData(const std::vector<FuzzTensor>& tensors, std::span<const std::byte> pool) {
    for (const FuzzTensor& tensor : tensors) add(tensor, pool);
  }

  void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const override {
    const std::vector<std::byte>& bytes = bytes_of(tensor);
    promise(offset <= bytes.size() && destination.size() <= bytes.size() - offset);
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(offset), destination.size(),
                destination.begin());
  }
  std::span<const std::byte> mapped(int32_t) const override { return {}; }

  const std::vector<std::byte>& bytes_of(int32_t tensor) const {
    return bytes_[static_cast<size_t>(tensor)];
  }

 private:
  void add(const FuzzTensor& tensor, std::span<const std::byte> pool) {
    std::vector<std::byte>& bytes = bytes_.emplace_back(tensor.info.bytes);
    if (tensor.filling == Filling::kZeros) return;
    // Tensors begin at different places of the pool, so that a byte of it is not one of each.
    fill_from(pool, 7 * bytes_.size(), bytes);
    if (tensor.filling == Filling::kPool) return;
    const auto size = static_cast<size_t>(std::max<int64_t>(1, bit_size(tensor.info.dtype) / 8));
    for (size_t at = 0; at < bytes.size(); ++at) {
      const bool first = at % size == 0;
      const auto step = static_cast<std::byte>(at / size / 32);
      const std::byte small = bytes[at] & std::byte{3};
      bytes[at] = first ? (tensor.filling == Filling::kSteps ? step : small) : std::byte{0};
    }
  }

  std::deque<std::vector<std::byte>> bytes_;
};

checkpoint::TensorTable table_of(const std::vector<FuzzTensor>& tensors) {
  checkpoint::TensorTable table{.names = {"fuzz.safetensors"},
                                .paths = {"fuzz.safetensors"},
                                .tensors = {},
                                .listing = "fuzz.safetensors"};
  for (const FuzzTensor& tensor : tensors) table.tensors.push_back({.info = &tensor.info});
  return table;
}

// What a layer turned out to be, and what its weights are; nothing where something was refused.
struct Decoded {
  MoeSpec spec;
  DecodedWeights weights;
};

std::optional<Decoded> read_directory(const io::JsonValue& root,
                                      const checkpoint::TensorTable& table, const PoolData& data) {
  std::optional<Decoded> decoded;
  expect_value_or_error([&] {
    checkpoint::ModelConfig config = checkpoint::read_model_config(root);
    const checkpoint::ModelLayers layers =
        checkpoint::map_model(root, table, checkpoint::ExtraLayers::kSkip, config);
    promise(layers.maps.size() == config.layers.size());
    if (!config.quantization.empty() || layers.maps.empty()) return;
    const CheckpointLayer layer =
        checkpoint::describe_layer(config, config.layers.front(), layers.maps.front());
    const auto source = checkpoint::make_layer_source(table, data, layers.maps.front(), nullptr);
    decoded = Decoded{.spec = layer.spec, .weights = walk_weights(layer.spec, *source)};
  });
  return decoded;
}

std::optional<Decoded> read_feed(const std::string& config, const std::vector<FuzzTensor>& tensors,
                                 const PoolData& data) {
  std::optional<Decoded> decoded;
  expect_value_or_error([&] {
    CheckpointFeed feed = CheckpointFeed::from_config(config);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorInfo& info = tensors[i].info;
      const std::vector<std::byte>& bytes = data.bytes_of(static_cast<int32_t>(i));
      const std::byte none{};
      expect_value_or_error([&] {
        feed.put(info.name, {.data = bytes.empty() ? &none : bytes.data(),
                             .dtype = info.dtype,
                             .shape = Shape(std::span<const int64_t>(info.shape))});
      });
    }
    promise(feed.missing(3).size() <= 3);
    if (feed.layers().empty() || !feed.is_complete(feed.layers().front())) return;
    const CheckpointLayer layer = feed.layer(feed.layers().front());
    const auto source = feed.layer_source(layer.index);
    decoded = Decoded{.spec = layer.spec, .weights = walk_weights(layer.spec, *source)};
  });
  return decoded;
}

}  // namespace

void fuzz_packed_weights(std::span<const std::byte> bytes) {
  FuzzInput input(bytes);
  const uint8_t kind = input.byte();
  const Family family = kFamilies[kind % kFamilies.size()](kSizes[input.below(kSizes.size())]);
  const bool router_too = kind >= 128;
  const std::string quantization = input.text();
  std::vector<FuzzTensor> tensors;
  const auto read = expect_value_or_error([&] {
    // By itself first, so that the text can neither close nor change the configuration around it.
    const io::JsonDocument method =
        io::JsonDocument::parse(quantization, "fuzz.quantization_config", io::kConfigLimits);
    const checkpoint::Quantization found =
        checkpoint::read_quantization(method.root(), family.experts);
    for (const Matrix& matrix : family.matrices) add_tensors(matrix, found, router_too, tensors);
  });
  if (read) return;
  edit(input, tensors);
  keep_storable(tensors);

  const PoolData data(tensors, input.rest());
  const checkpoint::TensorTable table = table_of(tensors);
  const std::string config =
      fmt::format(R"({{{},"quantization_config":{}}})", family.keys, quantization);
  std::optional<Decoded> directory;
  expect_value_or_error([&] {
    const io::JsonDocument document =
        io::JsonDocument::parse(config, "fuzz.config.json", io::kConfigLimits);
    directory = read_directory(document.root(), table, data);
  });
  if (kind % 64 >= 32) return;
  const std::optional<Decoded> fed = read_feed(config, tensors, data);
  // A model that is fed tensor by tensor has the weights of its directory.
  const bool comparable =
      directory && fed && directory->spec.weight_dtype == fed->spec.weight_dtype;
  if (comparable) promise(directory->weights == fed->weights);
}

}  // namespace conclave::testing
