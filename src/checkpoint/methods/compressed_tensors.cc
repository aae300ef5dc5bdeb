// The method "compressed-tensors": schemes for groups of modules.
#include "checkpoint/methods/compressed_tensors_planes.h"
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/module_rules.h"
#include "checkpoint/methods/words.h"
#include "io/text.h"
#include "quant/activation_rows.h"
#include "quant/weight_format.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

using Storage = CompressedStorage;

// The type of the codes that a scheme names by their bits and kind.
DType type_of_scheme(const io::JsonValue& scheme) {
  const auto given = scheme.find_set("num_bits");
  const int64_t bits = given ? given->as_int64() : 0;
  const std::string kind = text_of(scheme, "type", "int");
  if (kind == "int" && bits >= 2 && bits <= 8) return integer_type(bits);
  for (const quant::WeightFormat& format : quant::format_catalog().rows()) {
    const bool has_codes =
        format.codes != nullptr && !kind.empty() && kind == format.compressed_tensors;
    if (has_codes && bits == bit_size(format.element)) return format.element;
  }
  throw NotRead{fmt::format("{} codes of {} bits", kind.empty() ? "\"\"" : kind, bits)};
}

bool is_symmetric(const io::JsonValue& scheme) { return flag_of(scheme, "symmetric", true); }

// Groups are parts of a row.
void read_group(const io::JsonValue& scheme, QuantSpec& spec) {
  set_block(spec, 1, block_size(scheme.at("group_size")));
  // "weight" and "static" order columns while scales are sought, and store them as they were.
  const auto order = scheme.find_set("actorder");
  if (!order || (order->is_bool() && !order->as_bool())) return;
  const std::string_view name = order->is_string() ? order->as_string() : "";
  if (name == "group" || order->is_bool()) {
    spec.has_column_order = true;
  } else if (name != "weight" && name != "static") {
    throw NotRead{"groups of columns in an order of their own (actorder)"};
  }
}

