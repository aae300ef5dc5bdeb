#include "context.h"

#include "conclave/device.h"
#include "conclave/version.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace conclave::python {
namespace {

// All contexts share one pool, so that layers of several devices do not add up their threads. It is
// never destroyed: at exit its threads may have been left behind by a fork.
std::shared_ptr<SharedExecutor> process_executor() {
  static const auto& executor = *new auto(std::make_shared<SharedExecutor>());
  return executor;
}

// The number of unused workspaces that are kept for later calls, enough for that many threads.
constexpr size_t kMaxIdle = 8;

}  // namespace

PyContext::PyContext(const std::string& device, const std::string& isa, Ranks ranks)
    : executor_(process_executor()),
      ranks_(std::move(ranks)),
      context_({.device = device,
                .isa = isa,
                .executor = executor_.get(),
                .log = &sink_,
                .communicator = ranks_.experts.get(),
                .tensor_communicator = ranks_.slices.get()}),
      device_(parse_array_device(context_.device())) {}

WorkspaceLease::WorkspaceLease(PyContext& context, size_t bytes, Stream stream)
    : context_(context) {
  PyContext::Workspaces& all = context.workspaces_.get();
  if (context.device_.is_cuda) {
    PyContext::StreamWorkspace* slot = nullptr;
    {
      const std::lock_guard lock(all.mutex);
      auto& entry = all.of_stream[stream.handle];
      if (!entry) entry = std::make_unique<PyContext::StreamWorkspace>();
      slot = entry.get();
    }
    stream_lock_ = std::unique_lock(slot->mutex);
    if (slot->grown.empty() || slot->grown.back()->memory().size() < bytes) {
      slot->grown.push_back(std::make_unique<Workspace>(context.context_, bytes, stream));
    }
    workspace_ = slot->grown.back().get();
    return;
  }
  {
    const std::lock_guard lock(all.mutex);
    const auto found = std::find_if(all.idle.begin(), all.idle.end(), [&](const auto& workspace) {
      return workspace->memory().size() >= bytes;
    });
    if (found != all.idle.end()) {
      own_ = std::move(*found);
      all.idle.erase(found);
    }
  }
  if (!own_) own_ = std::make_unique<Workspace>(context.context_, bytes);
  workspace_ = own_.get();
}

WorkspaceLease::~WorkspaceLease() {
  if (!own_) return;
  PyContext::Workspaces& all = context_.workspaces_.get();
  const std::lock_guard lock(all.mutex);
  auto& idle = all.idle;
  const auto place = std::find_if(idle.begin(), idle.end(), [&](const auto& other) {
    return other->memory().size() >= own_->memory().size();
  });
  idle.insert(place, std::move(own_));
  if (idle.size() > kMaxIdle) idle.erase(idle.begin());  // the smallest
}

void bind_context(nb::module_& module) {
  nb::class_<PyContext>(module, "Context",
                        "A device with the process' threads and scratch memory. Layers share it.")
      .def(
          "__init__",
          [](PyContext* self, const std::string& device, const std::string& isa,
             std::shared_ptr<Communicator> experts, std::shared_ptr<Communicator> slices) {
            new (self) PyContext(device, isa, {std::move(experts), std::move(slices)});
          },
          nb::arg("device") = "cpu", nb::arg("isa") = "", nb::arg("communicator") = nb::none(),
          nb::arg("tensor_communicator") = nb::none())
      .def_prop_ro("device", [](const PyContext& self) { return self.context().device(); })
      .def_prop_ro("isa", [](const PyContext& self) { return self.context().isa(); });
  module.def(
      "set_num_threads", [](int32_t threads) { process_executor()->set_num_threads(threads); },
      nb::arg("num_threads"), "CPU threads of all layers from now on, cut to max_threads().");
  module.def(
      "use_openmp", [] { process_executor()->use_openmp(); },
      "From now on layers run on the threads of the OpenMP runtime that is loaded, if any is.");
  module.def(
      "uses_openmp", [] { return process_executor()->uses_openmp(); },
      "Whether layers run on the threads of an OpenMP runtime.");
  module.def(
      "num_threads", [] { return process_executor()->num_threads(); }, "CPU threads in use.");
  module.def(
      "max_threads", [] { return process_executor()->concurrency(); },
      "CPUs that this process may use: what layers plan for.");
  module.def(
      "backends",
      [] {
        nb::list rows;
        for (const BackendInfo& backend : backends()) {
          nb::dict row;
          row["name"] = backend.name;
          row["usable"] = backend.usable;
          row["reason"] = backend.reason;
          rows.append(row);
        }
        return rows;
      },
      "Devices and libraries beside the CPU, and why one cannot be used.");
  module.def(
      "build_info",
      [] {
        const BuildInfo& info = build_info();
        nb::dict dict;
        dict["version"] = info.version;
        dict["commit"] = info.commit;
        dict["compiler"] = info.compiler;
        dict["build_type"] = info.build_type;
        dict["features"] = info.features;
        return dict;
      },
      "What this build was made from.");
}

}  // namespace conclave::python
