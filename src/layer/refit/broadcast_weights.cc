#include "conclave/broadcast_weights.h"

#include "core/code_bits.h"
#include "core/row_stride.h"
#include "core/weight_types.h"
#include "cpu/parallel.h"
#include "layer/agreed_values.h"
#include "layer/engine.h"
#include "layer/refit/broadcast_bytes.h"
#include "layer/refit/broadcast_table.h"
#include "layer/refit/rank_words.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr size_t kRowsBytes = size_t{2} << 20;  // one thread reads so much at a time
constexpr size_t kMostUnderWay = 2;             // chunks
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

// Waits for a device's queue at the end of a scope: nothing moves in its memory any more then.
class DrainedQueue {
 public:
  explicit DrainedQueue(const std::optional<DeviceQueue>& queue) : queue_(queue) {}
  DrainedQueue(const DrainedQueue&) = delete;
  DrainedQueue& operator=(const DrainedQueue&) = delete;
  ~DrainedQueue() {
    try {
      if (queue_) queue_->synchronize();
    } catch (const std::exception&) {
      return;  // a device that has failed moves nothing
    }
  }

 private:
  const std::optional<DeviceQueue>& queue_;
};

}  // namespace

struct BroadcastWeights::Impl {
  Impl(const Context& context, Communicator& communicator, const WeightSource* given,
       const BroadcastOptions& options);

  void check(const BroadcastOptions& options) const;
  void exchange_table();
  void make_room(const std::vector<Chunk>& chunks);
  void keep_at_root();
  void exchange_matrices(size_t most_bytes);
  std::byte* place_of(const Chunk& chunk, size_t number);
  void fill(const Chunk& chunk, std::byte* to);
  void read_rows(const BroadcastRows& rows, std::byte* to) const;
  void keep(const Chunk& chunk, const std::byte* from);
  void agree(const std::exception_ptr& mine) const {
    agree_on_failure(mine, communicator, kBroadcastPhase);
  }
  bool sends_from_device() const { return travels == MemoryKind::kDevice; }
  const BroadcastTensor& tensor_of(WeightId id) const;

  const Context& context;
  Communicator& communicator;
  const int32_t root;
  const WeightSource* source;  // the root's; null elsewhere
  std::optional<DeviceQueue> queue;
  MemoryKind travels = MemoryKind::kHost;
  MemoryKind kept = MemoryKind::kHost;
  BroadcastTable table;
  bool has_received = false;  // what is read lies in `received`, on the root as well
  BroadcastBuffer received;
  // While bytes travel; those that use memory end before it.
  std::array<BroadcastBuffer, kMostUnderWay> chunk_memory;
  std::unique_ptr<RowUpload> upload;  // the root's
};

BroadcastWeights::Impl::Impl(const Context& of, Communicator& ranks, const WeightSource* given,
                             const BroadcastOptions& options)
    : context(of), communicator(ranks), root(options.root), source(given) {
  std::exception_ptr failure;
  try {
    check(options);
    if (communicator.rank() != root) source = nullptr;
    const bool is_on_device = of.device_allocator() != nullptr;
    if (is_on_device) queue.emplace(of);
    if (is_on_device && communicator.supports(CommFeature::kDeviceMemory)) {
      travels = MemoryKind::kDevice;
    }
    kept = options.memory.value_or(travels);
    if (source != nullptr) table = BroadcastTable(*source, options.part);
  } catch (...) {
    failure = std::current_exception();
  }
  agree_on_failure(failure, communicator, kBeginPhase);
  const std::array common = {
      AgreedValue{.name = "the root of a broadcast", .value = options.root},
      AgreedValue{.name = "the bytes of an exchange", .value = options.exchange_bytes}};
  compare_values(common, communicator, kBeginPhase);
  exchange_table();
  exchange_matrices(static_cast<size_t>(options.exchange_bytes));
}

