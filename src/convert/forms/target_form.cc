#include "convert/forms/target_form.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <utility>

namespace conclave::inline v0::conversion {

void refuse_module(const ConvertedModule& module, std::string what, std::string found,
                   std::string expected, std::string hint) {
  throw Error(ErrorCode::kUnsupported, {.what = std::move(what),
                                        .tensor = module.name,
                                        .expected = std::move(expected),
                                        .found = std::move(found),
                                        .hint = std::move(hint)});
}

void require_whole_groups(const ConvertedModule& module, int64_t columns) {
  if (module.cols % columns == 0) return;
  refuse_module(module, "the rows are not whole groups", fmt::format("{} columns", module.cols),
                fmt::format("a multiple of {} columns", columns), "choose smaller groups");
}

PlannedTensor dense_tensor(std::string name, DType dtype, std::vector<int64_t> shape) {
  uint64_t elements = 1;
  for (const int64_t size : shape) elements *= static_cast<uint64_t>(size);
  return {.name = std::move(name),
          .type = std::string(to_string(dtype)),
          .shape = std::move(shape),
          .bytes = elements * static_cast<uint64_t>(byte_size(dtype))};
}

}  // namespace conclave::inline v0::conversion
