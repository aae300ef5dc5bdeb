// The steps of an operation that run on the device beside NCCL's: marks that the host reads, the
// comparison of what ranks mean, and sums in rank order.
#pragma once

#include "comm/reduce.h"

#include "conclave/comm.h"
#include "conclave/dtype.h"

#include <array>
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::comm {

// Messages and collectives of one launch, each of which has a claim: as many as fit into the
// parameters of a kernel, so that a graph keeps them. Bounds the ranks of a group too.
inline constexpr int32_t kMaxClaims = 128;

// One rank says this of its part to another, before the bytes.
struct DeviceClaim {
  uint32_t code = 0;  // kind, type and rule
  int32_t peer = -1;
  int64_t offered = 0;   // bytes for the other rank
  int64_t expected = 0;  // bytes from it
};
struct DeviceClaims {
  int32_t count = 0;
  std::array<DeviceClaim, kMaxClaims> list;
};

// Where an operation says that its turn has come and that it is over. Operations of a graph, which
// run any number of times, share the last cell.
inline constexpr int32_t kMarkCells = 65;
inline constexpr int32_t kGraphCell = kMarkCells - 1;

// A rank and a peer mean these, where they differ.
struct ClaimPair {
  DeviceClaim mine;
  DeviceClaim theirs;
};

// In host memory that the device writes. All count upwards.
struct Marks {
  std::array<uint32_t, kMarkCells> begun;
  std::array<uint32_t, kMarkCells> ended;
  uint32_t collectives = 0;  // begun
  uint32_t mismatches = 0;   // once above 0: `mine` and `theirs` are set
  DeviceClaim mine;
  DeviceClaim theirs;
  // The host writes it and kernels read it: not 0 once they are to wait for no peer any more.
  alignas(128) uint32_t stop = 0;
};
// The counters themselves, in device memory.
struct MarkCounters {
  std::array<uint32_t, kMarkCells> begun;
  std::array<uint32_t, kMarkCells> ended;
  uint32_t collectives;
  uint32_t mismatches;
};
struct MarkPlace {
  MarkCounters* counters = nullptr;  // on the device
  Marks* marks = nullptr;            // as the device addresses it
  int32_t cell = 0;
};

// Enqueues the mark of a beginning, and writes the claims for peers to `out`, in order.
void mark_begun(const MarkPlace& place, bool is_collective, const DeviceClaims& claims,
                DeviceClaim* out, CUstream_st* stream);
// Compares what peers have said with what this rank expects of them, in order, then marks the end.
void mark_ended(const MarkPlace& place, const DeviceClaims& expected, const DeviceClaim* in,
                CUstream_st* stream);

// Addends of other ranks up to here, all together, go to every rank at once: one step, in which
// each rank adds up everything.
inline constexpr int64_t kAtOnceBytes = int64_t{8} << 20;

// The addends of a sum: this rank's own, and those of the other ranks, one after the other by rank.
struct OrderedParts {
  const std::byte* own = nullptr;
  const std::byte* others = nullptr;
  int64_t stride_bytes = 0;  // between those of others
  int32_t rank = 0;
  int32_t ranks = 1;
};
// Enqueues out = part 0 op part 1 op ..., with the bits of reduce_into. Everything is aligned to
// elements.
void add_in_order(const OrderedParts& parts, std::byte* out, int64_t bytes, DType dtype,
                  ReduceOp op, CUstream_st* stream);

// Loads the kernels on the current device, so that no operation has to.
void prepare_steps();

}  // namespace conclave::inline v0::comm
