// refit_bench FORM [THREADS [REPEATS]]: FORM is one of forms() below, such as bf16 or int4; refits
// a layer of Qwen3-30B-A3B's size from shared memory, in every mode, and prints gigabytes of
// weights a second beside those of memcpy: on the clock, and by processor time as if every thread
// had a core of its own.
#include "conclave/conclave.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <ranges>
#include <string>
#include <string_view>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace {

using namespace conclave;
using Clock = std::chrono::steady_clock;

QuantSpec groups_of(int64_t columns) {
  return {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns};
}

struct Form {
  std::string_view name;
  DType dtype;
  QuantSpec quant;
};

std::vector<Form> forms() {
  QuantSpec points = groups_of(128);
  points.zeros = WeightZero::kPoint;
  QuantSpec order = groups_of(128);
  order.has_column_order = true;
  QuantSpec mxfp4 = groups_of(32);
  mxfp4.scale_values = ScaleValues::kPowerOfTwo;
  QuantSpec nvfp4 = groups_of(16);
  nvfp4.scale_values = ScaleValues::kFloat8;
  nvfp4.has_global_scale = true;
  QuantSpec iq4_nl = groups_of(32);
  iq4_nl.signed_scales = true;
  iq4_nl.scale_values = ScaleValues::kF16;
  QuantSpec q4_k = groups_of(32);
  q4_k.signed_scales = true;
  q4_k.scale_values = q4_k.zero_values = ScaleValues::kSteps;
  q4_k.zeros = WeightZero::kOffset;
  return {{"bf16", DType::kBF16, {}},
          {"int4", DType::kI4, groups_of(128)},
          {"int4-g64", DType::kI4, groups_of(64)},
          {"int4-g32", DType::kI4, groups_of(32)},
          {"int4-zeros", DType::kU4, points},
          {"int4-order", DType::kI4, order},
          {"mxfp4", DType::kF4, mxfp4},
          {"nvfp4", DType::kF4, nvfp4},
          {"iq4_nl", DType::kIQ4, iq4_nl},
          {"q4_k", DType::kU4, q4_k}};
}

MoeSpec spec_of(std::string_view name) {
  const std::vector<Form> all = forms();
  const auto form = std::ranges::find(all, name, &Form::name);
  if (form == all.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("no form of weights is {}; there are {}", name,
                            fmt::join(all | std::views::transform(&Form::name), ", ")));
  }
  MoeSpec spec;
  spec.num_experts = 128;
  spec.top_k = 8;
  spec.hidden_size = 2048;
  spec.intermediate_size = 768;
  spec.weight_dtype = form->dtype;
  spec.quant = form->quant;
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
  const std::filesystem::path path = fmt::format("/dev/shm/refit_bench.{}", getpid());
  try {
    const MoeSpec spec = spec_of(form);
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
    fmt::print("hash {:016x}\n", Refit::content_hash(layer));
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    std::filesystem::remove(path);
    return 1;
  }
  std::filesystem::remove(path);
  return 0;
}
