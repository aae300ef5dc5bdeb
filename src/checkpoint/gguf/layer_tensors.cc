#include "checkpoint/gguf/layer_tensors.h"

#include "checkpoint/gguf/tensor_taker.h"
#include "routing/router_tensors.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

class LayerFinder : private GgufTensorTaker {
 public:
  LayerFinder(const GgufTensorTable& tensors, int64_t index, const GgufSizes& sizes,
              const GgufDemands& demands, GgufAbsent absent)
      : GgufTensorTaker(tensors, index, absent), sizes_(sizes), demands_(demands) {
    layer().num_experts = sizes.num_experts;
  }

  void find() {
    find_router();
    find_projections();
    find_experts();
    find_shared();
    if (sizes_.has_residual) find_residual();
    check_all_used();
  }

  GgufLayer take_layer() { return std::move(layer()); }
  using GgufTensorTaker::take_so_far;

 private:
  GgufMatrix take_factor(std::string_view name, bool is_demanded) {
    const GgufDims dims{.rows = 1, .cols = sizes_.num_experts};
    const GgufPlace place = look_up(name, is_demanded, dims);
    if (!place) return {};
    check_type(weights::kExpertScale, place);
    check_shape(place, dims);
    return {place, 0};
  }

  void find_router() {
    const GgufDims of_experts{.rows = 1, .cols = sizes_.num_experts};
    take_required(weights::kRouter, "ffn_gate_inp.weight",
                  {.rows = sizes_.num_experts, .cols = sizes_.hidden_size});
    take_optional(weights::kRouterBias, "ffn_gate_inp.bias", of_experts, demands_.biases);
    if (sizes_.normalises_router) {
      take_required(weights::kRouterInputScale, "ffn_gate_inp.scale",
                    {.rows = 1, .cols = sizes_.hidden_size});
    }
    take_optional(weights::kSelectionBias, "exp_probs_b.bias", of_experts);
    if (!layer().has(weights::kSelectionBias)) {
      take_optional(weights::kSelectionBias, "exp_probs_b", of_experts);
    }
    if (!layer().has(weights::kSelectionBias) && demands_.selection_bias) {
      require("exp_probs_b.bias", of_experts);
    }
    for (const routing::RouterTensor* own : routing::all_router_tensors()) {
      if (own->gguf_name.empty()) continue;
      const GgufPlace place = look_up(own->gguf_name, own == demands_.router_tensor, {});
      if (place) take(*own->id, place, {.rows = count_rows(place), .cols = row_length(place)});
    }
  }

  // Experts may work on a projection of the hidden state.
  void find_projections() {
    width_ = sizes_.hidden_size;
    constexpr std::string_view kNorm = "ffn_routed_norm.weight";
    constexpr std::array<std::array<std::string_view, 2>, 2> kNames = {{
        {"ffn_latent_down.weight", "ffn_latent_up.weight"},
        {"ffn_routed_down.weight", "ffn_routed_up.weight"},
    }};
    // The norm tells that there are projections, and how wide.
    const GgufPlace norm = look_up(kNorm);
    if (norm) width_ = row_length(norm);
    for (const auto& [down_name, up_name] : kNames) {
      const GgufPlace up = look_up(up_name);
      if (!up && !peek(down_name)) continue;
      const GgufPlace down = require(down_name, {.cols = sizes_.hidden_size});
      width_ = down ? count_rows(down) : row_length(up);
      take(weights::kLatentDown, down, {.rows = width_, .cols = sizes_.hidden_size});
      take_required(weights::kLatentUp, up_name, {.rows = sizes_.hidden_size, .cols = width_});
      take(weights::kLatentNorm, norm, {.rows = 1, .cols = width_});
      has_projections_ = true;
    }
    if (has_projections_ || (!demands_.projections && !norm)) return;
    if (!norm) width_ = width_of_experts();
    const auto& [down_name, up_name] = kNames[norm ? 1 : 0];
    require(down_name, {.rows = width_, .cols = sizes_.hidden_size});
    require(up_name, {.rows = sizes_.hidden_size, .cols = width_});
  }

  // The length of the rows that experts read, by what has come of them.
  int64_t width_of_experts() const {
    const GgufPlace rows = peek_any({"ffn_gate_up_exps.weight", "ffn_up_exps.weight",
                                     "ffn_gate_exps.weight", "ffn_up.0.weight"});
    if (rows) return row_length(rows);
    const GgufPlace down = peek("ffn_down_exps.weight");
    const bool is_stack = down && count_rows(down) % sizes_.num_experts == 0;
    return is_stack ? count_rows(down) / sizes_.num_experts : kUnknownSize;
  }

