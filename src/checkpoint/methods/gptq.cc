// The method "gptq": codes in words along the columns of a matrix whose transpose is stored, zero
// points in words along its rows, and the group of each column.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/module_rules.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"
#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <string_view>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kZeros = ".qzeros";
constexpr std::string_view kOrder = ".g_idx";

int64_t bits_of(const MatrixForm& form) { return form.quant->stored.bits; }

StoredShapes code_shapes(const MatrixForm& form) {
  return {{ceil_div(form.cols * bits_of(form), kWordBits), form.rows}};
}
StoredShapes scale_shapes(const MatrixForm& form) { return {{form.groups, form.rows}}; }
StoredShapes zero_shapes(const MatrixForm& form) {
  return {{form.groups, ceil_div(form.rows * bits_of(form), kWordBits)}};
}
StoredShapes order_shapes(const MatrixForm& form) { return {{form.cols}}; }

// A word of ones, each as wide as a code.
constexpr uint32_t ones_of(int64_t bits) {
  uint32_t ones = 0;
  for (int64_t bit = 0; bit < kWordBits; bit += bits) ones |= uint32_t{1} << bit;
  return ones;
}

// The zero point of a row in a group of columns. The first version takes one from each code of a
// word at once, so that a code of 0 borrows from the next; where codes lie across words, it wraps.
int64_t zero_at(const MatrixForm& form, std::span<const std::byte> words, int64_t group,
                int64_t row) {
  const int64_t bits = bits_of(form);
  const int64_t line = group * ceil_div(form.rows * bits, kWordBits);
  const bool less_one = form.quant->stored.zeros_less_one;
  const uint32_t ones = less_one && kWordBits % bits == 0 ? ones_of(bits) : 0;
  const auto word = [&](int64_t i) { return word_at(words, line + i) + ones; };
  const uint32_t zero = code_in_line(word, row, bits);
  if (!less_one || ones != 0) return zero;
  return (zero + 1) & ((uint32_t{1} << bits) - 1);
}

void check_zeros_are_middle(const MatrixForm& form, const PlaneInput& zeros) {
  const int64_t middle = middle_of(bits_of(form));
  for (int64_t group = 0; group < form.groups; ++group) {
    for (int64_t row = 0; row < form.rows; ++row) {
      const int64_t zero = zero_at(form, zeros.bytes, group, row);
      if (zero != middle) reject_value(zeros, "a zero point of symmetric codes", middle, zero);
    }
  }
}

void check_groups_are_neighbours(const MatrixForm& form, const PlaneInput& order) {
  for (int64_t col = 0; col < form.cols; ++col) {
    const int64_t group = index_at(order, col);
    const int64_t expected = col / form.group_cols;
    if (group != expected) {
      reject_value(order, "the group of a column, without desc_act,", expected, group);
    }
  }
}

// Words of whole codes lie as canonical ones do, but for their order.
bool has_whole_codes(const MatrixForm& form) {
  const int64_t bits = bits_of(form);
  return bits == integer_bits(bits) && form.cols * bits % kWordBits == 0;
}

// Calls take(stored, canonical) with the numbers of each word in both orders.
template <class Take>
void for_each_word(const MatrixForm& form, const Take& take) {
  constexpr int64_t kTile = 16;
  const int64_t lines = form.cols * bits_of(form) / kWordBits;
  for (int64_t first = 0; first < form.rows; first += kTile) {
    const int64_t last = std::min(first + kTile, form.rows);
    for (int64_t line = 0; line < lines; ++line) {
      for (int64_t row = first; row < last; ++row) take(line * form.rows + row, row * lines + line);
    }
  }
}

void copy_word(std::span<const std::byte> from, int64_t index, std::span<std::byte> to,
               int64_t place) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(uint32_t));
  std::memcpy(to.data() + place * kBytes, from.data() + index * kBytes, sizeof(uint32_t));
}

