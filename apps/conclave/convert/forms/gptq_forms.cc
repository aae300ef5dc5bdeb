// GPTQ's first format, rounded to nearest.
#include "convert/forms/catalog.h"
#include "convert/forms/method_form.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <charconv>
#include <utility>

namespace conclave::tool {
namespace {

constexpr const char* kGptqMethod = "gptq";
constexpr int64_t kMaxGroup = 65'536;

struct GptqOptions {
  std::string name;  // as asked for, with its options
  DType codes = DType::kI4;
  int64_t bits = 4;     // as stored; the type may have more
  int64_t group = 128;  // 0: a scale for each row
  bool symmetric = true;
};

MethodForm form_of(const GptqOptions& options) {
  QuantSpec spec{.weights = WeightScale::kChannel};
  if (options.group > 0) {
    spec = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = options.group};
  }
  spec.zeros = options.symmetric ? WeightZero::kNone : WeightZero::kPoint;
  return {.method = kGptqMethod,
          .codes = options.codes,
          .code_bits = options.bits,
          .quant = spec,
          .scale_dtype = DType::kF16};
}

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
                    .method = kGptqMethod,
                    .options = "group=N or group=row; sym or asym",
                    .make = [=](FormOptions& options, ScaleRule rule) -> FormPointer {
                      GptqOptions gptq{.name = name, .codes = codes, .bits = bits};
                      take_options(options, gptq);
                      return std::make_shared<MethodTarget>(gptq.name, form_of(gptq), rule);
                    }});
  }
  return rows;
}

}  // namespace conclave::tool
