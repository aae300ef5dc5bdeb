#include "experts/reference/reference.h"

#include "core/workspace_layout.h"
#include "cpu/parallel.h"
#include "experts/slab_layout.h"
#include "gemm/reference_product.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::experts {
namespace {

class ReferenceKernel final : public ExpertsKernel {
 public:
  explicit ReferenceKernel(const ExpertsProblem& problem)
      : layout_(problem), activation_(problem.activation) {}

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
    book_intermediate(workspace, max_slots);
    return workspace.total_bytes();
  }

  void run(const ExpertBatch& batch, const PackedExperts& weights, const ExpertOutput& output,
           std::span<std::byte> workspace, Executor& executor) const override {
    WorkspaceLayout booking;
    float* intermediate = slice_as<float>(workspace, book_intermediate(booking, 0));
    const int64_t gate_up_panels = layout_.gate_up_panels();
    cpu::parallel_for(executor, batch.num_local_experts * gate_up_panels, 1,
                      [&](int64_t begin, int64_t end, int32_t) {
                        for (int64_t item = begin; item < end; ++item) {
                          activate_panel(batch, weights, item / gate_up_panels,
                                         item % gate_up_panels, intermediate);
                        }
                      });
    const int64_t down_panels = layout_.down_panels();
    cpu::parallel_for(executor, batch.num_local_experts * down_panels, 1,
                      [&](int64_t begin, int64_t end, int32_t) {
                        for (int64_t item = begin; item < end; ++item) {
                          down_panel(batch, weights, item / down_panels, item % down_panels,
                                     intermediate, output);
                        }
                      });
  }

 private:
  // The expert's first activated row; these rows lie dense, whatever gaps the batch has.
  float* activated_rows(const ExpertBatch& batch, int64_t expert, float* intermediate) const {
    int64_t row = 0;
    for (int64_t e = 0; e < expert; ++e) row += batch.expert_count[e];
    return intermediate + row * layout_.padded_intermediate();
  }

  WorkspaceSlice book_intermediate(WorkspaceLayout& workspace, int64_t max_slots) const {
    return workspace.book_bytes(max_slots,
                                static_cast<size_t>(layout_.padded_intermediate()) * sizeof(float));
  }

  void activate_panel(const ExpertBatch& batch, const PackedExperts& weights, int64_t expert,
                      int64_t panel, float* intermediate) const {
    const std::byte* packed = weights.gate_up +
                              static_cast<size_t>(expert) * layout_.bytes().gate_up +
                              static_cast<size_t>(panel) * layout_.stride(layout_.gate_up);
    const int64_t width = layout_.gate_up_columns();
    const int64_t first = panel * width;
    const int64_t valid = std::min(width, layout_.intermediate_size - first);
    float* activated = activated_rows(batch, expert, intermediate);
    for (int64_t i = 0; i < batch.expert_count[expert]; ++i) {
      const int64_t slot = batch.expert_begin[expert] + i;
      const auto* x = static_cast<const float*>(static_cast<const void*>(
          batch.bundle.rows + batch.source_row[slot] * batch.bundle.row_bytes));
      const Sums sums = biased_product(layout_.gate_up, packed, x);
      // Without a gate, both operands are the same product.
      const float* up = sums.data() + (gemm::kPanelColumns - width);
      float* row = activated + i * layout_.padded_intermediate() + first;
      std::fill_n(row, width, 0.0F);
      for (int64_t c = 0; c < valid; ++c) {
        row[c] = activation::apply_scalar(activation_, sums[static_cast<size_t>(c)], up[c]);
      }
    }
  }

  using Sums = std::array<float, gemm::kPanelColumns>;
  Sums biased_product(const gemm::PanelLayout& layout, const std::byte* panel,
                      const float* x) const {
    Sums sums;
    gemm::reference_product(layout, panel, x, 0, gemm::kPanelColumns, sums.data());
    const float* bias = layout_.bias(layout, panel);
    for (size_t c = 0; bias != nullptr && c < sums.size(); ++c) sums[c] += bias[c];
    return sums;
  }

  void down_panel(const ExpertBatch& batch, const PackedExperts& weights, int64_t expert,
                  int64_t panel, float* intermediate, const ExpertOutput& output) const {
    const std::byte* packed = weights.down + static_cast<size_t>(expert) * layout_.bytes().down +
                              static_cast<size_t>(panel) * layout_.stride(layout_.down);
    const int64_t first = panel * gemm::kPanelColumns;
    const int64_t valid = std::min(gemm::kPanelColumns, layout_.hidden_size - first);
    const float* activated = activated_rows(batch, expert, intermediate);
    for (int64_t i = 0; i < batch.expert_count[expert]; ++i) {
      const int64_t slot = batch.expert_begin[expert] + i;
      const Sums sums =
          biased_product(layout_.down, packed, activated + i * layout_.padded_intermediate());
      std::copy_n(sums.data(), valid, output.rows + slot * output.row_stride + first);
    }
  }

  SlabLayout layout_;
  activation::Activation activation_;
};

}  // namespace

std::unique_ptr<ExpertsKernel> make_reference_kernel(const ExpertsProblem& problem) {
  return std::make_unique<ReferenceKernel>(problem);
}

}  // namespace conclave::inline v0::experts
