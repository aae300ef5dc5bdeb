#include "experts/cpu/expert_mlp.h"

#include "core/workspace_layout.h"
#include "cpu/parallel.h"
#include "experts/coded_rows.h"
#include "experts/cpu/adapters/adapter_pass.h"
#include "experts/cpu/panel_meaning.h"
#include "experts/cpu/panel_stage.h"
#include "experts/cpu/row_groups.h"
#include "experts/slab_layout.h"
#include "gemm/cpu/pack_numbers.h"
#include "gemm/cpu/transpose_lanes.h"

#include <algorithm>
#include <utility>

namespace conclave::inline v0::experts {
namespace {

// Columns that lie together in an activated row, whether or not rows are grouped.
constexpr int64_t kBlockColumns = 32;
constexpr int64_t kFloatBytes = sizeof(float);

// One run's data, shared by the workers.
struct Call {
  const ExpertBatch& batch;
  const PackedExperts& weights;
  const ExpertOutput& output;
  const WorkList& work;
  std::byte* prepared;      // the batch's rows, grouped or prepared; unused if read in place
  bool shares_rows;         // rows are prepared where the batch has them, not once for each expert
  std::byte* intermediate;  // activated rows, grouped or prepared in the same way
  float* widened;     // each worker's scales and offsets of a panel; unused if none are narrow
  std::byte* panels;  // each worker's panel; unused if experts lie in slabs
  AdapterCall adapters;

  const std::byte* source_row(const WorkItem& item, int64_t i) const {
    return batch.bundle.rows + batch.source_row[item.first_slot + i] * batch.bundle.row_bytes;
  }
  bool in_place() const { return !weights.in_place.empty(); }
  const ExpertMatrices& expert(const WorkItem& item) const {
    return weights.in_place[static_cast<size_t>(item.expert)];
  }
  PanelInPlace panel(const WorkItem& item, const WorkItem* next) const {
    PanelInPlace panel{.expert = expert(item), .index = item.panel};
    if (next == nullptr) return panel;
    panel.next_expert = &expert(*next);
    panel.next_index = next->panel;
    return panel;
  }
};

const float* floats(const std::byte* row) {
  return static_cast<const float*>(static_cast<const void*>(row));
}

class ExpertMlp final : public ExpertsKernel {
 public:
  ExpertMlp(const ExpertsProblem& problem, ExpertMlpConfig config)
      : num_local_experts_(problem.num_local_experts),
        layout_(problem),
        gate_up_at_(layout_.gate_up_places()),
        down_at_(layout_.down_places()),
        config_(std::move(config)),
        gate_up_meaning_(layout_.gate_up, gemm::widen_function(problem.cpu().isa)),
        down_meaning_(layout_.down, gemm::widen_function(problem.cpu().isa)),
        input_({.rule = quant::activation_rule(problem.weight_dtype, problem.quant),
                .has_factors = layout_.has_factors,
                .value_bytes = config_.functions.code_row != nullptr
                                   ? round_up(layout_.hidden_size, 64)
                                   : round_up(layout_.hidden_size, 32) * kFloatBytes,
                .panels = layout_.gate_up,
                .code_row = config_.functions.code_row,
                .code_dtype = config_.code_dtype}),
        inner_({.rule = quant::activation_rule(problem.weight_dtype, problem.quant),
                .has_factors = layout_.has_factors,
                .value_bytes = layout_.padded_intermediate() * kFloatBytes,
                .panels = layout_.down,
                .code_row = config_.functions.code_row,
                .code_dtype = config_.code_dtype}),
        parameters_(activation::formula_parameters(problem.activation)),
        panel_room_(problem.reads_in_place ? layout_.panel_room() : 0),
        packing_({.transpose = gemm::transpose_function(problem.cpu().isa),
                  .numbers = gemm::numbers_function(problem.cpu().isa)}),
        adapters_(problem, problem.cpu().isa, config_.row_dtype) {
    // A panel that is made once for every block should be made seldom.
    if (problem.reads_in_place) config_.tiling.block *= kBlocksInPlace;
    if (config_.functions.down_product == nullptr) {
      config_.functions.down_product = config_.functions.product;
    }
  }

