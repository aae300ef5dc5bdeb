// device_refit_bench [MODEL [THREADS [REPEATS [RANKS [MEMORIES]]]]]: refits a layer of a model's
// size on a GPU, in every mode, from pinned, pageable and shared memory and from tensors on the
// device, and prints gigabytes of weights a second beside those of the driver's copies of the same
// run, and where the time goes. MODEL is qwen, mixtral, or qwen- and a form of codes; MEMORIES
// names some, as pinned,pageable. Without it forwards of another thread go on beside refits where
// it says so. With several ranks, a GPU each, it measures instead how they receive the layer from
// the first one over NCCL and refit their parts.
#include "copied_source.h"

#include "conclave/conclave.h"
#include "conclave/interop/cuda.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

using namespace conclave;
using bench::check;
using bench::CopiedSource;
using bench::Memory;
using Clock = std::chrono::steady_clock;

QuantSpec groups_of(int64_t columns) {
  return {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns};
}

// Codes of Qwen3-30B-A3B's sizes.
struct Coded {
  std::string_view model;
  DType dtype;
  QuantSpec quant;
};
std::vector<Coded> coded_models() {
  QuantSpec mxfp4 = groups_of(32);
  mxfp4.scale_values = ScaleValues::kPowerOfTwo;
  QuantSpec nvfp4 = groups_of(16);
  nvfp4.scale_values = ScaleValues::kFloat8;
  nvfp4.has_global_scale = true;
  QuantSpec q4_k = groups_of(32);
  q4_k.signed_scales = true;
  q4_k.scale_values = q4_k.zero_values = ScaleValues::kSteps;
  q4_k.zeros = WeightZero::kOffset;
  QuantSpec q6_k = groups_of(16);
  q6_k.signed_scales = true;
  q6_k.scale_values = ScaleValues::kSteps;
  return {{"qwen-e4m3",
           DType::kF8E4M3,
           {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup}},
          {"qwen-int8",
           DType::kI8,
           {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken}},
          {"qwen-int4", DType::kI4, groups_of(128)},
          {"qwen-mxfp4", DType::kF4, mxfp4},
          {"qwen-nvfp4", DType::kF4, nvfp4},
          {"qwen-nf4", DType::kNF4, groups_of(64)},
          {"qwen-q4k", DType::kU4, q4_k},
          {"qwen-q6k", DType::kI8, q6_k}};
}

MoeSpec spec_of(std::string_view model) {
  const bool is_mixtral = model == "mixtral";
  MoeSpec spec;
  spec.num_experts = is_mixtral ? 8 : 128;
  spec.top_k = is_mixtral ? 2 : 8;
  spec.hidden_size = is_mixtral ? 4096 : 2048;
  spec.intermediate_size = is_mixtral ? 14336 : 768;
  spec.weight_dtype = DType::kBF16;
  if (is_mixtral || model == "qwen") return spec;
  for (const Coded& coded : coded_models()) {
    if (coded.model != model) continue;
    spec.weight_dtype = coded.dtype;
    spec.quant = coded.quant;
    return spec;
  }
  throw std::runtime_error(fmt::format("no model is called {}", model));
}

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

constexpr size_t kTask = size_t{1} << 20;

// Copies by the host's threads, from pageable memory to pinned.
void measure_host_copies(const CopiedSource& pageable, const CopiedSource& pinned, int threads,
                         int repeats) {
  const auto pool = make_thread_pool({.num_threads = threads});
  struct Work {
    const std::byte* from;
    std::byte* to;
    size_t bytes;
    std::atomic<size_t> next{0};
  };
  print(fmt::format("host copies, {} threads", threads), pageable.bytes(),
        median_seconds(repeats, [&] {
          Work work{pageable.data(), const_cast<std::byte*>(pinned.data()), pageable.bytes()};
          pool->run({.invoke =
                         [](void* opaque, int32_t) noexcept {
                           auto& own = *static_cast<Work*>(opaque);
                           while (true) {
                             const size_t at = own.next.fetch_add(kTask);
                             if (at >= own.bytes) return;
                             std::memcpy(own.to + at, own.from + at,
                                         std::min(kTask, own.bytes - at));
                           }
                         },
                     .state = &work});
        }));
}

