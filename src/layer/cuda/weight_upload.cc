#include "layer/cuda/weight_upload.h"

#include "core/row_stride.h"
#include "core/weight_types.h"
#include "cuda/check.h"
#include "cuda/memory_place.h"
#include "experts/cuda/common/arrange_codes.h"
#include "layer/cuda/column_orders.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstring>
#include <cuda_runtime_api.h>

namespace conclave::inline v0 {
namespace {

int64_t rows_of(const WeightBlock& block) { return block.row_end - block.row_begin; }
int64_t cols_of(const WeightBlock& block) { return block.col_end - block.col_begin; }

// Rows that follow each other are one block: the driver has less to do, and none of its copies to
// pageable memory goes row by row.
void copy_rows(const void* source, size_t source_pitch, const DeviceMatrix& destination,
               size_t row_bytes, int64_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
  if (source_pitch == row_bytes && static_cast<size_t>(destination.stride_bytes) == row_bytes) {
    cuda::check(cudaMemcpyAsync(destination.data, source, row_bytes * static_cast<size_t>(rows),
                                kind, stream),
                "cudaMemcpyAsync");
    return;
  }
  cuda::check(
      cudaMemcpy2DAsync(destination.data, static_cast<size_t>(destination.stride_bytes), source,
                        source_pitch, row_bytes, static_cast<size_t>(rows), kind, stream),
      "cudaMemcpy2DAsync");
}

int64_t rows_of_piece(int64_t row_bytes) {
  constexpr auto kBytes = static_cast<int64_t>(PinnedRing::kPieceBytes);
  return std::max<int64_t>(kBytes / std::max<int64_t>(row_bytes, 1), 1);
}

void copy_to_rows(const std::byte* from, size_t pitch, size_t row_bytes, int64_t rows,
                  std::byte* to) {
  if (pitch == row_bytes) {
    std::memcpy(to, from, static_cast<size_t>(rows) * row_bytes);
    return;
  }
  for (int64_t i = 0; i < rows; ++i, from += pitch, to += row_bytes) {
    std::memcpy(to, from, row_bytes);
  }
}

// The block in device memory.
ConstTensorView device_block(const WeightSource& source, const BlockRequest& request) {
  const ConstTensorView whole = source.view(request.id, request.expert);
  if (whole.empty()) {
    throw Error(ErrorCode::kDevice,
                {.what = "a source of device memory has no view of a matrix",
                 .tensor = source.locate(request.id, request.expert),
                 .hint = "interleaved vectors and computed weights need host memory"});
  }
  if (!begins_bytes(whole, request.block)) {
    throw Error(ErrorCode::kDevice,
                {.what = "a block of codes in device memory begins inside a byte",
                 .tensor = source.locate(request.id, request.expert),
                 .found = "column " + std::to_string(request.block.col_begin),
                 .hint = "split over another number of ranks, or give the weights in host memory"});
  }
  return block_of_view(whole, request.block);
}

}  // namespace

void HostReads::read(WeightId id, int64_t expert, const WeightBlock& block,
                     std::span<std::byte> destination) const {
  if (destination.empty()) return;
  const ConstTensorView view = device_block(source_, {.id = id, .expert = expert, .block = block});
  const int64_t rows = view.shape[0];
  const auto row_bytes = static_cast<int64_t>(destination.size()) / rows;
  const int64_t pitch = packed_bytes(view.dtype, view.row_stride);
  const int64_t most_rows = ring_ == nullptr ? rows : rows_of_piece(row_bytes);
  const auto* from = static_cast<const std::byte*>(view.data);
  std::byte* to = destination.data();
  for (int64_t first = 0; first < rows; first += most_rows) {
    const int64_t count = std::min(most_rows, rows - first);
    const auto bytes = static_cast<size_t>(count * row_bytes);
    std::byte* const arrived = ring_ == nullptr ? to : ring_->next(bytes).memory;
    copy_rows(from, static_cast<size_t>(pitch), {.data = arrived, .stride_bytes = row_bytes},
              static_cast<size_t>(row_bytes), count, cudaMemcpyDeviceToHost, stream_);
    cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    if (arrived != to) std::memcpy(to, arrived, bytes);
    from += count * pitch;
    to += bytes;
  }
}

WeightUpload::WeightUpload(const WeightSource& source, cudaStream_t stream, PinnedRing& ring)
    : source_(source),
      reads_(source.memory() == MemoryKind::kHost ? nullptr : cuda::make_stream()),
      host_reads_(source, reads_.get(), &ring),
      stream_(stream),
      ring_(ring),
      loader_(on_host()) {}

bool WeightUpload::only_enqueues(const BlockRequest& request) const {
  if (source_.memory() == MemoryKind::kDevice) return true;
  const ConstTensorView whole = source_.view(request.id, request.expert);
  return !whole.empty() && begins_bytes(whole, request.block) && cuda::is_pinned(whole.data);
}

void WeightUpload::copy(const BlockRequest& request, const DeviceMatrix& destination) {
  if (rows_of(request.block) == 0 || cols_of(request.block) == 0) return;
  if (source_.memory() == MemoryKind::kHost) return copy_from_host(request, destination);
  const ConstTensorView block = device_block(source_, request);
  copy_rows(block.data, static_cast<size_t>(packed_bytes(block.dtype, block.row_stride)),
            destination, static_cast<size_t>(packed_bytes(block.dtype, block.shape[1])),
            block.shape[0], cudaMemcpyDeviceToDevice, stream_);
}

// A source without a view writes where a copy begins.
void WeightUpload::copy_from_host(const BlockRequest& request, const DeviceMatrix& destination) {
  const DType dtype = source_.describe(request.id).dtype;
  const auto row_bytes = static_cast<size_t>(packed_bytes(dtype, cols_of(request.block)));
  const ConstTensorView whole = source_.view(request.id, request.expert);
  const bool has_view = !whole.empty() && begins_bytes(whole, request.block);
  const ConstTensorView view = has_view ? block_of_view(whole, request.block) : ConstTensorView{};
  const auto pitch = static_cast<size_t>(has_view ? packed_bytes(dtype, row_stride(view)) : 0);
  if (has_view && cuda::is_pinned(view.data)) {
    return copy_rows(view.data, pitch, destination, row_bytes, rows_of(request.block),
                     cudaMemcpyHostToDevice, stream_);
  }
  const auto* from = static_cast<const std::byte*>(view.data);
  DeviceMatrix to = destination;
  const int64_t most_rows = rows_of_piece(static_cast<int64_t>(row_bytes));
  WeightBlock part = request.block;
  for (; part.row_begin < request.block.row_end; part.row_begin = part.row_end) {
    part.row_end = std::min(part.row_begin + most_rows, request.block.row_end);
    const int64_t rows = rows_of(part);
    const size_t bytes = static_cast<size_t>(rows) * row_bytes;
    const PinnedRing::Piece piece = ring_.next(bytes);
    if (has_view) {
      copy_to_rows(from, pitch, row_bytes, rows, piece.memory);
      from += static_cast<size_t>(rows) * pitch;
      source_.release(request.id, request.expert, part);
    } else {
      source_.read(request.id, request.expert, part, {piece.memory, bytes});
    }
    copy_rows(piece.memory, row_bytes, to, row_bytes, rows, cudaMemcpyHostToDevice, stream_);
    cuda::check(cudaEventRecord(piece.passed, stream_), "cudaEventRecord");
    to.data += rows * to.stride_bytes;
  }
}

void WeightUpload::copy_placed(const BlockRequest& request, const PlacedCodes& places,
                               const DeviceMatrix& destination) {
  ConstTensorView view;
  loader_.load({&request, 1}, {&view, 1});
  const auto* const source = static_cast<const std::byte*>(view.data);
  const int64_t pitch = packed_bytes(view.dtype, row_stride(view));
  const auto columns = static_cast<int64_t>(places.columns.size());
  const int64_t row_bytes = packed_bytes(view.dtype, columns);
  const int64_t rows =
      places.rows.empty() ? view.shape[0] : static_cast<int64_t>(places.rows.size());
  const int64_t most_rows = rows_of_piece(row_bytes);
  for (int64_t first = 0; first < rows; first += most_rows) {
    const int64_t count = std::min(most_rows, rows - first);
    const PinnedRing::Piece piece = ring_.next(static_cast<size_t>(count * row_bytes));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row =
          places.rows.empty() ? first + i : places.rows[static_cast<size_t>(first + i)];
      std::byte* const out = piece.memory + i * row_bytes;
      if (row < 0) {
        std::memset(out, 0, static_cast<size_t>(row_bytes));
      } else {
        place_codes(source + row * pitch, places.columns, bit_size(view.dtype), out);
      }
    }
    copy_rows(piece.memory, static_cast<size_t>(row_bytes),
              {.data = destination.data + first * destination.stride_bytes,
               .stride_bytes = destination.stride_bytes},
              static_cast<size_t>(row_bytes), count, cudaMemcpyHostToDevice, stream_);
    cuda::check(cudaEventRecord(piece.passed, stream_), "cudaEventRecord");
  }
}