  BatchRequirements requirements() const override {
    return {.row_dtype = config_.row_dtype,
            .row_bytes = round_up(layout_.hidden_size, 32) * byte_size(config_.row_dtype) +
                         adapters_.mark_bytes()};
  }
  SlabBytes slab_bytes() const override { return layout_.bytes(); }
  std::string packed_layout() const override { return layout_.name(); }
  std::string tile() const override { return config_.tile; }
  PackGranule pack_granule() const override { return layout_.granule(); }
  void pack(const ExpertMatrices& expert, std::byte* gate_up_slab,
            std::byte* down_slab) const override {
    layout_.pack(expert, gate_up_slab, down_slab, packing_);
  }
  size_t workspace_bytes(int64_t max_slots, int32_t workers) const override {
    WorkspaceLayout workspace;
    book(workspace, WorkList::max_rows(max_slots, num_local_experts_, config_.tiling), workers);
    return workspace.total_bytes();
  }

  void run(const ExpertBatch& batch, const PackedExperts& weights, const ExpertOutput& output,
           std::span<std::byte> workspace, Executor& executor) const override {
    WorkspaceLayout work_booking;
    const WorkList work(batch, config_.tiling,
                        {slice_as<ActiveExpert>(workspace, book_work(work_booking)),
                         static_cast<size_t>(num_local_experts_)});
    WorkspaceLayout booking;
    const Slices slices = book(booking, work.num_rows(), executor.concurrency());
    const Call call{.batch = batch,
                    .weights = weights,
                    .output = output,
                    .work = work,
                    .prepared = slice_as<std::byte>(workspace, slices.prepared),
                    .shares_rows = input_.changes() && input_.are_shared() &&
                                   batch.bundle.num_rows <= work.num_rows(),
                    .intermediate = slice_as<std::byte>(workspace, slices.intermediate),
                    .widened = slice_as<float>(workspace, slices.widened),
                    .panels = slice_as<std::byte>(workspace, slices.panels),
                    .adapters = adapters_.call(weights.adapters, workspace, slices.adapters)};
    if (call.adapters) begin_gate_up_adapters(call, executor);
    if (grouped()) group_rows(call, executor);
    if (input_.changes()) prepare_input(call, executor);
    run_gate_up(call, executor);
    if (call.adapters) begin_down_adapters(call, executor);
    if (inner_.changes()) prepare_activated(call, executor);
    run_down(call, executor);
  }

 private:
  static constexpr int64_t kBlocksInPlace = 4;

  struct Slices {
    WorkspaceSlice prepared;
    WorkspaceSlice intermediate;
    WorkspaceSlice widened;
    WorkspaceSlice panels;
    AdapterPass::Slices adapters;
  };

  int64_t intermediate_row_bytes() const {
    if (inner_.changes()) return inner_.row_bytes();
    return layout_.padded_intermediate() * byte_size(config_.row_dtype);
  }
  // Bytes per row of `prepared`; 0 if rows are read where the batch has them.
  int64_t prepared_row_bytes() const {
    if (input_.changes()) return input_.row_bytes();
    return grouped() ? requirements().row_bytes : 0;
  }

  bool grouped() const { return config_.tiling.group > 1; }
  // Whether nothing else fetches the next panel's first scales: few rows fetch codes alone.
  static bool fetches_begin(const gemm::PanelTask& task) {
    return task.next_panel == nullptr || task.num_rows <= gemm::kMostNarrowRows;
  }
  bool fetch_ahead(const WorkItem& item) const { return item.num_rows > config_.fetch_above_rows; }

