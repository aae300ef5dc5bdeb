#include "experts/reference/e4m3_reference.h"

#include "core/checked.h"
#include "core/float8.h"
#include "core/workspace_layout.h"
#include "cpu/parallel.h"
#include "experts/reference/e4m3_rows.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::experts {
namespace {

// Weight rows of one task.
constexpr int64_t kRowsPerTask = 8;
constexpr int64_t kSlabAlignment = 64;

// What one occupied slot needs: its input row and its activated row, each with its scales.
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

class E4m3Reference final : public ExpertsKernel {
 public:
  explicit E4m3Reference(const ExpertsProblem& problem)
      : problem_(problem),
        gate_up_(e4m3_row_layout(problem.quant, problem.hidden_size)),
        down_(e4m3_row_layout(problem.quant, problem.intermediate_size)),
        slot_{problem.hidden_size, problem.intermediate_size, problem.quant.activations} {}

  BatchRequirements requirements() const override {
    return {.row_dtype = DType::kF32,
            .row_bytes = round_up(problem_.hidden_size, 16) * int64_t{sizeof(float)}};
  }
  SlabBytes slab_bytes() const override {
    const auto slab = [](int64_t rows, size_t bytes) {
      return static_cast<size_t>(round_up(rows * static_cast<int64_t>(bytes), kSlabAlignment));
    };
    return {.gate_up = slab(problem_.intermediate_size, inner_bytes()),
            .down = slab(problem_.hidden_size, down_.bytes())};
  }
  std::string packed_layout() const override {
    return std::string("e4m3.rows") + (problem_.activation.gated ? "" : ".single") + ".v1";
  }
  std::string tile() const override { return "1x1"; }
  PackGranule pack_granule() const override {
    return {.inner_rows = 1,
            .hidden_rows = 1,
            .gate_up_bytes = inner_bytes(),
            .down_bytes = down_.bytes()};
  }

  void pack(const ExpertMatrices& expert, std::byte* gate_up_slab,
            std::byte* down_slab) const override {
    const int64_t inner_rows = expert.up.shape[0];
    for (int64_t row = 0; row < inner_rows; ++row, gate_up_slab += inner_bytes()) {
      std::byte* up = gate_up_slab;
      if (problem_.activation.gated) {
        pack_e4m3_row(gate_up_, expert.gate, expert.gate_scale, expert.gate_bias, row, up);
        up += gate_up_.bytes();
      }
      pack_e4m3_row(gate_up_, expert.up, expert.up_scale, expert.up_bias, row, up);
    }
    const int64_t hidden_rows = expert.down.shape[0];
    for (int64_t row = 0; row < hidden_rows; ++row, down_slab += down_.bytes()) {
      pack_e4m3_row(down_, expert.down, expert.down_scale, expert.down_bias, row, down_slab);
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
    for_each_task(ceil_div(problem_.intermediate_size, kRowsPerTask),
                  [&](int64_t expert, int64_t task, float* rows) {
                    activate(batch, weights, expert, task, rows);
                  });
    for_each_task(1, [&](int64_t expert, int64_t, float* rows) {
      for (int64_t i = 0; i < batch.expert_count[expert]; ++i, rows += slot_.floats()) {
        quantize(problem_.intermediate_size, inner, rows + slot_.inner(),
                 rows + slot_.inner_scales());
      }
    });
    for_each_task(ceil_div(problem_.hidden_size, kRowsPerTask),
                  [&](int64_t expert, int64_t task, float* rows) {
                    multiply_down(batch, weights, expert, task, rows, output);
                  });
  }

 private:
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

  // In place: values become those of their codes. Columns go through a piece at a time, a piece
  // being what shares a scale.
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

  ActivationRow row_at(const float* values, const float* scales) const {
    const bool plain = slot_.form == ActivationScale::kNone;
    return {.values = values, .scales = plain ? nullptr : scales};
  }

  void activate(const ExpertBatch& batch, const PackedExperts& weights, int64_t expert,
                int64_t task, float* rows) const {
    const int64_t first = task * kRowsPerTask;
    const int64_t last = std::min(first + kRowsPerTask, problem_.intermediate_size);
    const std::byte* slab = weights.gate_up + static_cast<size_t>(expert) * slab_bytes().gate_up;
    const int64_t width = quant::scale_width(slot_.form, problem_.hidden_size);
    for (int64_t i = 0; i < batch.expert_count[expert]; ++i, rows += slot_.floats()) {
      const ActivationRow x = row_at(rows, rows + slot_.input_scales());
      for (int64_t feature = first; feature < last; ++feature) {
        const std::byte* packed = slab + static_cast<size_t>(feature) * inner_bytes();
        const float gate = e4m3_product(gate_up_, packed, x, width);
        // Without a gate both are the one product.
        const float up = problem_.activation.gated
                             ? e4m3_product(gate_up_, packed + gate_up_.bytes(), x, width)
                             : gate;
        rows[slot_.inner() + feature] = activation::apply_scalar(problem_.activation, gate, up);
      }
    }
  }

  void multiply_down(const ExpertBatch& batch, const PackedExperts& weights, int64_t expert,
                     int64_t task, const float* rows, const ExpertOutput& output) const {
    const int64_t first = task * kRowsPerTask;
    const int64_t last = std::min(first + kRowsPerTask, problem_.hidden_size);
    const std::byte* slab = weights.down + static_cast<size_t>(expert) * slab_bytes().down;
    const int64_t width = quant::scale_width(slot_.form, problem_.intermediate_size);
    for (int64_t i = 0; i < batch.expert_count[expert]; ++i, rows += slot_.floats()) {
      const ActivationRow h = row_at(rows + slot_.inner(), rows + slot_.inner_scales());
      float* out = output.rows + (batch.expert_begin[expert] + i) * output.row_stride;
      for (int64_t col = first; col < last; ++col) {
        out[col] = e4m3_product(down_, slab + static_cast<size_t>(col) * down_.bytes(), h, width);
      }
    }
  }

  ExpertsProblem problem_;
  E4m3RowLayout gate_up_;
  E4m3RowLayout down_;
  SlotLayout slot_;
};

}  // namespace

std::unique_ptr<ExpertsKernel> make_e4m3_reference_kernel(const ExpertsProblem& problem) {
  return std::make_unique<E4m3Reference>(problem);
}

}  // namespace conclave::inline v0::experts