void WeightUpload::copy_known(const BlockRequest& request, const KnownCodes& known,
                              const DeviceMatrix& destination) {
  ConstTensorView view;
  loader_.load({&request, 1}, {&view, 1});
  if (view.empty()) return;
  std::vector<std::byte> storage;
  const ConstTensorView narrow =
      known.narrow(view, {source_, request.id, request.expert, request.block}, storage);
  const int64_t row_bytes = packed_bytes(narrow.dtype, narrow.shape[1]);
  const int64_t most_rows = rows_of_piece(row_bytes);
  for (int64_t first = 0; first < narrow.shape[0]; first += most_rows) {
    const int64_t rows = std::min(most_rows, narrow.shape[0] - first);
    const auto bytes = static_cast<size_t>(rows * row_bytes);
    const PinnedRing::Piece piece = ring_.next(bytes);
    std::memcpy(piece.memory, storage.data() + first * row_bytes, bytes);
    copy_rows(piece.memory, static_cast<size_t>(row_bytes),
              {.data = destination.data + first * destination.stride_bytes,
               .stride_bytes = destination.stride_bytes},
              static_cast<size_t>(row_bytes), rows, cudaMemcpyHostToDevice, stream_);
    cuda::check(cudaEventRecord(piece.passed, stream_), "cudaEventRecord");
  }
}

