#include "synth/write.h"

#include "output/table.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"
#include "conclave/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

// One batch holds as many neighbouring tensors as there are workers.
struct FillBatch {
  const MoeSpec& spec;
  uint64_t seed;
  std::span<const SynthTensor> tensors;
  std::vector<std::vector<std::byte>>& buffers;
  std::atomic<size_t> next{0};
  std::mutex mutex = {};
  std::exception_ptr failure = {};
};

void invert(std::span<std::byte> number) {
  float value = 0;
  std::memcpy(&value, number.data(), sizeof(value));
  value = 1.0F / value;
  std::memcpy(number.data(), &value, sizeof(value));
}

void fill_tensor(const FillBatch& batch, const SynthTensor& tensor,
                 std::vector<std::byte>& buffer) {
  const auto source =
      make_synthetic_source(batch.spec, batch.seed + static_cast<uint64_t>(tensor.layer));
  buffer.resize(tensor.bytes);
  if (tensor.is_shape) {
    const std::array sizes = {tensor.rows, tensor.cols};
    std::memcpy(buffer.data(), sizes.data(), sizeof(sizes));
    return;
  }
  source->read(tensor.id, tensor.expert,
               {.row_begin = 0, .row_end = tensor.rows, .col_begin = 0, .col_end = tensor.cols},
               buffer);
  if (tensor.is_divisor) invert(buffer);
}

void fill_worker(void* state, int32_t) noexcept {
  auto& batch = *static_cast<FillBatch*>(state);
  for (size_t i = batch.next++; i < batch.tensors.size(); i = batch.next++) {
    try {
      fill_tensor(batch, batch.tensors[i], batch.buffers[i]);
    } catch (...) {
      const std::scoped_lock lock(batch.mutex);
      batch.failure = std::current_exception();
    }
  }
}

// Removes shards of a model that will not be whole.
class WrittenShards {
 public:
  WrittenShards() = default;
  WrittenShards(const WrittenShards&) = delete;
  WrittenShards& operator=(const WrittenShards&) = delete;
  ~WrittenShards() {
    std::error_code ignored;
    for (const std::filesystem::path& path : paths_) std::filesystem::remove(path, ignored);
  }

  void add(std::filesystem::path path) { paths_.push_back(std::move(path)); }
  void keep() { paths_.clear(); }

 private:
  std::vector<std::filesystem::path> paths_;
};

void write_json(const std::filesystem::path& path, const nlohmann::ordered_json& json) {
  std::ofstream file(path);
  file << json_text(json, 2) << '\n';
  file.close();
  if (!file) {
    throw Error(
        ErrorCode::kFileWrite,
        {.what = "cannot write the file", .file = path.string(), .found = std::strerror(errno)});
  }
}

}  // namespace

void write_checkpoint(const Context& context, const SynthModel& model,
                      const std::vector<SynthShard>& shards, const std::filesystem::path& directory,
                      uint64_t seed, Console& console) {
  uint64_t total = 0;
  for (const SynthShard& shard : shards) total += shard.bytes;
  uint64_t done = 0;
  std::vector<std::vector<std::byte>> buffers(
      static_cast<size_t>(context.executor().concurrency()));
  WrittenShards written;
  for (const SynthShard& shard : shards) {
    SafetensorsWriter writer(directory / shard.file_name, {{"format", "pt"}});
    for (const SynthTensor& tensor : shard.tensors) {
      writer.declare(tensor.name, tensor.dtype, tensor.shape);
    }
    for (size_t begin = 0; begin < shard.tensors.size(); begin += buffers.size()) {
      const size_t count = std::min(buffers.size(), shard.tensors.size() - begin);
      FillBatch batch{.spec = model.spec,
                      .seed = seed,
                      .tensors = std::span(shard.tensors).subspan(begin, count),
                      .buffers = buffers};
      context.executor().run({.invoke = fill_worker, .state = &batch});
      if (batch.failure) std::rethrow_exception(batch.failure);
      for (size_t i = 0; i < count; ++i) {
        writer.write(buffers[i]);
        done += buffers[i].size();
      }
      console.progress("writing", static_cast<int64_t>(done), static_cast<int64_t>(total));
    }
    writer.finish();
    written.add(directory / shard.file_name);
  }
  written.keep();
  write_json(directory / "model.safetensors.index.json", make_index(shards));
  // Written last: without it the directory is not a model.
  write_json(directory / "config.json", make_config(model));
}

}  // namespace conclave::tool
