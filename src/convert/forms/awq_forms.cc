// AWQ's layouts, rounded to nearest: what rows have is not known, so that columns have no factors.
#include "convert/forms/catalog.h"
#include "convert/forms/method_form.h"
#include "convert/forms/method_options.h"

namespace conclave::inline v0::conversion {
namespace {

constexpr const char* kAwqMethod = "awq";
constexpr const char* kName = "awq-int4";

MethodForm form_of(int64_t group, bool has_zeros, const char* layout) {
  QuantSpec spec{.weights = WeightScale::kChannel};
  if (group > 0) spec = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = group};
  spec.zeros = has_zeros ? WeightZero::kPoint : WeightZero::kNone;
  return {.method = kAwqMethod,
          .format = layout,
          .codes = DType::kI4,
          .quant = spec,
          .scale_dtype = DType::kF16};
}

}  // namespace

std::vector<FormRow> awq_forms() {
  return {{.name = kName,
           .method = kAwqMethod,
           .options = "group=N or group=row; gemm or gemv; asym, or with gemm sym",
           .make = [](FormOptions& options, ScaleRule rule) -> FormPointer {
             OptionTaker taker(options, kName);
             int64_t group = 128;
             taker.take_group(group);
             const bool gemv = taker.take("gemv");
             if (!gemv) taker.take("gemm");
             const bool symmetric = !gemv && taker.take("sym");
             if (!symmetric) taker.take("asym");
             return std::make_shared<MethodTarget>(
                 taker.name(), form_of(group, !symmetric, gemv ? "gemv" : "gemm"), rule);
           }}};
}

}  // namespace conclave::inline v0::conversion
