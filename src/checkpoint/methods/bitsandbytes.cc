// The method "bitsandbytes": 4-bit codes of a flattened matrix, whose scales may be codes
// themselves, and int8 with a largest value for each row.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/shared_planes.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"
#include "core/code_bits.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "io/text.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kBlock = 64;  // what transformers quantises with
constexpr int64_t kNestedBlock = 256;
constexpr std::string_view kNested = "nested";  // a form whose scales are codes
// The sizes of the package, each a multiple of those before.
constexpr std::array<int64_t, 8> kBlocks = {32, kBlock, 128, 256, 512, 1024, 2048, 4096};
constexpr io::JsonLimits kStateLimits = {.max_bytes = 4096, .max_depth = 4, .max_values = 64};

[[noreturn]] void reject(const PlaneInput& input, const char* what, std::string expected,
                         std::string found) {
  throw Error(ErrorCode::kTensorValue, {.what = what,
                                        .file = std::string(input.file),
                                        .tensor = input.info->name,
                                        .expected = std::move(expected),
                                        .found = std::move(found)});
}

// The package keeps this of a matrix, as JSON in a tensor of bytes.
struct State {
  int64_t block = kBlock;
  int64_t nested_block = kNestedBlock;
  float nested_offset = 0;
};

State read_state(const MatrixForm& form, const PlaneInput& input, bool is_nested) {
  const io::JsonDocument document = io::JsonDocument::parse(
      input.bytes, std::string(input.file) + ": " + input.info->name, kStateLimits);
  const io::JsonValue root = document.root();
  std::vector<int64_t> shape;
  for (const io::JsonValue& size : root.at("shape").items()) shape.push_back(size.as_int64());
  if (shape != std::vector<int64_t>{form.rows, form.cols}) {
    root.at("shape").reject(ErrorCode::kTensorShape, "codes of a matrix of another shape",
                            fmt::format("[{}, {}]", form.rows, form.cols));
  }
  State state{.block = root.at("blocksize").as_int64()};
  // A group of the layer must lie within a block, whatever the blocks of other matrices are.
  if (std::ranges::find(kBlocks, state.block) == kBlocks.end() ||
      (form.group_cols != 0 && state.block % form.group_cols != 0)) {
    root.at("blocksize")
        .reject(ErrorCode::kUnsupportedQuantization, "scales of blocks of another size",
                fmt::format("one of {}, a multiple of {}", fmt::join(kBlocks, ", "),
                            std::max<int64_t>(form.group_cols, 1)));
  }
  if (is_nested) {
    state.nested_block = block_size(root.at("nested_blocksize"));
    state.nested_offset = static_cast<float>(root.at("nested_offset").as_double());
  }
  return state;
}

int64_t code_count(const MatrixForm& form) { return form.rows * form.cols; }

constexpr std::array kStorageTypes = {DType::kU8,   DType::kI8,  DType::kF16,
                                      DType::kBF16, DType::kF32, DType::kF8E4M3};

constexpr std::array kFlatFloats = {DType::kF32};
constexpr std::array kScaleTypes = {DType::kF32, DType::kU8};

// Any type may hold the bytes; they stand in one column, as no matrix does.
bool has_one_column(const TensorInfo& tensor) {
  return tensor.shape.size() == 2 && tensor.shape.back() == 1;
}
StoredShapes code_shapes(const MatrixForm& form) {
  const int64_t bytes = ceil_div(code_count(form), 2);
  StoredShapes shapes;
  for (const int64_t element : {1, 2, 4}) shapes.push_back({ceil_div(bytes, element), 1});
  return shapes;
}

// The upper half of a byte is the first code.
void swap_halves(std::span<std::byte> bytes) {
  for (std::byte& byte : bytes) byte = byte << 4 | byte >> 4;
}

void check_table(const MatrixForm& form, const PlaneInput& table) {
  const quant::WeightFormat& format = quant::format_of(form.quant->element);
  for (int64_t code = 0; code < 16; ++code) {
    const float stored = float_at(table, code);
    const float known = format.codes->decode(static_cast<uint8_t>(code));
    if (std::abs(stored - known) <= 0x1p-20F) continue;
    reject(table, "a code has a value of its own", fmt::format("{}", known),
           fmt::format("{}", stored));
  }
}

