#include "experts/reference/reference.h"

#include "core/workspace_layout.h"
#include "cpu/parallel.h"
#include "experts/coded_rows.h"
#include "experts/cpu/adapters/adapter_pass.h"
#include "experts/slab_layout.h"
#include "gemm/reference_product.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace conclave::inline v0::experts {
namespace {

// One run's data. Rows of occupied slots lie dense, whatever gaps the batch has.
struct Call {
  const ExpertBatch& batch;
  const PackedExperts& weights;
  const ExpertOutput& output;
  std::byte* input;  // unused where rows are read in place
  std::byte* activated;
  std::byte* panels;  // each worker's panel; unused if experts lie in slabs
  AdapterCall adapters;
};

const float* floats(const std::byte* row) {
  return static_cast<const float*>(static_cast<const void*>(row));
}

class ReferenceKernel final : public ExpertsKernel {
 public:
  explicit ReferenceKernel(const ExpertsProblem& problem)
      : layout_(problem),
        gate_up_at_(layout_.gate_up_places()),
        down_at_(layout_.down_places()),
        input_({.rule = quant::activation_rule(problem.weight_dtype, problem.quant),
                .has_factors = layout_.has_factors,
                .value_bytes = layout_.hidden_size * int64_t{sizeof(float)},
                .panels = layout_.gate_up}),
        inner_({.rule = quant::activation_rule(problem.weight_dtype, problem.quant),
                .has_factors = layout_.has_factors,
                .value_bytes = layout_.padded_intermediate() * int64_t{sizeof(float)},
                .panels = layout_.down}),
        activation_(problem.activation),
        panel_room_(problem.reads_in_place ? layout_.panel_room() : 0),
        adapters_(problem, cpu::Isa::kScalar, DType::kF32) {}

  BatchRequirements requirements() const override {
    return {.row_dtype = DType::kF32,
            .row_bytes = round_up(layout_.hidden_size, 16) * int64_t{sizeof(float)} +
                         adapters_.mark_bytes()};
  }
  SlabBytes slab_bytes() const override { return layout_.bytes(); }
  std::string packed_layout() const override { return layout_.name(); }
  std::string tile() const override { return "1x1"; }
  PackGranule pack_granule() const override { return layout_.granule(); }
  void pack(const ExpertMatrices& expert, std::byte* gate_up_slab,
            std::byte* down_slab) const override {
    layout_.pack(expert, gate_up_slab, down_slab);
  }
  size_t workspace_bytes(int64_t max_slots, int32_t workers) const override {
    WorkspaceLayout workspace;
    book(workspace, max_slots, workers);
    return workspace.total_bytes();
  }

  void run(const ExpertBatch& batch, const PackedExperts& weights, const ExpertOutput& output,
           std::span<std::byte> workspace, Executor& executor) const override {
    const int64_t* const counts = batch.expert_count;
    const int64_t occupied = std::accumulate(counts, counts + batch.num_local_experts, int64_t{0});
    WorkspaceLayout booking;
    const Slices slices = book(booking, occupied, executor.concurrency());
    const Call call{.batch = batch,
                    .weights = weights,
                    .output = output,
                    .input = slice_as<std::byte>(workspace, slices.input),
                    .activated = slice_as<std::byte>(workspace, slices.activated),
                    .panels = slice_as<std::byte>(workspace, slices.panels),
                    .adapters = adapters_.call(weights.adapters, workspace, slices.adapters)};
    if (call.adapters) {
      for_each_task(call, 1, executor, [&](const Task& task) { begin_gate_up(call, task); });
    }
    if (input_.changes()) {
      for_each_task(call, 1, executor, [&](const Task& task) { prepare_input(call, task); });
    }
    for_each_task(call, layout_.gate_up_panels(), executor,
                  [&](const Task& task) { activate_panel(call, task); });
    if (call.adapters) {
      for_each_task(call, 1, executor, [&](const Task& task) { begin_down(call, task); });
    }
    if (inner_.changes()) {
      for_each_task(call, 1, executor, [&](const Task& task) { prepare_activated(call, task); });
    }
    for_each_task(call, layout_.down_panels(), executor,
                  [&](const Task& task) { down_panel(call, task); });
  }

 private:
  struct Slices {
    WorkspaceSlice input;
    WorkspaceSlice activated;
    WorkspaceSlice panels;
    AdapterPass::Slices adapters;
  };

