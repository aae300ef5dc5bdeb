// The method "compressed-tensors": schemes for groups of modules.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"
#include "io/text.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kGroupColumns = 128;

StoredShapes words_of_rows(const MatrixForm& form) {
  return {{form.rows, ceil_div(form.cols * form.quant->stored.bits, kWordBits)}};
}
bool fills_words(const MatrixForm& form) {
  return form.cols * form.quant->stored.bits % kWordBits == 0;
}
void decode_rows(const MatrixForm& form, std::span<const PlaneInput> inputs,
                 std::span<std::byte> plane) {
  const int64_t bits = form.quant->stored.bits;
  const int64_t words = ceil_div(form.cols * bits, kWordBits);
  for (int64_t row = 0; row < form.rows; ++row) {
    const auto word = [&](int64_t i) { return word_at(inputs[0].bytes, row * words + i); };
    for (int64_t col = 0; col < form.cols; ++col) {
      set_integer(plane.data(), row * form.cols + col, bits, code_in_line(word, col, bits));
    }
  }
}

// Says again what the configuration says.
constexpr StoredPlane kShape = {.suffix = "_shape", .ending = "", .use = StoredPlane::Use::kUnused};
constexpr std::array kWords = {
    StoredPlane{.suffix = "_packed",
                .ending = "",
                .types = kWordTypes,
                .shapes = words_of_rows,
                .decode = decode_rows,
                .lies_in_place = fills_words},
    kShape,
};

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

bool is_symmetric(const io::JsonValue& scheme) { return flag_of(scheme, "symmetric", true); }

// Groups are parts of a row.
void read_group(const io::JsonValue& scheme, QuantSpec& spec) {
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
    read_group(scheme, spec);
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
  QuantizedWeights found{.element = format.element};
  const bool plain = is("naive-quantized") || is(format.compressed_tensors.in_bytes);
  const bool in_words = is(format.compressed_tensors.in_words);
  if (!in_words && !plain) throw NotRead{"the format " + io::show_name(stored)};
  read_weights(*weights, found.spec);
  if (in_words) found = codes_in_words(found.element, found.spec);
  if (const auto activations = group.find_set("input_activations")) {
    read_activations(*activations, *format.row_codes, found.spec);
  }
  if (group.find_set("output_activations")) throw NotRead{"quantised outputs"};
  return found;
}

bool same(const QuantizedWeights& one, const QuantizedWeights& other) {
  const QuantSpec& a = one.spec;
  const QuantSpec& b = other.spec;
  return one.element == other.element && one.planes.data() == other.planes.data() &&
         one.stored.bits == other.stored.bits && a.weights == b.weights &&
         a.block_rows == b.block_rows && a.block_cols == b.block_cols &&
         a.activations == b.activations && a.zeros == b.zeros &&
         a.has_column_order == b.has_column_order;
}

}  // namespace

QuantizedWeights codes_in_words(DType element, const QuantSpec& spec) {
  return {
      .element = element, .spec = spec, .stored = {.bits = bit_size(element)}, .planes = kWords};
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

}  // namespace conclave::inline v0::checkpoint
