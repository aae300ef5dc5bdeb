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
          bool keeps_memory)
      : spec_(layer.layer().spec()),
        context_(layer.context().context()),
        scope_(scope_of(experts, tensors)) {
    RefitOptions options{.mode = parse_word<RefitMode>("mode", mode),
                         .scope = scope_,
                         .epoch = epoch,
                         .keeps_memory = keeps_memory,
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

  // From now on rank `root` has what is staged; null: this rank's own source.
  void send_over(std::shared_ptr<Communicator> communicator, int32_t root) {
    communicator_ = std::move(communicator);
    root_ = root;
    has_told_ranks_ = false;
  }
  // Tells the others, which wait, that the root has found no weights to send.
  void give_up() {
    if (communicator_ == nullptr || has_told_ranks_) return;
    const nb::gil_scoped_release released;
    try {
      const BroadcastWeights none(context_, *communicator_, nullptr, {.root = root_});
    } catch (const Error&) {
      return;  // as intended: the root has an error of its own to raise
    }
  }
  void stage(const WeightSource& source, const RefitScope& part) {
    if (communicator_ != nullptr) return stage_sent(&source, part);
    run_interruptible([&] { refit_->stage(source, part); });
  }
  // Ranks other than the root have no source.
  void stage_sent(const WeightSource* source, const RefitScope& part) {
    const bool is_all = part.experts.empty() && part.tensors.empty();
    has_told_ranks_ = true;
    run_interruptible([&] {
      const BroadcastWeights received(context_, *communicator_, source,
                                      {.root = root_, .part = is_all ? scope_ : part});
      refit_->stage(received, part);
    });
  }
  void commit() {
    const nb::gil_scoped_release released;
    refit_->commit();
  }
  void rollback() {
    const nb::gil_scoped_release released;
    refit_->rollback();
  }
  void withdraw() {
    const nb::gil_scoped_release released;
    refit_->withdraw();
  }
  bool is_staged() const { return refit_->is_staged(); }
  const MoeSpec& spec() const { return spec_; }

 private:
  MoeSpec spec_;
  const Context& context_;  // the layer's
  RefitScope scope_;
  std::shared_ptr<Communicator> communicator_;
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
                    const std::vector<std::string>&, uint64_t, int32_t, bool>(),
           nb::arg("layer"), nb::arg("mode"), nb::arg("experts"), nb::arg("tensors"),
           nb::arg("epoch"), nb::arg("threads"), nb::arg("keeps_memory"), nb::keep_alive<1, 2>())
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
      .def("give_up", &PyRefit::give_up)
      .def(
          "stage_received",
          [](PyRefit& self, const std::vector<int32_t>& experts,
             const std::vector<std::string>& tensors) {
            self.stage_sent(nullptr, scope_of(experts, tensors));
          },
          nb::arg("experts"), nb::arg("tensors"))
      .def("commit", &PyRefit::commit)
      .def("rollback", &PyRefit::rollback)
      .def("withdraw", &PyRefit::withdraw)
      .def_prop_ro("is_staged", &PyRefit::is_staged);
  nb::class_<PyReplay>(module, "Replay", "Keeps refits out. Use conclave.Layer.replaying.")
      .def(nb::init<const PyLayer&, uintptr_t>(), nb::arg("layer"), nb::arg("stream"),
           nb::keep_alive<1, 2>())
      .def("end", &PyReplay::end);
  module.def(
      "withdraw_refit", [](PyLayer& layer) { layer.withdraw_refit(); }, nb::arg("layer"),
      "Says no in the commit of other ranks.");
  module.def(
      "content_hash",
      [](const PyLayer& layer) {
        const nb::gil_scoped_release released;
        return Refit::content_hash(layer.layer());
      },
      nb::arg("layer"), "A hash of the weights that this rank holds.");
}

}  // namespace conclave::python
