#include "layer/stages/overlapped_pipeline.h"

#include "layer/stages/host_chunk.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace conclave::inline v0 {
namespace {

// Two chunks at most are under way. Each has a half of the workspace, which the chunk after the
// next takes over.
class OverlappedPipeline {
 public:
  OverlappedPipeline(const HostCall& call, KernelCounts& counts) : call_(call), counts_(counts) {}

  // While the experts of a chunk run, the rows of the next one come; while those of that one run,
  // the results of the first go home.
  void run() {
    begin(0);
    begin(1);
    for (int64_t first = 0; first < call_.chunks; first += 2) {
      const int64_t end = std::min(first + 2, call_.chunks);
      for (int64_t index = first; index < end; ++index) chunk(index).run();
      for (int64_t index = first; index < end; ++index) {
        chunk(index).finish();
        begin(index + 2);
      }
    }
  }

 private:
  std::optional<HostChunk>& place(int64_t index) {
    return under_way_[static_cast<size_t>(index % 2)];
  }
  HostChunk& chunk(int64_t index) { return *place(index); }
  void begin(int64_t index) {
    if (index < call_.chunks) place(index).emplace(call_, index).begin(counts_);
  }

  const HostCall& call_;
  KernelCounts& counts_;
  std::array<std::optional<HostChunk>, 2> under_way_;
};

}  // namespace

void run_overlapped(const HostCall& call, KernelCounts& counts) {
  OverlappedPipeline(call, counts).run();
}

}  // namespace conclave::inline v0
