// The forms of bitsandbytes: LLM.int8, and blocks of 64 codes of 4 bits.
#include "convert/forms/catalog.h"
#include "convert/forms/method_form.h"
#include "convert/forms/method_options.h"

namespace conclave::inline v0::conversion {
namespace {

constexpr const char* kBitsandbytes = "bitsandbytes";
constexpr const char* kNested = "nested";
constexpr const char* kBytes = "bnb-int8";
constexpr int64_t kBlock = 64;

FormRow blocks(const char* name, DType codes) {
  return {.name = name,
          .method = kBitsandbytes,
          .options = "nested",
          .make = [=](FormOptions& options, ScaleRule rule) -> FormPointer {
            OptionTaker taker(options, name);
            MethodForm form{
                .method = kBitsandbytes,
                .codes = codes,
                .quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = kBlock}};
            if (taker.take(kNested)) form.format = kNested;
            return std::make_shared<MethodTarget>(taker.name(), form, rule);
          }};
}

}  // namespace

std::vector<FormRow> bitsandbytes_forms() {
  return {{.name = kBytes,
           .method = kBitsandbytes,
           .make = [](FormOptions&, ScaleRule rule) -> FormPointer {
             return std::make_shared<MethodTarget>(
                 kBytes,
                 MethodForm{.method = kBitsandbytes,
                            .codes = DType::kI8,
                            .quant = {.weights = WeightScale::kChannel}},
                 rule);
           }},
          blocks("bnb-nf4", DType::kNF4),
          blocks("bnb-fp4", DType::kBnbFP4)};
}

}  // namespace conclave::inline v0::conversion
