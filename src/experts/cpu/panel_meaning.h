// Gives tasks the scales and offsets of their panels. Many rows take them from float32, to which
// narrow ones are widened first; few rows take them as they lie.
#pragma once

#include "experts/slab_layout.h"
#include "gemm/cpu/widen_numbers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

class PanelMeaning {
 public:
  PanelMeaning(const gemm::PanelLayout& panel, gemm::WidenFunction widen)
      : scales_(panel.scale_plane()),
        offsets_(panel.offset_plane()),
        scales_at_(panel.scales_at()),
        offsets_at_(panel.offsets_at()),
        widen_(widen) {}

  // Float32 numbers that a worker needs room for.
  int64_t room() const { return room_of(scales_) + room_of(offsets_); }

  // Sets those of a task; `room` is the worker's.
  void set(gemm::PanelTask& task, float* room) const {
    const bool widens = task.num_rows > gemm::kMostNarrowRows || task.order.lower != nullptr;
    task.scales = numbers(scales_, task.panel + scales_at_, widens, room);
    task.offsets = numbers(offsets_, task.panel + offsets_at_, widens, room + room_of(scales_));
  }

  // Fetches where the next panel's codes, scales and offsets begin, for a task of few rows: it
  // would wait for each of these, while it fetches ahead what follows them.
  void fetch_begin(const std::byte* panel) const {
    if (panel == nullptr || scales_.groups == 0) return;
    fetch(panel, kBeginBytes);
    fetch_begin(scales_, panel + scales_at_);
    fetch_begin(offsets_, panel + offsets_at_);
  }

 private:
  static constexpr size_t kBeginBytes = 1024;

  static void fetch(const std::byte* data, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(data + line, 0, 2);
  }
  static void fetch_begin(const gemm::NumberPlane& plane, const std::byte* packed) {
    fetch(packed, std::min(plane.units_at(), kBeginBytes));
    if (plane.num_units() != 0) fetch(packed + plane.units_at(), 256);
  }
  static bool is_narrow(const gemm::NumberPlane& plane) {
    return plane.values != ScaleValues::kFloat;
  }
  static int64_t room_of(const gemm::NumberPlane& plane) {
    return is_narrow(plane) ? plane.groups * gemm::kPanelColumns : 0;
  }
  gemm::GroupNumbers numbers(const gemm::NumberPlane& plane, const std::byte* packed, bool widens,
                             float* room) const {
    if (plane.groups == 0) return {};
    if (!is_narrow(plane)) return {.floats = SlabPlaces::at<float>(packed, 0)};
    const gemm::GroupNumbers narrow = gemm::packed_numbers(plane, packed);
    if (!widens) return narrow;
    widen_(narrow, plane.groups, room);
    return {.floats = room};
  }

  gemm::NumberPlane scales_;
  gemm::NumberPlane offsets_;
  size_t scales_at_;
  size_t offsets_at_;
  gemm::WidenFunction widen_;
};

}  // namespace conclave::inline v0::experts
