#include "layer/stages/cuda/gather_ranks.h"

#include "comm/one_launch.h"
#include "core/rank_counts.h"
#include "dispatch/cuda/rank_rows.h"
#include "dispatch/cuda/window_rows.h"
#include "layer/cuda/gathered_row.h"
#include "layer/cuda/row_format.h"

#include "conclave/comm.h"
#include "conclave/interop/cuda.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

constexpr const char* kGatherPhase = "forward: gather the rows";
constexpr const char* kBringHomePhase = "forward: bring the sums home";

// The bytes of one direction, for or from each rank. This rank's own stay where they are.
struct Messages {
  explicit Messages(int32_t ranks) : bytes(ranks), offsets(ranks) {}

  void set(int32_t rank, int64_t offset, int64_t size) {
    offsets[rank] = offset;
    bytes[rank] = size;
  }

  RankCounts bytes;
  RankCounts offsets;
};

void exchange(const CudaChunk& chunk, const std::byte* from, const Messages& out, std::byte* to,
              const Messages& in, const char* phase) {
  Communicator& ranks = *chunk.plan.part.expert_communicator;
  const Stream stream = to_stream(chunk.stream);
  const CommHandle handle = ranks.begin_all_to_all_v({.send = from,
                                                      .send_bytes = out.bytes.all(),
                                                      .send_offsets = out.offsets.all(),
                                                      .recv = to,
                                                      .recv_bytes = in.bytes.all(),
                                                      .recv_offsets = in.offsets.all(),
                                                      .memory = MemoryKind::kDevice},
                                                     stream);
  ranks.wait_on(stream, handle, ranks.timeout(), phase);
}

// Every rank's rows have their place among all, and this rank's are there already.
void exchange_rows(const CudaChunk& chunk, const GatheredRow& form, std::byte* all) {
  const RankCounts& counts = chunk.rank_counts;
  const int32_t own = chunk.plan.parallel.ep_rank;
  Messages out(counts.ranks());
  Messages in(counts.ranks());
  for (int32_t rank = 0; rank < counts.ranks(); ++rank) {
    if (rank == own) continue;
    out.set(rank, counts.sum_before(own) * form.bytes, counts[own] * form.bytes);
    in.set(rank, counts.sum_before(rank) * form.bytes, counts[rank] * form.bytes);
  }
  exchange(chunk, all, out, all, in, kGatherPhase);
}

// The exchange itself packs and unpacks. False where the rows of a rank have no room in a window:
// every rank knows the numbers of all.
bool gather_in_one_launch(const CudaChunk& chunk, dispatch::WindowRows rows) {
  Communicator& ranks = *chunk.plan.part.expert_communicator;
  comm::OneLaunch* const able = comm::find_one_launch(&ranks);
  if (able == nullptr) return false;
  const RankCounts& counts = chunk.rank_counts;
  const int32_t own = chunk.plan.parallel.ep_rank;
  const int64_t row_bytes = rows.pack.form.bytes;
  Messages out(counts.ranks());
  Messages in(counts.ranks());
  RankCounts first(counts.ranks());
  for (int32_t rank = 0; rank < counts.ranks(); ++rank) {
    if (counts[rank] * row_bytes > able->window_bytes()) return false;
    first[rank] = counts.sum_before(rank);
    if (rank == own) continue;
    out.bytes[rank] = counts[own] * row_bytes;
    in.bytes[rank] = counts[rank] * row_bytes;
  }
  rows.rank = own;
  rows.first_rows = first.all();
  rows.num_rows = counts.all();
  const Stream stream = to_stream(chunk.stream);
  const CommHandle handle = able->begin_kernel(
      {.send_bytes = out.bytes.all(), .recv_bytes = in.bytes.all(), .dtype = DType::kU8},
      dispatch::WindowRowKernel(rows), stream);
  ranks.wait_on(stream, handle, ranks.timeout(), kGatherPhase);
  return true;
}

// The exchange itself adds up if rows lie as those of `sums`, which is alike on every rank.
bool sum_in_one_launch(const CudaChunk& chunk, const RoutedRows& part, const RoutedRows& sums) {
  Communicator& ranks = *chunk.plan.part.expert_communicator;
  comm::OneLaunch* const able = comm::find_one_launch(&ranks);
  const RankCounts& counts = chunk.rank_counts;
  const int64_t row_bytes = part.stride * byte_size(part.dtype);
  if (able == nullptr || part.dtype != sums.dtype || part.stride != sums.stride) return false;
  Messages blocks(counts.ranks());
  for (int32_t rank = 0; rank < counts.ranks(); ++rank) {
    blocks.set(rank, counts.sum_before(rank) * row_bytes, counts[rank] * row_bytes);
  }
  const Stream stream = to_stream(chunk.stream);
  const CommHandle handle =
      able->begin_sum_of_parts({.parts = static_cast<const std::byte*>(part.data),
                                .bytes = blocks.bytes.all(),
                                .offsets = blocks.offsets.all(),
                                .out = static_cast<std::byte*>(sums.data)},
                               stream);
  ranks.wait_on(stream, handle, ranks.timeout(), kBringHomePhase);
  return true;
}

}  // namespace

