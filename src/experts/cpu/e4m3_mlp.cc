#include "experts/cpu/e4m3_mlp.h"

#include "core/checked.h"
#include "core/float8.h"
#include "core/workspace_layout.h"
#include "cpu/parallel.h"
#include "quant/activation_rows.h"

#include <algorithm>
#include <array>
#include <utility>

namespace conclave::inline v0::experts {
namespace {

// Activation rows that a panel multiplies at a time; their products lie on the stack.
constexpr int64_t kMostRows = 32;
using Products = std::array<float, kMostRows * kE4m3PanelRows>;

// Workspace of one occupied slot: its input row and its activated row, each with its scales.
struct SlotLayout {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  ActivationScale form = ActivationScale::kNone;

  int64_t input_scales() const { return hidden_size; }
  int64_t inner() const { return input_scales() + quant::scales_per_row(form, hidden_size); }
  int64_t inner_scales() const { return inner() + intermediate_size; }
  int64_t floats() const {
    return round_up(inner_scales() + quant::scales_per_row(form, intermediate_size), 16);
  }
};

class E4m3Mlp final : public ExpertsKernel {
 public:
  E4m3Mlp(const ExpertsProblem& problem, E4m3MlpConfig config)
      : problem_(problem),
        config_(std::move(config)),
        gate_up_(e4m3_panel_layout(problem.quant, problem.hidden_size)),
        down_(e4m3_panel_layout(problem.quant, problem.intermediate_size)),
        slot_{problem.hidden_size, problem.intermediate_size, problem.quant.activations} {}

  BatchRequirements requirements() const override {
    return {.row_dtype = DType::kF32,
            .row_bytes = round_up(problem_.hidden_size, 16) * int64_t{sizeof(float)}};
  }
  SlabBytes slab_bytes() const override {
    return {.gate_up = static_cast<size_t>(inner_panels()) * inner_bytes(),
            .down = static_cast<size_t>(hidden_panels()) * down_.bytes()};
  }
  std::string packed_layout() const override {
    return std::string("e4m3.panel64") + (problem_.activation.gated ? "" : ".single") + ".v1";
  }
  std::string tile() const override { return config_.tile; }
  PackGranule pack_granule() const override {
    return {.inner_rows = kE4m3PanelRows,
            .hidden_rows = kE4m3PanelRows,
            .gate_up_bytes = inner_bytes(),
            .down_bytes = down_.bytes()};
  }

  void pack(const ExpertMatrices& expert, std::byte* gate_up_slab,
            std::byte* down_slab) const override {
    const E4m3Rows gate{expert.gate, expert.gate_scale, expert.gate_bias};
    const E4m3Rows up{expert.up, expert.up_scale, expert.up_bias};
    const E4m3Rows down{expert.down, expert.down_scale, expert.down_bias};
    for (int64_t row = 0; row < expert.up.shape[0]; row += kE4m3PanelRows) {
      std::byte* panel = gate_up_slab + static_cast<size_t>(row / kE4m3PanelRows) * inner_bytes();
      if (problem_.activation.gated) {
        pack_e4m3_panel(gate_up_, gate, row, panel);
        panel += gate_up_.bytes();
      }
      pack_e4m3_panel(gate_up_, up, row, panel);
    }
    for (int64_t row = 0; row < expert.down.shape[0]; row += kE4m3PanelRows) {
      pack_e4m3_panel(down_, down, row,
                      down_slab + static_cast<size_t>(row / kE4m3PanelRows) * down_.bytes());
    }
  }

  size_t workspace_bytes(int64_t max_slots) const override {
    WorkspaceLayout workspace;
    book_slots(workspace, max_slots);
    return workspace.total_bytes();
  }

  void run(const ExpertBatch& batch, const PackedExperts& weights, const ExpertOutput& output,
           std::span<std::byte> workspace, Executor& executor) const override {
    WorkspaceLayout booking;
    float* slots = slice_as<float>(workspace, book_slots(booking, 0));
    const auto for_each_task = [&](int64_t tasks, const auto& task) {
      cpu::parallel_for(executor, batch.num_local_experts * tasks, 1,
                        [&](int64_t begin, int64_t end, int32_t) {
                          for (int64_t item = begin; item < end; ++item) {
                            const int64_t expert = item / tasks;
                            task(expert, item % tasks, first_slot(batch, expert, slots));
                          }
                        });
    };
    const quant::ActivationRule input = rule(weights.input_scale);
    const quant::ActivationRule inner = rule(weights.intermediate_scale);
    for_each_task(1, [&](int64_t expert, int64_t, float* rows) {
      for (int64_t i = 0; i < batch.expert_count[expert]; ++i, rows += slot_.floats()) {
        take_input(batch, batch.expert_begin[expert] + i, input, rows);
      }
    });
    for_each_task(inner_panels(), [&](int64_t expert, int64_t task, float* rows) {
      activate(batch, weights, expert, task, rows);
    });
    for_each_task(1, [&](int64_t expert, int64_t, float* rows) {
      for (int64_t i = 0; i < batch.expert_count[expert]; ++i, rows += slot_.floats()) {
        quantize(problem_.intermediate_size, inner, rows + slot_.inner(),
                 rows + slot_.inner_scales());
      }
    });
    for_each_task(hidden_panels(), [&](int64_t expert, int64_t task, float* rows) {
      multiply_down(batch, weights, expert, task, rows, output);
    });
  }

 private:
  int64_t inner_panels() const { return ceil_div(problem_.intermediate_size, kE4m3PanelRows); }
  int64_t hidden_panels() const { return ceil_div(problem_.hidden_size, kE4m3PanelRows); }
  size_t inner_bytes() const { return (problem_.activation.gated ? 2 : 1) * gate_up_.bytes(); }

