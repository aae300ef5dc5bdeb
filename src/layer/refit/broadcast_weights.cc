#include "conclave/broadcast_weights.h"

#include "core/code_bits.h"
#include "core/row_stride.h"
#include "core/weight_types.h"
#include "cpu/parallel.h"
#include "layer/agreed_values.h"
#include "layer/refit/broadcast_bytes.h"
#include "layer/refit/broadcast_table.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr size_t kRowsBytes = size_t{2} << 20;  // one thread reads so much at a time
constexpr const char* kBeginPhase = "broadcast of weights: begin";

// One exchange carries rows that follow each other.
struct Chunk {
  std::span<const BroadcastRows> rows;
  size_t begin() const { return rows.front().at; }
  size_t bytes() const { return rows.back().at + rows.back().bytes() - begin(); }
};

std::vector<Chunk> chunks_of(std::span<const BroadcastRows> rows, size_t most_bytes) {
  std::vector<Chunk> chunks;
  for (size_t first = 0, last = 0; first < rows.size(); first = last) {
    const auto end = [&](size_t row) { return rows[row].at + rows[row].bytes(); };
    for (last = first + 1; last < rows.size() && end(last) - rows[first].at <= most_bytes;) ++last;
    chunks.push_back({rows.subspan(first, last - first)});
  }
  return chunks;
}

}  // namespace

struct BroadcastWeights::Impl {
  Impl(const Context& context, Communicator& communicator, const WeightSource* given,
       const BroadcastOptions& options);

  void exchange_table(const RefitScope& part);
  void exchange_matrices(size_t most_bytes);
  void read_rows(const BroadcastRows& rows, std::byte* to) const;
  void fill(const Chunk& chunk);
  std::byte* place_of(const Chunk& chunk);
  void keep(const Chunk& chunk);
  const BroadcastTensor& tensor_of(WeightId id) const;

  const Context& context;
  BroadcastBytes bytes;
  const WeightSource* source;  // the root's; null elsewhere
  std::optional<DeviceQueue> queue;
  MemoryKind travels = MemoryKind::kHost;
  MemoryKind kept = MemoryKind::kHost;
  BroadcastTable table;
  BroadcastBuffer received;
  // While bytes travel.
  BroadcastBuffer chunk_memory;
  BroadcastBuffer part;
  BroadcastBuffer echo;
  BroadcastBuffer pageable;  // the root's, of what it sends from a device
};

BroadcastWeights::Impl::Impl(const Context& of, Communicator& communicator,
                             const WeightSource* given, const BroadcastOptions& options)
    : context(of), bytes(communicator, options.root), source(given) {
  if (options.root < 0 || options.root >= communicator.size()) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a broadcast comes from a rank",
                                              .tensor = "BroadcastOptions.root",
                                              .found = std::to_string(options.root),
                                              .limit = std::to_string(communicator.size() - 1)});
  }
  if (options.exchange_bytes < 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a broadcast exchanges some bytes at a time",
                                              .tensor = "BroadcastOptions.exchange_bytes",
                                              .found = std::to_string(options.exchange_bytes)});
  }
  const std::array common = {
      AgreedValue{.name = "the root of a broadcast", .value = options.root},
      AgreedValue{.name = "the bytes of an exchange", .value = options.exchange_bytes}};
  compare_values(common, communicator, kBeginPhase);
  if (!bytes.is_root()) source = nullptr;
  const bool is_on_device = of.device_allocator() != nullptr;
  if (is_on_device) queue.emplace(of);
  if (is_on_device && communicator.supports(CommFeature::kDeviceMemory)) {
    travels = MemoryKind::kDevice;
  }
  kept = options.memory.value_or(travels);
  exchange_table(options.part);
  exchange_matrices(static_cast<size_t>(options.exchange_bytes));
}