void read_weights(const io::JsonValue& scheme, QuantSpec& spec) {
  if (!is_symmetric(scheme)) spec.zeros = WeightZero::kPoint;
  const std::string strategy = text_of(scheme, "strategy", "tensor");
  if (strategy == "tensor") {
    spec.weights = WeightScale::kTensor;
  } else if (strategy == "channel") {
    spec.weights = WeightScale::kChannel;
  } else if (strategy == "block") {
    const io::JsonValue sizes = scheme.at("block_structure");
    sizes.is_string() ? set_block_text(sizes, spec) : set_block(sizes, spec);
  } else if (strategy == "group" || strategy == "tensor_group") {
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

// A scheme of rows may leave its type out, which is then the one that goes beside the weights.
DType row_type(const io::JsonValue& scheme, DType weights) {
  const DType usual = quant::format_of(weights).row_codes->element;
  if (!scheme.find_set("num_bits") && !scheme.find_set("type")) return usual;
  const DType element = type_of_scheme(scheme);
  if (quant::takes_quotient_rows(weights, element)) return element;
  throw NotRead{fmt::format("activations in {} beside such weights", to_string(element))};
}

// Groups of rows without a size of their own are as wide as the blocks of the weights.
int64_t group_of_rows(const io::JsonValue& scheme, const QuantSpec& spec) {
  const auto size = scheme.find_set("group_size");
  if (!size && spec.weights == WeightScale::kBlock) return spec.block_cols;
  return block_size(size ? *size : scheme.at("group_size"));
}

void read_activations(const io::JsonValue& scheme, QuantizedWeights& weights) {
  QuantSpec& spec = weights.spec;
  const DType rows = row_type(scheme, weights.element);
  if (!is_symmetric(scheme)) throw NotRead{"activations with zero points"};
  // Zeros are multiplied with sums of rows' codes, which are exact for integers alone.
  QuantSpec coded = spec;
  coded.activation_dtype = rows;
  const bool is_exact = quant::activation_rule(weights.element, coded).is_exact();
  if (spec.has_column_order || (spec.zeros != WeightZero::kNone && !is_exact)) {
    weights.note = kPlainRows;
    return;
  }
  if (rows != quant::format_of(weights.element).row_codes->element) spec.activation_dtype = rows;
  const std::string strategy = text_of(scheme, "strategy", "tensor");
  const bool dynamic = is_dynamic(scheme);
  if (!dynamic && strategy == "tensor") {
    spec.activations = ActivationScale::kTensorStatic;
  } else if (dynamic && (strategy == "token" || strategy == "tensor")) {
    spec.activations = ActivationScale::kToken;
  } else if (dynamic && (strategy == "group" || strategy == "tensor_group")) {
    spec.activations = ActivationScale::kGroup;
    spec.activation_group = group_of_rows(scheme, spec);
  } else {
    throw NotRead{fmt::format("{} activations of the strategy {}", dynamic ? "dynamic" : "static",
                              io::show_name(strategy))};
  }
}

bool states_exponents(const io::JsonValue& scheme) {
  return text_of(scheme, "scale_dtype", "").find("uint8") != std::string::npos;
}
// Scales of rows that are powers of two or e4m3 themselves.
bool has_small_scales(const io::JsonValue& scheme) {
  return states_exponents(scheme) ||
         text_of(scheme, "scale_dtype", "").find("float8") != std::string::npos;
}

bool is_local(const io::JsonValue& scheme) {
  const auto dynamic = scheme.find_set("dynamic");
  return dynamic && dynamic->is_string() && dynamic->as_string() == "local";
}

// The package's generate_mx_scales rounds amax by the mantissa of its codes, but e4m3 as e2m1.
struct PackageRows {
  int64_t bits;
  DType rows;
  RowScaleRule rule;
};
constexpr int64_t kPackageGroup = 32;
constexpr std::array kPackageRows = {PackageRows{4, DType::kF4, RowScaleRule::kEvenPower},
                                     PackageRows{6, DType::kF6E2M3, RowScaleRule::kEvenPower},
                                     PackageRows{8, DType::kF8E4M3, RowScaleRule::kHalfPower}};

// Rows of small floats in groups of columns, whose scales are powers of two, or e4m3 with a number
// of the checkpoint. False: they are quantised in another way.
bool read_scaled_rows(const io::JsonValue& scheme, int64_t bits, QuantizedWeights& weights) {
  const auto size = scheme.find_set("group_size");
  const std::string strategy = text_of(scheme, "strategy", "tensor");
  const bool may = size && is_symmetric(scheme) && weights.spec.zeros == WeightZero::kNone &&
                   !weights.spec.has_column_order;
  if (!may) return false;
  if (bits == 4 && strategy == "tensor_group" && is_local(scheme)) {
    if (!weights.spec.has_global_scale) return false;
    set_scaled_rows(DType::kF4, block_size(*size), RowScaleRule::kTwoLevel, weights);
    return true;
  }
  const bool mx =
      states_exponents(scheme) && strategy == "group" && block_size(*size) == kPackageGroup;
  if (!mx || !is_dynamic(scheme)) return false;
  const auto* const found = std::ranges::find(kPackageRows, bits, &PackageRows::bits);
  if (found == kPackageRows.end()) return false;
  set_scaled_rows(found->rows, kPackageGroup, found->rule, weights);
  return true;
}

// Rows whose scales are of another type than layers make stay as they are.
void read_rows(const io::JsonValue& scheme, QuantizedWeights& weights) {
  const bool floats = text_of(scheme, "type", "int") == "float";
  const auto given = scheme.find_set("num_bits");
  const int64_t bits = given ? given->as_int64() : 0;
  const bool other = floats && ((given && bits < 8) || has_small_scales(scheme));
  if (!other || text_of(scheme, "strategy", "tensor") == "token") {
    return read_activations(scheme, weights);
  }
  if (!read_scaled_rows(scheme, bits, weights)) weights.note = kPlainRows;
}

// How the format that a scheme names stores its codes.
Storage storage_of(const io::JsonValue& scheme, const std::string& stored, const QuantSpec& spec) {
  const int64_t bits = scheme.at("num_bits").as_int64();
  const bool floats = text_of(scheme, "type", "int") == "float";
  const bool bytes = bits == 8 && (stored == "naive-quantized" ||
                                   stored == (floats ? "float-quantized" : "int-quantized"));
  if (bytes) return {.kind = Storage::Kind::kBytes, .bits = bits};
  if (!floats && stored == "pack-quantized") return {.kind = Storage::Kind::kWords, .bits = bits};
  if (floats && bits == 4 && stored == "nvfp4-pack-quantized") {
    return {.kind = Storage::Kind::kPairs, .bits = bits};
  }
  const bool groups = spec.weights == WeightScale::kBlock && spec.block_rows == 1;
  if (floats && bits == 4 && groups && stored == "mxfp4-pack-quantized") {
    return {.kind = Storage::Kind::kPairs, .bits = bits, .scales_in_bytes = true};
  }
  if (floats && bits == 8 && groups && stored == "mxfp8-quantized") {
    return {.kind = Storage::Kind::kBytes, .bits = bits, .scales_in_bytes = true};
  }
  throw NotRead{"the format " + io::show_name(stored)};
}

QuantizedWeights read_config_group(const io::JsonValue& group, const std::string& stored) {
  const auto weights = group.find_set("weights");
  if (!weights) throw NotRead{"activations only"};
  QuantizedWeights found{.element = type_of_scheme(*weights)};
  read_weights(*weights, found.spec);
  const auto group_size = weights->find_set("group_size");
  if (group_size && found.spec.weights == WeightScale::kBlock && found.spec.block_rows == 1) {
    found.whole_groups = key_of(*group_size);
  }
  const Storage storage = storage_of(*weights, stored, found.spec);
  found.spec.has_global_scale = stored == "nvfp4-pack-quantized";
  found.stored.bits = storage.bits;
  if (const auto activations = group.find_set("input_activations")) {
    read_rows(*activations, found);
  }
  found.planes = compressed_planes(storage, found.spec);
  if (group.find_set("output_activations")) throw NotRead{"quantised outputs"};
  return found;
}

// The scheme of a group, or why it is not read.
ModuleScheme read_scheme(const io::JsonValue& group, const std::string& stored) {
  try {
    return {.weights = read_config_group(group, stored), .reason = {}};
  } catch (const NotRead& refusal) {
    return {.weights = {}, .reason = refusal.reason};
  }
}

// Codes lie over the ends of words since 0.17; builds between releases had either.
WordLayout words_of_version(const io::JsonValue& config) {
  constexpr int kFirstAcross = 17;
  const std::string text = text_of(config, "version", "");
  int major = 0;
  int minor = 0;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, major);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != '.') return WordLayout::kEither;
  if (std::from_chars(first.ptr + 1, end, minor).ec != std::errc()) return WordLayout::kEither;
  if (major > 0 || minor >= kFirstAcross) return WordLayout::kAcross;
  return minor + 1 < kFirstAcross ? WordLayout::kWhole : WordLayout::kEither;
}