  WorkspaceSlice book_work(WorkspaceLayout& workspace) const {
    return workspace.book<ActiveExpert>(num_local_experts_);
  }
  // Float32 numbers of room for the narrow ones of a panel.
  int64_t worker_room() const { return std::max(gate_up_meaning_.room(), down_meaning_.room()); }
  float* room_of(const Call& call, int32_t worker) const {
    return call.widened + worker * worker_room();
  }
  Slices book(WorkspaceLayout& workspace, int64_t num_rows, int32_t workers) const {
    book_work(workspace);
    const auto prepared_bytes = static_cast<size_t>(prepared_row_bytes());
    const auto intermediate_bytes = static_cast<size_t>(intermediate_row_bytes());
    return {.prepared = workspace.book_bytes(num_rows, prepared_bytes),
            .intermediate = workspace.book_bytes(num_rows, intermediate_bytes),
            .widened = workspace.book<float>(workers * worker_room()),
            .panels = workspace.book_bytes(workers, panel_room_),
            .adapters = adapters_.book(workspace, num_rows)};
  }
  std::byte* panel_of(const Call& call, int32_t worker) const {
    return call.panels + static_cast<size_t>(worker) * panel_room_;
  }

  // Calls body(item) once per block of rows; a worker takes `grain` blocks at once.
  template <class Body>
  static void for_each_block(const Call& call, int64_t grain, Executor& executor,
                             const Body& body) {
    cpu::parallel_for(executor, call.work.num_blocks(), grain,
                      [&](int64_t begin, int64_t end, int32_t) {
                        WorkList::Cursor cursor;
                        for (int64_t block = begin; block < end; ++block) {
                          body(call.work.item(block, 1, cursor));
                        }
                      });
  }

  // Copies the rows of each block into groups of interleaved rows.
  void group_rows(const Call& call, Executor& executor) const {
    for_each_block(call, 4, executor, [&](const WorkItem& item) {
      interleave_rows({.bundle = call.batch.bundle,
                       .row_index = call.batch.source_row + item.first_slot,
                       .num_rows = item.num_rows,
                       .group = config_.tiling.group},
                      call.prepared + item.first_row * call.batch.bundle.row_bytes);
    });
  }

  // If a batch has more rows than its experts read, since nothing reads padding tokens, rows are
  // prepared once per expert: the workspace has no room to prepare all of them.
  void prepare_input(const Call& call, Executor& executor) const {
    const RowBundle& bundle = call.batch.bundle;
    const auto prepare = [&](const float* factors, int64_t source, int64_t row) {
      const std::byte* const values = bundle.rows + source * bundle.row_bytes;
      input_.prepare(factors, call.weights.input_scale, floats(values),
                     call.prepared + row * input_.row_bytes());
    };
    if (call.shares_rows) {
      cpu::parallel_for(executor, bundle.num_rows, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t row = begin; row < end; ++row) prepare(nullptr, row, row);
      });
      return;
    }
    for_each_block(call, 1, executor, [&](const WorkItem& item) {
      const std::byte* const slab = gate_up_at_.slab(call.weights.gate_up, item.expert);
      const auto* const factors = SlabPlaces::at<float>(slab, gate_up_at_.factors);
      for (int64_t i = 0; i < item.num_rows; ++i) {
        prepare(factors, call.batch.source_row[item.first_slot + i], item.first_row + i);
      }
    });
  }

  void prepare_activated(const Call& call, Executor& executor) const {
    for_each_block(call, 1, executor, [&](const WorkItem& item) {
      const std::byte* const slab = down_at_.slab(call.weights.down, item.expert);
      const auto* const factors = SlabPlaces::at<float>(slab, down_at_.factors);
      for (int64_t i = 0; i < item.num_rows; ++i) {
        std::byte* const row = call.intermediate + (item.first_row + i) * inner_.row_bytes();
        inner_.prepare(factors, call.weights.intermediate_scale, floats(row), row);
      }
    });
  }

  static AdapterRows adapter_rows(const WorkItem& item) {
    return {.expert = item.expert, .first_row = item.first_row, .num_rows = item.num_rows};
  }

