#include "experts/reference/reference.h"

#include "core/workspace_layout.h"
#include "cpu/parallel.h"
#include "experts/coded_rows.h"
#include "experts/slab_layout.h"
#include "gemm/reference_product.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace conclave::inline v0::experts {
namespace {

// One run's data. Rows of occupied slots lie dense, whatever gaps the batch has.
struct Call {
  const ExpertBatch& batch;
  const PackedExperts& weights;
  const ExpertOutput& output;
  std::byte* input;  // unused where rows are read in place
  std::byte* activated;
};

const float* floats(const std::byte* row) {
  return static_cast<const float*>(static_cast<const void*>(row));
}

class ReferenceKernel final : public ExpertsKernel {
 public:
  explicit ReferenceKernel(const ExpertsProblem& problem)
      : layout_(problem),
        input_(problem.quant, layout_.hidden_size, layout_.hidden_size),
        inner_(problem.quant, layout_.intermediate_size, layout_.padded_intermediate()),
        activation_(problem.activation) {}

  BatchRequirements requirements() const override {
    return {.row_dtype = DType::kF32,
            .row_bytes = round_up(layout_.hidden_size, 16) * int64_t{sizeof(float)}};
  }
  SlabBytes slab_bytes() const override { return layout_.bytes(); }
  std::string packed_layout() const override { return layout_.name(); }
  std::string tile() const override { return "1x1"; }
  PackGranule pack_granule() const override { return layout_.granule(); }
  void pack(const ExpertMatrices& expert, std::byte* gate_up_slab,
            std::byte* down_slab) const override {
    layout_.pack(expert, gate_up_slab, down_slab);
  }
  size_t workspace_bytes(int64_t max_slots) const override {
    WorkspaceLayout workspace;
    book(workspace, max_slots);
    return workspace.total_bytes();
  }

  void run(const ExpertBatch& batch, const PackedExperts& weights, const ExpertOutput& output,
           std::span<std::byte> workspace, Executor& executor) const override {
    int64_t occupied = 0;
    for (int64_t e = 0; e < batch.num_local_experts; ++e) occupied += batch.expert_count[e];
    WorkspaceLayout booking;
    const Slices slices = book(booking, occupied);
    const Call call{.batch = batch,
                    .weights = weights,
                    .output = output,
                    .input = slice_as<std::byte>(workspace, slices.input),
                    .activated = slice_as<std::byte>(workspace, slices.activated)};
    if (input_.coded()) {
      for_each(call, 1, executor, [&](int64_t expert, int64_t) { code_input(call, expert); });
    }
    for_each(call, layout_.gate_up_panels(), executor,
             [&](int64_t expert, int64_t panel) { activate_panel(call, expert, panel); });
    if (inner_.coded()) {
      for_each(call, 1, executor, [&](int64_t expert, int64_t) { code_activated(call, expert); });
    }
    for_each(call, layout_.down_panels(), executor,
             [&](int64_t expert, int64_t panel) { down_panel(call, expert, panel); });
  }

 private:
  struct Slices {
    WorkspaceSlice input;
    WorkspaceSlice activated;
  };

  Slices book(WorkspaceLayout& workspace, int64_t max_slots) const {
    const auto input_bytes = static_cast<size_t>(input_.coded() ? input_.row_bytes() : 0);
    return {.input = workspace.book_bytes(max_slots, input_bytes),
            .activated = workspace.book_bytes(max_slots, static_cast<size_t>(inner_.row_bytes()))};
  }

  // body(expert, task) for each task of each expert.
  template <class Body>
  static void for_each(const Call& call, int64_t tasks, Executor& executor, const Body& body) {
    cpu::parallel_for(executor, call.batch.num_local_experts * tasks, 1,
                      [&](int64_t begin, int64_t end, int32_t) {
                        for (int64_t item = begin; item < end; ++item) {
                          body(item / tasks, item % tasks);
                        }
                      });
  }