void BroadcastWeights::Impl::exchange_table(const RefitScope& wanted) {
  std::exception_ptr failure;
  std::vector<int64_t> words;
  try {
    if (kept == MemoryKind::kDevice && !queue) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "weights are kept on a device by a context that has one",
                   .tensor = "BroadcastOptions.memory"});
    }
    if (bytes.is_root()) {
      if (source == nullptr) {
        throw Error(ErrorCode::kNullPointer,
                    {.what = "the root of a broadcast has no weights", .tensor = "source"});
      }
      table = BroadcastTable(*source, wanted);
      words = table.words();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  bytes.agree(failure);
  const auto send = [&](std::span<std::byte> data) {
    const size_t padded = bytes.padded(data.size());
    BroadcastBuffer all(padded, MemoryKind::kHost, nullptr);
    BroadcastBuffer own(padded, MemoryKind::kHost, nullptr);
    BroadcastBuffer back(padded, MemoryKind::kHost, nullptr);
    std::ranges::copy(data, all.data());
    bytes.run(data.size(), all.data(), own, back);
    std::copy_n(all.data(), data.size(), data.data());
  };
  auto count = static_cast<int64_t>(words.size());
  send(std::as_writable_bytes(std::span(&count, 1)));
  words.resize(static_cast<size_t>(count));
  send(std::as_writable_bytes(std::span(words)));
  if (!bytes.is_root()) table = BroadcastTable(words);
}

// Where a chunk is sent from, or arrives.
std::byte* BroadcastWeights::Impl::place_of(const Chunk& chunk) {
  const bool arrives_in_place = !bytes.is_root() && kept == travels;
  return arrives_in_place ? received.data() + chunk.begin() : chunk_memory.data();
}