  // Adapters read rows as the batch has them, and activated rows before these become codes.
  void begin_gate_up_adapters(const Call& call, Executor& executor) const {
    for_each_block(call, 1, executor, [&](const WorkItem& item) {
      adapters_.begin_gate_up(call.adapters, adapter_rows(item), call.batch.bundle.row_bytes,
                              [&](int64_t i) { return call.source_row(item, i); });
    });
  }
  void begin_down_adapters(const Call& call, Executor& executor) const {
    const int64_t group = config_.tiling.group;
    const int64_t block_bytes = kBlockColumns * byte_size(config_.row_dtype);
    for_each_block(call, 1, executor, [&](const WorkItem& item) {
      const auto activated = [&](int64_t i) {
        const int64_t row = item.first_row + i;
        return call.intermediate + row / group * group * intermediate_row_bytes() +
               row % group * block_bytes;
      };
      // Rows that are not grouped lie whole.
      if (group == 1) {
        adapters_.begin_down(call.adapters, adapter_rows(item), block_bytes, [&](int64_t i) {
          return call.intermediate + (item.first_row + i) * intermediate_row_bytes();
        });
      } else {
        adapters_.begin_down(call.adapters, adapter_rows(item), block_bytes * group, activated);
      }
    });
  }

  // The epilogue of a panel of gate and up: what adapters add comes before the activation.
  struct AdaptedEpilogue {
    const AdapterPass& pass;
    const AdapterCall& call;
    const WorkItem& item;
    gemm::EpilogueFunction activate;
    const void* parameters;

    static void run(const gemm::PanelTask& task, const gemm::FinishedTile& tile) noexcept {
      const auto& own = *static_cast<const AdaptedEpilogue*>(task.epilogue_parameters);
      own.pass.add_gate_up(own.call,
                           {.expert = own.item.expert,
                            .first_row = own.item.first_row + tile.first_row,
                            .num_rows = tile.num_rows},
                           own.item.panel, tile.sums);
      gemm::PanelTask plain = task;
      plain.epilogue_parameters = own.parameters;
      own.activate(plain, tile);
    }
  };

  void run_gate_up(const Call& call, Executor& executor) const {
    const PanelStage stage{.slabs = call.weights.gate_up,
                           .places = gate_up_at_,
                           .num_panels = layout_.gate_up_panels()};
    run_stage(executor, call.work, stage,
              [&](int32_t worker, const WorkItem& item, const WorkItem* next) {
                const std::byte* panel = stage.panel(item);
                const std::byte* next_panel = next != nullptr ? stage.panel(*next) : nullptr;
                if (call.in_place()) {
                  std::byte* const made = panel_of(call, worker);
                  layout_.make_gate_up_panel(call.panel(item, next), packing_.transpose, made);
                  panel = made;
                }
                gemm::PanelTask task = gate_up_task(call, item, panel, next_panel);
                gate_up_meaning_.set(task, room_of(call, worker));
                if (fetches_begin(task)) gate_up_meaning_.fetch_begin(next_panel);
                const AdaptedEpilogue adapted{.pass = adapters_,
                                              .call = call.adapters,
                                              .item = item,
                                              .activate = task.epilogue,
                                              .parameters = task.epilogue_parameters};
                if (call.adapters) {
                  task.epilogue = &AdaptedEpilogue::run;
                  task.epilogue_parameters = &adapted;
                }
                config_.functions.product(task);
              });
  }

  gemm::PanelTask gate_up_task(const Call& call, const WorkItem& item, const std::byte* panel,
                               const std::byte* next_panel) const {
    const bool in_place = prepared_row_bytes() == 0;
    const int64_t row_bytes = in_place ? call.batch.bundle.row_bytes : prepared_row_bytes();
    const bool by_index = in_place || call.shares_rows;
    const std::byte* rows = in_place ? call.batch.bundle.rows : call.prepared;
    if (!by_index) rows += item.first_row * row_bytes;
    const int64_t column = item.panel * layout_.gate_up_columns();
    const int64_t column_bytes = byte_size(config_.row_dtype) * config_.tiling.group;
    return {
        .panel = panel,
        .next_panel = fetch_ahead(item) ? next_panel : nullptr,
        .panel_bytes = static_cast<int64_t>(gate_up_at_.stride),
        .k = layout_.hidden_size,
        .rows = rows,
        .row_index = by_index ? call.batch.source_row + item.first_slot : nullptr,
        .row_bytes = row_bytes,
        .num_rows = item.num_rows,
        .bias = SlabPlaces::at<float>(panel, gate_up_at_.biases),
        .out =
            call.intermediate + item.first_row * intermediate_row_bytes() + column * column_bytes,
        .out_row_bytes = intermediate_row_bytes(),
        .valid_columns = std::min(layout_.gate_up_columns(), layout_.intermediate_size - column),
        .epilogue = config_.functions.activate,
        .epilogue_parameters = &parameters_,
        .out_block_bytes = kBlockColumns * column_bytes,
        .scale_width = layout_.gate_up.scale_width,
        .order = gate_up_at_.order(gate_up_at_.slab(call.weights.gate_up, item.expert)),
        .row_scales = input_.scales(rows)};
  }

