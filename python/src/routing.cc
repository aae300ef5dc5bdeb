#include "routing.h"

#include "arrays.h"
#include "context.h"
#include "fields.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"
#include "conclave/routing.h"
#include "conclave/token_router.h"

#include <memory>
#include <string>
#include <vector>

namespace conclave::python {
namespace {

class PyRouter {
 public:
  PyRouter(std::shared_ptr<PyContext> context, const nb::dict& spec)
      : context_(std::move(context)), router_(context_->context(), spec_from_dict(spec)) {}

  void route(nb::handle logits, nb::handle topk_ids, nb::handle topk_weights, nb::handle token_ids,
             nb::handle selection_bias, nb::handle expert_scale, nb::handle global_scale,
             const nb::dict& tensors, nb::handle shared_weights, uintptr_t stream,
             nb::handle banned_experts, int64_t expert_budget) const {
    std::vector<Array> kept;
    kept.reserve(9 + tensors.size());
    const auto keep = [&](nb::handle object, const char* name) -> const Array& {
      const Array& array = kept.emplace_back(object, name, stream);
      array.require_device(context_->device());
      return array;
    };
    const auto vector = [&](nb::handle object, const char* name, const char* shape) {
      return object.is_none() ? ConstTensorView{} : keep(object, name).vector(shape);
    };
    RouteArgs args;
    if (!logits.is_none()) args.logits = keep(logits, "gating_output").matrix("[T, num_experts]");
    args.token_ids = vector(token_ids, "token_ids", "[T]");
    args.selection_bias = vector(selection_bias, "selection_bias", "[num_experts]");
    args.expert_scale = vector(expert_scale, "expert_scale", "[num_experts]");
    args.global_scale = vector(global_scale, "global_scale", "[1]");
    if (!banned_experts.is_none()) {
      const Array& banned = keep(banned_experts, "banned_experts");
      args.banned_experts =
          banned.rank() == 1 ? banned.vector("[num_experts]") : banned.matrix("[T, num_experts]");
    }
    args.expert_budget = expert_budget;
    std::vector<std::string> names;  // kept as long as the arrays that refer to them
    names.reserve(tensors.size());
    for (const auto& [key, tensor] : tensors) {
      const std::string& name = names.emplace_back(nb::cast<std::string>(nb::str(key)));
      const Array& array = keep(tensor, name.c_str());
      args.tensors[name] = array.rank() == 1 ? array.vector("[n]") : array.matrix("[rows, cols]");
    }
    args.topk_ids = keep(topk_ids, "topk_ids").writable_matrix("[T, top_k]");
    args.topk_weights = keep(topk_weights, "topk_weights").writable_matrix("[T, top_k]");
    if (!shared_weights.is_none()) {
      args.shared_weights = keep(shared_weights, "shared_weights").writable_matrix("[T, shared]");
    }
    if (context_->device().is_cuda) {
      args.stream = to_stream(reinterpret_cast<CUstream_st*>(stream));
    }
    const nb::gil_scoped_release released;
    router_.route(args);
  }

 private:
  std::shared_ptr<PyContext> context_;
  TokenRouter router_;
};

}  // namespace

void bind_routing(nb::module_& module) {
  nb::class_<PyRouter> router(module, "Router", "A router by values, without experts.");
  router.def(nb::init<std::shared_ptr<PyContext>, const nb::dict&>(), nb::arg("context"),
             nb::arg("spec"));
  router.def("route", &PyRouter::route, nb::arg("logits").none(), nb::arg("topk_ids"),
             nb::arg("topk_weights"), nb::arg("token_ids") = nb::none(),
             nb::arg("selection_bias") = nb::none(), nb::arg("expert_scale") = nb::none(),
             nb::arg("global_scale") = nb::none(), nb::arg("tensors") = nb::dict(),
             nb::arg("shared_weights") = nb::none(), nb::arg("stream") = 0,
             nb::arg("banned_experts") = nb::none(), nb::arg("expert_budget") = 0,
             "Writes topk_ids [T, k] int32 and topk_weights [T, k] float32.");
  module.def(
      "routing_method",
      [](const std::string& name) {
        MoeSpec spec;
        spec.router = routing_method(name);
        return nb::cast<nb::dict>(spec_to_dict(spec)["router"]);
      },
      nb::arg("name"), "The router of a routing method of vLLM, as a dictionary.");
}

}  // namespace conclave::python
