#include "checkpoint/gguf/row_reader.h"
#include "core/weight_types.h"
#include "io/gguf/types.h"
#include "io/text.h"
#include "quant/gguf/block_type.h"

#include "conclave/error.h"
#include "conclave/gguf.h"

#include <fmt/format.h>

namespace conclave::inline v0 {

void gguf_values(std::string_view type, std::span<const std::byte> bytes, std::span<float> values) {
  const io::GgufType* const found = io::find_gguf_type(type);
  const bool has_values =
      found != nullptr && (quant::find_block_type(type) != nullptr ||
                           is_plain(checkpoint::plain_type(*found).value_or(DType::kI32)));
  if (!has_values) {
    throw Error(ErrorCode::kGgufTensorType, {.what = "the type has no values here",
                                             .expected = "F32, F16, BF16 or blocks that are read",
                                             .found = io::show_text(type)});
  }
  const auto count = static_cast<int64_t>(values.size());
  if (bytes.size() != gguf_row_bytes(type, count)) {
    throw Error(ErrorCode::kShape,
                {.what = fmt::format("{} values of {} have another size", count, type),
                 .expected = fmt::format("{} bytes", gguf_row_bytes(type, count)),
                 .found = fmt::format("{} bytes", bytes.size())});
  }
  checkpoint::float_rows(*found, 1)->read(bytes.data(), 0, count,
                                          std::as_writable_bytes(values).data());
}

}  // namespace conclave::inline v0
