#include "checkpoint/lora/lora_factors.h"

#include "core/part_spec.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Shapes of one MLP of the layer.
struct Part {
  int64_t count = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  bool gated = true;
};

Part routed_part(const MoeSpec& spec) {
  return {.count = spec.num_experts,
          .hidden_size = expert_width(spec),
          .intermediate_size = spec.intermediate_size,
          .gated = is_gated(spec.activation)};
}
Part shared_part(const MoeSpec& spec) {
  return {.count = shared_facts(spec).is_there ? spec.shared.count : 0,
          .hidden_size = spec.hidden_size,
          .intermediate_size = spec.shared.intermediate_size,
          .gated = is_gated(activation_or_routed(spec.shared.activation, spec))};
}

std::string text_of(int64_t rows, int64_t cols) { return Shape{rows, cols}.to_string(); }

// A stacked parameter, known by the shapes of its factors. Where it is `turned`, lora_A and lora_B
// stand for each other's transpose.
struct Stacked {
  LoraMatrix matrix = LoraMatrix::kGateUp;
  bool turned = false;
  int64_t in = 0;   // columns of lora_A
  int64_t out = 0;  // rows of lora_B
};

class Reader {
 public:
  Reader(const SafetensorsFile& file, const LoraConfig& config, const MoeSpec& spec,
         const StackLayout& layout)
      : file_(file), config_(config), spec_(spec), layout_(layout) {
    made_.name = file.path().string();
  }

  void read(const LoraPair& pair) {
    check_whole(pair);
    if (pair.module.place == LoraPlace::kStacked) return read_stacked(pair);
    const bool is_shared = pair.module.place == LoraPlace::kShared;
    const Part part = is_shared ? shared_part(spec_) : routed_part(spec_);
    const WeightMlp mlp = is_shared ? WeightMlp::kShared : WeightMlp::kRouted;
    if (part.count == 0 || pair.module.expert >= part.count) {
      refuse(pair.a, ErrorCode::kTensorUnexpected,
             {.what = "an adapter names an expert that the model lacks",
              .found = std::to_string(pair.module.expert),
              .limit = std::to_string(part.count) + (is_shared ? " shared experts" : " experts")});
    }
    read_projection(pair, mlp, part);
  }
  LoraAdapter take() {
    made_.memory = kept_;
    return std::move(made_);
  }

 private:
  [[noreturn]] void refuse(const TensorInfo* tensor, ErrorCode code, ErrorDetail detail) const {
    detail.file = made_.name;
    if (detail.tensor.empty() && tensor != nullptr) detail.tensor = tensor->name;
    throw Error(code, std::move(detail));
  }

  void check_whole(const LoraPair& pair) const {
    if (pair.a == nullptr || pair.b == nullptr) {
      const TensorInfo* const there = pair.a != nullptr ? pair.a : pair.b;
      refuse(there, ErrorCode::kTensorMissing,
             {.what = "one of two factors is missing",
              .expected = pair.a == nullptr ? "lora_A beside it" : "lora_B beside it"});
    }
    for (const TensorInfo* tensor : {pair.a, pair.b}) {
      if (!is_plain(tensor->dtype)) {
        refuse(tensor, ErrorCode::kTensorDType,
               {.what = "factors have another type",
                .expected = "F32, F16 or BF16",
                .found = std::string(to_string(tensor->dtype))});
      }
      if (tensor->shape.size() == 2) continue;
      refuse(tensor, ErrorCode::kTensorShape,
             {.what = "a factor is no matrix",
              .expected = "2 dimensions",
              .found = std::to_string(tensor->shape.size())});
    }
    const int64_t terms = pair.a->shape[0];
    if (terms > 0 && pair.b->shape[1] == terms) return;
    refuse(pair.b, ErrorCode::kTensorShape,
           {.what = "the ranks of lora_A and lora_B differ, or are 0",
            .expected = text_of(pair.b->shape[0], terms),
            .found = text_of(pair.b->shape[0], pair.b->shape[1])});
  }