Tensor WeightUpload::read_block(const BlockRequest& request) {
  ConstTensorView view;
  loader_.load({&request, 1}, {&view, 1});
  Tensor block(view.dtype, view.shape);
  const auto row_bytes = static_cast<size_t>(view.shape[1] * byte_size(view.dtype));
  const auto pitch = static_cast<size_t>(row_stride(view) * byte_size(view.dtype));
  for (size_t row = 0; row < static_cast<size_t>(view.shape[0]); ++row) {
    std::memcpy(block.as<std::byte>() + row * row_bytes,
                static_cast<const std::byte*>(view.data) + row * pitch, row_bytes);
  }
  return block;
}

std::vector<float> WeightUpload::read_floats(const BlockRequest& request) {
  ConstTensorView view;
  loader_.load({&request, 1}, {&view, 1});
  std::vector<float> values(static_cast<size_t>(view.shape.num_elements()));
  convert(view, {.data = values.data(), .dtype = DType::kF32, .shape = view.shape});
  return values;
}

std::vector<float> WeightUpload::read_floats(WeightId id, int64_t expert) {
  const WeightInfo info = source_.describe(id);
  return read_floats({.id = id, .expert = expert, .block = {0, info.rows, 0, info.cols}});
}

Tensor WeightUpload::read_matrix(WeightId id) {
  const WeightInfo info = source_.describe(id);
  return read_block({.id = id, .block = {0, info.rows, 0, info.cols}});
}

void WeightUpload::copy_bytes(std::span<const std::byte> values, void* destination) {
  auto* to = static_cast<std::byte*>(destination);
  while (!values.empty()) {
    const size_t bytes = std::min(values.size(), PinnedRing::kPieceBytes);
    const PinnedRing::Piece piece = ring_.next(bytes);
    std::memcpy(piece.memory, values.data(), bytes);
    cuda::check(cudaMemcpyAsync(to, piece.memory, bytes, cudaMemcpyHostToDevice, stream_),
                "cudaMemcpyAsync");
    cuda::check(cudaEventRecord(piece.passed, stream_), "cudaEventRecord");
    values = values.subspan(bytes);
    to += bytes;
  }
}
void WeightUpload::copy_floats(const std::vector<float>& values, float* destination) {
  copy_bytes(std::as_bytes(std::span(values)), destination);
}
void WeightUpload::copy_ints(const std::vector<int32_t>& values, int32_t* destination) {
  copy_bytes(std::as_bytes(std::span(values)), destination);
}

void WeightUpload::arrange_codes(std::byte* codes, int64_t rows, int64_t row_bytes,
                                 experts::CodeOrder order) {
  experts::arrange_codes(codes, rows, row_bytes, order, stream_);
}

void WeightUpload::finish() {
  cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

}  // namespace conclave::inline v0
