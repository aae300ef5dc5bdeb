// device_refit_bench [qwen|qwen-e4m3|mixtral [THREADS [REPEATS [RANKS]]]]: refits a layer of a
// model's size on a GPU, in every mode, from pinned memory, from shared memory and from tensors on
// the device, and prints gigabytes of weights a second beside those of the driver's copies of the
// same run. Forwards of another thread go on meanwhile where it says so. With several ranks, a GPU
// each, it measures instead how they receive the layer from the first one over NCCL and refit their
// parts.
#include "conclave/conclave.h"
#include "conclave/interop/cuda.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime_api.h>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using namespace conclave;
using Clock = std::chrono::steady_clock;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

MoeSpec spec_of(std::string_view model) {
  const bool is_mixtral = model == "mixtral";
  MoeSpec spec;
  spec.num_experts = is_mixtral ? 8 : 128;
  spec.top_k = is_mixtral ? 2 : 8;
  spec.hidden_size = is_mixtral ? 4096 : 2048;
  spec.intermediate_size = is_mixtral ? 14336 : 768;
  spec.weight_dtype = model == "qwen-e4m3" ? DType::kF8E4M3 : DType::kBF16;
  if (model == "qwen-e4m3") {
    spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  }
  return spec;
}

// Host memory of a kind.
struct PinnedBlock {
  explicit PinnedBlock(size_t bytes) { check(cudaMallocHost(&data, bytes)); }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  ~PinnedBlock() { static_cast<void>(cudaFreeHost(data)); }
  void* data = nullptr;
};

// A layer's weights in one block: pinned, or as the system gives it. Every expert has the values of
// the first one, which takes the less time to make.
class Copied final : public WeightSource {
 public:
  Copied(const WeightSource& source, bool is_pinned) {
    size_t bytes = 0;
    for (const WeightId id : weights::kAll) {
      infos_[id] = source.describe(id);
      first_[id] = bytes;
      bytes += padded(infos_[id]) * static_cast<size_t>(infos_[id].count);
    }
    if (is_pinned) {
      pinned_ = std::make_unique<PinnedBlock>(bytes);
      data_ = static_cast<std::byte*>(pinned_->data);
    } else {
      pageable_.resize(bytes);
      data_ = pageable_.data();
    }
    for (const WeightId id : weights::kAll) {
      const WeightInfo& info = infos_[id];
      for (int64_t expert = 0; expert < info.count; ++expert) {
        const std::span<std::byte> place(at(id, expert), bytes_of(info));
        if (expert == 0) source.read(id, 0, {0, info.rows, 0, info.cols}, place);
        if (expert > 0) std::copy_n(at(id, 0), place.size(), place.data());
        bytes_ += place.size();
      }
    }
  }
  size_t bytes() const { return bytes_; }
  const std::byte* data() const { return data_; }

  WeightInfo describe(WeightId id) const override { return infos_[id]; }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const WeightInfo& info = infos_[id];
    const size_t row = bytes_of(info) / static_cast<size_t>(info.rows);
    const auto first = static_cast<size_t>(block.row_begin);
    std::copy_n(at(id, expert) + first * row, destination.size(), destination.data());
  }
  ConstTensorView view(WeightId id, int64_t expert) const override {
    const WeightInfo& info = infos_[id];
    return {at(id, expert), info.dtype, {info.rows, info.cols}};
  }

 private:
  static size_t bytes_of(const WeightInfo& info) {
    return info.count == 0 ? 0 : dense_bytes(info.dtype, {info.rows, info.cols});
  }
  static size_t padded(const WeightInfo& info) { return (bytes_of(info) + 255) / 256 * 256; }
  std::byte* at(WeightId id, int64_t expert) const {
    return data_ + first_[id] + static_cast<size_t>(expert) * padded(infos_[id]);
  }

  WeightTable<WeightInfo> infos_;
  WeightTable<size_t> first_;
  size_t bytes_ = 0;
  std::unique_ptr<PinnedBlock> pinned_;
  std::vector<std::byte> pageable_;
  std::byte* data_ = nullptr;
};

std::vector<SharedTensor> tensors_of(const WeightSource& source) {
  std::vector<SharedTensor> tensors;
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source.describe(id);
    if (info.count != 0) tensors.push_back({.id = id, .info = info});
  }
  return tensors;
}

