#include "refit.h"

#include "array_source.h"
#include "layer.h"
#include "load_scope.h"
#include "names.h"

#include "conclave/broadcast_weights.h"
#include "conclave/checkpoint.h"
#include "conclave/comm.h"
#include "conclave/error.h"
#include "conclave/interop/cuda.h"
#include "conclave/refit.h"
#include "conclave/shared_weights.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

RefitScope scope_of(const std::vector<int32_t>& experts, const std::vector<std::string>& tensors) {
  RefitScope scope{.experts = experts};
  for (const std::string& name : tensors) scope.tensors.push_back(refit_tensor(name));
  return scope;
}

class PyRefit {
 public:
  PyRefit(PyLayer& layer, const std::string& mode, const std::vector<int32_t>& experts,
          const std::vector<std::string>& tensors, uint64_t epoch, int32_t threads,
          bool keeps_memory, std::shared_ptr<Communicator> communicator)
      : spec_(layer.layer().spec()),
        scope_(scope_of(experts, tensors)),
        communicator_(std::move(communicator)) {
    RefitOptions options{.mode = parse_word<RefitMode>("mode", mode),
                         .scope = scope_,
                         .epoch = epoch,
                         .keeps_memory = keeps_memory,
                         .communicator = communicator_.get(),
                         .refusal = RefitRefusal::kSilent};  // the package tells, of its checks too
    if (threads > 1) {
      executor_ = make_thread_pool({.num_threads = threads});
      options.executor = executor_.get();
    }
    refit_ = layer.begin_refit(options);
  }
  ~PyRefit() {
    const nb::gil_scoped_release released;
    refit_.reset();
  }
  PyRefit(const PyRefit&) = delete;
  PyRefit& operator=(const PyRefit&) = delete;

  // In the next stage rank `root` has the weights; null: each rank has a source of its own. The
  // communicator is kept, since commit needs it.
  void send_over(const std::shared_ptr<Communicator>& communicator, int32_t root) {
    is_sent_ = communicator != nullptr;
    if (is_sent_) communicator_ = communicator;
    root_ = root;
    has_told_ranks_ = false;
  }
  // Tells the others, which wait, why this rank does not take part in the stage that it has begun.
  void give_up(const std::string& reason) {
    if (!is_sent_ || has_told_ranks_) return;
    const nb::gil_scoped_release released;
    refit_->refuse_broadcast(*communicator_, reason);
  }
  void stage(const WeightSource& source, const RefitScope& part) {
    if (is_sent_) return stage_sent(&source, part);
    run_interruptible([&] { refit_->stage(source, part); });
  }
  // Ranks other than the root have no source.
  void stage_sent(const WeightSource* source, const RefitScope& part) {
    has_told_ranks_ = true;
    run_interruptible(
        [&] { refit_->stage_broadcast(*communicator_, source, {.root = root_, .part = part}); });
  }
  void commit() {
    const nb::gil_scoped_release released;
    refit_->commit();
  }
  void rollback() {
    const nb::gil_scoped_release released;
    refit_->rollback();
  }
  void withdraw(const std::string& reason) {
    const nb::gil_scoped_release released;
    refit_->withdraw(reason);
  }
  bool is_staged() const { return refit_->is_staged(); }
  const MoeSpec& spec() const { return spec_; }

 private:
  MoeSpec spec_;
  RefitScope scope_;
  std::shared_ptr<Communicator> communicator_;  // outlives the refit
  bool is_sent_ = false;
  int32_t root_ = 0;
  bool has_told_ranks_ = false;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Refit> refit_;
};

void stage_arrays(PyRefit& self, const nb::dict& weights, const std::string& order,
                  const std::string& shared_order, bool transposed, std::vector<int32_t> local_of,
                  const std::vector<int32_t>& experts, const std::vector<std::string>& tensors) {
  const ArraySource source(
      weights, self.spec(),
      {.order = parse_word<GateUpOrder>("gate_up_order", order),
       .shared_order = parse_word<GateUpOrder>("shared_gate_up_order", shared_order),
       .transposed = transposed,
       .local_of = std::move(local_of)});
  self.stage(source, scope_of(experts, tensors));
}

