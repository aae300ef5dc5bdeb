// refit_bench bf16|int4 [THREADS [REPEATS]]: refits a layer of Qwen3-30B-A3B's size from shared
// memory, in every mode, and prints gigabytes of weights a second beside those of memcpy: on the
// clock, and by processor time as if every thread had a core of its own.
#include "conclave/conclave.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace {

using namespace conclave;
using Clock = std::chrono::steady_clock;

MoeSpec spec_of(std::string_view form) {
  MoeSpec spec;
  spec.num_experts = 128;
  spec.top_k = 8;
  spec.hidden_size = 2048;
  spec.intermediate_size = 768;
  spec.weight_dtype = form == "int4" ? DType::kI4 : DType::kBF16;
  if (form == "int4") {
    spec.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 128};
  }
  return spec;
}

std::vector<SharedTensor> tensors_of(const WeightSource& source) {
  std::vector<SharedTensor> tensors;
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source.describe(id);
    if (info.count != 0) tensors.push_back({.id = id, .info = info});
  }
  return tensors;
}

uint64_t publish(SharedWeightsWriter& writer, const WeightSource& source) {
  uint64_t bytes = 0;
  writer.begin();
  for (const SharedTensor& tensor : tensors_of(source)) {
    for (int64_t expert = 0; expert < tensor.info.count; ++expert) {
      const std::span<std::byte> to = writer.memory(tensor.id, expert);
      source.read(tensor.id, expert, {0, tensor.info.rows, 0, tensor.info.cols}, to);
      bytes += to.size();
    }
  }
  writer.publish();
  return bytes;
}

// Medians in seconds: the clock, and the processor time of all threads.
struct Times {
  double clock = 0;
  double processor = 0;
};

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double median_of(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

template <class Action>
Times time_of(int repeats, const Action& action) {
  std::vector<double> clock;
  std::vector<double> processor;
  for (int i = 0; i < repeats; ++i) {
    const Clock::time_point begin = Clock::now();
    const double used = processor_seconds();
    action();
    processor.push_back(processor_seconds() - used);
    clock.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return {median_of(clock), median_of(processor)};
}

void print(const std::string& name, uint64_t bytes, int threads, const Times& times) {
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  fmt::print("{:<28} {:7.1f} ms {:6.2f} GB/s   processor {:7.1f} ms {:6.2f} GB/s\n", name,
             times.clock * 1e3, gigabytes / times.clock, times.processor * 1e3,
             gigabytes * threads / times.processor);
}

// All threads copy their part of the matrices to memory that they have touched before.
void copy_by(int threads, std::span<const std::byte> from, std::span<std::byte> to) {
  std::vector<std::thread> workers;
  const size_t part = from.size() / static_cast<size_t>(threads);
  for (int i = 0; i < threads; ++i) {
    const size_t at = part * static_cast<size_t>(i);
    workers.emplace_back([=] { std::memcpy(to.data() + at, from.data() + at, part); });
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string form = argc > 1 ? argv[1] : "bf16";
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const int repeats = argc > 3 ? std::atoi(argv[3]) : 9;
  const MoeSpec spec = spec_of(form);
  const std::filesystem::path path = fmt::format("/dev/shm/refit_bench.{}", getpid());
  try {
    uint64_t bytes = 0;
    {
      const auto random = make_synthetic_source(spec, 1);
      SharedWeightsWriter writer(path, tensors_of(*random));
      bytes = publish(writer, *random);
    }
    const Context context({.num_threads = threads});
    const auto executor = make_thread_pool({.num_threads = threads});
    const SharedWeights shared(path);
    MoeLayer layer = MoeLayer::create(context, spec, shared);
    fmt::print("{}, {} threads, {:.3f} GB, {}\n", form, threads, static_cast<double>(bytes) / 1e9,
               layer.plan().packed_layout);

    std::vector<std::byte> from(bytes, std::byte{1});
    std::vector<std::byte> to(bytes, std::byte{2});
    print("memcpy", bytes, threads, time_of(repeats, [&] { copy_by(threads, from, to); }));
    print("checksum of a reader", bytes, 1, time_of(repeats, [&] { SharedWeights{path}; }));
    const auto refit = [&](const char* name, RefitMode mode, bool keeps_memory = false) {
      double longest = 0;
      print(name, bytes, threads, time_of(repeats, [&] {
              Refit transaction(
                  layer, {.mode = mode, .executor = executor.get(), .keeps_memory = keeps_memory});
              transaction.stage(shared);
              longest = std::max(longest, time_of(1, [&] { transaction.commit(); }).clock);
            }));
      fmt::print("{:<28} {:7.1f} ms at most\n", "  of this the commit", longest * 1e3);
    };
    refit("staged", RefitMode::kStaged);
    refit("staged, copied", RefitMode::kStagedCopy);
    refit("staged, memory kept", RefitMode::kStaged, true);
    refit("staged, copied, kept", RefitMode::kStagedCopy, true);
    refit("in place", RefitMode::kInPlace);
    print("content hash", bytes, 1, time_of(repeats, [&] { Refit::content_hash(layer); }));
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    std::filesystem::remove(path);
    return 1;
  }
  std::filesystem::remove(path);
  return 0;
}
