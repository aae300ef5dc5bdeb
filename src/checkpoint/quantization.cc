#include "checkpoint/quantization.h"

#include "checkpoint/config_reader.h"
#include "io/text.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <charconv>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kMaxBlock = int64_t{1} << 20;
constexpr int64_t kGroupColumns = 128;

// A method stores weights in a way that is not read: this is a verdict, not a fault of the file.
struct NotRead {
  std::string reason;
};

std::string text_of(const io::JsonValue& object, std::string_view key, std::string_view otherwise) {
  const auto value = object.find_set(key);
  return std::string(value ? value->as_string() : otherwise);
}

int64_t block_size(const io::JsonValue& value) {
  const int64_t size = value.as_int64();
  if (size >= 1 && size <= kMaxBlock) return size;
  value.reject(ErrorCode::kConfigValue, "a block size is out of range",
               fmt::format("1 to {}", kMaxBlock));
}

void set_block(QuantSpec& spec, int64_t rows, int64_t cols) {
  spec.weights = WeightScale::kBlock;
  spec.block_rows = rows;
  spec.block_cols = cols;
}

void set_block(const io::JsonValue& sizes, QuantSpec& spec) {
  if (sizes.size() != 2) {
    sizes.reject(ErrorCode::kConfigValue, "a block has two sizes", "[rows, columns]");
  }
  std::vector<int64_t> read;
  for (const io::JsonValue& size : sizes.items()) read.push_back(block_size(size));
  set_block(spec, read[0], read[1]);
}

// Parses "128x128".
void set_block_text(const io::JsonValue& value, QuantSpec& spec) {
  const std::string_view text = value.as_string();
  int64_t rows = 0;
  int64_t cols = 0;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, rows);
  const bool parts = first.ec == std::errc() && first.ptr != end && *first.ptr == 'x';
  const auto second = parts ? std::from_chars(first.ptr + 1, end, cols) : first;
  const auto in_range = [](int64_t size) { return size >= 1 && size <= kMaxBlock; };
  if (!parts || second.ec != std::errc() || second.ptr != end || !in_range(rows) ||
      !in_range(cols)) {
    value.reject(ErrorCode::kConfigValue, "a block size has no meaning", "\"128x128\"");
  }
  set_block(spec, rows, cols);
}

// The groups of dynamic activations follow the blocks of the weights.
void set_dynamic(QuantSpec& spec) {
  if (spec.weights != WeightScale::kBlock) {
    spec.activations = ActivationScale::kToken;
    return;
  }
  if (spec.block_cols != kGroupColumns) {
    throw NotRead{fmt::format("activations in groups of {} columns; this version has groups of {}",
                              spec.block_cols, kGroupColumns)};
  }
  spec.activations = ActivationScale::kGroup;
}

QuantSpec read_fp8(const io::JsonValue& config) {
  const std::string fmt = text_of(config, "fmt", "e4m3");
  if (fmt != "e4m3" && fmt != "float8_e4m3fn") throw NotRead{"codes of " + io::show_name(fmt)};
  QuantSpec spec{.weights = WeightScale::kTensor};
  if (const auto block = config.find_set("weight_block_size")) set_block(*block, spec);
  const std::string scheme = text_of(config, "activation_scheme", "dynamic");
  if (scheme == "dynamic") {
    set_dynamic(spec);
    spec.power_of_two_scales = text_of(config, "scale_fmt", "float") == "ue8m0";
  } else if (scheme == "static") {
    spec.activations = ActivationScale::kTensorStatic;
  } else {
    config.at("activation_scheme")
        .reject(ErrorCode::kConfigValue, "no such activation scheme", "dynamic or static");
  }
  return spec;
}