  void run_down(const Call& call, Executor& executor) const {
    const PanelStage stage{
        .slabs = call.weights.down, .places = down_at_, .num_panels = layout_.down_panels()};
    run_stage(executor, call.work, stage,
              [&](int32_t worker, const WorkItem& item, const WorkItem* next) {
                const std::byte* panel = stage.panel(item);
                const std::byte* next_panel = next != nullptr ? stage.panel(*next) : nullptr;
                if (call.in_place()) {
                  std::byte* const made = panel_of(call, worker);
                  layout_.make_down_panel(call.panel(item, next), packing_.transpose, made);
                  panel = made;
                }
                gemm::PanelTask task = down_task(call, item, panel, next_panel);
                down_meaning_.set(task, room_of(call, worker));
                if (fetches_begin(task)) down_meaning_.fetch_begin(next_panel);
                config_.functions.down_product(task);
                if (call.adapters) {
                  adapters_.add_down(call.adapters, adapter_rows(item), item.panel,
                                     down_out(call, item), call.output.row_stride,
                                     task.valid_columns);
                }
              });
  }

  static float* down_out(const Call& call, const WorkItem& item) {
    return call.output.rows + item.first_slot * call.output.row_stride +
           item.panel * gemm::kPanelColumns;
  }

  gemm::PanelTask down_task(const Call& call, const WorkItem& item, const std::byte* panel,
                            const std::byte* next_panel) const {
    const int64_t column = item.panel * gemm::kPanelColumns;
    float* const out = down_out(call, item);
    const std::byte* const rows = call.intermediate + item.first_row * intermediate_row_bytes();
    return {.panel = panel,
            .next_panel = fetch_ahead(item) ? next_panel : nullptr,
            .panel_bytes = static_cast<int64_t>(down_at_.stride),
            .k = layout_.intermediate_size,
            .rows = rows,
            .row_bytes = intermediate_row_bytes(),
            .num_rows = item.num_rows,
            .bias = SlabPlaces::at<float>(panel, down_at_.biases),
            .out = static_cast<std::byte*>(static_cast<void*>(out)),
            .out_row_bytes = call.output.row_stride * int64_t{sizeof(float)},
            .valid_columns = std::min(gemm::kPanelColumns, layout_.hidden_size - column),
            .scale_width = layout_.down.scale_width,
            .scale_skip = layout_.down.scale_skip,
            .order = down_at_.order(down_at_.slab(call.weights.down, item.expert)),
            .row_scales = inner_.scales(rows)};
  }

  int64_t num_local_experts_;
  SlabLayout layout_;
  SlabPlaces gate_up_at_;
  SlabPlaces down_at_;
  ExpertMlpConfig config_;
  PanelMeaning gate_up_meaning_;
  PanelMeaning down_meaning_;
  CodedRows input_;
  CodedRows inner_;
  activation::FormulaParameters parameters_;
  size_t panel_room_;
  gemm::PackFunctions packing_;
  AdapterPass adapters_;
};

}  // namespace

std::unique_ptr<ExpertsKernel> make_expert_mlp(const ExpertsProblem& problem,
                                               ExpertMlpConfig config) {
  return std::make_unique<ExpertMlp>(problem, std::move(config));
}

}  // namespace conclave::inline v0::experts
