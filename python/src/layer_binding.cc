#include "adapters.h"
#include "arrays.h"
#include "call_arguments.h"
#include "fields.h"
#include "gguf_blocks.h"
#include "layer.h"
#include "migration.h"
#include "names.h"
#include "regroup.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

LayerRequest request_of(std::shared_ptr<PyContext> context, MoeSpec spec, const nb::dict& options,
                        const nb::dict& parallel, bool count) {
  return {.context = std::move(context),
          .spec = std::move(spec),
          .options = options_from_dict(options),
          .parallel = parallel_from_dict(parallel),
          .counting = count ? Counting::kOn : Counting::kOff};
}

MoeSpec with_rows(const MoeSpec& spec, bool plain_rows) {
  return plain_rows ? with_plain_rows(spec) : spec;
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
  // Device memory may be used in place; host memory is packed and released.
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

void bind_other_ranks(nb::class_<PyLayer>& layer) {
  layer.def(
      "on_ranks",
      [](PyLayer& self, const std::shared_ptr<PyContext>& context, const nb::dict& parallel) {
        return std::make_unique<PyLayer>(self, context, parallel_from_dict(parallel), nullptr,
                                         nullptr);
      },
      nb::arg("context"), nb::arg("parallel"), "The layer on other ranks, which hold all of it.");
  layer.def(
      "on_ranks_from_checkpoint",
      [](PyLayer& self, const std::shared_ptr<PyContext>& context, const nb::dict& parallel,
         const Checkpoint& checkpoint, int64_t index) {
        const std::unique_ptr<WeightSource> source = checkpoint.layer_source(index);
        return std::make_unique<PyLayer>(self, context, parallel_from_dict(parallel), source.get(),
                                         nullptr);
      },
      nb::arg("context"), nb::arg("parallel"), nb::arg("checkpoint"), nb::arg("index"),
      "The layer on other ranks; what they lack is read.");
  layer.def(
      "on_ranks_from_feed",
      [](PyLayer& self, const std::shared_ptr<PyContext>& context, const nb::dict& parallel,
         const CheckpointFeed& feed, int64_t index) {
        const std::unique_ptr<WeightSource> source = feed.layer_source(index);
        return std::make_unique<PyLayer>(self, context, parallel_from_dict(parallel), source.get(),
                                         nullptr);
      },
      nb::arg("context"), nb::arg("parallel"), nb::arg("feed"), nb::arg("index"),
      "The layer on other ranks; what they lack is read.");
  layer.def(
      "on_ranks_from_arrays",
      [](PyLayer& self, const std::shared_ptr<PyContext>& context, const nb::dict& parallel,
         const nb::dict& weights, const std::string& order, const std::string& shared_order,
         bool transposed, std::vector<int32_t> local_of) {
        const auto source = std::make_shared<ArraySource>(
            weights, self.layer().spec(),
            layout_of(order, shared_order, transposed, std::move(local_of)));
        const bool keeps = source->memory() == MemoryKind::kDevice;
        return std::make_unique<PyLayer>(self, context, parallel_from_dict(parallel), source.get(),
                                         keeps ? source : nullptr);
      },
      nb::arg("context"), nb::arg("parallel"), nb::arg("weights"), nb::arg("gate_up_order"),
      nb::arg("shared_gate_up_order"), nb::arg("transposed"), nb::arg("local_of"),
      "The layer on other ranks; what they lack is read.");
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
         const nb::dict& options, const nb::dict& parallel, bool count, bool plain_rows) {
        const MoeSpec spec = with_rows(checkpoint.layer(index).spec, plain_rows);
        const LayerRequest request = request_of(context, spec, options, parallel, count);
        const std::unique_ptr<WeightSource> source = checkpoint.layer_source(index);
        return std::make_unique<PyLayer>(request, *source, nullptr);
      },
      nb::arg("context"), nb::arg("checkpoint"), nb::arg("index"), nb::arg("options"),
      nb::arg("parallel"), nb::arg("count") = true, nb::arg("plain_rows") = false,
      "Plans and packs a layer of a checkpoint.");
  layer.def_static(
      "from_feed",
      [](const std::shared_ptr<PyContext>& context, const CheckpointFeed& feed, int64_t index,
         const nb::dict& options, const nb::dict& parallel, bool count, bool plain_rows) {
        const MoeSpec spec = with_rows(feed.layer(index).spec, plain_rows);
        const LayerRequest request = request_of(context, spec, options, parallel, count);
        const std::unique_ptr<WeightSource> source = feed.layer_source(index);
        return std::make_unique<PyLayer>(request, *source, nullptr);
      },
      nb::arg("context"), nb::arg("feed"), nb::arg("index"), nb::arg("options"),
      nb::arg("parallel"), nb::arg("count") = true, nb::arg("plain_rows") = false,
      "Plans and packs a complete layer of a feed, which may release it then.");
  layer.def_static(
      "from_blocks",
      [](const std::shared_ptr<PyContext>& context, const PyGgufBlocks& blocks,
         const nb::dict& options, const nb::dict& parallel, bool count) {
        const LayerRequest request =
            request_of(context, blocks.blocks().spec(), options, parallel, count);
        const std::unique_ptr<WeightSource> source = blocks.blocks().source();
        return std::make_unique<PyLayer>(request, *source, nullptr);
      },
      nb::arg("context"), nb::arg("blocks"), nb::arg("options"), nb::arg("parallel"),
      nb::arg("count") = true, "Plans and packs a layer of blocks.");
  layer.def(
      "reload_from_blocks",
      [](PyLayer& self, const PyGgufBlocks& blocks, const std::string& mode) {
        const std::unique_ptr<WeightSource> source = blocks.blocks().source();
        self.reload(*source, parse_word<ReloadMode>("mode", mode), nullptr);
      },
      nb::arg("blocks"), nb::arg("mode"), "New weights of the same shapes and types.");
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

