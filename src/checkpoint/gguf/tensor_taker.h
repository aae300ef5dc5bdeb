// Takes the tensors of one layer of a GGUF model by name, and checks each against its place there.
#pragma once

#include "checkpoint/gguf/layer_tensors.h"
#include "checkpoint/gguf/tensor_table.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// A size that no tensor has told yet.
inline constexpr int64_t kUnknownSize = 0;
// Returns "?" for such a size.
std::string size_text(int64_t size);

int64_t row_length(const GgufPlace& place);
int64_t count_rows(const GgufPlace& place);
// Whether the tensor may be a stack of so many matrices: its axis for them, if it has one, has this
// length.
bool may_be_stack(const GgufPlace& place, int64_t count);

// Matrices [rows, cols] that follow one another in a tensor. Vectors are matrices of one row.
struct GgufDims {
  int64_t rows = kUnknownSize;
  int64_t cols = kUnknownSize;
  int64_t count = 1;

  std::string text() const;  // "[128, 768, 2048]"
};

// Whether tensors that are not there may come later.
enum class GgufAbsent : uint8_t { kIsAnError, kMayCome };

class GgufTensorTaker {
 public:
  // The table must outlive it.
  GgufTensorTaker(const GgufTensorTable& tensors, int64_t index, GgufAbsent absent);

  // Throws an Error that names the tensor, and its file if it is in one.
  [[noreturn]] void fail(ErrorCode code, const GgufPlace& place, ErrorDetail detail) const;

  bool may_come() const noexcept { return may_come_; }
  std::span<const GgufPlace> own() const noexcept { return own_; }
  // The tensor's name without the layer's prefix.
  std::string_view rest_of(const GgufPlace& place) const;
  bool has_any(const std::function<bool(std::string_view rest)>& wanted) const;

  // The tensor, or the first of several; empty if there is none. Does not count as its use.
  GgufPlace peek(std::string_view name) const;
  GgufPlace peek_any(std::initializer_list<std::string_view> names) const;
  // The tensor, which has a use now; empty if there is none.
  GgufPlace look_up(std::string_view name);
  // The same for one that must be there: empty only if it may come, and then listed as missing.
  // Throws Error(kTensorMissing).
  GgufPlace require(std::string_view name, const GgufDims& dims);
  GgufPlace look_up(std::string_view name, bool is_demanded, const GgufDims& dims);

  // Throws Error(kTensorShape). Sizes that are not known fit any.
  void check_shape(const GgufPlace& place, const GgufDims& dims) const;
  // Throws Error(kTensorDType).
  void check_type(WeightId id, const GgufPlace& place) const;

  // Takes matrices the first of which begins at `first_row`, `stride` rows apart.
  void store(WeightId id, const GgufPlace& place, const GgufDims& dims, int64_t first_row,
             int64_t stride);
  // Takes a tensor of nothing but these matrices; none if it is empty.
  void take(WeightId id, const GgufPlace& place, const GgufDims& dims);
  void take_required(WeightId id, std::string_view name, const GgufDims& dims);
  void take_optional(WeightId id, std::string_view name, const GgufDims& dims,
                     bool is_demanded = false);

  // Throws Error(kTensorUnexpected) for a tensor of routers or experts that has no use.
  void check_all_used() const;

  GgufLayer& layer() noexcept { return layer_; }
  const GgufLayer& layer() const noexcept { return layer_; }
  GgufLayerSoFar take_so_far();

 private:
  const GgufTensorTable& tensors_;
  std::span<const GgufPlace> own_;  // the layer's tensors by name
  bool may_come_;
  GgufLayer layer_;
  std::set<std::string_view> used_;
  std::vector<GgufLayerSoFar::Missing> missing_;
};

}  // namespace conclave::inline v0::checkpoint
