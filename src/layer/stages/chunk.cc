#include "layer/stages/chunk.h"

#include "layer/stages/host_chunk.h"

#include <algorithm>
#include <array>
#include <optional>

namespace conclave::inline v0 {
namespace {

void run_in_turn(const HostCall& call, KernelCounts& counts) {
  for (int64_t index = 0; index < call.chunks; ++index) {
    HostChunk chunk(call, index);
    chunk.begin(counts);
    chunk.run();
    chunk.finish();
  }
}

// While the experts of a chunk run, the rows of the next one come; while those of that one run, the
// results of the first go home. Each of the two has a half of the workspace, which the chunk after
// the next takes over.
void run_by_twos(const HostCall& call, KernelCounts& counts) {
  std::array<std::optional<HostChunk>, 2> under_way;
  const auto chunk = [&](int64_t index) -> HostChunk& {
    return *under_way[static_cast<size_t>(index % 2)];
  };
  const auto begin = [&](int64_t index) {
    if (index >= call.chunks) return;
    under_way[static_cast<size_t>(index % 2)].emplace(call, index).begin(counts);
  };
  begin(0);
  begin(1);
  for (int64_t first = 0; first < call.chunks; first += 2) {
    const int64_t end = std::min(first + 2, call.chunks);
    for (int64_t index = first; index < end; ++index) chunk(index).run();
    for (int64_t index = first; index < end; ++index) {
      chunk(index).finish();
      begin(index + 2);
    }
  }
}

}  // namespace

KernelCounts run_chunks(const HostCall& call) {
  KernelCounts counts;
  if (call.plan.chunk_order == ChunkOrder::kByTwos) {
    run_by_twos(call, counts);
  } else {
    run_in_turn(call, counts);
  }
  return counts;
}

}  // namespace conclave::inline v0