// Names and expressions come before classes of modules, which begin with a capital: "Linear". A
// group without targets is for all modules.
void add_rules(const io::JsonValue& group, size_t scheme, std::vector<ModuleRule>& by_name,
               std::vector<ModuleRule>& by_class) {
  const auto targets = group.find_set("targets");
  if (!targets) {
    by_class.push_back({.scheme = scheme});
    return;
  }
  for (const io::JsonValue& target : targets->items()) {
    const std::string text(target.as_string());
    using Kind = ModuleRule::Kind;
    if (!text.empty() && text[0] >= 'A' && text[0] <= 'Z') {
      by_class.push_back({.scheme = scheme});
    } else if (text.starts_with("re:")) {
      by_name.push_back({.kind = Kind::kExpression, .text = text.substr(3), .scheme = scheme});
    } else {
      by_name.push_back({.kind = Kind::kName, .text = text, .scheme = scheme});
    }
  }
}

}  // namespace

std::optional<QuantizedWeights> usual_storage(DType element, const QuantSpec& spec) {
  const quant::WeightFormat* const format = quant::find_format(element);
  if (format == nullptr) return std::nullopt;
  for (const WeightForm& form : format->forms) {
    if (!form.packed_in || form.quant.has_global_scale != spec.has_global_scale) continue;
    const bool words = *form.packed_in == DType::kI32;
    const Storage storage{.kind = words ? Storage::Kind::kWords : Storage::Kind::kPairs,
                          .bits = bit_size(element),
                          .scales_in_bytes = form.scale_dtype == DType::kF8E8M0};
    return QuantizedWeights{.element = element,
                            .spec = spec,
                            .stored = {.bits = storage.bits},
                            .planes = compressed_planes(storage, spec)};
  }
  return std::nullopt;
}

