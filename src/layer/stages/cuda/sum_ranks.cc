#include "layer/stages/cuda/sum_ranks.h"

#include "core/row_stride.h"
#include "dispatch/cuda/sum_rows.h"
#include "layer/cuda/row_format.h"

#include "conclave/comm.h"
#include "conclave/interop/cuda.h"

#include <span>

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

TensorView rows_in(const CudaChunk& chunk, CudaBuffer buffer) {
  const int64_t hidden = chunk.plan.spec.hidden_size;
  return {.data = chunk.scratch.at<float>(buffer),
          .dtype = DType::kF32,
          .shape = {chunk.count, hidden},
          .row_stride = padded_row(hidden, DType::kF32)};
}

TensorView sum(const CudaChunk& chunk, const TensorView& part, CudaBuffer to) {
  if (part.empty()) return {};
  const TensorView total = rows_in(chunk, to);
  const auto bytes = static_cast<size_t>(chunk.count * part.row_stride) * sizeof(float);
  const ConstByteView send(std::span(static_cast<const std::byte*>(part.data), bytes),
                           MemoryKind::kDevice);
  const ByteView recv(std::span(static_cast<std::byte*>(total.data), bytes), MemoryKind::kDevice);
  Communicator& ranks = *chunk.plan.part.tensor_communicator;
  const Stream stream = to_stream(chunk.stream);
  const CommHandle handle = ranks.begin_all_reduce(send, recv, DType::kF32, ReduceOp::kSum, stream);
  ranks.wait_on(stream, handle, ranks.timeout(), "forward: add up the slices");
  return total;
}

void round(const CudaChunk& chunk, const LiveRows& live, const TensorView& sums,
           const TensorView& out) {
  if (out.empty()) return;
  dispatch::round_sums({.num_tokens = chunk.count,
                        .live_tokens = live.tokens,
                        .routed_rows = static_cast<const float*>(sums.data),
                        .routed_row_stride = sums.row_stride,
                        .hidden_size = chunk.plan.spec.hidden_size,
                        .out = out.data,
                        .out_dtype = out.dtype,
                        .out_stride = row_stride(out)},
                       chunk.stream);
}

}  // namespace

CudaOutputs rank_parts(const CudaChunk& chunk, const ForwardArgs& args) {
  CudaOutputs parts{.out = rows_in(chunk, kRankPart), .shared = {}};
  if (!args.shared_out.empty()) parts.shared = rows_in(chunk, kRankSharedPart);
  return parts;
}

CudaOutputs sum_over_ranks(const CudaChunk& chunk, const CudaOutputs& parts) {
  CudaOutputs sums{.out = sum(chunk, parts.out, kRankSum), .shared = {}};
  sums.shared = sum(chunk, parts.shared, kRankSharedSum);
  return sums;
}

void round_sums_of_ranks(const CudaChunk& chunk, const LiveRows& live, const CudaOutputs& sums,
                         const CudaOutputs& outputs) {
  round(chunk, live, sums.out, outputs.out);
  round(chunk, live, sums.shared, outputs.shared);
}

}  // namespace conclave::inline v0