// Blocks reach over the ends of rows: a plane has a scale for each part of a row that lies in one.
StoredShapes flat_shapes(const MatrixForm& form) {
  StoredShapes shapes = {{ceil_div(code_count(form), kBlock)}};
  for (const int64_t block : kBlocks) {
    shapes.push_back({ceil_div(code_count(form), block)});
    shapes.push_back({ceil_div(code_count(form), block), 1});
  }
  return shapes;
}

float scale_of(std::span<const PlaneInput> inputs, const State& state, int64_t block) {
  const PlaneInput& scales = inputs[0];
  if (inputs.size() == 3) return float_at(scales, block);
  const float value = float_at(inputs[4], value_at<uint8_t>(scales.bytes, block));
  return value * float_at(inputs[3], block / state.nested_block) + state.nested_offset;
}

// The inputs are scales, their state and table, and where scales are codes, their own scales and
// table.
State check_scales(const MatrixForm& form, std::span<const PlaneInput> inputs) {
  const State state = read_state(form, inputs[1], inputs.size() > 3);
  check_input(inputs[2], kFloatTypes, {{16}});
  check_table(form, inputs[2]);
  const int64_t blocks = ceil_div(code_count(form), state.block);
  check_input(inputs[0], kScaleTypes, {{blocks}, {blocks, 1}});
  if (inputs.size() > 3) {
    check_input(inputs[3], kFloatTypes, {{ceil_div(blocks, state.nested_block)}});
    check_input(inputs[4], kFloatTypes, {{256}});
  }
  return state;
}

void decode_scales(const MatrixForm& form, std::span<const PlaneInput> inputs,
                   std::span<std::byte> plane) {
  const State state = check_scales(form, inputs);
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      const int64_t first = row * form.cols + group * form.group_cols;
      set_float(plane, row * form.groups + group, scale_of(inputs, state, first / state.block));
    }
  }
}

// The package packs every linear module that it is not told to skip, routers too.
void decode_flat_values(const MatrixForm& form, std::span<const PlaneInput> inputs,
                        std::span<std::byte> values) {
  const int64_t bytes = ceil_div(code_count(form), 2);
  if (std::ssize(inputs[0].bytes) < bytes) {
    reject(inputs[0], "too few codes for the matrix", fmt::format("{} bytes", bytes),
           fmt::format("{} bytes", inputs[0].bytes.size()));
  }
  const std::span<const PlaneInput> scales = inputs.subspan(1);
  const bool is_nested = scales.size() > 3;
  check_input(scales[0], is_nested ? std::span<const DType>(kByteTypes) : kFlatFloats,
              flat_shapes(form));
  MatrixForm flat = form;
  flat.group_cols = 0;
  const State state = check_scales(flat, scales);
  const quant::WeightFormat& format = quant::format_of(form.quant->element);
  for (int64_t i = 0; i < code_count(form); ++i) {
    const auto pair = value_at<uint8_t>(inputs[0].bytes, i / 2);
    const auto code = static_cast<uint8_t>(i % 2 == 0 ? pair >> 4 : pair & 0xfU);
    set_float(values, i, format.codes->decode(code) * scale_of(scales, state, i / state.block));
  }
}

constexpr std::string_view kScales = ".absmax";
constexpr std::string_view kTable = ".quant_map";
constexpr std::string_view kNestedScales = ".nested_absmax";
constexpr std::string_view kNestedTable = ".nested_quant_map";

constexpr std::string_view kNf4State = ".quant_state.bitsandbytes__nf4";
constexpr std::string_view kFp4State = ".quant_state.bitsandbytes__fp4";

// The way back. Matrices are written where rows are whole blocks, so that scales are those of rows.

int64_t block_count(const MatrixForm& form) { return ceil_div(code_count(form), kBlock); }

// The package has this table for all codes of scales: in each of seven decades as many values as a
// power of two, with both signs, then 0 and 1.
std::array<float, 256> nested_values() {
  std::array<float, 256> values = {};
  size_t count = 0;
  for (int decade = 0; decade < 7; ++decade) {
    const int steps = 1 << decade;
    const double largest = std::pow(10.0, decade - 6);
    for (int step = 0; step < steps; ++step) {
      const double middle = 0.1 + 0.9 * (step + 0.5) / steps;
      values[count++] = static_cast<float>(largest * middle);
      values[count++] = static_cast<float>(-largest * middle);
    }
  }
  values[count++] = 0;
  values[count++] = 1;
  std::ranges::sort(values);
  return values;
}