void transpose_words(const MatrixForm& form, std::span<const std::byte> words,
                     std::span<std::byte> plane) {
  for_each_word(
      form, [&](int64_t stored, int64_t canonical) { copy_word(words, stored, plane, canonical); });
  if (bits_of(form) == 8) flip_signs(plane);
}

void decode_codes(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  const int64_t bits = bits_of(form);
  const std::span<const std::byte> words = inputs[0].bytes;
  if (has_whole_codes(form)) return transpose_words(form, words, plane);
  for (int64_t row = 0; row < form.rows; ++row) {
    const auto word = [&](int64_t i) { return word_at(words, i * form.rows + row); };
    for (int64_t col = 0; col < form.cols; ++col) {
      set_integer(plane.data(), row * form.cols + col, bits, code_in_line(word, col, bits));
    }
  }
}

void encode_codes(const MatrixForm& form, const MatrixPlanes& planes, std::span<std::byte> tensor) {
  const int64_t bits = bits_of(form);
  if (has_whole_codes(form)) {
    for_each_word(form, [&](int64_t stored, int64_t canonical) {
      copy_word(planes.codes, canonical, tensor, stored);
    });
    if (bits == 8) flip_signs(tensor);
    return;
  }
  const int64_t row_codes = ceil_div(form.cols, 2) * 2;  // each row begins with a byte of its own
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t col = 0; col < form.cols; ++col) {
      const uint32_t code = stored_integer(planes.codes.data(), row * row_codes + col, bits);
      put_in_line(tensor, row, form.rows, col, bits, code);
    }
  }
}

// The aids of codes, if they are stored, must say what the configuration says.
template <bool kSymmetric, bool kOrdered>
void decode_checked(const MatrixForm& form, std::span<const PlaneInput> inputs,
                    std::span<std::byte> plane) {
  const PlaneInput& zeros = inputs[1];
  const PlaneInput& order = inputs[2];
  if (kSymmetric && zeros.info != nullptr) {
    check_input(zeros, kWordTypes, zero_shapes(form));
    check_zeros_are_middle(form, zeros);
  }
  if (!kOrdered && order.info != nullptr) {
    check_input(order, kIndexTypes, order_shapes(form));
    check_groups_are_neighbours(form, order);
  }
  decode_codes(form, inputs, plane);
}

void decode_scales(const MatrixForm& form, std::span<const PlaneInput> inputs,
                   std::span<std::byte> plane) {
  transpose(inputs[0], form.groups, form.rows, plane);
}

void encode_scales(const MatrixForm& form, const MatrixPlanes& planes,
                   std::span<std::byte> tensor) {
  const int64_t bytes = static_cast<int64_t>(tensor.size()) / (form.rows * form.groups);
  transpose(planes.scales, bytes, form.rows, form.groups, tensor);
}

// A code of 0 stands for less than any zero point, so that none borrows from its neighbour.
void encode_zeros(const MatrixForm& form, const MatrixPlanes& planes, std::span<std::byte> tensor) {
  const int64_t bits = bits_of(form);
  const int64_t words = ceil_div(form.rows * bits, kWordBits);
  const int64_t least = form.quant->stored.zeros_less_one ? 1 : 0;
  for (int64_t group = 0; group < form.groups; ++group) {
    for (int64_t row = 0; row < form.rows; ++row) {
      int64_t zero = middle_of(bits);
      if (!planes.zeros.empty()) {
        zero += static_cast<int64_t>(value_at<float>(planes.zeros, row * form.groups + group));
      }
      put_in_line(tensor, group * words, 1, row, bits, static_cast<uint32_t>(zero - least));
    }
  }
}

void encode_order(const MatrixForm& form, const MatrixPlanes& planes, std::span<std::byte> tensor) {
  for (int64_t col = 0; col < form.cols; ++col) {
    const auto group = planes.order.empty() ? static_cast<int32_t>(col / form.group_cols)
                                            : planes.order[static_cast<size_t>(col)];
    std::memcpy(tensor.data() + col * static_cast<int64_t>(sizeof(group)), &group, sizeof(group));
  }
}

