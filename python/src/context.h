// A library context with the threads of the process and the workspaces that its layers share.
#pragma once

#include "arrays.h"
#include "executor.h"
#include "load_scope.h"
#include "per_process.h"

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/layer.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace conclave::python {

class PyContext;

// A workspace for one forward, returned when the lease ends. On CUDA it belongs to the stream, and
// meanwhile the lease keeps other threads from enqueuing there.
class WorkspaceLease {
 public:
  WorkspaceLease(PyContext& context, size_t bytes, Stream stream);
  ~WorkspaceLease();
  WorkspaceLease(const WorkspaceLease&) = delete;
  WorkspaceLease& operator=(const WorkspaceLease&) = delete;

  Workspace& workspace() noexcept { return *workspace_; }

 private:
  PyContext& context_;
  std::unique_ptr<Workspace> own_;  // on "cpu"
  Workspace* workspace_ = nullptr;
  std::unique_lock<std::mutex> stream_lock_;
};

class PyContext {
 public:
  // Null where layers are not split over ranks of this kind.
  struct Ranks {
    std::shared_ptr<Communicator> experts;
    std::shared_ptr<Communicator> slices;
  };
  PyContext(const std::string& device, const std::string& isa, Ranks ranks);

  const Context& context() const noexcept { return context_; }
  SharedExecutor& executor() const noexcept { return *executor_; }
  const ArrayDevice& device() const noexcept { return device_; }

 private:
  friend class WorkspaceLease;
  struct StreamWorkspace {
    std::mutex mutex;
    // The last one is in use; graphs captured before it grew may still use the others.
    std::vector<std::unique_ptr<Workspace>> grown;
  };

  struct Workspaces {
    std::mutex mutex;
    std::vector<std::unique_ptr<Workspace>> idle;                 // on "cpu", smallest first
    std::map<void*, std::unique_ptr<StreamWorkspace>> of_stream;  // on CUDA
  };

  std::shared_ptr<SharedExecutor> executor_;
  Ranks ranks_;
  SignalSink sink_;
  Context context_;
  ArrayDevice device_;
  PerProcess<Workspaces> workspaces_;
};

void bind_context(nb::module_& module);

}  // namespace conclave::python
