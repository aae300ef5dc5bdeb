// GPTQ's first format, rounded to nearest: codes in words along columns of the transposed matrix,
// zero points less one in words along its rows, and the group of each column.
#include "convert/forms/catalog.h"
#include "output/table.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <numeric>
#include <utility>

namespace conclave::tool {
namespace {

constexpr int64_t kWordBits = 32;
constexpr int64_t kMaxGroup = 65'536;

struct GptqOptions {
  std::string name;  // as asked for, with its options
  DType codes = DType::kI4;
  int64_t bits = 4;     // as stored; the type may have more
  int64_t group = 128;  // 0: a scale for each row
  bool symmetric = true;
};

template <class T>
T load(std::span<const std::byte> bytes, int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(std::span<std::byte> bytes, int64_t index, T value) {
  std::memcpy(bytes.data() + static_cast<size_t>(index) * sizeof(T), &value, sizeof(T));
}

QuantSpec spec_of(const GptqOptions& options) {
  QuantSpec spec{.weights = WeightScale::kChannel};
  if (options.group > 0) {
    spec = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = options.group};
  }
  spec.zeros = options.symmetric ? WeightZero::kNone : WeightZero::kPoint;
  return spec;
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

class GptqForm final : public TargetForm {
 public:
  GptqForm(GptqOptions options, ScaleRule rule)
      : options_(std::move(options)),
        quantiser_({.codes = options_.codes,
                    .code_bits = options_.bits,
                    .quant = spec_of(options_),
                    .scale_dtype = DType::kF16,
                    .rule = rule}) {}

  std::string name() const override { return options_.name; }

  void check(const ConvertedModule& module) const override {
    if (options_.group > 0) require_whole_groups(module, options_.group);
    for (const auto& [size, axis] : {std::pair(module.cols, "columns"), {module.rows, "rows"}}) {
      if (size % whole_codes() == 0) continue;
      refuse_module(module, fmt::format("the {} do not fill words of codes", axis),
                    fmt::format("{} {}", size, axis),
                    fmt::format("a multiple of {}", whole_codes()));
    }
  }

  std::vector<PlannedTensor> tensors(const ConvertedModule& module) const override {
    const int64_t groups = groups_of(module);
    std::vector<PlannedTensor> planned;
    const auto add = [&](const char* ending, WeightPlane plane, DType dtype,
                         std::vector<int64_t> shape) {
      planned.push_back(dense_tensor(module.name + ending, dtype, std::move(shape)));
      planned.back().plane = plane;
    };
    add(".qweight", WeightPlane::kWeights, DType::kI32,
        {module.cols * bits() / kWordBits, module.rows});
    add(".qzeros", WeightPlane::kZero, DType::kI32, {groups, module.rows * bits() / kWordBits});
    add(".scales", WeightPlane::kScale, DType::kF16, {groups, module.rows});
    add(".g_idx", WeightPlane::kColumnOrder, DType::kI32, {module.cols});
    return planned;
  }

  QuantisedRows encode(std::span<const float> values, int64_t rows, int64_t cols,
                       float) const override {
    return quantiser_.quantise(values, rows, cols, 1);
  }

  std::vector<std::byte> finish(const ConvertedModule& module, const PlannedTensor& tensor,
                                const GatheredRows& rows) const override {
    switch (tensor.plane) {
      case WeightPlane::kWeights:
        return bits() == bit_size(options_.codes) ? transposed_words(module, rows.codes)
                                                  : repacked_words(module, rows.codes);
      case WeightPlane::kScale:
        return transposed_scales(module, rows.scales);
      case WeightPlane::kZero:
        return zero_words(module, rows.zeros);
      default:
        return groups_of_columns(module);
    }
  }

  nlohmann::ordered_json configuration(const std::vector<std::string>& kept) const override {
    nlohmann::ordered_json config = {{"quant_method", "gptq"}};
    config.update(settings());
    config["dynamic"] = rules(kept);
    return config;
  }

  // Older loaders read this file in place of the configuration.
  std::vector<TextFile> files(const std::vector<std::string>& kept) const override {
    nlohmann::ordered_json config = settings();
    config["quant_method"] = "gptq";
    config["dynamic"] = rules(kept);
    return {{.name = "quantize_config.json", .text = json_text(config, 2) + "\n"}};
  }

 private:
  int64_t bits() const { return options_.bits; }
  // The fewest codes that fill words, in which one of 3 bits may lie across two.
  int64_t whole_codes() const { return kWordBits / std::gcd(kWordBits, bits()); }
  int64_t groups_of(const ConvertedModule& module) const {
    return options_.group > 0 ? module.cols / options_.group : 1;
  }

  nlohmann::ordered_json settings() const {
    return {{"bits", bits()},       {"group_size", options_.group > 0 ? options_.group : -1},
            {"desc_act", false},    {"sym", options_.symmetric},
            {"lm_head", false},     {"checkpoint_format", "gptq"},
            {"pack_dtype", "int32"}};
  }

  static nlohmann::ordered_json rules(const std::vector<std::string>& kept) {
    nlohmann::ordered_json rules = nlohmann::ordered_json::object();
    for (const std::string& name : kept) rules[pattern_of(name)] = nlohmann::ordered_json::object();
    return rules;
  }

  // Codes of 4 bits count from 0 already, those of 8 bits have a sign.
  uint32_t sign_bits() const { return bits() == 8 ? 0x80808080U : 0; }

  std::vector<std::byte> transposed_words(const ConvertedModule& module,
                                          std::span<const std::byte> codes) const {
    constexpr int64_t kTile = 16;
    const int64_t lines = module.cols * bits() / kWordBits;
    std::vector<std::byte> out(codes.size());
    for (int64_t first = 0; first < module.rows; first += kTile) {
      const int64_t last = std::min(first + kTile, module.rows);
      for (int64_t line = 0; line < lines; ++line) {
        for (int64_t row = first; row < last; ++row) {
          store(std::span(out), line * module.rows + row,
                load<uint32_t>(codes, row * lines + line) ^ sign_bits());
        }
      }
    }
    return out;
  }

  // The quantiser's codes have half a byte each, and count from -8.
  std::vector<std::byte> repacked_words(const ConvertedModule& module,
                                        std::span<const std::byte> codes) const {
    constexpr int64_t kLeast = -8;
    const int64_t lines = module.cols * bits() / kWordBits;
    const int64_t row_bytes = (module.cols + 1) / 2;
    std::vector<std::byte> out(static_cast<size_t>(lines * module.rows) * sizeof(uint32_t));
    for (int64_t row = 0; row < module.rows; ++row) {
      for (int64_t col = 0; col < module.cols; ++col) {
        const auto pair = load<uint8_t>(codes, row * row_bytes + col / 2);
        const int64_t value = (col % 2 == 0 ? pair & 15 : pair >> 4) + kLeast;
        put_code(out, {.first = row, .stride = module.rows}, col, value + middle());
      }
    }
    return out;
  }

  // Words of a line, the lowest bits of the first being code 0.
  struct Line {
    int64_t first = 0;
    int64_t stride = 1;
  };
  void put_code(std::span<std::byte> words, const Line& line, int64_t index, int64_t code) const {
    const int64_t bit = index * bits();
    const int64_t at = bit % kWordBits;
    const auto add = [&](int64_t word, uint32_t part) {
      const int64_t place = line.first + word * line.stride;
      store(words, place, load<uint32_t>(words, place) | part);
    };
    add(bit / kWordBits, static_cast<uint32_t>(code) << at);
    if (at + bits() > kWordBits) {
      add(bit / kWordBits + 1, static_cast<uint32_t>(code) >> (kWordBits - at));
    }
  }

  int64_t middle() const { return int64_t{1} << (bits() - 1); }

  std::vector<std::byte> transposed_scales(const ConvertedModule& module,
                                           std::span<const std::byte> scales) const {
    const int64_t groups = groups_of(module);
    std::vector<std::byte> out(scales.size());
    for (int64_t row = 0; row < module.rows; ++row) {
      for (int64_t group = 0; group < groups; ++group) {
        store(std::span(out), group * module.rows + row,
              load<uint16_t>(scales, row * groups + group));
      }
    }
    return out;
  }

  // A code of 0 stands for less than any zero point, so that none borrows from its neighbour.
  std::vector<std::byte> zero_words(const ConvertedModule& module,
                                    std::span<const std::byte> zeros) const {
    const int64_t groups = groups_of(module);
    const int64_t words = module.rows * bits() / kWordBits;
    std::vector<std::byte> out(static_cast<size_t>(groups * words) * sizeof(uint32_t));
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t row = 0; row < module.rows; ++row) {
        const auto zero = zeros.empty()
                              ? int64_t{0}
                              : static_cast<int64_t>(load<float>(zeros, row * groups + group));
        put_code(out, {.first = group * words}, row, zero + middle() - 1);
      }
    }
    return out;
  }