  void expect(const TensorInfo* tensor, int64_t rows, int64_t cols) const {
    if (tensor->shape[0] == rows && tensor->shape[1] == cols) return;
    refuse(tensor, ErrorCode::kTensorShape,
           {.what = "a factor does not fit the model",
            .expected = text_of(rows, cols),
            .found = text_of(tensor->shape[0], tensor->shape[1])});
  }

  // The factor of products of this rank, which the config must have for the module.
  double scale_of(const std::string& name, const TensorInfo* tensor, int64_t rank) const {
    const double said = config_.rank_of(name);
    if (said != static_cast<double>(rank)) {
      refuse(tensor, ErrorCode::kConfigValue,
             {.what = "the rank of a factor is not that of adapter_config.json",
              .expected = std::to_string(static_cast<int64_t>(said)),
              .found = std::to_string(rank)});
    }
    return config_.scale_of(name, rank);
  }

  ConstTensorView keep(Tensor tensor) {
    kept_->push_back(std::move(tensor));
    return kept_->back().const_view();
  }
  static ConstTensorView rows_of(const ConstTensorView& view, int64_t first, int64_t count) {
    const int64_t cols = view.shape[1];
    return {.data = static_cast<const std::byte*>(view.data) + first * cols * byte_size(view.dtype),
            .dtype = view.dtype,
            .shape = {count, cols}};
  }
  // Every `step`-th row or column, from `first` on; `turned` gives the transpose.
  struct Pick {
    int64_t first_row = 0;
    int64_t row_step = 1;
    int64_t rows = 0;
    int64_t first_col = 0;
    int64_t col_step = 1;
    int64_t cols = 0;
    bool turned = false;
  };
  ConstTensorView pick(const ConstTensorView& view, const Pick& pick) {
    Tensor made(view.dtype,
                pick.turned ? Shape{pick.cols, pick.rows} : Shape{pick.rows, pick.cols});
    const auto bytes = static_cast<size_t>(byte_size(view.dtype));
    const auto* const from = static_cast<const std::byte*>(view.data);
    for (int64_t r = 0; r < pick.rows; ++r) {
      for (int64_t c = 0; c < pick.cols; ++c) {
        const int64_t source = (pick.first_row + r * pick.row_step) * view.shape[1] +
                               pick.first_col + c * pick.col_step;
        const int64_t target = pick.turned ? c * pick.rows + r : r * pick.cols + c;
        std::memcpy(made.as<std::byte>() + static_cast<size_t>(target) * bytes,
                    from + static_cast<size_t>(source) * bytes, bytes);
      }
    }
    return keep(std::move(made));
  }

  void add(const LoraPair& pair, WeightMlp mlp, WeightMatrix matrix, int64_t expert,
           const ConstTensorView& a, const ConstTensorView& b, double scale) {
    made_.factors.push_back({.mlp = mlp,
                             .matrix = matrix,
                             .expert = expert,
                             .a = a,
                             .b = b,
                             .scale = scale,
                             .name = pair.a->name});
  }
  // Rows of gate, then of up, or in turn.
  void add_gate_up(const LoraPair& pair, WeightMlp mlp, int64_t expert, const ConstTensorView& a,
                   const ConstTensorView& b, double scale) {
    const int64_t rows = b.shape[0] / 2;
    const bool in_turn = layout_.order == GateUpOrder::kInterleaved;
    const auto half = [&](int64_t index) {
      if (!in_turn) return rows_of(b, index * rows, rows);
      return pick(b, {.first_row = index, .row_step = 2, .rows = rows, .cols = b.shape[1]});
    };
    add(pair, mlp, WeightMatrix::kGate, expert, a, half(0), scale);
    add(pair, mlp, WeightMatrix::kUp, expert, a, half(1), scale);
  }

