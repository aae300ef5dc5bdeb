// Rows of all ranks at every rank in one launch through their windows: each rank's rows, with what
// their tokens have chosen, are stored to the peers as they are made, and what comes goes to where
// experts read it.
#pragma once

#include "comm/one_launch.h"
#include "dispatch/cuda/rank_rows.h"

#include <cstddef>
#include <cstdint>
#include <span>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// Makes what pack_rank_rows, an exchange of its blocks and unpack_choices make, but for ids,
// weights and marks behind the rows.
struct WindowRows {
  PackRankRows pack;                         // `out` is this rank's place among the blocks of all
  UnpackChoices unpack;                      // likewise `blocks`, which are written
  int32_t rank = 0;                          // this one
  std::span<const int64_t> first_rows = {};  // each rank's, among those of all
  std::span<const int64_t> num_rows = {};
};

class WindowRowKernel final : public comm::WindowKernel {
 public:
  // All that `rows` names outlives it.
  explicit WindowRowKernel(const WindowRows& rows) : rows_(rows) {}
  void enqueue(const comm::WindowParams& windows, CUstream_st* stream) const override;

 private:
  const WindowRows& rows_;
};

// Loads the kernels on the current device, so that no forward has to.
void prepare_window_rows();

}  // namespace conclave::inline v0::dispatch
