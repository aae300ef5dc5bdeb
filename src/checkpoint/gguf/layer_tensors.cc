#include "checkpoint/gguf/layer_tensors.h"

#include "checkpoint/gguf/row_reader.h"
#include "quant/gguf/block_type.h"
#include "routing/router_tensors.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

using Place = io::GgufFile::Place;

int64_t row_length(const Place& place) {
  const auto shape = place.tensor->shape();
  return shape.empty() ? 1 : shape.back();
}

int64_t count_rows(const Place& place) {
  const auto shape = place.tensor->shape();
  if (shape.empty()) return 1;
  return std::accumulate(shape.begin(), shape.end() - 1, int64_t{1},
                         [](int64_t product, int64_t size) { return product * size; });
}

std::string prefix_of(int64_t layer) { return fmt::format("blk.{}.", layer); }

std::span<const Place> tensors_of(const GgufTensorsByLayer& by_layer, int64_t layer) {
  const auto own = by_layer.find(prefix_of(layer));
  return own == by_layer.end() ? std::span<const Place>() : own->second;
}

// The tensor whose name is `rest` behind the layer's prefix; empty if there is none.
Place find_among(std::span<const Place> own, std::string_view rest, size_t prefix) {
  const auto name = [prefix](const Place& place) {
    return std::string_view(place.tensor->name).substr(prefix);
  };
  const auto at = std::ranges::lower_bound(own, rest, {}, name);
  return at != own.end() && name(*at) == rest ? *at : Place();
}

// "ffn_up.3.weight": the matrix of an expert in old files.
bool is_of_one_expert(std::string_view rest) {
  constexpr std::array<std::string_view, 3> kMatrices = {"ffn_gate.", "ffn_up.", "ffn_down."};
  return std::ranges::any_of(kMatrices, [rest](std::string_view matrix) {
    return rest.starts_with(matrix) && rest.size() > matrix.size() && rest[matrix.size()] >= '0' &&
           rest[matrix.size()] <= '9';
  });
}

// Whether the tensor belongs to a router, routed or shared experts, and has a meaning here. Steps
// of quantised rows are what llama.cpp itself reads and never uses.
bool belongs_to_experts(std::string_view rest) {
  constexpr std::array<std::string_view, 4> kParts = {"ffn_gate_inp", "exp_probs_b", "_exps.",
                                                      "_shexp."};
  if (rest.ends_with(".input_scale") || rest.starts_with("ffn_norm_exps")) return false;
  return is_of_one_expert(rest) || std::ranges::any_of(kParts, [rest](std::string_view part) {
           return rest.find(part) != std::string_view::npos;
         });
}

class LayerFinder {
 public:
  LayerFinder(const io::GgufFile& file, const GgufTensorsByLayer& by_layer, int64_t index,
              const GgufSizes& sizes, const GgufDemands& demands)
      : file_(file), sizes_(sizes), demands_(demands) {
    layer_.index = index;
    layer_.prefix = prefix_of(index);
    own_ = tensors_of(by_layer, index);
    layer_.num_experts = sizes.num_experts;
  }

  GgufLayer find() {
    find_router();
    find_projections();
    find_experts();
    find_shared();
    if (sizes_.has_residual) find_residual();
    check_all_used();
    return std::move(layer_);
  }

 private:
  [[noreturn]] void fail(ErrorCode code, const Place& place, ErrorDetail detail) const {
    detail.file = (place ? *place.part : file_.parts().front()).file.name();
    if (place) detail.tensor = place.tensor->name;
    throw Error(code, std::move(detail));
  }

  Place look_up(std::string_view name) {
    const Place place = find_among(own_, name, layer_.prefix.size());
    if (place) use(place);
    return place;
  }

  Place require(std::string_view name) {
    const Place place = look_up(name);
    if (!place) {
      fail(ErrorCode::kTensorMissing, place,
           {.what = fmt::format("layer {} lacks a tensor of the model", layer_.index),
            .tensor = layer_.prefix + std::string(name)});
    }
    return place;
  }

  // Null only if the tensor may be absent.
  Place look_up(std::string_view name, bool is_demanded) {
    return is_demanded ? require(name) : look_up(name);
  }

  bool has_any(const std::function<bool(std::string_view rest)>& wanted) const {
    return std::ranges::any_of(own_, [&](const Place& place) {
      return wanted(std::string_view(place.tensor->name).substr(layer_.prefix.size()));
    });
  }