  // A module of one expert, or of the shared experts, which files may have as one MLP.
  void read_projection(const LoraPair& pair, WeightMlp mlp, const Part& part) {
    const int64_t rank = pair.a->shape[0];
    const double scale = scale_of(pair.module.name, pair.a, rank);
    const int64_t inner =
        part.intermediate_size * (mlp == WeightMlp::kShared ? part.count : int64_t{1});
    const bool is_down = pair.module.matrix == LoraMatrix::kDown;
    const bool is_fused = pair.module.matrix == LoraMatrix::kGateUp;
    if (!part.gated && (is_fused || pair.module.matrix == LoraMatrix::kGate)) {
      refuse(pair.a, ErrorCode::kTensorUnexpected, {.what = "the model's experts have no gate"});
    }
    expect(pair.a, rank, is_down ? inner : part.hidden_size);
    expect(pair.b, is_down ? part.hidden_size : inner * (is_fused ? 2 : 1), rank);
    const ConstTensorView a = keep(file_.load(pair.a->name));
    const ConstTensorView b = keep(file_.load(pair.b->name));
    if (is_fused) {
      if (mlp == WeightMlp::kShared && part.count != 1) {
        refuse(pair.a, ErrorCode::kUnsupported,
               {.what = "one fused gate_up_proj of several shared experts is not read"});
      }
      return add_gate_up(pair, mlp, pair.module.expert, a, b, scale);
    }
    if (mlp == WeightMlp::kRouted) {
      return add(pair, mlp, matrix_of(pair.module.matrix), pair.module.expert, a, b, scale);
    }
    const int64_t width = part.intermediate_size;
    for (int64_t expert = 0; expert < part.count; ++expert) {
      const ConstTensorView own_a =
          is_down ? pick(a, {.rows = rank, .first_col = expert * width, .cols = width}) : a;
      const ConstTensorView own_b = is_down ? b : rows_of(b, expert * width, width);
      add(pair, mlp, matrix_of(pair.module.matrix), expert, own_a, own_b, scale);
    }
  }
  static WeightMatrix matrix_of(LoraMatrix matrix) {
    if (matrix == LoraMatrix::kDown) return WeightMatrix::kDown;
    return matrix == LoraMatrix::kGate ? WeightMatrix::kGate : WeightMatrix::kUp;
  }

  bool has_columns_first() const { return layout_.axes == checkpoint::AxisOrder::kColsFirst; }
  // Versions before 0.19 took all stacks for [E, in, out], later ones take them for [E, out, in]
  // unless the model's class says otherwise, which that of Llama 4 does not.
  bool may_be_turned() const {
    if (layout_.order == GateUpOrder::kInterleaved) return false;
    return config_.may_turn_stacks() || has_columns_first();
  }

  Stacked stacked_of(const LoraPair& pair, const Part& part) const {
    if (!part.gated && part.hidden_size == part.intermediate_size) {
      refuse(pair.a, ErrorCode::kUnsupported,
             {.what = "stacked factors do not say whether they are up_proj's or down_proj's, which "
                      "are both square",
              .found = text_of(part.intermediate_size, part.hidden_size)});
    }
    const int64_t wide = part.intermediate_size * (part.gated ? 2 : 1);
    const LoraMatrix first = part.gated ? LoraMatrix::kGateUp : LoraMatrix::kUp;
    const std::array forms = {
        Stacked{.matrix = first, .in = part.hidden_size, .out = wide},
        Stacked{.matrix = LoraMatrix::kDown, .in = part.intermediate_size, .out = part.hidden_size},
        Stacked{.matrix = first, .turned = true, .in = wide, .out = part.hidden_size},
        Stacked{.matrix = LoraMatrix::kDown,
                .turned = true,
                .in = part.hidden_size,
                .out = part.intermediate_size}};
    const auto fitting = [&](bool turned) {
      return std::ranges::find_if(forms, [&](const Stacked& form) {
        return form.turned == turned && pair.a->shape[1] == form.in && pair.b->shape[0] == form.out;
      });
    };
    const auto straight = fitting(false);
    const auto turned = may_be_turned() ? fitting(true) : forms.end();
    // With 2 I = H or I = H shapes do not tell what is turned. The version does of most models.
    if (straight != forms.end() && turned != forms.end() && has_columns_first()) {
      if (layout_.words == checkpoint::StackWords::kUnsaid) {
        return config_.may_turn_stacks() ? *straight : *turned;
      }
      refuse(pair.a, ErrorCode::kUnsupported,
             {.what = "stacked factors do not say whether they change rows or columns first",
              .found = text_of(pair.a->shape[0], pair.a->shape[1]) + " and lora_B " +
                       text_of(pair.b->shape[0], pair.b->shape[1])});
    }
    if (turned != forms.end()) return *turned;
    if (straight != forms.end()) return *straight;
    refuse(pair.a, ErrorCode::kTensorShape,
           {.what = "stacked factors fit no parameter of the model's experts",
            .expected = "lora_A [r x " + std::to_string(part.count) + ", " +
                        std::to_string(part.hidden_size) + " or " +
                        std::to_string(part.intermediate_size) + "]",
            .found = text_of(pair.a->shape[0], pair.a->shape[1]) + " and lora_B " +
                     text_of(pair.b->shape[0], pair.b->shape[1])});
  }

