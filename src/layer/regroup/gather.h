// Gathers what each rank says of itself, from all ranks in order.
#pragma once

#include "conclave/comm.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Collective: [ranks][kCount].
template <size_t kCount>
std::vector<int64_t> gather_numbers(const std::array<int64_t, kCount>& mine,
                                    Communicator& communicator, const char* phase) {
  std::vector<int64_t> all(kCount * static_cast<size_t>(communicator.size()));
  communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)),
                          phase);
  return all;
}

// Collective: the list of each rank, of any length.
inline std::vector<std::vector<int32_t>> gather_lists(std::span<const int32_t> mine,
                                                      Communicator& communicator,
                                                      const char* phase) {
  const std::vector<int64_t> sizes = gather_numbers(
      std::array<int64_t, 1>{static_cast<int64_t>(mine.size())}, communicator, phase);
  const auto most = static_cast<size_t>(std::ranges::max(sizes));
  std::vector<int32_t> padded(mine.begin(), mine.end());
  padded.resize(most);
  std::vector<int32_t> all(most * sizes.size());
  if (most > 0) {
    communicator.all_gather(std::as_bytes(std::span(padded)),
                            std::as_writable_bytes(std::span(all)), phase);
  }
  std::vector<std::vector<int32_t>> lists;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    const auto own = std::span(all).subspan(rank * most, static_cast<size_t>(sizes[rank]));
    lists.emplace_back(own.begin(), own.end());
  }
  return lists;
}

}  // namespace conclave::inline v0