// The format of the codes that a scheme names by their bits and kind.
const quant::WeightFormat& format_of_scheme(const io::JsonValue& scheme) {
  const auto bits = scheme.find_set("num_bits");
  const std::string kind = text_of(scheme, "type", "int");
  for (const quant::WeightFormat& format : quant::format_catalog().rows()) {
    if (format.codes == nullptr || !bits || bits->as_int64() != bit_size(format.element)) continue;
    if (kind == format.compressed_tensors.type) return format;
  }
  throw NotRead{fmt::format("{} codes of {} bits", kind, bits ? bits->as_int64() : 0)};
}

bool is_symmetric(const io::JsonValue& scheme) {
  const auto symmetric = scheme.find_set("symmetric");
  return !symmetric || symmetric->as_bool();
}

// Groups are parts of a row.
void set_group(const io::JsonValue& scheme, QuantSpec& spec) {
  set_block(spec, 1, block_size(scheme.at("group_size")));
  // "weight" and "static" order columns while scales are sought, and store them as they were.
  const auto order = scheme.find_set("actorder");
  const std::string_view name = order && order->is_string() ? order->as_string() : "";
  if (order && name != "weight" && name != "static") {
    throw NotRead{"groups of columns in an order of their own (actorder)"};
  }
}

void read_weights(const io::JsonValue& scheme, QuantSpec& spec) {
  if (!is_symmetric(scheme)) throw NotRead{"weights with zero points"};
  const std::string strategy = text_of(scheme, "strategy", "tensor");
  if (strategy == "tensor") {
    spec.weights = WeightScale::kTensor;
  } else if (strategy == "channel") {
    spec.weights = WeightScale::kChannel;
  } else if (strategy == "block") {
    const io::JsonValue sizes = scheme.at("block_structure");
    sizes.is_string() ? set_block_text(sizes, spec) : set_block(sizes, spec);
  } else if (strategy == "group") {
    set_group(scheme, spec);
  } else {
    throw NotRead{"weights of the strategy " + io::show_name(strategy)};
  }
}

// "dynamic" is a flag; schemes of other formats use a text.
bool is_dynamic(const io::JsonValue& scheme) {
  const auto dynamic = scheme.find_set("dynamic");
  if (!dynamic) return false;
  if (dynamic->is_string()) {
    throw NotRead{"activations that are dynamic: " + io::show_name(dynamic->as_string())};
  }
  return dynamic->as_bool();
}

void read_activations(const io::JsonValue& scheme, const quant::CodeBook& codes, QuantSpec& spec) {
  const DType element = format_of_scheme(scheme).element;
  if (element != codes.element) {
    throw NotRead{fmt::format("activations in {} beside such weights", to_string(element))};
  }
  if (!is_symmetric(scheme)) throw NotRead{"activations with zero points"};
  const std::string strategy = text_of(scheme, "strategy", "tensor");
  const bool dynamic = is_dynamic(scheme);
  if (!dynamic && strategy == "tensor") {
    spec.activations = ActivationScale::kTensorStatic;
  } else if (dynamic && (strategy == "token" || strategy == "tensor")) {
    spec.activations = ActivationScale::kToken;
  } else if (dynamic && (strategy == "group" || strategy == "tensor_group")) {
    const int64_t size = scheme.at("group_size").as_int64();
    if (size != kGroupColumns) {
      throw NotRead{
          fmt::format("activations in groups of {} columns; this version has groups of "
                      "{}",
                      size, kGroupColumns)};
    }
    spec.activations = ActivationScale::kGroup;
  } else {
    throw NotRead{fmt::format("{} activations of the strategy {}", dynamic ? "dynamic" : "static",
                              io::show_name(strategy))};
  }
}

