// Sums of rows over ranks in one launch through their windows: each rank makes its part of the rows
// of all, stores it to whom it belongs, adds up in rank order what comes for its own, and rounds.
#pragma once

#include "comm/one_launch.h"
#include "core/checked.h"
#include "dispatch/cuda/combine.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <span>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// Row t of all ranks' rows is u_t = part of rank 0 + part of rank 1 + ..., from left to right in
// float32, where each part is what `part` would have as its output in the type `travels`. Writes
// out = round(scale * u) for this rank's own rows, of which only the first *live_tokens if given.
struct WindowSums {
  DeviceCombineArgs part;       // without outputs; no slots: its routed_rows are the part
  DType travels = DType::kF32;  // or expert_dtype, if nothing joins the slots or rows of `part`
  int32_t rank = 0;             // this one
  std::span<const int64_t> first_rows = {};  // each rank's, among those of `part`
  std::span<const int64_t> num_rows = {};
  std::byte* own = nullptr;  // window_sum_bytes for this rank's rows
  float scale = 1;
  const int64_t* live_tokens = nullptr;  // on the device, or null
  void* out = nullptr;
  DType out_dtype = DType::kF32;
  int64_t out_stride = 0;
};

// Rows in windows have whole units of so many columns.
inline constexpr int64_t kWindowSumColumns = 256;
inline int64_t window_sum_columns(int64_t columns) { return round_up(columns, kWindowSumColumns); }
// The bytes of a message with so many rows.
inline int64_t window_sum_bytes(int64_t num_rows, int64_t columns, DType travels) {
  return num_rows * window_sum_columns(columns) * byte_size(travels);
}

class WindowSumKernel final : public comm::WindowKernel {
 public:
  // All that `sums` names outlives it.
  explicit WindowSumKernel(const WindowSums& sums) : sums_(sums) {}
  void enqueue(const comm::WindowParams& windows, CUstream_st* stream) const override;

 private:
  const WindowSums& sums_;
};

// Loads the kernels on the current device, so that no forward has to.
void prepare_window_sums();

}  // namespace conclave::inline v0::dispatch