GatheredTokens gather_tokens(const CudaChunk& chunk, const CudaRouting& routing,
                             const SourceRows& rows, const CudaMarks& marks) {
  const CudaPlan& plan = chunk.plan;
  const GatheredRow form = gathered_row(plan, rows.dtype);
  auto* const all = chunk.scratch.at<std::byte>(kGatheredRows);
  const RankCounts& counts = chunk.rank_counts;
  const bool as_codes = travels_as_codes(plan);
  const dispatch::RankRowForm layout{.dtype = as_codes ? DType::kBF16 : form.dtype,
                                     .columns = as_codes ? 0 : form.columns,
                                     .ids = form.ids,
                                     .mark = form.mark,
                                     .bytes = form.bytes,
                                     .top_k = plan.num_slots()};
  std::byte* const own = all + counts.sum_before(plan.parallel.ep_rank) * form.bytes;
  if (as_codes) {
    make_codes(chunk, routed_mlp(chunk), rows,
               {.codes = reinterpret_cast<uint8_t*>(own),
                .scales = reinterpret_cast<float*>(own + form.scales),
                .block_bytes = form.bytes});
  }
  const dispatch::PackRankRows pack{.form = layout,
                                    .rows = rows.data,
                                    .dtype = rows.dtype,
                                    .row_stride = rows.stride,
                                    .num_rows = chunk.count,
                                    .live_rows = routing.live.tokens,
                                    .topk_ids = routing.topk_ids,
                                    .topk_weights = routing.topk_weights,
                                    .marks = marks.by_token,
                                    .mark = marks.mark,
                                    .out = own};
  const dispatch::UnpackChoices choices{
      .form = layout,
      .blocks = all,
      .num_rows = counts.sum(),
      .topk_ids = chunk.scratch.at<int32_t>(kGatheredIds),
      .topk_weights = chunk.scratch.at<float>(kGatheredWeights),
      .marks = form.mark == 0 ? nullptr : chunk.scratch.at<int32_t>(kGatheredMarks)};
  if (!gather_in_one_launch(chunk, {.pack = pack, .unpack = choices})) {
    dispatch::pack_rank_rows(pack, chunk.stream);
    exchange_rows(chunk, form, all);
    dispatch::unpack_choices(choices, chunk.stream);
  }
  CudaRouting gathered;
  gathered.topk_ids = choices.topk_ids;
  gathered.topk_weights = choices.topk_weights;
  SourceRows arrived{
      .data = all, .dtype = form.dtype, .stride = form.bytes / byte_size(form.dtype)};
  if (as_codes) {
    arrived.scales = reinterpret_cast<const float*>(all + form.scales);
    arrived.scale_stride = form.bytes / static_cast<int64_t>(sizeof(float));
  }
  return {.rows = arrived,
          .routing = gathered,
          .marks = {.table = chunk.adapters.table, .by_token = choices.marks}};
}

RoutedRows bring_home(const CudaChunk& chunk, const RoutedRows& part) {
  const RankCounts& counts = chunk.rank_counts;
  const int32_t own = chunk.plan.parallel.ep_rank;
  // Norms take rows without padding.
  const bool is_latent = chunk.plan.spec.latent.size != 0;
  const int64_t stride = is_latent ? part.columns : padded_row(part.columns, DType::kF32);
  const RoutedRows sums{.form = RoutedRows::Form::kAreSums,
                        .data = chunk.scratch.at<float>(kExpertSums),
                        .dtype = DType::kF32,
                        .stride = stride,
                        .columns = part.columns};
  if (sum_in_one_launch(chunk, part, sums)) return sums;
  const int64_t row_bytes = part.stride * byte_size(part.dtype);
  Messages out(counts.ranks());
  Messages in(counts.ranks());
  int64_t place = 0;
  for (int32_t rank = 0; rank < counts.ranks(); ++rank) {
    if (rank == own) continue;
    out.set(rank, counts.sum_before(rank) * row_bytes, counts[rank] * row_bytes);
    in.set(rank, place, counts[own] * row_bytes);
    place += counts[own] * row_bytes;
  }
  const auto* const parts = static_cast<const std::byte*>(part.data);
  auto* const others = chunk.scratch.at<std::byte>(kOtherParts);
  exchange(chunk, parts, out, others, in, kBringHomePhase);
  dispatch::add_rank_parts({.own = parts + counts.sum_before(own) * row_bytes,
                            .others = others,
                            .dtype = part.dtype,
                            .rank = own,
                            .ranks = counts.ranks(),
                            .num_rows = counts[own],
                            .columns = part.columns,
                            .stride = part.stride,
                            .out = static_cast<float*>(sums.data),
                            .out_stride = sums.stride},
                           chunk.stream);
  return sums;
}

}  // namespace conclave::inline v0
