// Panels read by rows, for the plain products: what each code stands for is looked up once a panel.
#pragma once

#include "gemm/packed_layout.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm {

// A panel that outlives it.
class PanelReader {
 public:
  PanelReader(const PanelLayout& layout, const std::byte* panel) noexcept;

  // panel_value of a k and of `count` columns from `first` on.
  void read(int64_t k, int64_t first, int64_t count, float* values) const noexcept;

 private:
  template <class T, class Widen>
  void read_plain(int64_t k, int64_t first, int64_t count, Widen widen,
                  float* values) const noexcept;
  template <int64_t kBits>
  void read_codes(int64_t k, int64_t first, int64_t count, float* values) const noexcept;

  DType dtype_;
  int64_t bits_;
  int64_t group_;
  size_t row_bytes_;
  const std::byte* panel_;
  std::array<float, 256> value_of_{};
};

}  // namespace conclave::inline v0::gemm
