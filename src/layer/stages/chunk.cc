#include "layer/stages/chunk.h"

#include "layer/stages/host_chunk.h"
#include "layer/stages/overlapped_pipeline.h"

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

}  // namespace

KernelCounts run_chunks(const HostCall& call) {
  KernelCounts counts;
  if (call.plan.chunk_order == ChunkOrder::kInTurn) {
    run_in_turn(call, counts);
  } else {
    run_overlapped(call, counts);
  }
  return counts;
}

}  // namespace conclave::inline v0