  void use(const Place& place) {
    if (used_.insert(place.tensor->name).second) layer_.bytes += place.tensor->bytes;
  }

  // `count` matrices of `rows` rows each follow one another in the tensor.
  void check_shape(const Place& place, int64_t count, int64_t rows, int64_t cols) const {
    if (row_length(place) == cols && count_rows(place) == count * rows) return;
    fail(ErrorCode::kTensorShape, place,
         {.what = "the tensor's shape disagrees with the layer's sizes",
          .expected = count == 1 ? fmt::format("[{}, {}]", rows, cols)
                                 : fmt::format("[{}, {}, {}]", count, rows, cols),
          .found = io::describe_tensor(*place.tensor)});
  }

  // Types may be known to GGUF and still mean nothing here: integers as weights, floats as ids.
  void check_type(WeightId id, const Place& place) const {
    const io::GgufType& type = *place.tensor->type;
    const std::optional<DType> plain = plain_type(type);
    const bool is_integer = plain == DType::kI32 || plain == DType::kI64;
    const bool is_number = (plain && !is_integer) || quant::find_block_type(type.name) != nullptr;
    const routing::RouterTensor* const own = routing::find_router_tensor(id);
    const bool wants_integers = own != nullptr && own->element == routing::RouterElement::kIndex;
    if (wants_integers ? is_integer : is_number) return;
    fail(ErrorCode::kTensorDType, place,
         {.what = "the tensor has a type that it cannot have",
          .expected = wants_integers ? "I32 or I64" : "F32, F16, BF16 or blocks",
          .found = std::string(type.name)});
  }

  // Takes `count` matrices [rows, cols], the first of which begins at `first_row`, `stride` rows
  // apart.
  void store(WeightId id, const Place& place, int64_t count, int64_t rows, int64_t cols,
             int64_t first_row, int64_t stride) {
    check_type(id, place);
    GgufStored& stored = layer_.stored[id];
    stored.rows = rows;
    stored.cols = cols;
    for (int64_t i = 0; i < count; ++i) {
      stored.matrices.push_back({place, first_row + i * stride});
    }
  }

  void take(WeightId id, const Place& place, int64_t count, int64_t rows, int64_t cols) {
    check_shape(place, count, rows, cols);
    store(id, place, count, rows, cols, 0, rows);
  }

  // Vectors are matrices of one row.
  void take_optional(WeightId id, std::string_view name, int64_t rows, int64_t cols,
                     bool is_demanded = false) {
    if (const Place place = look_up(name, is_demanded)) take(id, place, 1, rows, cols);
  }

  GgufMatrix take_factor(std::string_view name, bool is_demanded) {
    const Place place = look_up(name, is_demanded);
    if (!place) return {};
    check_type(weights::kExpertScale, place);
    check_shape(place, 1, 1, sizes_.num_experts);
    return {place, 0};
  }

  void find_router() {
    const int64_t hidden = sizes_.hidden_size;
    const int64_t experts = sizes_.num_experts;
    take(weights::kRouter, require("ffn_gate_inp.weight"), 1, experts, hidden);
    take_optional(weights::kRouterBias, "ffn_gate_inp.bias", 1, experts, demands_.biases);
    if (sizes_.normalises_router) {
      take(weights::kRouterInputScale, require("ffn_gate_inp.scale"), 1, 1, hidden);
    }
    take_optional(weights::kSelectionBias, "exp_probs_b.bias", 1, experts);
    if (!layer_.has(weights::kSelectionBias)) {
      take_optional(weights::kSelectionBias, "exp_probs_b", 1, experts);
    }
    if (!layer_.has(weights::kSelectionBias) && demands_.selection_bias) {
      require("exp_probs_b.bias");
    }
    for (const routing::RouterTensor* own : routing::all_router_tensors()) {
      if (own->gguf_name.empty()) continue;
      const Place place = look_up(own->gguf_name, own == demands_.router_tensor);
      if (place) take(*own->id, place, 1, count_rows(place), row_length(place));
    }
  }

