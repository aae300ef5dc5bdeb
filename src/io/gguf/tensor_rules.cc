#include "io/gguf/tensor_rules.h"

#include "core/checked.h"
#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

namespace conclave::inline v0::io {
namespace {

[[noreturn]] void fail(ErrorCode code, std::string_view tensor, std::string_view file,
                       ErrorDetail detail) {
  detail.file = std::string(file);
  detail.tensor = show_name(tensor);
  throw Error(code, std::move(detail));
}

}  // namespace

void check_gguf_name(std::string_view name, std::string_view file) {
  if (!name.empty() && name.size() <= kMaxGgufNameBytes && is_plain_text(name)) return;
  throw Error(ErrorCode::kGgufName,
              {.what = "the name of a tensor is empty, too long or no plain UTF-8 text",
               .file = std::string(file),
               .found = show_text(name),
               .limit = fmt::format("{} bytes", kMaxGgufNameBytes)});
}

const GgufType& require_gguf_type(uint32_t id, std::string_view tensor, std::string_view file) {
  if (const GgufType* type = find_gguf_type(id)) return *type;
  const std::string_view removed = removed_gguf_type(id);
  fail(ErrorCode::kGgufTensorType, tensor, file,
       {.what = removed.empty() ? "the type of the tensor is not known"
                                : "the type of the tensor was removed from the format",
        .found = removed.empty() ? std::to_string(id) : fmt::format("{} ({})", removed, id),
        .hint = "convert the model again with a current llama.cpp"});
}

uint64_t gguf_tensor_bytes(const GgufTensor& tensor, std::string_view file) {
  const GgufType& type = *tensor.type;
  const int64_t row = tensor.rank > 0 ? tensor.dims[tensor.rank - 1] : 1;
  if (row % type.block_elements != 0) {
    fail(ErrorCode::kGgufShape, tensor.name, file,
         {.what = "a row of the tensor does not hold whole blocks",
          .expected = fmt::format("a multiple of {}", type.block_elements),
          .found = describe_tensor(tensor)});
  }
  // The elements are counted too: of fewer than 8 bits each, more than 2^63 would fit 2^63 bytes.
  std::optional<int64_t> elements = 1;
  for (const int64_t dim : tensor.shape()) {
    if (elements) elements = checked_mul(*elements, dim);
  }
  const std::optional<int64_t> bytes =
      elements ? checked_mul<int64_t>(*elements / type.block_elements, type.block_bytes)
               : std::nullopt;
  if (bytes) return static_cast<uint64_t>(*bytes);
  fail(ErrorCode::kGgufSizeOverflow, tensor.name, file,
       {.what = "the tensor's size does not fit 63 bits", .found = describe_tensor(tensor)});
}

}  // namespace conclave::inline v0::io