  static const char* parameter_of(LoraMatrix matrix) {
    if (matrix == LoraMatrix::kDown) return ".down_proj";
    return matrix == LoraMatrix::kGateUp ? ".gate_up_proj" : ".up_proj";
  }

  // lora_A has the ranks of one expert after those of another, lora_B the experts of one rank after
  // those of another.
  void read_stacked(const LoraPair& pair) {
    const Part part = routed_part(spec_);
    const Stacked form = stacked_of(pair, part);
    const int64_t experts = part.count;
    const int64_t terms = pair.a->shape[0];
    if (terms % experts != 0) {
      refuse(pair.a, ErrorCode::kTensorShape,
             {.what = "stacked factors belong to another number of experts",
              .expected = "a multiple of " + std::to_string(experts) + " rows",
              .found = std::to_string(terms)});
    }
    const int64_t rank = terms / experts;
    const double scale = scale_of(pair.module.name + parameter_of(form.matrix), pair.a, rank);
    const Tensor a = file_.load(pair.a->name);
    const Tensor b = file_.load(pair.b->name);
    for (int64_t expert = 0; expert < experts; ++expert) {
      ConstTensorView own_a =
          pick(a.const_view(),
               {.first_row = expert * rank, .rows = rank, .cols = form.in, .turned = form.turned});
      ConstTensorView own_b = pick(b.const_view(), {.rows = form.out,
                                                    .first_col = expert,
                                                    .col_step = experts,
                                                    .cols = rank,
                                                    .turned = form.turned});
      if (form.turned) std::swap(own_a, own_b);
      if (form.matrix == LoraMatrix::kGateUp) {
        add_gate_up(pair, WeightMlp::kRouted, expert, own_a, own_b, scale);
      } else {
        add(pair, WeightMlp::kRouted, matrix_of(form.matrix), expert, own_a, own_b, scale);
      }
    }
  }

  const SafetensorsFile& file_;
  const LoraConfig& config_;
  const MoeSpec& spec_;
  StackLayout layout_;
  std::shared_ptr<std::vector<Tensor>> kept_ = std::make_shared<std::vector<Tensor>>();
  LoraAdapter made_;
};

}  // namespace

int64_t largest_rank(const LoraPair& pair, const LoraConfig& config) {
  if (pair.module.place != LoraPlace::kStacked) {
    const int64_t rows = pair.a != nullptr && !pair.a->shape.empty() ? pair.a->shape[0] : 0;
    // More is refused when the layer is read: no layer should be asked for that room.
    return std::min<int64_t>(rows, kMostAdapterRank);
  }
  double rank = 0;
  for (const char* parameter : {".gate_up_proj", ".up_proj", ".down_proj"}) {
    rank = std::max(rank, config.rank_of(pair.module.name + parameter));
  }
  return static_cast<int64_t>(rank);
}

LoraAdapter read_lora_factors(const SafetensorsFile& file, const LoraConfig& config,
                              std::span<const LoraPair> pairs, const MoeSpec& spec,
                              const StackLayout& layout) {
  Reader reader(file, config, spec, layout);
  for (const LoraPair& pair : pairs) reader.read(pair);
  return reader.take();
}

}  // namespace conclave::inline v0