  // Experts may work on a projection of the hidden state.
  void find_projections() {
    width_ = sizes_.hidden_size;
    constexpr std::array<std::array<std::string_view, 2>, 2> kNames = {{
        {"ffn_latent_down.weight", "ffn_latent_up.weight"},
        {"ffn_routed_down.weight", "ffn_routed_up.weight"},
    }};
    for (const auto& [down, up] : kNames) {
      const Place place = look_up(down, static_cast<bool>(look_up(up)));
      if (!place) continue;
      width_ = count_rows(place);
      take(weights::kLatentDown, place, 1, width_, sizes_.hidden_size);
      take(weights::kLatentUp, require(up), 1, sizes_.hidden_size, width_);
      take_optional(weights::kLatentNorm, "ffn_routed_norm.weight", 1, width_);
    }
    if (demands_.projections && !layer_.has(weights::kLatentDown)) require(kNames[0][0]);
  }

  void find_experts() {
    if (has_any(is_of_one_expert)) {
      find_per_expert();
    } else {
      find_stacks();
    }
    find_expert_biases();
    layer_.gate_factor = take_factor("ffn_gate_exps.scale", demands_.gate_factor);
    layer_.up_factor = take_factor("ffn_up_exps.scale", demands_.up_factor);
    if (sizes_.scales_experts) {
      take_optional(weights::kExpertScale, "ffn_down_exps.scale", 1, sizes_.num_experts,
                    demands_.expert_scale);
    } else {
      layer_.down_factor = take_factor("ffn_down_exps.scale", demands_.down_factor);
    }
  }

  // All matrices of experts have biases, or none.
  void find_expert_biases() {
    const auto is_bias = [](std::string_view rest) { return rest.ends_with("_exps.bias"); };
    if (!demands_.biases && !has_any(is_bias)) return;
    const int64_t inner = layer_.rows(weights::kUp);
    if (layer_.has(weights::kGate)) take_expert_bias(weights::kGate, "ffn_gate_exps.bias", inner);
    take_expert_bias(weights::kUp, "ffn_up_exps.bias", inner);
    take_expert_bias(weights::kDown, "ffn_down_exps.bias", width_);
  }

  void take_expert_bias(WeightId matrix, std::string_view name, int64_t width) {
    const Place place = require(name);
    check_shape(place, sizes_.num_experts, 1, width);
    store(matrix.with(WeightPlane::kBias), place, sizes_.num_experts, 1, width, 0, 1);
  }

  // Rows of an expert in a stack of all, which must divide evenly.
  int64_t rows_of_stack(const Place& place, int64_t parts) const {
    const int64_t rows = count_rows(place);
    const int64_t divisor = sizes_.num_experts * parts;
    if (rows % divisor == 0 && row_length(place) == width_) return rows / divisor;
    fail(ErrorCode::kTensorShape, place,
         {.what = "the tensor does not hold the experts of the layer",
          .expected =
              fmt::format("[{}, {}rows, {}]", sizes_.num_experts, parts == 2 ? "2 x " : "", width_),
          .found = io::describe_tensor(*place.tensor)});
  }

  void find_stacks() {
    const int64_t experts = sizes_.num_experts;
    int64_t inner = 0;
    if (const Place fused = look_up("ffn_gate_up_exps.weight")) {
      layer_.layout = "stacked_fused";
      inner = rows_of_stack(fused, 2);
      store(weights::kGate, fused, experts, inner, width_, 0, 2 * inner);
      store(weights::kUp, fused, experts, inner, width_, inner, 2 * inner);
    } else {
      layer_.layout = "stacked";
      const Place up = require("ffn_up_exps.weight");
      inner = rows_of_stack(up, 1);
      take(weights::kUp, up, experts, inner, width_);
      if (const Place gate = look_up("ffn_gate_exps.weight", demands_.gate)) {
        take(weights::kGate, gate, experts, inner, width_);
      }
    }
    take(weights::kDown, require("ffn_down_exps.weight"), experts, width_, inner);
  }

  void find_per_expert() {
    layer_.layout = "per_expert";
    const auto name = [](std::string_view matrix, int64_t expert) {
      return fmt::format("ffn_{}.{}.weight", matrix, expert);
    };
    const int64_t inner = count_rows(require(name("up", 0)));
    for (int64_t expert = 0; expert < sizes_.num_experts; ++expert) {
      take(weights::kUp, require(name("up", expert)), 1, inner, width_);
      take(weights::kDown, require(name("down", expert)), 1, width_, inner);
      take(weights::kGate, require(name("gate", expert)), 1, inner, width_);
    }
  }