  Slices book(WorkspaceLayout& workspace, int64_t max_slots, int32_t workers) const {
    const auto input_bytes = static_cast<size_t>(input_.changes() ? input_.row_bytes() : 0);
    return {.input = workspace.book_bytes(max_slots, input_bytes),
            .activated = workspace.book_bytes(max_slots, static_cast<size_t>(inner_.row_bytes())),
            .panels = workspace.book_bytes(workers, panel_room_),
            .adapters = adapters_.book(workspace, max_slots)};
  }

  // A task of an expert, whose occupied rows begin at first_row of all.
  struct Task {
    int64_t expert = 0;
    int64_t panel = 0;
    int64_t first_row = 0;
    int32_t worker = 0;
  };

  // Calls body(task) for `panels` tasks of each expert.
  template <class Body>
  static void for_each_task(const Call& call, int64_t panels, Executor& executor,
                            const Body& body) {
    const int64_t* const counts = call.batch.expert_count;
    cpu::parallel_for(
        executor, call.batch.num_local_experts * panels, 1,
        [&](int64_t begin, int64_t end, int32_t worker) {
          for (int64_t item = begin; item < end; ++item) {
            const int64_t expert = item / panels;
            body(Task{.expert = expert,
                      .panel = item % panels,
                      .first_row = std::accumulate(counts, counts + expert, int64_t{0}),
                      .worker = worker});
          }
        });
  }

  // The row where the batch has it.
  static const std::byte* source_row(const Call& call, const Task& task, int64_t i) {
    const int64_t slot = call.batch.expert_begin[task.expert] + i;
    return call.batch.bundle.rows + call.batch.source_row[slot] * call.batch.bundle.row_bytes;
  }
  const std::byte* gate_up_slab(const Call& call, const Task& task) const {
    return gate_up_at_.slab(call.weights.gate_up, task.expert);
  }
  const std::byte* down_slab(const Call& call, const Task& task) const {
    return down_at_.slab(call.weights.down, task.expert);
  }
  std::byte* input_row(const Call& call, const Task& task, int64_t i) const {
    return call.input + (task.first_row + i) * input_.row_bytes();
  }
  std::byte* activated_row(const Call& call, const Task& task, int64_t i) const {
    return call.activated + (task.first_row + i) * inner_.row_bytes();
  }

  static AdapterRows rows_of(const Call& call, const Task& task) {
    return {.expert = task.expert,
            .first_row = task.first_row,
            .num_rows = call.batch.expert_count[task.expert]};
  }
  void begin_gate_up(const Call& call, const Task& task) const {
    adapters_.begin_gate_up(call.adapters, rows_of(call, task), call.batch.bundle.row_bytes,
                            [&](int64_t i) { return source_row(call, task, i); });
  }
  void begin_down(const Call& call, const Task& task) const {
    adapters_.begin_down(call.adapters, rows_of(call, task), kHalfColumns * int64_t{sizeof(float)},
                         [&](int64_t i) { return activated_row(call, task, i); });
  }
  static AdapterRows row_of(const Task& task, int64_t i) {
    return {.expert = task.expert, .first_row = task.first_row + i, .num_rows = 1};
  }

  void prepare_input(const Call& call, const Task& task) const {
    const auto* const factors =
        SlabPlaces::at<float>(gate_up_slab(call, task), gate_up_at_.factors);
    for (int64_t i = 0; i < call.batch.expert_count[task.expert]; ++i) {
      std::byte* const row = input_row(call, task, i);
      input_.prepare(factors, call.weights.input_scale, floats(source_row(call, task, i)), row);
    }
  }

  void prepare_activated(const Call& call, const Task& task) const {
    const auto* const factors = SlabPlaces::at<float>(down_slab(call, task), down_at_.factors);
    for (int64_t i = 0; i < call.batch.expert_count[task.expert]; ++i) {
      std::byte* const row = activated_row(call, task, i);
      inner_.prepare(factors, call.weights.intermediate_scale, floats(row), row);
    }
  }

