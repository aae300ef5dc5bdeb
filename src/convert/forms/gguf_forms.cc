// Blocks of GGUF types: a tensor keeps its name and shape, and holds codes and scales together.
#include "convert/forms/catalog.h"

#include "conclave/gguf.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

namespace conclave::inline v0::conversion {
namespace {

// llama.cpp's number for files that are mostly of a type.
struct FileType {
  std::string_view type;
  uint32_t number;
};
constexpr std::array kFileTypes = {
    FileType{"Q4_0", 2},  FileType{"Q4_1", 3},  FileType{"Q8_0", 7},    FileType{"Q5_0", 8},
    FileType{"Q5_1", 9},  FileType{"Q2_K", 10}, FileType{"Q3_K", 12},   FileType{"Q4_K", 15},
    FileType{"Q5_K", 17}, FileType{"Q6_K", 18}, FileType{"IQ4_NL", 25}, FileType{"MXFP4", 38}};

std::string lower(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

class GgufForm final : public TargetForm {
 public:
  GgufForm(std::string_view type, ScaleRule rule) : type_(type), quantiser_(type, rule) {}

  std::string name() const override { return lower(type_); }
  bool is_form_of(const SourceTensor& tensor) const override { return tensor.type == type_; }
  void check(const ConvertedModule& module) const override {
    require_whole_groups(module, quantiser_.block_elements());
  }

  std::vector<PlannedTensor> tensors(const ConvertedModule& module) const override {
    return {{.name = module.tensor,
             .type = type_,
             .shape = module.shape,
             .bytes = gguf_row_bytes(type_, module.cols) * static_cast<uint64_t>(module.rows),
             .streamed = true}};
  }

  QuantisedRows encode(std::span<const float> values, int64_t rows, int64_t cols,
                       float) const override {
    return quantiser_.quantise(values, rows, cols);
  }

  std::optional<uint32_t> file_type() const override {
    const auto* at = std::ranges::find(kFileTypes, type_, &FileType::type);
    return at != kFileTypes.end() ? std::optional(at->number) : std::nullopt;
  }

 private:
  std::string type_;
  BlockQuantiser quantiser_;
};

}  // namespace

std::vector<FormRow> gguf_forms() {
  std::vector<FormRow> rows;
  for (const std::string_view type : BlockQuantiser::types()) {
    rows.push_back({.name = lower(type),
                    .container = ModelContainer::kGguf,
                    .mixes = true,
                    .make = [type](FormOptions&, ScaleRule rule) -> FormPointer {
                      return std::make_shared<GgufForm>(type, rule);
                    }});
  }
  return rows;
}

}  // namespace conclave::inline v0::conversion