void publish(const std::filesystem::path& path, const WeightSource& source) {
  SharedWeightsWriter writer(path, tensors_of(source));
  writer.begin();
  for (const SharedTensor& tensor : tensors_of(source)) {
    for (int64_t expert = 0; expert < tensor.info.count; ++expert) {
      source.read(tensor.id, expert, {0, tensor.info.rows, 0, tensor.info.cols},
                  writer.memory(tensor.id, expert));
    }
  }
  writer.publish();
}

template <class Action>
double median_seconds(int repeats, const Action& action) {
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    const Clock::time_point begin = Clock::now();
    action();
    if (i > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

void print(const std::string& name, size_t bytes, double seconds) {
  fmt::print("{:<34} {:8.2f} ms {:8.2f} GB/s\n", name, seconds * 1e3,
             static_cast<double>(bytes) / 1e9 / seconds);
}

// Enqueues forwards until it is destroyed, and knows the longest time that one call took.
class Forwards {
 public:
  Forwards(const Context& context, MoeLayer& layer) {
    thread_ = std::thread([&] {
      const MoeSpec& spec = layer.spec();
      const DeviceQueue queue(context);
      Workspace workspace(context, layer.workspace_bytes());
      DeviceTensor hidden = queue.allocate(DType::kBF16, {kTokens, spec.hidden_size});
      DeviceTensor out = queue.allocate(DType::kBF16, {kTokens, spec.hidden_size});
      queue.fill(hidden.view(), 0);
      while (!stopped_.load()) {
        for (int i = 0; i < 8; ++i) {
          const Clock::time_point begin = Clock::now();
          ForwardArgs args;
          args.hidden = hidden.const_view();
          args.out = out.view();
          args.workspace = &workspace;
          args.stream = queue.stream();
          layer.forward(args);
          const std::chrono::duration<double> took = Clock::now() - begin;
          if (count_ > 100) longest_ = std::max(longest_, took.count());
          ++count_;
        }
        queue.synchronize();
      }
    });
  }
  Forwards(const Forwards&) = delete;
  Forwards& operator=(const Forwards&) = delete;
  ~Forwards() {
    stopped_ = true;
    thread_.join();
    fmt::print("{:<34} {:8.2f} ms at most, {} forwards\n", "  a forward's call meanwhile",
               longest_ * 1e3, count_);
  }

 private:
  static constexpr int64_t kTokens = 32;
  std::atomic<bool> stopped_{false};
  double longest_ = 0;
  int64_t count_ = 0;
  std::thread thread_;
};

void measure_copies(const Copied& pageable, const Copied& pinned, int repeats) {
  const size_t bytes = pinned.bytes();
  void* device = nullptr;
  void* other = nullptr;
  check(cudaMalloc(&device, bytes));
  check(cudaMalloc(&other, bytes));
  const auto copy = [&](const char* name, const void* from, cudaMemcpyKind kind) {
    print(name, bytes, median_seconds(repeats, [&] {
            check(cudaMemcpyAsync(device, from, bytes, kind, cudaStreamLegacy));
            check(cudaStreamSynchronize(cudaStreamLegacy));
          }));
  };
  copy("copy from pinned memory", pinned.data(), cudaMemcpyHostToDevice);
  copy("copy from pageable memory", pageable.data(), cudaMemcpyHostToDevice);
  copy("copy on the device", other, cudaMemcpyDeviceToDevice);
  check(cudaFree(device));
  check(cudaFree(other));
}

void measure(std::string_view model, int threads, int repeats) {
  const MoeSpec spec = spec_of(model);
  const std::filesystem::path path = fmt::format("/dev/shm/device_refit_bench.{}", getpid());
  const auto random = make_synthetic_source(spec, 1);
  const Copied pinned(*random, true);
  const Copied pageable(*random, false);
  publish(path, pinned);
  const SharedWeights shared(path);
  std::filesystem::remove(path);
  const size_t bytes = pinned.bytes();
  const Context context({.device = "cuda:0", .num_threads = threads});
  MoeLayer layer = MoeLayer::create(context, spec, pinned, {.max_tokens = 64});
  fmt::print("{}, {} threads, {:.3f} GB\n", model, threads, static_cast<double>(bytes) / 1e9);
  measure_copies(pageable, pinned, repeats);
  print("reload, staged", bytes,
        median_seconds(repeats, [&] { layer.reload(pageable, ReloadMode::kStaged); }));
  print("reload, in place", bytes,
        median_seconds(repeats, [&] { layer.reload(pageable, ReloadMode::kInPlace); }));
  const auto refit = [&](const std::string& name, RefitMode mode, const WeightSource& source,
                         bool keeps_memory, Executor* executor = nullptr) {
    std::vector<double> commits;
    print(name, bytes, median_seconds(repeats, [&] {
            Refit transaction(layer,
                              {.mode = mode, .executor = executor, .keeps_memory = keeps_memory});
            transaction.stage(source);
            const Clock::time_point begin = Clock::now();
            transaction.commit();
            commits.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
          }));
    fmt::print("{:<34} {:8.2f} ms\n", "  of this the commit",
               *std::ranges::max_element(commits) * 1e3);
  };
  const auto alone = make_thread_pool({.num_threads = 1});
  for (const auto& [name, source] :
       {std::pair<const char*, const WeightSource*>{"pinned", &pinned},
        std::pair<const char*, const WeightSource*>{"pageable", &pageable},
        std::pair<const char*, const WeightSource*>{"shared", &shared}}) {
    refit(fmt::format("staged, {}", name), RefitMode::kStaged, *source, false);
    refit(fmt::format("staged, {}, memory kept", name), RefitMode::kStaged, *source, true);
    refit(fmt::format("in place, {}", name), RefitMode::kInPlace, *source, false);
  }
  refit("staged, pageable, one thread", RefitMode::kStaged, pageable, true, alone.get());
  {
    const Forwards forwards(context, layer);
    refit("staged, pinned, beside forwards", RefitMode::kStaged, pinned, true);
    refit("staged, pageable, beside forwards", RefitMode::kStaged, pageable, true);
  }
  print("content hash", bytes, median_seconds(2, [&] { Refit::content_hash(layer); }));
}

// Each rank has a slice of every expert.
void measure_ranks(std::string_view model, int threads, int repeats, int32_t ranks) {
  const MoeSpec spec = spec_of(model);
  const auto random = make_synthetic_source(spec, 1);
  const Copied pageable(*random, false);
  auto group = make_local_group({.num_ranks = ranks});
  std::vector<std::thread> workers;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    workers.emplace_back([&, rank] {
      try {
        const std::string device = fmt::format("cuda:{}", rank);
        const auto comm = connect("nccl", {.rank = rank,
                                           .size = ranks,
                                           .bootstrap = group[static_cast<size_t>(rank)].get(),
                                           .device = device});
        const Context context(
            {.device = device, .num_threads = threads, .tensor_communicator = comm.get()});
        MoeLayer layer = MoeLayer::create(context, spec, pageable, {.max_tokens = 64},
                                          {.tp_size = ranks, .tp_rank = rank});
        std::vector<double> broadcasts;
        const double whole = median_seconds(repeats, [&] {
          const Clock::time_point begin = Clock::now();
          const BroadcastWeights received(context, *comm, rank == 0 ? &pageable : nullptr);
          broadcasts.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
          Refit refit(layer, {.keeps_memory = true});
          refit.stage(received);
          refit.commit();
        });
        std::ranges::sort(broadcasts);
        if (rank == 0) {
          print(fmt::format("broadcast over {} ranks", ranks), pageable.bytes(),
                broadcasts[broadcasts.size() / 2]);
          print("broadcast and refit", pageable.bytes(), whole);
        }
        comm->barrier("end");
      } catch (const std::exception& error) {
        fmt::print(stderr, "rank {}: {}\n", rank, error.what());
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string model = argc > 1 ? argv[1] : "qwen";
    const int threads = argc > 2 ? std::atoi(argv[2]) : 8;
    const int repeats = argc > 3 ? std::atoi(argv[3]) : 9;
    const int ranks = argc > 4 ? std::atoi(argv[4]) : 1;
    if (ranks > 1) {
      measure_ranks(model, threads, repeats, ranks);
    } else {
      measure(model, threads, repeats);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