// Scales as codes: less their mean, and over the largest that is left of each block of them.
struct NestedScales {
  float offset = 0;
  std::vector<float> largest;
  std::vector<uint8_t> codes;
};

NestedScales nest(std::span<const std::byte> scales) {
  const int64_t count = std::ssize(scales) / static_cast<int64_t>(sizeof(float));
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double{value_at<float>(scales, i)};
  NestedScales nested{
      .offset = static_cast<float>(sum / static_cast<double>(count)), .largest = {}, .codes = {}};
  const std::array<float, 256> values = nested_values();
  for (int64_t begin = 0; begin < count; begin += kNestedBlock) {
    const int64_t end = std::min(count, begin + kNestedBlock);
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, std::abs(value_at<float>(scales, i) - nested.offset));
    }
    nested.largest.push_back(largest);
    for (int64_t i = begin; i < end; ++i) {
      const float off = value_at<float>(scales, i) - nested.offset;
      const float share = largest > 0 ? off / largest : 0.0F;
      const auto nearest = std::ranges::min_element(
          values, {}, [&](float value) { return std::abs(value - share); });
      nested.codes.push_back(static_cast<uint8_t>(nearest - values.begin()));
    }
  }
  return nested;
}

template <class T>
void put(std::span<const T> values, std::span<std::byte> tensor) {
  std::memcpy(tensor.data(), values.data(), values.size_bytes());
}

void encode_flat_scales(const MatrixForm&, const MatrixPlanes& planes,
                        std::span<std::byte> tensor) {
  put(planes.scales, tensor);
}

void encode_nested_codes(const MatrixForm&, const MatrixPlanes& planes,
                         std::span<std::byte> tensor) {
  put(std::span<const uint8_t>(nest(planes.scales).codes), tensor);
}

StoredShapes nested_shapes(const MatrixForm& form) {
  return {{ceil_div(block_count(form), kNestedBlock)}};
}
void encode_nested_scales(const MatrixForm&, const MatrixPlanes& planes,
                          std::span<std::byte> tensor) {
  put(std::span<const float>(nest(planes.scales).largest), tensor);
}

StoredShapes nested_table_shapes(const MatrixForm&) { return {{256}}; }
void encode_nested_table(const MatrixForm&, const MatrixPlanes&, std::span<std::byte> tensor) {
  put(std::span<const float>(nested_values()), tensor);
}

StoredShapes table_shapes(const MatrixForm&) { return {{16}}; }
void encode_table(const MatrixForm& form, const MatrixPlanes&, std::span<std::byte> tensor) {
  const quant::WeightFormat& format = quant::format_of(form.quant->element);
  for (int64_t code = 0; code < 16; ++code) {
    set_float(tensor, code, format.codes->decode(static_cast<uint8_t>(code)));
  }
}

// Its length depends on the sizes alone: the number has as many digits as any other.
template <bool kIsNf4, bool kIsNested>
std::string state_text(const MatrixForm& form, float offset) {
  std::string text = fmt::format(
      R"({{"quant_type": "{}", "blocksize": {}, "dtype": "bfloat16", "shape": [{}, {}])",
      kIsNf4 ? "nf4" : "fp4", kBlock, form.rows, form.cols);
  if (kIsNested) {
    text += fmt::format(
        R"(, "nested_blocksize": {}, "nested_dtype": "float32", "nested_offset": {:.8e})",
        kNestedBlock, offset);
  }
  return text + "}";
}
template <bool kIsNf4, bool kIsNested>
StoredShapes state_shapes(const MatrixForm& form) {
  return {{std::ssize(state_text<kIsNf4, kIsNested>(form, 0))}};
}
template <bool kIsNf4, bool kIsNested>
void encode_state(const MatrixForm& form, const MatrixPlanes& planes, std::span<std::byte> tensor) {
  const float offset = kIsNested ? nest(planes.scales).offset : 0.0F;
  put(std::span<const char>(state_text<kIsNf4, kIsNested>(form, offset)), tensor);
}

// Values take all of these, scales all but the first.
template <bool kIsNf4>
constexpr std::array kInputs = {kScales, kIsNf4 ? kNf4State : kFp4State, kTable, kNestedScales,
                                kNestedTable};
template <bool kIsNf4, bool kIsNested>
constexpr std::span<const std::string_view> kValueInputs =
    std::span(kInputs<kIsNf4>).first(kIsNested ? 5 : 3);

