#include "layer.h"

#include "fields.h"
#include "names.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <algorithm>
#include <utility>

namespace conclave::python {
namespace {

// The tensors of a call as the library takes them, and what keeps their memory until it is over.
class CallViews {
 public:
  CallViews(const CallArrays& call, const PyContext& context, uintptr_t stream);

  ForwardArgs args;
  std::span<std::byte> workspace;

 private:
  ConstTensorView input(nb::handle object, const char* name, const char* shape, int rank = 2);
  TensorView output(nb::handle object, const char* name, const char* shape);
  const Array& keep(nb::handle object, const char* name);
  void take_num_tokens(nb::handle object);
  void take_workspace(nb::handle object);

  const ArrayDevice& device_;
  uintptr_t stream_;
  std::vector<Array> kept_;
  int64_t num_tokens_ = 0;
};

const Array& CallViews::keep(nb::handle object, const char* name) {
  const Array& array = kept_.emplace_back(object, name, stream_);
  array.require_device(device_);
  return array;
}

ConstTensorView CallViews::input(nb::handle object, const char* name, const char* shape, int rank) {
  if (object.is_none()) return {};
  const Array& array = keep(object, name);
  return rank == 1 ? array.vector(shape) : array.matrix(shape);
}

TensorView CallViews::output(nb::handle object, const char* name, const char* shape) {
  if (object.is_none()) return {};
  return keep(object, name).writable_matrix(shape);
}

// A number, or int64 [1] on the layer's device.
void CallViews::take_num_tokens(nb::handle object) {
  if (object.is_none()) return;
  if (nb::isinstance<nb::int_>(object)) {
    num_tokens_ = nb::cast<int64_t>(object);
    if (device_.is_cuda) {
      throw Error(ErrorCode::kDevice, {.what = "a layer on CUDA reads this number on the device",
                                       .tensor = "num_tokens",
                                       .expected = "an int64 tensor of one element there",
                                       .found = "a Python integer"});
    }
    args.num_tokens = &num_tokens_;
    return;
  }
  const ConstTensorView view = keep(object, "num_tokens").vector("[1]");
  if (view.dtype != DType::kI64 || view.shape[0] != 1) {
    throw Error(ErrorCode::kDType,
                {.what = "an argument has the wrong type",
                 .tensor = "num_tokens",
                 .expected = "int64 [1]",
                 .found = std::string(dtype_to_python(view.dtype)) + " " + view.shape.to_string()});
  }
  args.num_tokens = static_cast<const int64_t*>(view.data);
}

void CallViews::take_workspace(nb::handle object) {
  if (object.is_none()) return;
  const TensorView view = keep(object, "workspace").writable_vector("[bytes]");
  const auto bytes = static_cast<size_t>(view.shape[0] * byte_size(view.dtype));
  workspace = {static_cast<std::byte*>(view.data), bytes};
}

CallViews::CallViews(const CallArrays& call, const PyContext& context, uintptr_t stream)
    : device_(context.device()), stream_(stream) {
  kept_.reserve(16);
  args.hidden = input(call.hidden, "hidden", "[T, hidden_size]");
  args.router_logits = input(call.router_logits, "router_logits", "[T, num_experts]");
  args.topk_ids = input(call.topk_ids, "topk_ids", "[T, top_k]");
  args.topk_weights = input(call.topk_weights, "topk_weights", "[T, top_k]");
  args.router_input = input(call.router_input, "router_input", "[T, hidden_size]");
  args.residual_input = input(call.residual_input, "residual_input", "[T, hidden_size]");
  args.token_ids = input(call.token_ids, "token_ids", "[T]", 1);
  args.padding_mask = input(call.padding_mask, "padding_mask", "[T]", 1);
  take_num_tokens(call.num_tokens);
  args.out = output(call.out, "out", "[T, hidden_size]");
  args.shared_out = output(call.shared_out, "shared_out", "[T, hidden_size]");
  args.captured_logits = output(call.captured_logits, "captured_logits", "[T, num_experts]");
  args.captured_ids = output(call.captured_ids, "captured_ids", "[T, top_k]");
  args.captured_weights = output(call.captured_weights, "captured_weights", "[T, top_k]");
  take_workspace(call.workspace);
  if (device_.is_cuda) args.stream = to_stream(reinterpret_cast<CUstream_st*>(stream));
}

void add(StageTimings& total, const StageTimings& part) {
  total.route_ns += part.route_ns;
  total.dispatch_ns += part.dispatch_ns;
  total.experts_ns += part.experts_ns;
  total.shared_ns += part.shared_ns;
  total.combine_ns += part.combine_ns;
  total.total_ns += part.total_ns;
}

}  // namespace

// Counters for one call, made once for each number of calls at a time.
class PyLayer::CountersLease {
 public:
  explicit CountersLease(PyLayer& layer) : state_(layer.state_.get()) {
    if (!layer.counts_) return;
    const std::lock_guard lock(state_.counters_mutex);
    if (state_.idle.empty()) {
      state_.counters.push_back(std::make_unique<Counters>());
      state_.counters.back()->load.resize(static_cast<size_t>(layer.layer_->spec().num_experts));
      state_.idle.push_back(state_.counters.back().get());
    }
    counters_ = state_.idle.back();
    state_.idle.pop_back();
  }
  ~CountersLease() {
    if (counters_ == nullptr) return;
    const std::lock_guard lock(state_.counters_mutex);
    state_.idle.push_back(counters_);
  }
  CountersLease(const CountersLease&) = delete;
  CountersLease& operator=(const CountersLease&) = delete;