// A rank may be alone to see this; the others hear of it.
void BroadcastWeights::Impl::check(const BroadcastOptions& options) const {
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
  if (options.memory == MemoryKind::kDevice && context.device_allocator() == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "weights are kept on a device by a context that has one",
                 .tensor = "BroadcastOptions.memory"});
  }
  if (communicator.rank() == root && source == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "the root of a broadcast has no weights", .tensor = "source"});
  }
}

void BroadcastWeights::Impl::exchange_table() {
  std::vector<int64_t> words = table.words();
  BroadcastBytes bytes(communicator, root);
  const auto send = [&](std::span<std::byte> data) {
    bytes.send(data.size(), data.data(), MemoryKind::kHost, {});
  };
  auto count = std::ssize(words);
  send(std::as_writable_bytes(std::span(&count, 1)));
  words.resize(static_cast<size_t>(count));
  send(std::as_writable_bytes(std::span(words)));
  if (communicator.rank() != root) table = BroadcastTable(words);
}

// A root whose weights are the host's keeps what it uploads: its layer reads that, not the host's
// memory a second time. Where there is no room it does without.
void BroadcastWeights::Impl::keep_at_root() {
  if (kept != MemoryKind::kDevice || !sends_from_device() || communicator.size() == 1 ||
      source->memory() != MemoryKind::kHost) {
    return;
  }
  try {
    received = BroadcastBuffer(table.bytes(), kept, &*queue);
    has_received = true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
  }
}

void BroadcastWeights::Impl::make_room(const std::vector<Chunk>& chunks) {
  const DeviceQueue* const device = queue ? &*queue : nullptr;
  if (source != nullptr) {
    keep_at_root();
    if (sends_from_device() && communicator.size() > 1) {
      upload =
          device_runtime(context)->make_row_upload(*source, queue->stream(), context.executor());
    }
  } else {
    received = BroadcastBuffer(table.bytes(), kept, device);
    has_received = true;
  }
  if (has_received && kept == travels) return;
  size_t most = 0;
  for (const Chunk& chunk : chunks) most = std::max(most, chunk.bytes());
  for (BroadcastBuffer& memory : chunk_memory) memory = BroadcastBuffer(most, travels, device);
}

// Where a chunk is sent from, or arrives.
std::byte* BroadcastWeights::Impl::place_of(const Chunk& chunk, size_t number) {
  return has_received && kept == travels ? received.data() + chunk.begin()
                                         : chunk_memory[number % kMostUnderWay].data();
}

// One chunk is read, and on a device uploaded, while the one before travels.
void BroadcastWeights::Impl::exchange_matrices(size_t most_bytes) {
  const std::vector<BroadcastRows> rows = table.rows(std::min(kRowsBytes, most_bytes));
  const std::vector<Chunk> chunks = chunks_of(rows, most_bytes);
  std::exception_ptr failure;
  try {
    make_room(chunks);
  } catch (...) {
    failure = std::current_exception();
  }
  agree(failure);
  const bool is_ordered = sends_from_device() && communicator.supports(CommFeature::kStreamOrder);
  const DrainedQueue drained(queue);
  BroadcastBytes bytes(communicator, root);
  for (size_t number = 0; number < chunks.size(); ++number) {
    const Chunk& chunk = chunks[number];
    bytes.await(kMostUnderWay - 1);
    std::byte* const place = place_of(chunk, number);
    try {
      if (source != nullptr && communicator.size() > 1) fill(chunk, place);
      if (sends_from_device() && !is_ordered) queue->synchronize();
    } catch (...) {
      failure = std::current_exception();
    }
    agree(failure);
    bytes.send(chunk.bytes(), place, travels, is_ordered ? queue->stream() : Stream{});
    if (source != nullptr || kept == travels) continue;
    bytes.await(0);
    keep(chunk, place);
  }
  bytes.await(0);
  if (queue) queue->synchronize();
  try {
    if (source != nullptr) source->check_unchanged();
  } catch (...) {
    failure = std::current_exception();
  }
  agree(failure);
  upload.reset();
  chunk_memory = {};
}