void decode_zeros(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      const int64_t zero = zero_at(form, inputs[0].bytes, group, row);
      set_float(plane, row * form.groups + group,
                static_cast<float>(zero - middle_of(bits_of(form))));
    }
  }
}

constexpr std::array kAids = {kZeros, kOrder};

template <bool kSymmetric, bool kOrdered>
constexpr std::array kPlanes = {
    StoredPlane{.suffix = ".qweight",
                .types = kWordTypes,
                .shapes = code_shapes,
                .decode = decode_checked<kSymmetric, kOrdered>,
                .optional_inputs = kAids,
                .encode = encode_codes},
    StoredPlane{.suffix = kZeros,
                .use = kSymmetric ? StoredPlane::Use::kInput : StoredPlane::Use::kPlane,
                .plane = WeightPlane::kZero,
                .types = kWordTypes,
                .shapes = zero_shapes,
                .type = DType::kF32,
                .decode = decode_zeros,
                .encode = encode_zeros},
    StoredPlane{.suffix = ".scales",
                .plane = WeightPlane::kScale,
                .types = kFloatTypes,
                .shapes = scale_shapes,
                .decode = decode_scales,
                .encode = encode_scales},
    StoredPlane{.suffix = kOrder,
                .use = kOrdered ? StoredPlane::Use::kPlane : StoredPlane::Use::kInput,
                .plane = WeightPlane::kColumnOrder,
                .types = kIndexTypes,
                .shapes = order_shapes,
                .encode = encode_order},
};

std::span<const StoredPlane> planes_for(bool symmetric, bool ordered) {
  if (symmetric) return ordered ? std::span(kPlanes<true, true>) : std::span(kPlanes<true, false>);
  return ordered ? std::span(kPlanes<false, true>) : std::span(kPlanes<false, false>);
}

constexpr std::string_view kFirstFormat = "gptq";
constexpr std::string_view kSecondFormat = "gptq_v2";
constexpr std::string_view kWords = "int32";

// Newer files have both keys, of equal values.
std::string format_of(const io::JsonValue& config, std::string_view otherwise) {
  return text_of(config, "checkpoint_format", text_of(config, "format", otherwise));
}

void check_format(const std::string& format) {
  if (format != kFirstFormat && format != kSecondFormat) refuse_layout(format);
}

void check_words(const std::string& words) {
  if (words != kWords) throw NotRead{"words of the type " + io::show_name(words)};
}

void check_layout(const io::JsonValue& config) {
  check_format(format_of(config, kFirstFormat));
  if (flag_of(config, "is_marlin_format", false)) refuse_layout("marlin");
  if (flag_of(config, "is_bitblas_format", false)) refuse_layout("bitblas");
  check_words(text_of(config, "pack_dtype", kWords));
  if (config.find_set("rotation")) throw NotRead{"weights that are rotated"};
}

// The settings of modules, some of which a rule may replace.
struct Settings {
  int64_t bits = 0;
  int64_t group_size = 0;
  io::JsonValue group_key;  // says the size
  bool symmetric = false;
  bool ordered = false;
  bool static_groups = false;
  std::string format;  // the whole model's: the package packs all modules alike
  std::string own_format = {};
  std::string words;
};

Settings settings_of(const io::JsonValue& config) {
  return {.bits = config.at("bits").as_int64(),
          .group_size = config.at("group_size").as_int64(),
          .group_key = config.at("group_size"),
          .symmetric = flag_of(config, "sym", false),
          .ordered = flag_of(config, "desc_act", false),
          .static_groups = flag_of(config, "static_groups", false),
          .format = format_of(config, kFirstFormat),
          .words = text_of(config, "pack_dtype", kWords)};
}

// Keys of rules that say how weights lie.
constexpr std::array<std::string_view, 8> kLayoutKeys = {
    "bits",          "group_size", "sym",    "desc_act",
    "static_groups", "pack_dtype", "format", "checkpoint_format"};