// A GraphReplay that ends when it is told to.
class PyReplay {
 public:
  PyReplay(const PyLayer& layer, uintptr_t stream) {
    const nb::gil_scoped_release released;
    const bool is_on_device = layer.context().device().is_cuda;
    replay_.emplace(layer.layer(),
                    is_on_device ? to_stream(reinterpret_cast<CUstream_st*>(stream)) : Stream{});
  }
  void end() { replay_.reset(); }

 private:
  std::optional<GraphReplay> replay_;
};

}  // namespace

void bind_refit(nb::module_& module) {
  nb::class_<PyRefit>(module, "Refit", "New weights on their way. Use conclave.Layer.refit.")
      .def(nb::init<PyLayer&, const std::string&, const std::vector<int32_t>&,
                    const std::vector<std::string>&, uint64_t, int32_t, bool,
                    std::shared_ptr<Communicator>>(),
           nb::arg("layer"), nb::arg("mode"), nb::arg("experts"), nb::arg("tensors"),
           nb::arg("epoch"), nb::arg("threads"), nb::arg("keeps_memory"),
           nb::arg("communicator").none(), nb::keep_alive<1, 2>())
      .def("stage_arrays", &stage_arrays, nb::arg("weights"), nb::arg("gate_up_order"),
           nb::arg("shared_gate_up_order"), nb::arg("transposed"), nb::arg("local_of"),
           nb::arg("experts"), nb::arg("tensors"))
      .def(
          "stage_checkpoint",
          [](PyRefit& self, const Checkpoint& checkpoint, int64_t index,
             const std::vector<int32_t>& experts, const std::vector<std::string>& tensors) {
            self.stage(*checkpoint.layer_source(index), scope_of(experts, tensors));
          },
          nb::arg("checkpoint"), nb::arg("index"), nb::arg("experts"), nb::arg("tensors"))
      .def(
          "stage_feed",
          [](PyRefit& self, const CheckpointFeed& feed, int64_t index,
             const std::vector<int32_t>& experts, const std::vector<std::string>& tensors) {
            self.stage(*feed.layer_source(index), scope_of(experts, tensors));
          },
          nb::arg("feed"), nb::arg("index"), nb::arg("experts"), nb::arg("tensors"))
      .def(
          "stage_shared",
          [](PyRefit& self, const SharedWeights& weights, const std::vector<int32_t>& experts,
             const std::vector<std::string>& tensors) {
            self.stage(weights, scope_of(experts, tensors));
          },
          nb::arg("weights"), nb::arg("experts"), nb::arg("tensors"))
      .def("send_over", &PyRefit::send_over, nb::arg("communicator").none(), nb::arg("root"))
      .def("give_up", &PyRefit::give_up, nb::arg("reason"))
      .def(
          "stage_received",
          [](PyRefit& self, const std::vector<int32_t>& experts,
             const std::vector<std::string>& tensors) {
            self.stage_sent(nullptr, scope_of(experts, tensors));
          },
          nb::arg("experts"), nb::arg("tensors"))
      .def("commit", &PyRefit::commit)
      .def("rollback", &PyRefit::rollback)
      .def("withdraw", &PyRefit::withdraw, nb::arg("reason"))
      .def_prop_ro("is_staged", &PyRefit::is_staged);
  nb::class_<PyReplay>(module, "Replay", "Keeps refits out. Use conclave.Layer.replaying.")
      .def(nb::init<const PyLayer&, uintptr_t>(), nb::arg("layer"), nb::arg("stream"),
           nb::keep_alive<1, 2>())
      .def("end", &PyReplay::end);
  module.def(
      "withdraw_refit",
      [](PyLayer& layer, const std::shared_ptr<Communicator>& communicator,
         const std::string& reason) { layer.withdraw_refit(communicator.get(), reason); },
      nb::arg("layer"), nb::arg("communicator").none(), nb::arg("reason"),
      "Says no where other ranks commit or send weights.");
  module.def(
      "content_hash",
      [](const PyLayer& layer) {
        const nb::gil_scoped_release released;
        return Refit::content_hash(layer.layer());
      },
      nb::arg("layer"), "A hash of the weights that this rank holds.");
}

}  // namespace conclave::python