void measure_copies(const CopiedSource& pageable, const CopiedSource& pinned, int repeats) {
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

// Milliseconds of a refit's steps.
struct Steps {
  double begin = 0;
  double stage = 0;
  double commit = 0;
  double end = 0;
};

// `memories` that are named; empty for all.
void measure(std::string_view model, int threads, int repeats, std::string_view memories) {
  const MoeSpec spec = spec_of(model);
  const std::filesystem::path path = fmt::format("/dev/shm/device_refit_bench.{}", getpid());
  const auto random = make_synthetic_source(spec, 1);
  const CopiedSource pinned(*random, Memory::kPinned);
  const CopiedSource pageable(*random, Memory::kPageable);
  const CopiedSource device(*random, Memory::kDevice);
  publish(path, pinned);
  const SharedWeights shared(path);
  std::filesystem::remove(path);
  const size_t bytes = pinned.bytes();
  const Context context({.device = "cuda:0", .num_threads = threads});
  MoeLayer layer = MoeLayer::create(context, spec, pinned, {.max_tokens = 64});
  fmt::print("{}, {} threads, {:.3f} GB\n", model, threads, static_cast<double>(bytes) / 1e9);
  measure_copies(pageable, pinned, repeats);
  measure_host_copies(pageable, pinned, threads, repeats);
  print("reload, staged", bytes,
        median_seconds(repeats, [&] { layer.reload(pageable, ReloadMode::kStaged); }));
  print("reload, in place", bytes,
        median_seconds(repeats, [&] { layer.reload(pageable, ReloadMode::kInPlace); }));
  const auto refit = [&](const std::string& name, RefitMode mode, const WeightSource& source,
                         bool keeps_memory, Executor* executor = nullptr) {
    Steps last;
    print(name, bytes, median_seconds(repeats, [&] {
            Clock::time_point step = Clock::now();
            const auto lap = [&] {
              const Clock::time_point now = Clock::now();
              const std::chrono::duration<double> took = now - std::exchange(step, now);
              return took.count() * 1e3;
            };
            {
              Refit transaction(layer,
                                {.mode = mode, .executor = executor, .keeps_memory = keeps_memory});
              last.begin = lap();
              transaction.stage(source);
              last.stage = lap();
              transaction.commit();
              last.commit = lap();
            }
            last.end = lap();
          }));
    fmt::print("  the last: begin {:.2f}, stage {:.2f}, commit {:.2f}, end {:.2f} ms\n", last.begin,
               last.stage, last.commit, last.end);
  };
  const auto alone = make_thread_pool({.num_threads = 1});
  for (const auto& [name, source] :
       {std::pair<const char*, const WeightSource*>{"pinned", &pinned},
        std::pair<const char*, const WeightSource*>{"pageable", &pageable},
        std::pair<const char*, const WeightSource*>{"shared", &shared},
        std::pair<const char*, const WeightSource*>{"device", &device}}) {
    if (!memories.empty() && memories.find(name) == std::string_view::npos) continue;
    refit(fmt::format("staged, {}", name), RefitMode::kStaged, *source, false);
    refit(fmt::format("staged, {}, memory kept", name), RefitMode::kStaged, *source, true);
    refit(fmt::format("in place, {}", name), RefitMode::kInPlace, *source, false);
  }
  refit("staged, pageable, one thread", RefitMode::kStaged, pageable, true, alone.get());
  if (!memories.empty()) return;
  {
    const Forwards forwards(context, layer);
    refit("staged, pinned, beside forwards", RefitMode::kStaged, pinned, true);
    refit("staged, pageable, beside forwards", RefitMode::kStaged, pageable, true);
  }
  print("content hash", bytes, median_seconds(2, [&] { Refit::content_hash(layer); }));
}

// Each rank has a slice of every expert; the first one gives, from memory of each kind.
void measure_rank(std::string_view model, int threads, int repeats, int32_t ranks, int32_t rank,
                  Communicator& bootstrap) {
  const MoeSpec spec = spec_of(model);
  const std::string device = fmt::format("cuda:{}", rank);
  check(cudaSetDevice(rank));
  const auto comm =
      connect("nccl", {.rank = rank, .size = ranks, .bootstrap = &bootstrap, .device = device});
  const Context context(
      {.device = device, .num_threads = threads, .tensor_communicator = comm.get()});
  const auto random = make_synthetic_source(spec, 1);
  MoeLayer layer = MoeLayer::create(context, spec, CopiedSource(*random, Memory::kPageable),
                                    {.max_tokens = 64}, {.tp_size = ranks, .tp_rank = rank});
  const DeviceQueue queue(context);
  constexpr int64_t kBytes = int64_t{256} << 20;
  DeviceTensor sent = queue.allocate(DType::kU8, {kBytes});
  DeviceTensor gathered = queue.allocate(DType::kU8, {kBytes * ranks});
  const std::span<const std::byte> from(sent.as<std::byte>(), kBytes);
  const std::span<std::byte> to(gathered.as<std::byte>(), static_cast<size_t>(kBytes * ranks));
  const double exchange = median_seconds(repeats, [&] {
    comm->all_gather({from, MemoryKind::kDevice}, {to, MemoryKind::kDevice}, "exchange");
  });
  if (rank == 0) print("exchange over NCCL, of one rank", kBytes, exchange);
  for (const auto& [name, memory] :
       {std::pair("pinned", Memory::kPinned), std::pair("pageable", Memory::kPageable),
        std::pair("device", Memory::kDevice)}) {
    const CopiedSource source(*random, memory);
    std::vector<double> broadcasts;
    const double whole = median_seconds(repeats, [&] {
      comm->barrier("begin");
      const Clock::time_point begin = Clock::now();
      const BroadcastWeights received(context, *comm, rank == 0 ? &source : nullptr);
      broadcasts.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      Refit refit(layer, {.keeps_memory = true});
      refit.stage(received);
      refit.commit();
    });
    std::ranges::sort(broadcasts);
    if (rank == 0) {
      print(fmt::format("broadcast over {} ranks, {}", ranks, name), source.bytes(),
            broadcasts[broadcasts.size() / 2]);
      print("broadcast and refit", source.bytes(), whole);
    }
  }
  comm->barrier("end");
}

void measure_ranks(std::string_view model, int threads, int repeats, int32_t ranks) {
  auto group = make_local_group({.num_ranks = ranks});
  fmt::print("{}, {} ranks of {} threads\n", model, ranks, threads);
  std::vector<std::thread> workers;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    workers.emplace_back([&, rank] {
      try {
        measure_rank(model, threads, repeats, ranks, rank, *group[static_cast<size_t>(rank)]);
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
    const std::string memories = argc > 5 ? argv[5] : "";
    if (ranks > 1) {
      measure_ranks(model, threads, repeats, ranks);
    } else {
      measure(model, threads, repeats, memories);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