  static const ExpertMatrices& expert_in_place(const Call& call, const Task& task) {
    return call.weights.in_place[static_cast<size_t>(task.expert)];
  }
  std::byte* own_panel(const Call& call, const Task& task) const {
    return call.panels + static_cast<size_t>(task.worker) * panel_room_;
  }
  const std::byte* gate_up_panel(const Call& call, const Task& task) const {
    if (call.weights.in_place.empty())
      return gate_up_at_.panel(gate_up_slab(call, task), task.panel);
    std::byte* const made = own_panel(call, task);
    layout_.make_gate_up_panel({expert_in_place(call, task), task.panel}, nullptr, made);
    return made;
  }
  const std::byte* panel_of_down(const Call& call, const Task& task) const {
    if (call.weights.in_place.empty()) return down_at_.panel(down_slab(call, task), task.panel);
    std::byte* const made = own_panel(call, task);
    layout_.make_down_panel({expert_in_place(call, task), task.panel}, nullptr, made);
    return made;
  }

  void activate_panel(const Call& call, const Task& task) const {
    if (call.batch.expert_count[task.expert] == 0) return;
    const std::byte* const slab = gate_up_slab(call, task);
    const Panel panel{.layout = layout_.gate_up,
                      .packed = gate_up_panel(call, task),
                      .order = gate_up_at_.order(slab),
                      .biases = gate_up_at_.biases};
    const int64_t width = layout_.gate_up_columns();
    const int64_t first = task.panel * width;
    const int64_t valid = std::min(width, layout_.intermediate_size - first);
    for (int64_t i = 0; i < call.batch.expert_count[task.expert]; ++i) {
      const std::byte* const x =
          input_.changes() ? input_row(call, task, i) : source_row(call, task, i);
      Sums sums = biased_product(panel, x, input_);
      if (call.adapters) {
        adapters_.add_gate_up(call.adapters, row_of(task, i), task.panel, sums.data());
      }
      // Without a gate both are the one product.
      const float* up = sums.data() + (gemm::kPanelColumns - width);
      auto* const row =
          static_cast<float*>(static_cast<void*>(activated_row(call, task, i))) + first;
      std::fill_n(row, width, 0.0F);
      for (int64_t c = 0; c < valid; ++c) {
        row[c] = activation::apply_scalar(activation_, sums[static_cast<size_t>(c)], up[c]);
      }
    }
  }

  struct Panel {
    const gemm::PanelLayout& layout;
    const std::byte* packed = nullptr;
    gemm::PanelOrder order = {};
    size_t biases = SlabPlaces::kNone;
  };
  using Sums = std::array<float, gemm::kPanelColumns>;
  Sums biased_product(const Panel& panel, const std::byte* x, const CodedRows& rows) const {
    const auto& [layout, packed, order, biases] = panel;
    Sums sums;
    if (layout.scale_width != 0) {
      gemm::reference_coded_product(layout, packed, floats(x), rows.scales(x), order, sums.data());
    } else {
      gemm::reference_product(layout, packed, floats(x), 0, gemm::kPanelColumns, sums.data());
    }
    const auto* const bias = SlabPlaces::at<float>(packed, biases);
    for (size_t c = 0; bias != nullptr && c < sums.size(); ++c) sums[c] += bias[c];
    return sums;
  }

  void down_panel(const Call& call, const Task& task) const {
    if (call.batch.expert_count[task.expert] == 0) return;
    const std::byte* const slab = down_slab(call, task);
    const Panel panel{.layout = layout_.down,
                      .packed = panel_of_down(call, task),
                      .order = down_at_.order(slab),
                      .biases = down_at_.biases};
    const int64_t first = task.panel * gemm::kPanelColumns;
    const int64_t valid = std::min(gemm::kPanelColumns, layout_.hidden_size - first);
    for (int64_t i = 0; i < call.batch.expert_count[task.expert]; ++i) {
      const int64_t slot = call.batch.expert_begin[task.expert] + i;
      const Sums sums = biased_product(panel, activated_row(call, task, i), inner_);
      float* const out = call.output.rows + slot * call.output.row_stride + first;
      std::copy_n(sums.data(), valid, out);
      if (call.adapters) {
        adapters_.add_down(call.adapters, row_of(task, i), task.panel, out, call.output.row_stride,
                           valid);
      }
    }
  }

  SlabLayout layout_;
  SlabPlaces gate_up_at_;
  SlabPlaces down_at_;
  CodedRows input_;
  CodedRows inner_;
  activation::Activation activation_;
  size_t panel_room_;
  AdapterPass adapters_;
};

}  // namespace

std::unique_ptr<ExpertsKernel> make_reference_kernel(const ExpertsProblem& problem) {
  return std::make_unique<ReferenceKernel>(problem);
}

}  // namespace conclave::inline v0::experts