// Keys by which some version of the package seeks weights otherwise, to store them alike. Of the
// last four it reads none in a rule.
constexpr std::array<std::string_view, 20> kSearchKeys = {"act_group_aware",
                                                          "damp_percent",
                                                          "mse",
                                                          "hessian",
                                                          "fallback",
                                                          "failsafe",
                                                          "gptaq",
                                                          "gptaq_alpha",
                                                          "gptaq_memory_device",
                                                          "v2",
                                                          "v2_alpha",
                                                          "v2_memory_device",
                                                          "foem",
                                                          "smoother",
                                                          "smooth",
                                                          "adapter",
                                                          "damp_auto_increment",
                                                          "hyb_act",
                                                          "true_sequential",
                                                          "mock_quantization"};

void check_rule(const io::JsonValue& rule) {
  if (!rule.is_object()) {
    rule.reject(ErrorCode::kConfigValue, "a rule of dynamic is no object of settings",
                "an object, such as {\"bits\": 8}");
  }
  for (const io::JsonMember& setting : rule.members()) {
    if (std::ranges::find(kLayoutKeys, setting.key) != kLayoutKeys.end()) continue;
    if (std::ranges::find(kSearchKeys, setting.key) != kSearchKeys.end()) continue;
    setting.value.reject(
        ErrorCode::kConfigValue, "a rule of dynamic replaces an unknown setting",
        fmt::format("one of {}, {}", fmt::join(kLayoutKeys, ", "), fmt::join(kSearchKeys, ", ")));
  }
}

Settings replaced(const io::JsonValue& rule, Settings settings) {
  check_rule(rule);
  if (const auto bits = rule.find_set("bits")) settings.bits = bits->as_int64();
  if (const auto size = rule.find_set("group_size")) {
    settings.group_size = size->as_int64();
    settings.group_key = *size;
  }
  settings.symmetric = flag_of(rule, "sym", settings.symmetric);
  settings.ordered = flag_of(rule, "desc_act", settings.ordered);
  settings.static_groups = flag_of(rule, "static_groups", settings.static_groups);
  settings.own_format = format_of(rule, "");
  settings.words = text_of(rule, "pack_dtype", settings.words);
  return settings;
}

QuantizedWeights weights_of(const Settings& settings) {
  const int64_t bits = settings.bits;
  check_words(settings.words);
  if (!settings.own_format.empty() && settings.own_format != settings.format) {
    check_format(settings.own_format);
    throw NotRead{fmt::format("modules in the layout {} beside others in {}",
                              io::show_name(settings.own_format), io::show_name(settings.format))};
  }
  if (bits != 2 && bits != 3 && bits != 4 && bits != 8) {
    throw NotRead{fmt::format("codes of {} bits", bits)};
  }
  QuantSpec spec;
  set_group(settings.group_key, settings.group_size, spec);
  const bool ordered =
      settings.ordered && !settings.static_groups && spec.weights == WeightScale::kBlock;
  spec.zeros = settings.symmetric ? WeightZero::kNone : WeightZero::kPoint;
  spec.has_column_order = ordered;
  const bool first_version = settings.format == kFirstFormat;
  return {.element = integer_type(bits),
          .spec = spec,
          .stored = {.bits = bits, .zeros_less_one = first_version},
          .planes = planes_for(settings.symmetric, ordered)};
}

ModuleScheme scheme_with(const Settings& settings) {
  try {
    return {.weights = weights_of(settings), .reason = {}};
  } catch (const NotRead& refusal) {
    return {.weights = {}, .reason = refusal.reason};
  }
}

