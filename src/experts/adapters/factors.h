// Adapters as kernels of the CPU read them: packed factors, and the mark of a row that says which
// adapter it has.
#pragma once

#include "conclave/dtype.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace conclave::inline v0::experts {

// Where a kernel takes adapters, each row of its bundle ends with this many bytes, which begin with
// the row's mark: 0 without an adapter. So marks travel to other ranks as part of their rows.
inline constexpr int64_t kMarkBytes = 64;

inline uint32_t mark_of(const std::byte* row, int64_t row_bytes) {
  uint32_t mark;
  std::memcpy(&mark, row + row_bytes - kMarkBytes, sizeof(mark));
  return mark;
}
inline void set_mark(std::byte* row, int64_t row_bytes, uint32_t mark) {
  std::memcpy(row + row_bytes - kMarkBytes, &mark, sizeof(mark));
}

// Columns of B that lie together.
inline constexpr int64_t kHalfColumns = 32;

// B of a product whose panels have 64 columns: each half of a panel is a list of `rank` rows of 32
// columns, zeros where no column exists, and reads terms from `first_term` on.
struct HalfFactors {
  int64_t first_term = 0;
  int64_t rank = 0;
};

// A of a product: terms[i] = scale * dot(row i, x), each row padded with zeros to a multiple of 32.
struct TermRows {
  const std::byte* rows = nullptr;
  int64_t count = 0;
};

// The factors of one product of an expert; without terms it has none.
struct ProductFactors {
  TermRows a;
  const std::byte* b = nullptr;
  // The left and the right half of a panel: gate and up, or twice the same.
  std::array<HalfFactors, 2> halves = {};
  std::array<float, 2> scales = {1, 1};  // for terms that the first half reads, and for others
  int64_t first_of_second_scale = 0;     // the first of these others

  bool empty() const { return a.count == 0; }
  int64_t half_bytes(int half, int64_t element_bytes) const {
    return halves[static_cast<size_t>(half)].rank * kHalfColumns * element_bytes;
  }
  // Half `half` of panel `index`.
  const std::byte* b_of(int64_t index, int half, int64_t element_bytes) const {
    const int64_t first = half_bytes(0, element_bytes);
    const int64_t panel = first + half_bytes(1, element_bytes);
    return b + index * panel + (half == 0 ? 0 : first);
  }
};

struct ExpertFactors {
  ProductFactors gate_up;
  ProductFactors down;
};

// One adapter of the experts of one MLP, by place.
struct MlpAdapter {
  DType dtype = DType::kF32;  // kF32, kF16 or kBF16
  std::vector<ExpertFactors> experts;
};

}  // namespace conclave::inline v0::experts