namespace {

DType row_codes_of(const MethodForm& form) {
  return form.quant.activation_dtype.value_or(quant::format_of(form.codes).row_codes->element);
}

// The scheme that read_scaled_rows takes as this form.
nlohmann::ordered_json scaled_rows(const MethodForm& form) {
  const DType rows = row_codes_of(form);
  nlohmann::ordered_json scheme = {{"num_bits", bit_size(rows)},
                                   {"type", "float"},
                                   {"symmetric", true},
                                   {"group_size", form.quant.activation_group}};
  if (form.quant.activation_scale_rule == RowScaleRule::kTwoLevel) {
    scheme["strategy"] = "tensor_group";
    scheme["dynamic"] = "local";
    scheme["scale_dtype"] = "torch.float8_e4m3fn";
  } else {
    scheme["strategy"] = "group";
    scheme["dynamic"] = true;
    scheme["scale_dtype"] = "torch.uint8";
  }
  return scheme;
}

}  // namespace

std::string write_compressed_tensors(const MethodForm& form, const std::vector<std::string>& kept) {
  using Json = nlohmann::ordered_json;
  const quant::WeightFormat* const format = quant::find_format(form.codes);
  const std::string type(format == nullptr ? "" : format->compressed_tensors);
  Json weights = {{"num_bits", form.code_bits},
                  {"type", type},
                  {"symmetric", form.quant.zeros == WeightZero::kNone}};
  if (form.quant.weights == WeightScale::kBlock) {
    weights["strategy"] = form.quant.has_global_scale ? "tensor_group" : "group";
    weights["group_size"] = form.quant.block_cols;
  } else {
    weights["strategy"] = "channel";
  }
  Json rows = nullptr;
  if (form.quant.activation_scale_rule != RowScaleRule::kQuotient) {
    rows = scaled_rows(form);
  } else if (form.quant.activations == ActivationScale::kToken) {
    const quant::WeightFormat& of_rows = quant::format_of(row_codes_of(form));
    rows = {{"num_bits", bit_size(of_rows.element)},
            {"type", of_rows.compressed_tensors},
            {"symmetric", true},
            {"strategy", "token"},
            {"dynamic", true}};
  }
  const Json group = {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", rows}};
  const Json config = {{"quant_method", form.method},
                       {"format", form.format},
                       {"config_groups", {{"group_0", group}}},
                       {"ignore", kept}};
  return config.dump();
}

QuantizedWeights read_compressed_tensors(const io::JsonValue& config) {
  const std::string format = text_of(config, "format", "float-quantized");
  const bool by_group = format == "mixed-precision";
  if (format == "marlin-24") refuse_layout(format, "marlin's for 2:4 sparse weights");
  if (const auto sparsity = config.find_set("sparsity_config")) {
    const std::string stored = text_of(*sparsity, "format", "dense");
    if (stored != "dense") throw NotRead{"the sparse format " + io::show_name(stored)};
  }
  const auto transforms = config.find_set("transform_config");
  if (transforms && transforms->size() > 0) throw NotRead{"transforms of activations"};
  ModuleSchemes found;
  std::vector<ModuleRule> by_class;
  for (const io::JsonMember& group : config.at("config_groups").members()) {
    const std::string stored = by_group ? text_of(group.value, "format", "none given") : format;
    add_rules(group.value, found.schemes.size(), found.rules, by_class);
    found.schemes.push_back(read_scheme(group.value, stored));
    auto& weights = found.schemes.back().weights;
    if (weights) weights->stored.words = words_of_version(config);
  }
  if (found.schemes.empty()) throw NotRead{"no config_groups"};
  // Classes are not told apart: matrices of experts are "Linear", however a group spells it.
  for (const ModuleRule& rule : by_class) {
    const size_t first = by_class.front().scheme;
    if (rule.scheme != first && differ(found.schemes[rule.scheme], found.schemes[first])) {
      throw NotRead{"config_groups that differ from each other for the same modules"};
    }
  }
  found.rules.insert(found.rules.end(), by_class.begin(), by_class.end());
  return of_modules(std::move(found));
}

}  // namespace conclave::inline v0::checkpoint
