#include "ranks/gpus.h"

#include "output/terminal.h"
#include "ranks/launchers.h"

#include "conclave/context.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <span>
#include <vector>

namespace conclave::tool {
namespace {

constexpr const char* kOnTheCpu = "ranks on the CPU: --transport local, tcp or mpi";

struct Gpus {
  int32_t count = 0;
  std::string why_no_more;
  std::string hint;  // empty, or what a build without GPUs lacks
};

// Layers could run on so many. It asks the driver, and takes no memory of a device.
Gpus usable_gpus(const std::string& kind, int32_t most) {
  Gpus gpus;
  try {
    for (; gpus.count < most; ++gpus.count) {
      const Context asked({.device = fmt::format("{}:{}", kind, gpus.count), .num_threads = 1});
    }
  } catch (const Error& error) {
    // A build without CUDA names the device, a machine the driver's reason.
    const bool by_driver = error.code() == ErrorCode::kDevice && !error.detail().found.empty();
    gpus.why_no_more = by_driver ? error.detail().found : error.detail().what;
    gpus.hint = error.detail().hint;
  }
  return gpus;
}

std::string text_of(const Gpus& gpus) {
  if (gpus.why_no_more.empty()) return std::to_string(gpus.count);
  return fmt::format("{}: {}", gpus.count, gpus.why_no_more);
}

[[noreturn]] void refuse_fewer(int32_t ranks, const Gpus& gpus, const std::string& hint) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "there are fewer GPUs than ranks",
               .tensor = "--ranks",
               .expected = fmt::format("{} GPUs, one for each rank", ranks),
               .found = text_of(gpus),
               .hint = hint});
}

// Ranks with the same number are processes of one machine that see the same GPUs.
uint64_t view_of_machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  for (const char* const variable : {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}) {
    text += "\n" + environment_value(variable);
  }
  return hash_of(text);
}

// A rank tells this to the others.
struct View {
  uint64_t machine = 0;
  int64_t gpus = 0;
};

}  // namespace

void check_gpus(const ProcessTransport& transport, int32_t ranks) {
  const Gpus gpus = usable_gpus(transport.device_kind, ranks);
  if (gpus.count < ranks) {
    const std::string hint =
        gpus.count > 0 ? fmt::format("--ranks {}, or more devices in CUDA_VISIBLE_DEVICES; {}",
                                     gpus.count, kOnTheCpu)
                       : fmt::format("{}{}conclave doctor shows what is missing; {}", gpus.hint,
                                     gpus.hint.empty() ? "" : "; ", kOnTheCpu);
    refuse_fewer(ranks, gpus, hint);
  }
  for (const TransportInfo& info : transports()) {
    if (info.name != transport.name || info.usable || ranks == 1) continue;
    throw Error(ErrorCode::kUnsupported,
                {.what = "ranks cannot be connected by transport " + transport.name,
                 .tensor = "--transport",
                 .found = info.reason,
                 .hint = fmt::format("install libnccl.so.2, such as PyPI's nvidia-nccl-cu13, and "
                                     "put its folder into LD_LIBRARY_PATH; {}",
                                     kOnTheCpu)});
  }
}

std::string device_of_rank(Communicator& all, const std::string& kind) {
  const Gpus gpus = usable_gpus(kind, all.size());
  const View mine{.machine = view_of_machine(), .gpus = gpus.count};
  std::vector<View> views(static_cast<size_t>(all.size()));
  all.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(views)),
                 "share the GPUs");
  std::vector<int32_t> ordinals;
  for (auto view = views.begin(); view != views.end(); ++view) {
    const auto before = std::count_if(
        views.begin(), view, [&](const View& other) { return other.machine == view->machine; });
    ordinals.push_back(static_cast<int32_t>(before));
  }
  for (size_t rank = 0; rank < views.size(); ++rank) {
    if (ordinals[rank] < views[rank].gpus) continue;
    const auto sharing = std::count_if(views.begin(), views.end(), [&](const View& other) {
      return other.machine == views[rank].machine;
    });
    throw Error(
        ErrorCode::kUnsupported,
        {.what = fmt::format("rank {} has no GPU of its own", rank),
         .tensor = "--ranks",
         .expected = fmt::format("{} GPUs, which as many ranks of its machine share", sharing),
         .found = views[rank].gpus == gpus.count ? text_of(gpus) : std::to_string(views[rank].gpus),
         .hint = fmt::format("start fewer ranks, or let the launcher give each a GPU in "
                             "CUDA_VISIBLE_DEVICES; {}",
                             kOnTheCpu)});
  }
  return fmt::format("{}:{}", kind, ordinals[static_cast<size_t>(all.rank())]);
}

}  // namespace conclave::tool