  void find_experts() {
    if (has_any(is_of_one_expert)) {
      find_per_expert();
    } else {
      find_stacks();
    }
    find_expert_biases();
    layer().gate_factor = take_factor("ffn_gate_exps.scale", demands_.gate_factor);
    layer().up_factor = take_factor("ffn_up_exps.scale", demands_.up_factor);
    if (sizes_.scales_experts) {
      take_optional(weights::kExpertScale, "ffn_down_exps.scale",
                    {.rows = 1, .cols = sizes_.num_experts}, demands_.expert_scale);
    } else {
      layer().down_factor = take_factor("ffn_down_exps.scale", demands_.down_factor);
    }
  }

  // All matrices of experts have biases, or none.
  void find_expert_biases() {
    const auto is_bias = [](std::string_view rest) { return rest.ends_with("_exps.bias"); };
    if (!demands_.biases && !has_any(is_bias)) return;
    constexpr std::string_view kGate = "ffn_gate_exps.bias";
    // The gate's own bias may come before the gate.
    if (layer().has(weights::kGate) || demands_.gate || (may_come() && peek(kGate))) {
      take_expert_bias(weights::kGate, kGate, inner_);
    }
    take_expert_bias(weights::kUp, "ffn_up_exps.bias", inner_);
    take_expert_bias(weights::kDown, "ffn_down_exps.bias", width_);
  }

  void take_expert_bias(WeightId matrix, std::string_view name, int64_t width) {
    const GgufDims dims{.rows = 1, .cols = width, .count = sizes_.num_experts};
    const GgufPlace place = require(name, dims);
    if (!place) return;
    check_shape(place, dims);
    store(matrix.with(WeightPlane::kBias), place, dims, 0, 1);
  }

  // Rows of an expert in a stack of all, which must divide evenly.
  int64_t rows_of_stack(const GgufPlace& place, int64_t parts) const {
    const int64_t rows = count_rows(place);
    const int64_t divisor = sizes_.num_experts * parts;
    const bool has_width = width_ == kUnknownSize || row_length(place) == width_;
    if (rows % divisor == 0 && has_width && may_be_stack(place, sizes_.num_experts))
      return rows / divisor;
    ErrorDetail detail{.what = "the tensor does not hold the experts of the layer",
                       .expected = fmt::format("[{}, {}rows, {}]", sizes_.num_experts,
                                               parts == 2 ? "2 x " : "", size_text(width_)),
                       .found = io::describe_tensor(*place.tensor)};
    if (may_come() && !has_projections_) {
      detail.hint =
          "if experts read a projection, its tensors come first, unless a key has its size";
    }
    fail(ErrorCode::kTensorShape, place, std::move(detail));
  }

  // The width of experts, by what there is of them.
  int64_t inner_of_stacks() const {
    if (const GgufPlace fused = peek("ffn_gate_up_exps.weight")) return rows_of_stack(fused, 2);
    if (const GgufPlace up = peek("ffn_up_exps.weight")) return rows_of_stack(up, 1);
    if (!may_come()) return kUnknownSize;
    if (const GgufPlace gate = peek("ffn_gate_exps.weight")) return rows_of_stack(gate, 1);
    const GgufPlace down = peek("ffn_down_exps.weight");
    return down ? row_length(down) : kUnknownSize;
  }

  void find_stacks() {
    inner_ = inner_of_stacks();
    const GgufDims stack{.rows = inner_, .cols = width_, .count = sizes_.num_experts};
    if (const GgufPlace fused = look_up("ffn_gate_up_exps.weight")) {
      layer().layout = "stacked_fused";
      store(weights::kGate, fused, stack, 0, 2 * inner_);
      store(weights::kUp, fused, stack, inner_, 2 * inner_);
    } else {
      layer().layout = "stacked";
      take_required(weights::kUp, "ffn_up_exps.weight", stack);
      take_optional(weights::kGate, "ffn_gate_exps.weight", stack, demands_.gate);
    }
    take_required(weights::kDown, "ffn_down_exps.weight",
                  {.rows = width_, .cols = inner_, .count = sizes_.num_experts});
  }

