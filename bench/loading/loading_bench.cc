// loading_bench MODEL_DIR [read|map [THREADS]]: loads every MoE layer of a checkpoint, keeps all of
// them, and prints how long it took and how much anonymous memory it needed above the packed bytes.
#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/error.h"
#include "conclave/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// Counts resident pages that no file backs: those of mapped shards do not count.
int64_t anonymous_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8)) * 1024;
  }
  return 0;
}

// Samples every few milliseconds while it lives.
class PeakWatch {
 public:
  PeakWatch() : thread_([this] { watch(); }) {}
  PeakWatch(const PeakWatch&) = delete;
  PeakWatch& operator=(const PeakWatch&) = delete;
  ~PeakWatch() {
    stop_ = true;
    thread_.join();
  }
  int64_t peak() const { return peak_; }

 private:
  void watch() {
    while (!stop_) {
      peak_ = std::max(peak_.load(), anonymous_resident_bytes());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  std::atomic<bool> stop_{false};
  std::atomic<int64_t> peak_{0};
  std::thread thread_;
};

struct Arguments {
  std::string directory;
  conclave::FileAccess access = conclave::FileAccess::kRead;
  int32_t threads = 0;
};

int load(const Arguments& arguments) {
  const auto checkpoint =
      conclave::Checkpoint::open(arguments.directory, {.access = arguments.access});
  const conclave::Context context({.num_threads = arguments.threads});
  const int64_t before = anonymous_resident_bytes();
  std::vector<conclave::MoeLayer> layers;
  int64_t packed = 0;
  int64_t stored = 0;
  const PeakWatch watch;
  const auto begin = Clock::now();
  for (const conclave::CheckpointLayer& layer : checkpoint.layers()) {
    const auto source = checkpoint.layer_source(layer.index);
    layers.push_back(conclave::MoeLayer::create(context, layer.spec, *source, {.max_tokens = 1}));
    packed += static_cast<int64_t>(layers.back().plan().packed_bytes);
    stored += static_cast<int64_t>(layer.bytes);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const int64_t peak = std::max(watch.peak(), anonymous_resident_bytes()) - before;
  const auto gigabytes = [](int64_t bytes) { return static_cast<double>(bytes) * 1e-9; };
  fmt::print("layers {}, stored {:.3f} GB, packed {:.3f} GB\n", layers.size(), gigabytes(stored),
             gigabytes(packed));
  fmt::print("peak anonymous {:.3f} GB, {:.4f} of packed\n", gigabytes(peak),
             static_cast<double>(peak) / static_cast<double>(packed));
  fmt::print("{:.2f} s, {:.2f} GB/s, {} threads\n", seconds, gigabytes(stored) / seconds,
             context.executor().concurrency());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    std::fputs("usage: loading_bench MODEL_DIR [read|map [THREADS]]\n", stderr);
    return 2;
  }
  Arguments arguments{.directory = argv[1]};
  if (argc > 2 && std::string_view(argv[2]) == "map") {
    arguments.access = conclave::FileAccess::kMap;
  }
  if (argc > 3) arguments.threads = std::atoi(argv[3]);
  try {
    return load(arguments);
  } catch (const conclave::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
