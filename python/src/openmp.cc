#include "openmp.h"

#include <atomic>
#include <dlfcn.h>
#include <link.h>
#include <string>
#include <string_view>

namespace conclave::python {
namespace {

struct Found {
  std::string path;
  bool is_of_torch = false;
};

int look_at_library(dl_phdr_info* info, size_t, void* state) {
  auto& found = *static_cast<Found*>(state);
  const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  const size_t name = path.rfind('/') + 1;
  if (!path.substr(name).starts_with("libgomp")) return 0;
  const bool is_of_torch = path.find("torch") != std::string_view::npos;
  if (found.path.empty() || is_of_torch) found = {std::string(path), is_of_torch};
  return found.is_of_torch ? 1 : 0;
}

struct Region {
  ParallelTask task;
  int32_t num_workers;
  std::atomic<int32_t> next{0};
};

// Every worker runs once, however many threads the runtime provides.
void run_region(void* state) {
  auto& region = *static_cast<Region*>(state);
  for (;;) {
    const int32_t worker = region.next.fetch_add(1, std::memory_order_relaxed);
    if (worker >= region.num_workers) return;
    region.task.invoke(region.task.state, worker);
  }
}

}  // namespace

const OpenMpThreads* OpenMpThreads::load() {
  Found found;
  dl_iterate_phdr(look_at_library, &found);
  if (found.path.empty()) return nullptr;
  void* const library = dlopen(found.path.c_str(), RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) return nullptr;
  const auto parallel = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
  return parallel == nullptr ? nullptr : new OpenMpThreads(parallel);
}

const OpenMpThreads* OpenMpThreads::find() {
  static std::atomic<const OpenMpThreads*> known{nullptr};
  const OpenMpThreads* threads = known.load(std::memory_order_acquire);
  if (threads == nullptr) {
    threads = load();
    if (threads != nullptr) known.store(threads, std::memory_order_release);
  }
  return threads;
}

void OpenMpThreads::run(ParallelTask task, int32_t num_workers, int32_t num_threads) const {
  Region region{.task = task, .num_workers = num_workers};
  parallel_(run_region, &region, static_cast<unsigned>(num_threads), 0);
}

}  // namespace conclave::python