void BroadcastWeights::Impl::exchange_matrices(size_t most_bytes) {
  const std::vector<BroadcastRows> rows = table.rows(std::min(kRowsBytes, most_bytes));
  const std::vector<Chunk> chunks = chunks_of(rows, most_bytes);
  size_t most = 0;
  for (const Chunk& chunk : chunks) most = std::max(most, chunk.bytes());
  const size_t padded = bytes.padded(most);
  std::exception_ptr failure;
  try {
    const DeviceQueue* const device = queue ? &*queue : nullptr;
    part = BroadcastBuffer(padded, travels, device);
    if (bytes.is_root()) {
      echo = BroadcastBuffer(padded, travels, device);
      if (travels == MemoryKind::kDevice) {
        pageable = BroadcastBuffer(padded, MemoryKind::kHost, nullptr);
      }
    } else {
      received = BroadcastBuffer(table.bytes() + padded, kept, device);
    }
    if (bytes.is_root() || kept != travels) {
      chunk_memory = BroadcastBuffer(padded, travels, device);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  bytes.agree(failure);
  for (const Chunk& chunk : chunks) {
    try {
      if (bytes.is_root()) fill(chunk);
    } catch (...) {
      failure = std::current_exception();
    }
    bytes.agree(failure);
    bytes.run(chunk.bytes(), place_of(chunk), part, echo);
    keep(chunk);
  }
  try {
    if (source != nullptr) source->check_unchanged();
  } catch (...) {
    failure = std::current_exception();
  }
  bytes.agree(failure);
  chunk_memory = {};
  part = {};
  echo = {};
  pageable = {};
}

// Rows of a source in device memory go by way of the host, as codes may.
void BroadcastWeights::Impl::read_rows(const BroadcastRows& rows, std::byte* to) const {
  const BroadcastTensor& tensor = *rows.tensor;
  const WeightBlock block{rows.begin, rows.end, 0, tensor.info.cols};
  const ConstTensorView view = source->view(tensor.id, rows.expert);
  if (view.empty()) return source->read(tensor.id, rows.expert, block, {to, rows.bytes()});
  const int64_t stride = row_stride(view);
  const int64_t pitch = packed_bytes(view.dtype, stride);
  const auto row_bytes = static_cast<int64_t>(tensor.row_bytes());
  const auto* const from = static_cast<const std::byte*>(view.data);
  for (int64_t row = rows.begin; row < rows.end; ++row, to += row_bytes) {
    const std::byte* const at = from + row * pitch;
    if (source->memory() == MemoryKind::kHost) {
      std::copy_n(at, row_bytes, to);
    } else {
      queue->download({.data = at, .dtype = DType::kU8, .shape = {row_bytes}},
                      {.data = to, .dtype = DType::kU8, .shape = {row_bytes}});
    }
  }
}

void BroadcastWeights::Impl::fill(const Chunk& chunk) {
  std::byte* const host = travels == MemoryKind::kHost ? chunk_memory.data() : pageable.data();
  const auto read = [&](int64_t begin, int64_t end, int32_t) {
    for (int64_t i = begin; i < end; ++i) {
      const BroadcastRows& rows = chunk.rows[static_cast<size_t>(i)];
      read_rows(rows, host + (rows.at - chunk.begin()));
    }
  };
  const auto count = static_cast<int64_t>(chunk.rows.size());
  if (source->memory() == MemoryKind::kHost) {
    cpu::parallel_for_throwing(context.executor(), count, 1, read);
  } else {
    read(0, count, 0);  // a queue serves one thread
  }
  if (travels == MemoryKind::kHost) return;
  const auto size = static_cast<int64_t>(chunk.bytes());
  queue->upload({.data = host, .dtype = DType::kU8, .shape = {size}},
                {.data = chunk_memory.data(), .dtype = DType::kU8, .shape = {size}});
}

// Moves what has arrived to where it is kept, unless it arrived there.
void BroadcastWeights::Impl::keep(const Chunk& chunk) {
  if (bytes.is_root() || kept == travels) return;
  const auto size = static_cast<int64_t>(chunk.bytes());
  const TensorView to{
      .data = received.data() + chunk.begin(), .dtype = DType::kU8, .shape = {size}};
  const ConstTensorView from{.data = chunk_memory.data(), .dtype = DType::kU8, .shape = {size}};
  if (kept == MemoryKind::kHost) {
    queue->download(from, to);
  } else {
    queue->upload(from, to);
  }
}

const BroadcastTensor& BroadcastWeights::Impl::tensor_of(WeightId id) const {
  if (const BroadcastTensor* tensor = table.find(id)) return *tensor;
  throw Error(ErrorCode::kTensorMissing,
              {.what = "a tensor was not broadcast", .tensor = to_string(id)});
}

BroadcastWeights::BroadcastWeights(const Context& context, Communicator& communicator,
                                   const WeightSource* source, const BroadcastOptions& options)
    : impl_(new Impl(context, communicator, source, options)) {}
BroadcastWeights::BroadcastWeights(BroadcastWeights&&) noexcept = default;
BroadcastWeights& BroadcastWeights::operator=(BroadcastWeights&&) noexcept = default;
BroadcastWeights::~BroadcastWeights() = default;

WeightInfo BroadcastWeights::describe(WeightId id) const {
  const BroadcastTensor* const tensor = impl_->table.find(id);
  return tensor != nullptr ? tensor->info : WeightInfo{};
}

ConstTensorView BroadcastWeights::view(WeightId id, int64_t expert) const {
  const BroadcastTensor& tensor = impl_->tensor_of(id);
  const size_t place = impl_->table.place(tensor, expert);
  if (impl_->source != nullptr) return impl_->source->view(id, expert);
  return {.data = impl_->received.data() + place,
          .dtype = tensor.info.dtype,
          .shape = {tensor.info.rows, tensor.info.cols}};
}

void BroadcastWeights::read(WeightId id, int64_t expert, const WeightBlock& block,
                            std::span<std::byte> destination) const {
  const BroadcastTensor& tensor = impl_->tensor_of(id);
  const size_t place = impl_->table.place(tensor, expert);
  if (impl_->source != nullptr) return impl_->source->read(id, expert, block, destination);
  const auto row_bytes = static_cast<int64_t>(tensor.row_bytes());
  const int64_t cols = block.col_end - block.col_begin;
  std::vector<std::byte> copied;
  const std::byte* from =
      impl_->received.data() + place + static_cast<size_t>(block.row_begin * row_bytes);
  if (impl_->kept == MemoryKind::kDevice) {
    const int64_t size = (block.row_end - block.row_begin) * row_bytes;
    copied.resize(static_cast<size_t>(size));
    const DeviceQueue own(impl_->context);
    own.download({.data = from, .dtype = DType::kU8, .shape = {size}},
                 {.data = copied.data(), .dtype = DType::kU8, .shape = {size}});
    from = copied.data();
  }
  std::byte* to = destination.data();
  for (int64_t row = block.row_begin; row < block.row_end; ++row, from += row_bytes) {
    copy_codes(from, block.col_begin, cols, bit_size(tensor.info.dtype), to);
    to += packed_bytes(tensor.info.dtype, cols);
  }
}

MemoryKind BroadcastWeights::memory() const {
  return impl_->source != nullptr ? impl_->source->memory() : impl_->kept;
}

std::string BroadcastWeights::locate(WeightId id, int64_t expert) const {
  if (impl_->source != nullptr) return impl_->source->locate(id, expert);
  return "broadcast: " + to_string(id) + ", expert " + std::to_string(expert);
}

void BroadcastWeights::check_unchanged() const {
  if (impl_->source != nullptr) impl_->source->check_unchanged();
}

}  // namespace conclave::inline v0