// Rules replace settings of the modules that an expression matches, or "-:" leaves these out. The
// package writes the latter first.
QuantizedWeights with_rules(const io::JsonValue& config, const io::JsonValue& dynamic) {
  const Settings usual = settings_of(config);
  ModuleSchemes found;
  found.schemes.push_back(scheme_with(usual));
  for (const io::JsonMember& rule : dynamic.members()) {
    const bool leaves_out = rule.key.starts_with("-:");
    const bool has_sign = leaves_out || rule.key.starts_with("+:");
    found.rules.push_back({.kind = ModuleRule::Kind::kExpression,
                           .text = std::string(rule.key.substr(has_sign ? 2 : 0)),
                           .scheme = leaves_out ? 0 : found.schemes.size(),
                           .leaves_out = leaves_out});
    if (leaves_out) continue;
    found.schemes.push_back(scheme_with(replaced(rule.value, usual)));
  }
  found.rules.push_back({.scheme = 0});
  return of_modules(std::move(found));
}

// A name as a pattern that matches nothing else.
std::string pattern_of(const std::string& name) {
  std::string pattern = "-:^";
  for (const char c : name) {
    if (c == '.') pattern += '\\';
    pattern += c;
  }
  return pattern + "$";
}

}  // namespace

QuantizedWeights read_gptq(const io::JsonValue& config) {
  check_layout(config);
  const auto dynamic = config.find_set("dynamic");
  if (dynamic && !dynamic->is_object()) {
    dynamic->reject(ErrorCode::kConfigValue, "dynamic is no object of rules",
                    "an object of expressions and settings");
  }
  if (dynamic) return with_rules(config, *dynamic);
  return weights_of(settings_of(config));
}

std::string write_gptq(const MethodForm& form, const std::vector<std::string>& kept) {
  using Json = nlohmann::ordered_json;
  Json rules = Json::object();
  for (const std::string& name : kept) rules[pattern_of(name)] = Json::object();
  const bool groups = form.quant.weights == WeightScale::kBlock;
  const Json config = {{"quant_method", form.method},
                       {"bits", form.code_bits},
                       {"group_size", groups ? form.quant.block_cols : -1},
                       {"desc_act", form.quant.has_column_order},
                       {"sym", form.quant.zeros == WeightZero::kNone},
                       {"lm_head", false},
                       {"checkpoint_format", "gptq"},
                       {"pack_dtype", "int32"},
                       {"dynamic", rules}};
  return config.dump();
}

namespace {

// The settings of some modules, by their names or by expressions; without bits, or with 16, modules
// stay as they are.
QuantizedWeights with_extra(const io::JsonValue& config, const io::JsonValue& extra) {
  const Settings usual = settings_of(config);
  ModuleSchemes found;
  found.schemes.push_back(scheme_with(usual));
  for (const io::JsonMember& module : extra.members()) {
    const bool own = module.value.is_object() && module.value.find_set("bits");
    if (!own || module.value.at("bits").as_int64() >= 16) continue;
    found.by_name.emplace(module.key, found.schemes.size());
    found.schemes.push_back(scheme_with(replaced(module.value, usual)));
  }
  found.rules.push_back({.scheme = 0});
  return of_modules(std::move(found));
}

bool has_own_experts(const io::JsonValue& extra) {
  for (const io::JsonMember& module : extra.members()) {
    const bool own = module.value.is_object() && module.value.find_set("bits");
    if (!own || module.value.at("bits").as_int64() >= 16) continue;
    if (module.key.find("experts") != std::string_view::npos) return true;
  }
  return false;
}

}  // namespace

QuantizedWeights read_auto_round(const io::JsonValue& config) {
  const std::string packing = text_of(config, "packing_format", "");
  const auto extra = config.find_set("extra_config");
  const bool has_own = extra && extra->is_object() && has_own_experts(*extra);
  if (packing.find("awq") != std::string::npos) {
    if (has_own) throw NotRead{"experts with settings of their own, packed as AWQ does"};
    return read_awq(config);
  }
  if (packing.find("gptq") == std::string::npos) {
    throw NotRead{"the packing " + io::show_name(packing)};
  }
  check_layout(config);
  return has_own ? with_extra(config, *extra) : read_gptq(config);
}

}  // namespace conclave::inline v0::checkpoint