constexpr StoredPlane input(std::string_view suffix, std::span<const DType> types,
                            decltype(StoredPlane::shapes) shapes,
                            decltype(StoredPlane::encode) encode) {
  return {.suffix = suffix,
          .ending = "",
          .use = StoredPlane::Use::kInput,
          .types = types,
          .shapes = shapes,
          .encode = encode};
}

template <bool kIsNf4, bool kIsNested>
constexpr std::array kPlanes = {
    StoredPlane{.suffix = "",
                .ending = "",
                .types = kStorageTypes,
                .shapes = code_shapes,
                .has_codes = has_one_column,
                .convert = swap_halves,
                .value_shapes = code_shapes,
                .decode_values = decode_flat_values,
                .value_inputs = kValueInputs<kIsNf4, kIsNested>},
    StoredPlane{.suffix = kScales,
                .ending = "",
                .plane = WeightPlane::kScale,
                .types = kIsNested ? std::span<const DType>(kByteTypes) : kFlatFloats,
                .shapes = flat_shapes,
                .type = DType::kF32,
                .decode = decode_scales,
                .inputs = kValueInputs<kIsNf4, kIsNested>.subspan(1),
                .encode = kIsNested ? encode_nested_codes : encode_flat_scales},
    input(kIsNf4 ? kNf4State : kFp4State, kByteTypes, state_shapes<kIsNf4, kIsNested>,
          encode_state<kIsNf4, kIsNested>),
    input(kTable, kFlatFloats, table_shapes, encode_table),
    input(kNestedScales, kFlatFloats, nested_shapes, kIsNested ? encode_nested_scales : nullptr),
    input(kNestedTable, kFlatFloats, nested_table_shapes,
          kIsNested ? encode_nested_table : nullptr),
};

std::span<const StoredPlane> planes_for(bool nf4, bool nested) {
  if (nf4) return nested ? std::span(kPlanes<true, true>) : std::span(kPlanes<true, false>);
  return nested ? std::span(kPlanes<false, true>) : std::span(kPlanes<false, false>);
}

// One width of groups for all matrices of the layer that ends where their rows end.
void fit_to_rows(const StoredCodes& stored, const MoeSpec& layer, QuantSpec& spec) {
  int64_t width = std::gcd(stored.flat_block, layer.intermediate_size);
  width = std::gcd(width, layer.latent.size != 0 ? layer.latent.size : layer.hidden_size);
  if (shared_facts(layer).is_there) {
    width = std::gcd(width, std::gcd(layer.hidden_size, layer.shared.intermediate_size));
  }
  spec.block_cols = width;
}

// The size of the blocks of a matrix with so many bytes of codes; the last may hold padding. 0:
// the number of scales fits several, or none.
int64_t block_of(uint64_t code_bytes, int64_t scales) {
  constexpr int64_t kMostPadding = 8;
  const auto codes = 2 * static_cast<int64_t>(code_bytes);
  int64_t found = 0;
  for (const int64_t block : kBlocks) {
    if (scales < ceil_div(codes - kMostPadding + 1, block) || scales > ceil_div(codes, block)) {
      continue;
    }
    if (found != 0) return 0;
    found = block;
  }
  return found;
}

// The smallest blocks of the model, which lie within all others.
void settle_block(std::span<const TensorInfo* const> tensors, StoredCodes& stored) {
  std::map<std::string_view, const TensorInfo*> by_name;
  for (const TensorInfo* tensor : tensors) by_name.emplace(tensor->name, tensor);
  int64_t smallest = 0;
  for (const auto& [name, scales] : by_name) {
    if (!name.ends_with(kScales) || name.ends_with(kNestedScales)) continue;
    const auto codes = by_name.find(name.substr(0, name.size() - kScales.size()));
    if (codes == by_name.end() || scales->shape.empty()) continue;
    const int64_t block = block_of(codes->second->bytes, scales->shape.front());
    if (block != 0) smallest = smallest == 0 ? block : std::min(smallest, block);
  }
  if (smallest != 0) stored.flat_block = smallest;
}

QuantizedWeights read_flat_codes(const io::JsonValue& config) {
  const std::string type = text_of(config, "bnb_4bit_quant_type", "fp4");
  if (type != "nf4" && type != "fp4") throw NotRead{"codes of the type " + io::show_name(type)};
  const bool nf4 = type == "nf4";
  QuantizedWeights weights{
      .element = nf4 ? DType::kNF4 : DType::kBnbFP4,
      .stored = {.bits = 4, .flat_block = kBlock},
      .planes = planes_for(nf4, flag_of(config, "bnb_4bit_use_double_quant", false)),
      .settle = settle_block,
      .fit = fit_to_rows};
  set_block(weights.spec, 1, kBlock);
  return weights;
}