  static int64_t first_row(const ExpertBatch& batch, int64_t expert) {
    int64_t row = 0;
    for (int64_t e = 0; e < expert; ++e) row += batch.expert_count[e];
    return row;
  }
  // The row where the batch has it.
  static const std::byte* source_row(const Call& call, int64_t expert, int64_t i) {
    const int64_t slot = call.batch.expert_begin[expert] + i;
    return call.batch.bundle.rows + call.batch.source_row[slot] * call.batch.bundle.row_bytes;
  }
  std::byte* input_row(const Call& call, int64_t expert, int64_t i) const {
    return call.input + (first_row(call.batch, expert) + i) * input_.row_bytes();
  }
  std::byte* activated_row(const Call& call, int64_t expert, int64_t i) const {
    return call.activated + (first_row(call.batch, expert) + i) * inner_.row_bytes();
  }

  void code_input(const Call& call, int64_t expert) const {
    for (int64_t i = 0; i < call.batch.expert_count[expert]; ++i) {
      std::byte* const row = input_row(call, expert, i);
      std::memcpy(row, source_row(call, expert, i),
                  static_cast<size_t>(layout_.hidden_size) * sizeof(float));
      input_.quantize(call.weights.input_scale, row);
    }
  }

  void code_activated(const Call& call, int64_t expert) const {
    for (int64_t i = 0; i < call.batch.expert_count[expert]; ++i) {
      inner_.quantize(call.weights.intermediate_scale, activated_row(call, expert, i));
    }
  }

  void activate_panel(const Call& call, int64_t expert, int64_t panel) const {
    const std::byte* packed = call.weights.gate_up +
                              static_cast<size_t>(expert) * layout_.bytes().gate_up +
                              static_cast<size_t>(panel) * layout_.stride(layout_.gate_up);
    const int64_t width = layout_.gate_up_columns();
    const int64_t first = panel * width;
    const int64_t valid = std::min(width, layout_.intermediate_size - first);
    for (int64_t i = 0; i < call.batch.expert_count[expert]; ++i) {
      const std::byte* const x =
          input_.coded() ? input_row(call, expert, i) : source_row(call, expert, i);
      const Sums sums = biased_product(layout_.gate_up, packed, x, input_);
      // Without a gate both are the one product.
      const float* up = sums.data() + (gemm::kPanelColumns - width);
      auto* const row =
          static_cast<float*>(static_cast<void*>(activated_row(call, expert, i))) + first;
      std::fill_n(row, width, 0.0F);
      for (int64_t c = 0; c < valid; ++c) {
        row[c] = activation::apply_scalar(activation_, sums[static_cast<size_t>(c)], up[c]);
      }
    }
  }

  using Sums = std::array<float, gemm::kPanelColumns>;
  Sums biased_product(const gemm::PanelLayout& layout, const std::byte* panel, const std::byte* x,
                      const CodedRows& rows) const {
    Sums sums;
    if (layout.scale_width != 0) {
      gemm::reference_coded_product(layout, panel, floats(x), rows.scales(x), sums.data());
    } else {
      gemm::reference_product(layout, panel, floats(x), 0, gemm::kPanelColumns, sums.data());
    }
    const float* bias = layout_.bias(layout, panel);
    for (size_t c = 0; bias != nullptr && c < sums.size(); ++c) sums[c] += bias[c];
    return sums;
  }

  void down_panel(const Call& call, int64_t expert, int64_t panel) const {
    const std::byte* packed = call.weights.down +
                              static_cast<size_t>(expert) * layout_.bytes().down +
                              static_cast<size_t>(panel) * layout_.stride(layout_.down);
    const int64_t first = panel * gemm::kPanelColumns;
    const int64_t valid = std::min(gemm::kPanelColumns, layout_.hidden_size - first);
    for (int64_t i = 0; i < call.batch.expert_count[expert]; ++i) {
      const int64_t slot = call.batch.expert_begin[expert] + i;
      const Sums sums =
          biased_product(layout_.down, packed, activated_row(call, expert, i), inner_);
      std::copy_n(sums.data(), valid, call.output.rows + slot * call.output.row_stride + first);
    }
  }

  SlabLayout layout_;
  CodedRows input_;
  CodedRows inner_;
  activation::Activation activation_;
};

}  // namespace

std::unique_ptr<ExpertsKernel> make_reference_kernel(const ExpertsProblem& problem) {
  return std::make_unique<ReferenceKernel>(problem);
}

}  // namespace conclave::inline v0::experts