  quant::ActivationRule rule(float static_scale) const {
    return {.form = problem_.quant.activations,
            .power_of_two_scales = problem_.quant.power_of_two_scales,
            .static_scale = static_scale};
  }

  WorkspaceSlice book_slots(WorkspaceLayout& workspace, int64_t max_slots) const {
    return workspace.book_bytes(max_slots, static_cast<size_t>(slot_.floats()) * sizeof(float));
  }

  // Occupied slots lie dense, whatever gaps the batch has.
  float* first_slot(const ExpertBatch& batch, int64_t expert, float* slots) const {
    int64_t slot = 0;
    for (int64_t e = 0; e < expert; ++e) slot += batch.expert_count[e];
    return slots + slot * slot_.floats();
  }

  // Replaces each value by that of its code. It takes one piece of columns at a time; a piece
  // shares a scale.
  void quantize(int64_t columns, const quant::ActivationRule& rule, float* values,
                float* scales) const {
    if (rule.form == ActivationScale::kNone) return;
    const int64_t width = quant::scale_width(rule.form, columns);
    for (int64_t begin = 0; begin < columns; begin += width, ++scales) {
      const int64_t end = std::min(columns, begin + width);
      *scales = quant::scale_of(values + begin, end - begin, rule);
      for (int64_t i = begin; i < end; ++i) {
        values[i] = e4m3_to_float(quant::activation_code(values[i], *scales));
      }
    }
  }

  void take_input(const ExpertBatch& batch, int64_t slot, const quant::ActivationRule& rule,
                  float* row) const {
    const auto* x = static_cast<const float*>(static_cast<const void*>(
        batch.bundle.rows + batch.source_row[slot] * batch.bundle.row_bytes));
    std::copy_n(x, problem_.hidden_size, row);
    quantize(problem_.hidden_size, rule, row, row + slot_.input_scales());
  }

  // The task of `count` slots; `values` and `scales` are offsets in floats from a slot's begin.
  E4m3PanelTask task_of(const E4m3PanelLayout& layout, const float* rows, int64_t values,
                        int64_t scales, int64_t count, Products& products) const {
    const bool plain = slot_.form == ActivationScale::kNone;
    return {.layout = layout,
            .values = rows + values,
            .scales = plain ? nullptr : rows + scales,
            .scale_width = quant::scale_width(slot_.form, layout.cols),
            .stride = slot_.floats(),
            .num_rows = count,
            .out = products.data()};
  }

  void activate(const ExpertBatch& batch, const PackedExperts& weights, int64_t expert,
                int64_t panel, float* rows) const {
    const std::byte* packed = weights.gate_up + static_cast<size_t>(expert) * slab_bytes().gate_up +
                              static_cast<size_t>(panel) * inner_bytes();
    const int64_t first = panel * kE4m3PanelRows;
    const int64_t valid = std::min(kE4m3PanelRows, problem_.intermediate_size - first);
    Products gate;
    Products up;
    for (int64_t i = 0; i < batch.expert_count[expert]; i += kMostRows) {
      const int64_t count = std::min(kMostRows, batch.expert_count[expert] - i);
      float* block = rows + i * slot_.floats();
      E4m3PanelTask task = task_of(gate_up_, block, 0, slot_.input_scales(), count, gate);
      set_panel(packed, task);
      config_.product(task);
      if (problem_.activation.gated) {
        task.out = up.data();
        set_panel(packed + gate_up_.bytes(), task);
        config_.product(task);
      }
      // Without a gate, both operands are the same product.
      const Products& second = problem_.activation.gated ? up : gate;
      for (int64_t row = 0; row < count; ++row) {
        float* activated = block + row * slot_.floats() + slot_.inner() + first;
        for (int64_t lane = 0; lane < valid; ++lane) {
          const auto at = static_cast<size_t>(row * kE4m3PanelRows + lane);
          activated[lane] = activation::apply_scalar(problem_.activation, gate[at], second[at]);
        }
      }
    }
  }

  void multiply_down(const ExpertBatch& batch, const PackedExperts& weights, int64_t expert,
                     int64_t panel, const float* rows, const ExpertOutput& output) const {
    const std::byte* packed = weights.down + static_cast<size_t>(expert) * slab_bytes().down +
                              static_cast<size_t>(panel) * down_.bytes();
    const int64_t first = panel * kE4m3PanelRows;
    const int64_t valid = std::min(kE4m3PanelRows, problem_.hidden_size - first);
    Products products;
    for (int64_t i = 0; i < batch.expert_count[expert]; i += kMostRows) {
      const int64_t count = std::min(kMostRows, batch.expert_count[expert] - i);
      E4m3PanelTask task = task_of(down_, rows + i * slot_.floats(), slot_.inner(),
                                   slot_.inner_scales(), count, products);
      set_panel(packed, task);
      config_.product(task);
      for (int64_t row = 0; row < count; ++row) {
        const int64_t slot = batch.expert_begin[expert] + i + row;
        std::copy_n(products.data() + row * kE4m3PanelRows, valid,
                    output.rows + slot * output.row_stride + first);
      }
    }
  }

  ExpertsProblem problem_;
  E4m3MlpConfig config_;
  E4m3PanelLayout gate_up_;
  E4m3PanelLayout down_;
  SlotLayout slot_;
};

}  // namespace

std::unique_ptr<ExpertsKernel> make_e4m3_mlp(const ExpertsProblem& problem, E4m3MlpConfig config) {
  return std::make_unique<E4m3Mlp>(problem, std::move(config));
}

}  // namespace conclave::inline v0::experts