// Codes of int8 lie as they are, with the largest value of each row, which has the code 127.

StoredShapes row_shapes(const MatrixForm& form) { return {{form.rows}, {form.rows, 1}}; }

void decode_row_scales(const MatrixForm& form, std::span<const PlaneInput> inputs,
                       std::span<std::byte> plane) {
  for (int64_t row = 0; row < form.rows; ++row) {
    set_float(plane, row, float_at(inputs[0], row) / 127);
  }
}

void decode_row_values(const MatrixForm& form, std::span<const PlaneInput> inputs,
                       std::span<std::byte> values) {
  check_input(inputs[1], kFloatTypes, row_shapes(form));
  for (int64_t i = 0; i < code_count(form); ++i) {
    const auto code = static_cast<float>(value_at<int8_t>(inputs[0].bytes, i));
    set_float(values, i, code * (float_at(inputs[1], i / form.cols) / 127));
  }
}

void encode_row_scales(const MatrixForm& form, const MatrixPlanes& planes,
                       std::span<std::byte> tensor) {
  for (int64_t row = 0; row < form.rows; ++row) {
    set_float(tensor, row, value_at<float>(planes.scales, row) * 127);
  }
}

// Says that rows of codes follow each other, which is 0.
StoredShapes one_number(const MatrixForm&) { return {{}}; }
void encode_row_order(const MatrixForm&, const MatrixPlanes&, std::span<std::byte> tensor) {
  tensor[0] = std::byte{0};
}

bool has_integers(const TensorInfo& tensor) { return !is_plain(tensor.dtype); }

constexpr std::array kIntegerTypes = {DType::kI8};
constexpr std::string_view kLargest = ".SCB";
constexpr std::array kLargestOnly = {kLargest};
constexpr std::array kInt8Planes = {
    StoredPlane{.suffix = ".weight",
                .types = kIntegerTypes,
                .shapes = codes_as_read,
                .has_codes = has_integers,
                .value_shapes = codes_as_read,
                .decode_values = decode_row_values,
                .value_inputs = kLargestOnly},
    StoredPlane{.suffix = kLargest,
                .plane = WeightPlane::kScale,
                .types = kFloatTypes,
                .shapes = row_shapes,
                .type = DType::kF32,
                .decode = decode_row_scales,
                .encode = encode_row_scales},
    StoredPlane{.suffix = ".weight_format",
                .use = StoredPlane::Use::kUnused,
                .types = kByteTypes,
                .shapes = one_number,
                .encode = encode_row_order},
};

}  // namespace

QuantizedWeights read_bitsandbytes(const io::JsonValue& config) {
  if (flag_of(config, "load_in_4bit", false)) return read_flat_codes(config);
  if (!flag_of(config, "load_in_8bit", false)) throw NotRead{"neither 4 nor 8 bits"};
  return {.element = DType::kI8,
          .spec = {.weights = WeightScale::kChannel},
          .planes = kInt8Planes,
          .note =
              "bitsandbytes would multiply columns with outliers in float16; rows stay as "
              "they are here"};
}

std::string write_bitsandbytes(const MethodForm& form, const std::vector<std::string>& kept) {
  constexpr std::array kTypes = {std::pair(DType::kNF4, "nf4"), std::pair(DType::kBnbFP4, "fp4")};
  const auto* const type =
      std::ranges::find(kTypes, form.codes, [](const auto& row) { return row.first; });
  const bool in_blocks = type != kTypes.end();
  nlohmann::ordered_json config = {{"quant_method", form.method},
                                   {"load_in_8bit", !in_blocks},
                                   {"load_in_4bit", in_blocks},
                                   {"llm_int8_threshold", 6.0},
                                   {"llm_int8_skip_modules", kept}};
  if (in_blocks) {
    config["bnb_4bit_quant_type"] = type->second;
    config["bnb_4bit_use_double_quant"] = form.format == kNested;
    config["bnb_4bit_quant_storage"] = "uint8";
    config["bnb_4bit_compute_dtype"] = "bfloat16";
  }
  return config.dump();
}

}  // namespace conclave::inline v0::checkpoint