  int64_t inner_of_experts() const {
    if (const GgufPlace up = peek("ffn_up.0.weight"); up || !may_come()) {
      return up ? count_rows(up) : kUnknownSize;
    }
    for (const GgufPlace& place : own()) {
      const std::string_view rest = rest_of(place);
      if (is_of_one_expert(rest)) {
        return rest.starts_with("ffn_down.") ? row_length(place) : count_rows(place);
      }
    }
    return kUnknownSize;
  }

  void find_per_expert() {
    layer().layout = "per_expert";
    inner_ = inner_of_experts();
    const auto name = [](std::string_view matrix, int64_t expert) {
      return fmt::format("ffn_{}.{}.weight", matrix, expert);
    };
    for (int64_t expert = 0; expert < sizes_.num_experts; ++expert) {
      take_required(weights::kUp, name("up", expert), {.rows = inner_, .cols = width_});
      take_required(weights::kDown, name("down", expert), {.rows = width_, .cols = inner_});
      take_required(weights::kGate, name("gate", expert), {.rows = inner_, .cols = width_});
    }
  }

  // The width of shared experts: that of the rows of down, or of what has come before it.
  int64_t inner_of_shared() const {
    if (const GgufPlace down = peek("ffn_down_shexp.weight")) return row_length(down);
    const GgufPlace gate = may_come() ? peek("ffn_gate_shexp.weight") : GgufPlace();
    return gate ? count_rows(gate) : kUnknownSize;
  }

  // Shared experts are one MLP of their summed width. Without a tensor for the gate, the one for up
  // holds both if the down product is half as wide.
  void find_shared() {
    const int64_t hidden = sizes_.hidden_size;
    const auto is_shared = [](std::string_view rest) {
      return rest.find("_shexp.") != rest.npos && belongs_to_experts(rest);
    };
    if (!demands_.shared && !has_any(is_shared)) return;
    const int64_t inner = inner_of_shared();
    const GgufDims matrix{.rows = inner, .cols = hidden};
    take_required(weights::kSharedDown, "ffn_down_shexp.weight", {.rows = hidden, .cols = inner});
    const GgufPlace up = require("ffn_up_shexp.weight", matrix);
    const GgufPlace gate = look_up("ffn_gate_shexp.weight");
    if (gate) {
      take(weights::kSharedGate, gate, matrix);
    } else if (up && inner != kUnknownSize && count_rows(up) % 2 == 0 &&
               count_rows(up) / 2 == inner) {
      check_shape(up, {.rows = 2 * inner, .cols = hidden});
      store(weights::kSharedGate, up, matrix, 0, inner);
      store(weights::kSharedUp, up, matrix, inner, inner);
    } else if (demands_.gate) {
      require("ffn_gate_shexp.weight", matrix);
    }
    if (!layer().has(weights::kSharedUp)) take(weights::kSharedUp, up, matrix);
    take_optional(weights::kSharedExpertGate, "ffn_gate_inp_shexp.weight",
                  {.rows = 1, .cols = hidden}, demands_.shared_gate);
  }

  void find_residual() {
    const GgufPlace down = peek("ffn_down.weight");
    const GgufPlace rows =
        may_come() ? peek_any({"ffn_up.weight", "ffn_gate.weight"}) : GgufPlace();
    const int64_t inner = down ? row_length(down) : rows ? count_rows(rows) : kUnknownSize;
    const GgufDims matrix{.rows = inner, .cols = sizes_.hidden_size};
    take_required(weights::kResidualDown, "ffn_down.weight",
                  {.rows = sizes_.hidden_size, .cols = inner});
    take_required(weights::kResidualUp, "ffn_up.weight", matrix);
    take_required(weights::kResidualGate, "ffn_gate.weight", matrix);
  }

  const GgufSizes& sizes_;
  const GgufDemands& demands_;
  int64_t width_ = kUnknownSize;  // the length of the rows that routed experts read
  int64_t inner_ = kUnknownSize;  // and of those that their gates and ups write
  bool has_projections_ = false;
};

}  // namespace

GgufLayer find_layer_tensors(const GgufTensorTable& tensors, int64_t index, const GgufSizes& sizes,
                             const GgufDemands& demands) {
  LayerFinder finder(tensors, index, sizes, demands, GgufAbsent::kIsAnError);
  finder.find();
  return finder.take_layer();
}

GgufLayerSoFar find_tensors_so_far(const GgufTensorTable& tensors, int64_t index,
                                   const GgufSizes& sizes, const GgufDemands& demands) {
  LayerFinder finder(tensors, index, sizes, demands, GgufAbsent::kMayCome);
  finder.find();
  return finder.take_so_far();
}

}  // namespace conclave::inline v0::checkpoint