  std::vector<std::byte> groups_of_columns(const ConvertedModule& module) const {
    std::vector<std::byte> out(static_cast<size_t>(module.cols) * sizeof(int32_t));
    for (int64_t col = 0; col < module.cols; ++col) {
      const int64_t group = options_.group > 0 ? col / options_.group : 0;
      store(std::span(out), col, static_cast<int32_t>(group));
    }
    return out;
  }

  GptqOptions options_;
  Quantiser quantiser_;
};

// Takes "group", "sym" and "asym" out of the options.
void take_options(FormOptions& options, GptqOptions& gptq) {
  if (const auto group = options.find("group"); group != options.end()) {
    gptq.name += ":group=" + group->second;
    const std::string& text = group->second;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), gptq.group);
    const bool whole = problem == std::errc() && end == text.data() + text.size();
    if (text == "row") gptq.group = 0;
    if (text != "row" && (!whole || gptq.group < 1 || gptq.group > kMaxGroup)) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "no such group of columns",
                   .tensor = "--format",
                   .expected = fmt::format("group=row, or group=1 to {}", kMaxGroup),
                   .found = fmt::format("'group={}'", text)});
    }
    options.erase(group);
  }
  for (const char* const word : {"sym", "asym"}) {
    const auto found = options.find(word);
    if (found == options.end() || !found->second.empty()) continue;
    gptq.symmetric = *word == 's';
    gptq.name += (gptq.name.find(':') == std::string::npos ? ":" : ",") + std::string(word);
    options.erase(found);
    break;
  }
}

}  // namespace

std::vector<FormRow> gptq_forms() {
  std::vector<FormRow> rows;
  struct Row {
    const char* name;
    DType codes;
    int64_t bits;
  };
  for (const auto& [name, codes, bits] :
       {Row{"gptq-int4", DType::kI4, 4}, Row{"gptq-int8", DType::kI8, 8},
        Row{"gptq-int3", DType::kI4, 3}, Row{"gptq-int2", DType::kI4, 2}}) {
    rows.push_back({.name = name,
                    .options = "group=N or group=row; sym or asym",
                    .make = [=](FormOptions& options, ScaleRule rule) -> FormPointer {
                      GptqOptions gptq{.name = name, .codes = codes, .bits = bits};
                      take_options(options, gptq);
                      return std::make_shared<GptqForm>(std::move(gptq), rule);
                    }});
  }
  return rows;
}

}  // namespace conclave::tool