void BroadcastWeights::Impl::read_rows(const BroadcastRows& rows, std::byte* to) const {
  const BroadcastTensor& tensor = *rows.tensor;
  const WeightBlock block{rows.begin, rows.end, 0, tensor.info.cols};
  const ConstTensorView view = source->view(tensor.id, rows.expert);
  if (view.empty()) return source->read(tensor.id, rows.expert, block, {to, rows.bytes()});
  const int64_t pitch = packed_bytes(view.dtype, row_stride(view));
  const auto row_bytes = static_cast<int64_t>(tensor.row_bytes());
  const auto* const from = static_cast<const std::byte*>(view.data);
  const auto copy = [&](const std::byte* at, int64_t size) {
    if (source->memory() == MemoryKind::kHost) {
      std::copy_n(at, size, to);
    } else {
      queue->download({.data = at, .dtype = DType::kU8, .shape = {size}},
                      {.data = to, .dtype = DType::kU8, .shape = {size}});
    }
    to += size;
  };
  if (pitch == row_bytes) return copy(from + rows.begin * pitch, (rows.end - rows.begin) * pitch);
  for (int64_t row = rows.begin; row < rows.end; ++row) copy(from + row * pitch, row_bytes);
}

void BroadcastWeights::Impl::fill(const Chunk& chunk, std::byte* to) {
  if (sends_from_device()) {
    std::vector<RowsToDevice> rows;
    for (const BroadcastRows& one : chunk.rows) {
      rows.push_back({.id = one.tensor->id,
                      .expert = one.expert,
                      .block = {one.begin, one.end, 0, one.tensor->info.cols},
                      .to = to + (one.at - chunk.begin())});
    }
    return upload->copy(rows);
  }
  const auto read = [&](int64_t begin, int64_t end, int32_t) {
    for (int64_t i = begin; i < end; ++i) {
      const BroadcastRows& rows = chunk.rows[static_cast<size_t>(i)];
      read_rows(rows, to + (rows.at - chunk.begin()));
    }
  };
  const auto count = static_cast<int64_t>(chunk.rows.size());
  if (source->memory() == MemoryKind::kHost) {
    cpu::parallel_for_throwing(context.executor(), count, 1, read);
  } else {
    read(0, count, 0);  // a queue serves one thread
  }
}

// Moves what has arrived to where it is kept.
void BroadcastWeights::Impl::keep(const Chunk& chunk, const std::byte* arrived) {
  const auto size = static_cast<int64_t>(chunk.bytes());
  const TensorView to{
      .data = received.data() + chunk.begin(), .dtype = DType::kU8, .shape = {size}};
  const ConstTensorView from{.data = arrived, .dtype = DType::kU8, .shape = {size}};
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
  if (!impl_->has_received) return impl_->source->view(id, expert);
  return {.data = impl_->received.data() + place,
          .dtype = tensor.info.dtype,
          .shape = {tensor.info.rows, tensor.info.cols}};
}

void BroadcastWeights::read(WeightId id, int64_t expert, const WeightBlock& block,
                            std::span<std::byte> destination) const {
  const BroadcastTensor& tensor = impl_->tensor_of(id);
  const size_t place = impl_->table.place(tensor, expert);
  if (!impl_->has_received) return impl_->source->read(id, expert, block, destination);
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
  return impl_->has_received ? impl_->kept : impl_->source->memory();
}

std::string BroadcastWeights::locate(WeightId id, int64_t expert) const {
  if (impl_->source != nullptr) return impl_->source->locate(id, expert);
  return "broadcast: " + to_string(id) + ", expert " + std::to_string(expert);
}

void BroadcastWeights::check_unchanged() const {
  if (!impl_->has_received) impl_->source->check_unchanged();
}

}  // namespace conclave::inline v0