  // Shared experts are one MLP of their summed width. Without a tensor for the gate, the one for up
  // holds both if the down product is half as wide.
  void find_shared() {
    const int64_t hidden = sizes_.hidden_size;
    const auto is_shared = [](std::string_view rest) {
      return rest.find("_shexp.") != rest.npos && belongs_to_experts(rest);
    };
    if (!demands_.shared && !has_any(is_shared)) return;
    const Place down = require("ffn_down_shexp.weight");
    const int64_t inner = row_length(down);
    take(weights::kSharedDown, down, 1, hidden, inner);
    const Place up = require("ffn_up_shexp.weight");
    const Place gate = look_up("ffn_gate_shexp.weight");
    if (gate) {
      take(weights::kSharedGate, gate, 1, inner, hidden);
    } else if (count_rows(up) == 2 * inner) {
      check_shape(up, 1, 2 * inner, hidden);
      store(weights::kSharedGate, up, 1, inner, hidden, 0, inner);
      store(weights::kSharedUp, up, 1, inner, hidden, inner, inner);
    } else if (demands_.gate) {
      require("ffn_gate_shexp.weight");
    }
    if (!layer_.has(weights::kSharedUp)) take(weights::kSharedUp, up, 1, inner, hidden);
    take_optional(weights::kSharedExpertGate, "ffn_gate_inp_shexp.weight", 1, hidden,
                  demands_.shared_gate);
  }

  void find_residual() {
    const Place down = require("ffn_down.weight");
    const int64_t inner = row_length(down);
    take(weights::kResidualDown, down, 1, sizes_.hidden_size, inner);
    take(weights::kResidualUp, require("ffn_up.weight"), 1, inner, sizes_.hidden_size);
    take(weights::kResidualGate, require("ffn_gate.weight"), 1, inner, sizes_.hidden_size);
  }

  void check_all_used() const {
    for (const Place& place : own_) {
      const std::string_view name = place.tensor->name;
      if (used_.contains(name) || !belongs_to_experts(name.substr(layer_.prefix.size()))) continue;
      fail(ErrorCode::kTensorUnexpected, place,
           {.what = "the layer has no use for this tensor of its experts",
            .found = io::describe_tensor(*place.tensor)});
    }
  }

  const io::GgufFile& file_;
  const GgufSizes& sizes_;
  const GgufDemands& demands_;
  GgufLayer layer_;
  std::span<const Place> own_;  // the layer's tensors by name
  int64_t width_ = 0;           // the length of the rows that routed experts read
  std::set<std::string_view> used_;
};

}  // namespace

GgufTensorsByLayer sort_by_layer(const io::GgufFile& file) {
  constexpr std::string_view kStart = "blk.";
  GgufTensorsByLayer by_layer;
  for (const io::GgufFile::Part& part : file.parts()) {
    for (const io::GgufTensor& tensor : part.header.tensors) {
      const std::string_view name = tensor.name;
      const size_t dot = name.starts_with(kStart) ? name.find('.', kStart.size()) : name.npos;
      if (dot != name.npos) by_layer[name.substr(0, dot + 1)].push_back({&part, &tensor});
    }
  }
  for (auto& [prefix, own] : by_layer) {
    std::ranges::sort(own, {},
                      [](const Place& place) -> const std::string& { return place.tensor->name; });
  }
  return by_layer;
}

bool has_tensors(const GgufTensorsByLayer& by_layer, int64_t index) {
  return !tensors_of(by_layer, index).empty();
}

io::GgufFile::Place find_tensor(const GgufTensorsByLayer& by_layer, int64_t index,
                                std::string_view rest) {
  return find_among(tensors_of(by_layer, index), rest, prefix_of(index).size());
}

io::GgufFile::Place find_expert_tensor(const GgufTensorsByLayer& by_layer, int64_t index) {
  const size_t prefix = prefix_of(index).size();
  for (const Place& place : tensors_of(by_layer, index)) {
    if (belongs_to_experts(std::string_view(place.tensor->name).substr(prefix))) return place;
  }
  return {};
}

GgufLayer find_layer_tensors(const io::GgufFile& file, const GgufTensorsByLayer& by_layer,
                             int64_t index, const GgufSizes& sizes, const GgufDemands& demands) {
  return LayerFinder(file, by_layer, index, sizes, demands).find();
}

}  // namespace conclave::inline v0::checkpoint