  void fill(ForwardArgs& args) const {
    if (counters_ == nullptr) return;
    args.expert_load = counters_->load;
    args.timings = &counters_->timings;
  }

 private:
  State& state_;
  Counters* counters_ = nullptr;
};

PyLayer::PyLayer(const LayerRequest& request, const WeightSource& source,
                 std::shared_ptr<const WeightSource> kept)
    : context_(request.context),
      kept_(std::move(kept)),
      counts_(request.counting == Counting::kOn) {
  run_interruptible([&] {
    layer_.emplace(MoeLayer::create(context_->context(), request.spec, source, request.options,
                                    request.parallel));
    if (!counts_ || !context_->device().is_cuda) return;
    queue_.emplace(context_->context());
    device_load_ = queue_->allocate(DType::kI64, {request.spec.num_experts});
    queue_->fill(device_load_.view(), 0);
    queue_->synchronize();
  });
}

void PyLayer::forward(const CallArrays& call, uintptr_t stream) {
  CallViews views(call, *context_, stream);
  ForwardArgs& args = views.args;
  const bool is_cuda = context_->device().is_cuda;
  const nb::gil_scoped_release released;
  const std::shared_lock weights(state_.get().weights_mutex);
  std::optional<CountersLease> counters;
  if (is_cuda && counts_) {
    args.expert_load = {device_load_.as<int64_t>(),
                        static_cast<size_t>(layer_->spec().num_experts)};
  } else if (!is_cuda) {
    counters.emplace(*this);
    counters->fill(args);
  }
  if (views.workspace.data() != nullptr) {
    Workspace workspace(context_->context(), views.workspace, args.stream);
    args.workspace = &workspace;
    layer_->forward(args);
    return;
  }
  WorkspaceLease lease(*context_, layer_->workspace_bytes(), args.stream);
  args.workspace = &lease.workspace();
  layer_->forward(args);
}

void PyLayer::reload(const WeightSource& source, ReloadMode mode,
                     std::shared_ptr<const WeightSource> kept) {
  run_interruptible([&] {
    const std::unique_lock weights(state_.get().weights_mutex);
    layer_->reload(source, mode);
  });
  kept_ = std::move(kept);
}

std::vector<int64_t> PyLayer::total_load(StageTimings& timings) {
  std::vector<int64_t> load(static_cast<size_t>(layer_->spec().num_experts));
  if (queue_) {
    queue_->download(device_load_.const_view(),
                     {load.data(), DType::kI64, {layer_->spec().num_experts}});
    return load;
  }
  State& state = state_.get();
  const std::lock_guard lock(state.counters_mutex);
  for (const auto& counters : state.counters) {
    for (size_t expert = 0; expert < load.size(); ++expert) load[expert] += counters->load[expert];
    add(timings, counters->timings);
  }
  return load;
}

nb::dict PyLayer::timings_of(const StageTimings& total) const {
  nb::dict dict;
  dict["route_ns"] = total.route_ns;
  dict["dispatch_ns"] = total.dispatch_ns;
  dict["experts_ns"] = total.experts_ns;
  dict["shared_ns"] = total.shared_ns;
  dict["combine_ns"] = total.combine_ns;
  dict["total_ns"] = total.total_ns;
  return dict;
}

nb::dict PyLayer::stats() {
  StageTimings timings;
  const std::vector<int64_t> load = total_load(timings);
  const LayerStatus status = layer_->status();
  nb::dict dict;
  dict["forwards"] = status.forwards;
  dict["tokens"] = status.tokens;
  dict["skipped_ids"] = status.skipped_ids;
  dict["tokens_without_finite_logit"] = status.tokens_without_finite_logit;
  dict["expert_load"] = counts_ ? nb::cast(load) : nb::none();
  dict["timings"] = counts_ && !queue_ ? nb::object(timings_of(timings)) : nb::none();
  return dict;
}

void PyLayer::reset_stats() {
  if (queue_) {
    queue_->fill(device_load_.view(), 0);
    queue_->synchronize();
  }
  State& state = state_.get();
  const std::lock_guard lock(state.counters_mutex);
  for (const auto& counters : state.counters) {
    std::fill(counters->load.begin(), counters->load.end(), 0);
    counters->timings = {};
  }
}

namespace {

LayerRequest request_of(std::shared_ptr<PyContext> context, MoeSpec spec, const nb::dict& options,
                        const nb::dict& parallel, bool count) {
  return {.context = std::move(context),
          .spec = std::move(spec),
          .options = options_from_dict(options),
          .parallel = parallel_from_dict(parallel),
          .counting = count ? Counting::kOn : Counting::kOff};
}

ArrayLayout layout_of(const std::string& order, const std::string& shared_order, bool transposed,
                      std::vector<int32_t> local_of) {
  return {.order = parse_word<GateUpOrder>("gate_up_order", order),
          .shared_order = parse_word<GateUpOrder>("shared_gate_up_order", shared_order),
          .transposed = transposed,
          .local_of = std::move(local_of)};
}

std::unique_ptr<PyLayer> layer_from_arrays(const std::shared_ptr<PyContext>& context,
                                           const nb::dict& spec, const nb::dict& weights,
                                           const nb::dict& options, const nb::dict& parallel,
                                           const std::string& order,
                                           const std::string& shared_order, bool transposed,
                                           std::vector<int32_t> local_of, bool count) {
  const LayerRequest request = request_of(context, spec_from_dict(spec), options, parallel, count);
  validate(request.spec);
  const auto source = std::make_shared<ArraySource>(
      weights, request.spec, layout_of(order, shared_order, transposed, std::move(local_of)));
  // Device memory may be used where it lies; host memory is packed and let go.
  const bool keeps = source->memory() == MemoryKind::kDevice;
  return std::make_unique<PyLayer>(request, *source, keeps ? source : nullptr);
}

void reload_from_arrays(PyLayer& self, const nb::dict& weights, const std::string& mode,
                        const std::string& order, const std::string& shared_order, bool transposed,
                        std::vector<int32_t> local_of) {
  const auto source = std::make_shared<ArraySource>(
      weights, self.layer().spec(),
      layout_of(order, shared_order, transposed, std::move(local_of)));
  const bool keeps = source->memory() == MemoryKind::kDevice;
  self.reload(*source, parse_word<ReloadMode>("mode", mode), keeps ? source : nullptr);
}

void bind_making(nb::class_<PyLayer>& layer) {
  layer.def_static("from_arrays", &layer_from_arrays, nb::arg("context"), nb::arg("spec"),
                   nb::arg("weights"), nb::arg("options"), nb::arg("parallel"),
                   nb::arg("gate_up_order") = "concatenated",
                   nb::arg("shared_gate_up_order") = "concatenated", nb::arg("transposed") = false,
                   nb::arg("local_of") = std::vector<int32_t>(), nb::arg("count") = true,
                   "Plans and packs a layer of a spec from arrays, by the names of its weights.");
  layer.def_static(
      "from_checkpoint",
      [](const std::shared_ptr<PyContext>& context, const Checkpoint& checkpoint, int64_t index,
         const nb::dict& options, const nb::dict& parallel, bool count) {
        const LayerRequest request =
            request_of(context, checkpoint.layer(index).spec, options, parallel, count);
        const std::unique_ptr<WeightSource> source = checkpoint.layer_source(index);
        return std::make_unique<PyLayer>(request, *source, nullptr);
      },
      nb::arg("context"), nb::arg("checkpoint"), nb::arg("index"), nb::arg("options"),
      nb::arg("parallel"), nb::arg("count") = true, "Plans and packs a layer of a checkpoint.");
  layer.def_static(
      "from_feed",
      [](const std::shared_ptr<PyContext>& context, const CheckpointFeed& feed, int64_t index,
         const nb::dict& options, const nb::dict& parallel, bool count) {
        const LayerRequest request =
            request_of(context, feed.layer(index).spec, options, parallel, count);
        const std::unique_ptr<WeightSource> source = feed.layer_source(index);
        return std::make_unique<PyLayer>(request, *source, nullptr);
      },
      nb::arg("context"), nb::arg("feed"), nb::arg("index"), nb::arg("options"),
      nb::arg("parallel"), nb::arg("count") = true,
      "Plans and packs a complete layer of a feed, which may release it then.");
  layer.def(
      "reload_from_feed",
      [](PyLayer& self, const CheckpointFeed& feed, int64_t index, const std::string& mode) {
        const std::unique_ptr<WeightSource> source = feed.layer_source(index);
        self.reload(*source, parse_word<ReloadMode>("mode", mode), nullptr);
      },
      nb::arg("feed"), nb::arg("index"), nb::arg("mode"),
      "New weights of the same shapes and types.");
  layer.def("reload_from_arrays", &reload_from_arrays, nb::arg("weights"), nb::arg("mode"),
            nb::arg("gate_up_order") = "concatenated",
            nb::arg("shared_gate_up_order") = "concatenated", nb::arg("transposed") = false,
            nb::arg("local_of") = std::vector<int32_t>(),
            "New weights of the same shapes and types.");
  layer.def(
      "reload_from_checkpoint",
      [](PyLayer& self, const Checkpoint& checkpoint, int64_t index, const std::string& mode) {
        const std::unique_ptr<WeightSource> source = checkpoint.layer_source(index);
        self.reload(*source, parse_word<ReloadMode>("mode", mode), nullptr);
      },
      nb::arg("checkpoint"), nb::arg("index"), nb::arg("mode"),
      "New weights of the same shapes and types.");
}

void forward_of(PyLayer& self, nb::handle hidden, nb::handle out, nb::handle router_logits,
                nb::handle topk_ids, nb::handle topk_weights, nb::handle router_input,
                nb::handle residual_input, nb::handle token_ids, nb::handle padding_mask,
                nb::handle num_tokens, nb::handle shared_out, nb::handle captured_logits,
                nb::handle captured_ids, nb::handle captured_weights, nb::handle workspace,
                uintptr_t stream) {
  self.forward({.hidden = hidden,
                .out = out,
                .router_logits = router_logits,
                .topk_ids = topk_ids,
                .topk_weights = topk_weights,
                .router_input = router_input,
                .residual_input = residual_input,
                .token_ids = token_ids,
                .padding_mask = padding_mask,
                .num_tokens = num_tokens,
                .shared_out = shared_out,
                .captured_logits = captured_logits,
                .captured_ids = captured_ids,
                .captured_weights = captured_weights,
                .workspace = workspace},
               stream);
}

}  // namespace

void bind_layer(nb::module_& module) {
  nb::class_<PyLayer> layer(module, "Layer", "One MoE layer: planned, packed and ready to run.");
  bind_making(layer);
  layer.def("forward", &forward_of, nb::arg("hidden").none(), nb::arg("out").none(),
            nb::arg("router_logits") = nb::none(), nb::arg("topk_ids") = nb::none(),
            nb::arg("topk_weights") = nb::none(), nb::arg("router_input") = nb::none(),
            nb::arg("residual_input") = nb::none(), nb::arg("token_ids") = nb::none(),
            nb::arg("padding_mask") = nb::none(), nb::arg("num_tokens") = nb::none(),
            nb::arg("shared_out") = nb::none(), nb::arg("captured_logits") = nb::none(),
            nb::arg("captured_ids") = nb::none(), nb::arg("captured_weights") = nb::none(),
            nb::arg("workspace") = nb::none(), nb::arg("stream") = 0,
            "Writes [T, hidden_size] to out. See conclave.Layer.forward.");
  layer.def(
      "spec", [](const PyLayer& self) { return spec_to_dict(self.layer().spec()); },
      "The spec as a dictionary.");
  layer.def(
      "parallel", [](const PyLayer& self) { return parallel_to_dict(self.layer().parallel()); },
      "The split as a dictionary.");
  layer.def(
      "plan", [](const PyLayer& self) { return plan_to_dict(self.layer().plan()); },
      "The plan as a dictionary.");
  layer.def(
      "explain", [](const PyLayer& self) { return explain(self.layer().plan()); },
      "The plan as text.");
  layer.def("stats", &PyLayer::stats, "Counters since the layer was made.");
  layer.def("reset_stats", &PyLayer::reset_stats, "Sets expert_load and timings to zero.");
  layer.def_prop_ro("device",
                    [](const PyLayer& self) { return self.context().context().device(); });
  layer.def_prop_ro("workspace_bytes",
                    [](const PyLayer& self) { return self.layer().workspace_bytes(); });
  module.def(
      "make_plan",
      [](const PyContext& context, const nb::dict& spec, const nb::dict& options,
         const nb::dict& parallel) {
        const Plan plan = make_plan(context.context(), spec_from_dict(spec),
                                    options_from_dict(options), parallel_from_dict(parallel));
        nb::dict dict = plan_to_dict(plan);
        dict["text"] = explain(plan);
        return dict;
      },
      nb::arg("context"), nb::arg("spec"), nb::arg("options"), nb::arg("parallel"),
      "The plan that a layer of this spec would have, without weights.");
  module.def(
      "default_spec", [] { return spec_to_dict(MoeSpec{}); },
      "Every field of a spec with its default.");
  module.def(
      "default_options", [] { return options_to_dict(LayerOptions{}); },
      "Every option of a layer with its default.");
  module.def(
      "default_parallel", [] { return parallel_to_dict(ParallelSpec{}); },
      "Every field of a split with its default.");
  module.def(
      "check_spec", [](const nb::dict& spec) { validate(spec_from_dict(spec)); }, nb::arg("spec"),
      "Raises where a spec is not valid, naming the field.");
  module.def(
      "count_parameters",
      [](const nb::dict& spec) {
        const ParameterCount count = count_parameters(spec_from_dict(spec));
        return std::pair(count.total, count.active);
      },
      nb::arg("spec"), "Weight elements of a layer: all, and those that a token uses.");
}

}  // namespace conclave::python