QuantizedWeights read_config_group(const io::JsonValue& group, const std::string& stored) {
  const auto weights = group.find_set("weights");
  if (!weights) throw NotRead{"activations only"};
  const quant::WeightFormat& format = format_of_scheme(*weights);
  const auto is = [&](std::string_view name) { return !name.empty() && stored == name; };
  QuantizedWeights found{.element = format.element,
                         .in_words = is(format.compressed_tensors.in_words)};
  const bool plain = is("naive-quantized") || is(format.compressed_tensors.in_bytes);
  if (!found.in_words && !plain) throw NotRead{"the format " + io::show_name(stored)};
  read_weights(*weights, found.spec);
  if (const auto activations = group.find_set("input_activations")) {
    read_activations(*activations, *format.row_codes, found.spec);
  }
  if (group.find_set("output_activations")) throw NotRead{"quantised outputs"};
  if (Support takes = format.takes(found.spec); !takes) throw NotRead{takes.reason()};
  return found;
}

bool same(const QuantizedWeights& one, const QuantizedWeights& other) {
  const QuantSpec& a = one.spec;
  const QuantSpec& b = other.spec;
  return one.element == other.element && one.in_words == other.in_words && a.weights == b.weights &&
         a.block_rows == b.block_rows && a.block_cols == b.block_cols &&
         a.activations == b.activations;
}

QuantizedWeights read_compressed_tensors(const io::JsonValue& config) {
  const std::string format = text_of(config, "format", "float-quantized");
  const bool by_group = format == "mixed-precision";
  if (const auto sparsity = config.find_set("sparsity_config")) {
    const std::string stored = text_of(*sparsity, "format", "dense");
    if (stored != "dense") throw NotRead{"the sparse format " + io::show_name(stored)};
  }
  const auto transforms = config.find_set("transform_config");
  if (transforms && transforms->size() > 0) throw NotRead{"transforms of activations"};
  std::optional<QuantizedWeights> weights;
  for (const io::JsonMember& member : config.at("config_groups").members()) {
    const std::string stored = by_group ? text_of(member.value, "format", "none given") : format;
    const QuantizedWeights group = read_config_group(member.value, stored);
    if (weights && !same(*weights, group)) {
      throw NotRead{"config_groups that differ from each other"};
    }
    weights = group;
  }
  if (!weights) throw NotRead{"no config_groups"};
  return *weights;
}

QuantSpec spec_of_algorithm(const std::string& algorithm) {
  if (algorithm == "FP8") {
    return {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic};
  }
  if (algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    return {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
  }
  if (algorithm == "FP8_PB_WO") return {.weights = WeightScale::kBlock};
  throw NotRead{"the algorithm " + io::show_name(algorithm)};
}

// The methods "fp8" and ModelOpt's algorithms for it have one type of codes.
QuantizedWeights e4m3(const QuantSpec& spec) { return {.element = DType::kF8E4M3, .spec = spec}; }

template <class Read>
Quantization attempt(std::string method, const Read& read) {
  Quantization result{.method = std::move(method), .weights = {}, .reason = {}};
  try {
    result.weights = read();
  } catch (const NotRead& refusal) {
    result.reason = refusal.reason;
  }
  return result;
}

}  // namespace

Quantization read_quantization(const io::JsonValue& config) {
  const auto given = config.find_set("quant_method");
  if (!given) {
    return {
        .method = "a method that " + config.path() + " does not name", .weights = {}, .reason = {}};
  }
  const std::string method = io::show_name(given->as_string());
  if (method == "fp8") return attempt(method, [&] { return e4m3(read_fp8(config)); });
  if (method == "compressed-tensors") {
    return attempt(method, [&] { return read_compressed_tensors(config); });
  }
  if (method == "modelopt") return read_modelopt(config);
  return {.method = method, .weights = {}, .reason = {}};
}

Quantization read_modelopt(const io::JsonValue& root) {
  return attempt("modelopt", [&] {
    const auto nested = root.find_set("quantization");
    const auto algorithm = (nested ? *nested : root).find_set("quant_algo");
    if (!algorithm) throw NotRead{"no quant_algo"};
    return e4m3(spec_of_algorithm(std::string(algorithm->as_string())));
  });
}

}  // namespace conclave::inline v0::checkpoint