// Every argument of a call is an object of Python, whatever its place.
template <size_t>
using ObjectAt = nb::handle;

template <size_t kIndex>
auto signature_of() {
  constexpr const CallArgument& argument = kCallArguments[kIndex];
  if constexpr (argument.need == ArgumentNeed::kNamed) {
    return nb::arg(argument.name).none();
  } else {
    return nb::arg(argument.name) = nb::none();
  }
}

template <size_t... kIndex>
void bind_forward(nb::class_<PyLayer>& layer, std::index_sequence<kIndex...> /*arguments*/) {
  layer.def(
      "forward",
      [](PyLayer& self, ObjectAt<kIndex>... objects, uintptr_t stream) {
        self.forward({objects...}, stream);
      },
      signature_of<kIndex>()..., nb::arg("stream") = 0,
      "Writes [T, hidden_size] to out. See conclave.Layer.forward.");
}

nb::typed<nb::list, nb::dict> call_arguments() {
  nb::list rows;
  for (const CallArgument& argument : kCallArguments) {
    nb::list dtypes;
    for (const DType dtype : argument.types) dtypes.append(dtype_to_python(dtype));
    nb::dict row;
    row["name"] = argument.name;
    row["shape"] = argument.shape;
    row["dtypes"] = dtypes;
    row["is_scratch"] = argument.use == ArgumentUse::kScratch;
    rows.append(row);
  }
  return nb::typed<nb::list, nb::dict>(std::move(rows));
}

}  // namespace

void bind_layer(nb::module_& module) {
  nb::class_<PyLayer> layer(module, "Layer", "One MoE layer: planned, packed and ready to run.");
  bind_making(layer);
  bind_other_ranks(layer);
  bind_forward(layer, std::make_index_sequence<kCallArguments.size()>());
  layer.def(
      "spec", [](const PyLayer& self) { return spec_to_dict(self.layer().spec()); },
      "The spec as a dictionary.");
  layer.def_prop_ro(
      "num_logits", [](const PyLayer& self) { return num_logits(self.layer().spec()); },
      "Columns of the logits: all experts, and shared ones that the router weighs.");
  layer.def_prop_ro(
      "num_slots", [](const PyLayer& self) { return num_slots(self.layer().spec()); },
      "Ids and weights of a token: the router's choices, and shared experts that are slots.");
  layer.def_prop_ro(
      "router_weighs_shared",
      [](const PyLayer& self) {
        const MoeSpec& spec = self.layer().spec();
        return num_logits(spec) > spec.num_experts + spec.num_zero_experts;
      },
      "Whether the router weighs shared experts too, which ids and weights do not say.");
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
  layer.def_prop_ro("isa", [](const PyLayer& self) { return self.context().context().isa(); });
  layer.def("workspace_bytes", &PyLayer::workspace_bytes, nb::arg("tokens"),
            "Scratch memory of a call of so many tokens, which is planned for if it has to be.");
  layer.def("plan_for", &PyLayer::plan_for, nb::arg("max_tokens"),
            "Plans for calls of up to so many tokens, on the weights packed already.");
  layer.def(
      "grow_with_calls",
      [](PyLayer& self, int64_t max_tokens, size_t max_workspace_bytes) {
        self.grow_with_calls(
            {.max_tokens = max_tokens, .max_workspace_bytes = max_workspace_bytes});
      },
      nb::arg("max_tokens"), nb::arg("max_workspace_bytes"),
      "From now on calls of more tokens than are planned for plan anew, up to these limits.");
  bind_adapters(layer);
  bind_migration(module, layer);
  bind_regroup(module, layer);
  module.def("call_arguments", &call_arguments,
             "The arguments of Layer.forward, in its order, with shapes and types.");
}

}  // namespace conclave::python
