#include "layer/stages/host_stages.h"

#include "core/checked.h"
#include "core/part_spec.h"
#include "core/shared_facts.h"
#include "layer/plan.h"
#include "layer/stages/dense_mlp.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

using enum HostBuffer;
using enum HostStage;

// Rows that a dense product reads are padded to this many elements: whole vectors of float32.
constexpr int64_t kFloatsPerVector = 16;

constexpr std::array<std::string_view, kHostBuffers> kNames = {
    "hidden rows",      "hidden rows f32", "gate rows",        "logits",        "given ids",
    "token ids",        "router scratch",  "topk_ids",         "topk_weights",  "shared weights",
    "latent rows",      "expert input",    "unit weights",     "physical ids",  "dispatch",
    "expert scratch",   "expert rows",     "routed sum",       "shared index",  "shared scratch",
    "shared rows",      "shared factor",   "mix logits",       "mix",           "reduced shared",
    "residual input",   "residual index",  "residual scratch", "residual rows", "reduced residual",
    "identity weights", "reduced sum",     "projected"};

std::string input_text(const MoeSpec& spec) {
  std::string text;
  if (spec.latent.size != 0) text = fmt::format("latent down {}", spec.latent.size);
  if (spec.weight_on == WeightOn::kInput) {
    text += text.empty() ? "weight rows" : ", weight rows";
  }
  return text;
}

std::string shared_text(const MoeSpec& spec) {
  const SharedExpertSpec& shared = spec.shared;
  return fmt::format("{} shared of {} {}, {}", shared.count, shared.intermediate_size,
                     activation_or_routed(shared.activation, spec).name,
                     shared_facts(shared.mode).text);
}

// The work of the last pass beside rounding.
std::string finish_text(const MoeSpec& spec) {
  std::string text = "finish";
  if (spec.output_scale != 1) text += fmt::format(", x {:g}", spec.output_scale);
  if (spec.num_zero_experts != 0) text += fmt::format(", {} zero experts", spec.num_zero_experts);
  if (spec.has_output_bias) text += ", output bias";
  return text;
}

// The list that a plan's stages are added to, with what several of them read.
class Declaration {
 public:
  explicit Declaration(const LayerPlan& plan)
      : plan_(plan),
        spec_(plan.spec),
        floats_(plan.facts.floats),
        expert_input_(plan.facts.expert_input),
        routing_(BufferSet(plan.facts.ids) | plan.facts.weights) {}

  HostStages all() {
    begin();
    run();
    finish();
    return std::move(stages_);
  }

 private:
  void add(HostStage number, std::string name, BufferSet reads, BufferSet writes) {
    stages_.set(number, {.name = std::move(name), .reads = reads, .writes = writes});
  }
  void add_unlisted(HostStage number, std::string name, BufferSet reads, BufferSet writes) {
    stages_.set(number,
                {.name = std::move(name), .reads = reads, .writes = writes, .listed = false});
  }

  void begin() {
    add_unlisted(kHidden, "hidden rows", {},
                 when(plan_.facts.reads_hidden_rows, kHiddenRows) |
                     when(plan_.facts.reads_hidden_floats, floats_));
    add(kRoute, "route", when(spec_.has_gate, floats_),
        BufferSet(kGateRows) | kLogits | kGivenIds | kTokenIds | kRouterScratch | kTopkIds |
            kTopkWeights | kSharedWeights);
    if (plan_.facts.has_expert_input) {
      add(kInput, input_text(spec_), when(spec_.latent.size != 0, floats_) | kTopkWeights,
          BufferSet(kLatent) | kExpertInput | kUnitWeights);
    }
    add(kSendRows, "dispatch", routing_ | kTopkIds | expert_input_,
        BufferSet(kPhysicalIds) | kDispatch);
  }

  // The three stages of a rank's own tokens read and write these.
  BufferSet factors_read() const {
    return when(plan_.facts.factors_read_hidden, floats_) | kSharedWeights;
  }
  static BufferSet factors_written() { return BufferSet(kSharedFactor) | kMixLogits | kMix; }
  static BufferSet shared_written() {
    return BufferSet(kSharedIndex) | kSharedScratch | kSharedRows | kReducedShared;
  }
  static BufferSet residual_written() {
    return BufferSet(kResidualInput) | kResidualIndex | kResidualScratch | kResidualRows |
           kReducedResidual;
  }

  void fill_wait() {
    add_unlisted(
        kFillWait, "while rows travel",
        BufferSet(kDispatch) | kHiddenRows | when(plan_.facts.computes_factors, factors_read()),
        when(plan_.facts.computes_factors, factors_written()) |
            when(plan_.shared != nullptr, shared_written()) |
            when(plan_.residual != nullptr, residual_written()));
  }

  void run() {
    if (plan_.fills_wait != FillsWait::kForResults) fill_wait();
    add(kExperts,
        fmt::format("experts {}{}", spec_.activation.name, spec_.has_bias ? " with biases" : ""),
        BufferSet(kDispatch) | expert_input_, BufferSet(kExpertScratch) | kExpertRows);
    add_unlisted(kSendResults, "send results", routing_ | kExpertRows,
                 BufferSet(kDispatch) | when(plan_.facts.finishes_apart, kRoutedSum));
    if (plan_.facts.computes_factors) {
      add_unlisted(kFactors, "factors", factors_read(), factors_written());
    }
    if (plan_.shared) {
      add(kShared, shared_text(spec_), BufferSet(kHiddenRows) | kSharedWeights | kSharedFactor,
          shared_written());
    }
    if (plan_.residual) {
      add(kResidual,
          fmt::format("residual MLP {} {}", spec_.residual.intermediate_size,
                      activation_or_routed(spec_.residual.activation, spec_).name),
          kHiddenRows, residual_written());
    }
  }

  // The terms that join the routed sum before it is rounded. Weights of zero experts are the
  // router's.
  BufferSet terms() const {
    return BufferSet(kTopkIds) | kTopkWeights | kMix |
           (plan_.part.reduces() ? BufferSet(kReducedShared) | kReducedResidual
                                 : BufferSet(kSharedRows) | kResidualRows);
  }

  void finish() {
    const BufferSet results = routing_ | kDispatch | kExpertRows;
    if (!plan_.facts.finishes_apart) {
      return add(kFinish, "combine and " + finish_text(spec_), results | terms(), kIdentityWeights);
    }
    BufferSet sum = kRoutedSum;
    add(kCombine, "combine", results, sum);
    if (plan_.part.reduces()) {
      add(kSumRanks, "sum over tensor ranks", sum, kReducedSum);
      sum = kReducedSum;
    }
    if (spec_.latent.has_norm) {
      add(kNorm, "rms norm", sum, kRoutedSum);
      sum = kRoutedSum;
    }
    if (spec_.latent.size != 0) {
      add(kLatentUp, fmt::format("latent up {}", spec_.hidden_size), sum, kProjected);
      sum = kProjected;
    }
    add(kFinish, finish_text(spec_), sum | terms(), kIdentityWeights);
  }

  const LayerPlan& plan_;
  const MoeSpec& spec_;
  const BufferSet floats_;
  const BufferSet expert_input_;
  const BufferSet routing_;  // as dispatch and combine take it
  HostStages stages_;
};

// The bytes of every buffer of a plan; 0 where its stages need none.
class Sizes {
 public:
  explicit Sizes(const LayerPlan& plan)
      : plan_(plan), spec_(plan.spec), tokens_(plan.chunk_tokens()) {}

  std::array<size_t, kHostBuffers> all() {
    rows();
    routing();
    experts();
    others();
    sums();
    return bytes_;
  }

 private:
  static int64_t product(int64_t a, int64_t b) {
    if (const auto product = checked_mul(a, b)) return *product;
    throw Error(ErrorCode::kSizeOverflow, "the workspace exceeds 63 bits");
  }
  // rows * columns elements of `element` bytes.
  void set(HostBuffer buffer, int64_t rows, int64_t columns, int64_t element) {
    set_bytes(buffer, static_cast<size_t>(product(product(rows, columns), element)));
  }
  template <class T>
  void set(HostBuffer buffer, int64_t columns) {
    set(buffer, tokens_, columns, sizeof(T));
  }
  void set_bytes(HostBuffer buffer, size_t bytes) { bytes_[static_cast<size_t>(buffer)] = bytes; }

  void rows() {
    const StageFacts& facts = plan_.facts;
    if (facts.reads_hidden_rows) set(kHiddenRows, tokens_, facts.hidden_rows.row_bytes, 1);
    if (facts.reads_hidden_floats && !facts.hidden_rows_are_float()) {
      set(kHiddenFloats, tokens_, plan_.gate_row_bytes, 1);
    }
    if (spec_.has_gate) set(kGateRows, tokens_, plan_.gate_row_bytes, 1);
    if (spec_.latent.size != 0) set<float>(kLatent, spec_.latent.size);
    if (facts.has_expert_input) {
      set(kExpertInput, product(tokens_, facts.rows_per_token),
          plan_.experts->requirements().row_bytes, 1);
    }
    if (plan_.residual) {
      set(kResidualInput, tokens_, plan_.residual->requirements().row_bytes, 1);
    }
  }

  void routing() {
    set<float>(kLogits, num_logits(spec_));
    set<int32_t>(kGivenIds, spec_.top_k);
    set<int32_t>(kTopkIds, spec_.top_k);
    set<float>(kTopkWeights, spec_.top_k);
    if (plan_.router_traits.token_ids != routing::TokenIds::kUnused) set<int32_t>(kTokenIds, 1);
    set_bytes(kRouterScratch, plan_.router_scratch_bytes);
    if (plan_.facts.weighs_shared_rows) set<float>(kSharedWeights, spec_.shared.count);
    if (spec_.weight_on == WeightOn::kInput) set<float>(kUnitWeights, spec_.top_k);
    if (plan_.part.has_replicas()) set<int32_t>(kPhysicalIds, spec_.top_k);
    if (spec_.num_zero_experts > 0) set<float>(kIdentityWeights, 1);
  }

  void experts() {
    const int64_t slots = plan_.dispatcher->max_slots();
    set_bytes(kDispatch, plan_.dispatcher->workspace_bytes());
    set_bytes(kExpertScratch, plan_.experts->workspace_bytes(slots, plan_.workers));
    set(kExpertRows, slots, expert_width(spec_), sizeof(float));
  }

  void others() {
    const bool mixes = plan_.facts.mixes;
    if (mixes || plan_.facts.factors_read_hidden) set<float>(kSharedFactor, 1);
    if (mixes) set<float>(kMix, 1);
    if (shared_facts(spec_.shared).has_mix_gate()) set<float>(kMixLogits, 2);
    if (plan_.shared) {
      const int64_t count = spec_.shared.count;
      set(kSharedRows, product(count, tokens_), spec_.hidden_size, sizeof(float));
      set(kSharedIndex, every_row_index_size(count, tokens_), 1, sizeof(int64_t));
      set_bytes(kSharedScratch, plan_.shared->workspace_bytes(count * tokens_, plan_.workers));
      if (plan_.part.reduces()) set<float>(kReducedShared, spec_.hidden_size);
    }
    if (plan_.residual) {
      set<float>(kResidualRows, spec_.hidden_size);
      set(kResidualIndex, every_row_index_size(1, tokens_), 1, sizeof(int64_t));
      set_bytes(kResidualScratch, plan_.residual->workspace_bytes(tokens_, plan_.workers));
      if (plan_.part.reduces()) set<float>(kReducedResidual, spec_.hidden_size);
    }
  }

  void sums() {
    if (!plan_.facts.finishes_apart) return;
    set<float>(kRoutedSum, plan_.facts.routed_sum_stride);
    if (plan_.part.reduces()) set<float>(kReducedSum, plan_.facts.routed_sum_stride);
    if (spec_.latent.size != 0) set<float>(kProjected, spec_.hidden_size);
  }

  const LayerPlan& plan_;
  const MoeSpec& spec_;
  int64_t tokens_;
  std::array<size_t, kHostBuffers> bytes_{};
};

}  // namespace

int64_t dispatched_rows_per_token(const MoeSpec& spec) {
  return spec.weight_on == WeightOn::kInput ? spec.top_k : 1;
}

StageFacts stage_facts(const LayerPlan& plan) {
  const MoeSpec& spec = plan.spec;
  const SharedFacts shared = shared_facts(spec);
  const bool is_latent = spec.latent.size != 0;
  StageFacts facts;
  facts.has_expert_input = is_latent || spec.weight_on == WeightOn::kInput;
  facts.rows_per_token = dispatched_rows_per_token(spec);
  facts.finishes_apart = is_latent || plan.part.reduces();
  facts.weighs_shared_rows = shared.weighs_rows();
  facts.mixes = shared.mixes();
  // Even if another rank adds the shared rows, the routed part needs its factor here.
  facts.computes_factors = plan.shared || facts.mixes;
  facts.factors_read_hidden = facts.computes_factors && shared.reads_hidden();
  facts.reads_hidden_floats = spec.has_gate || facts.factors_read_hidden || is_latent;
  facts.routed_sum_stride = round_up(expert_width(spec), kFloatsPerVector);
  const experts::ExpertsKernel* reader = is_latent ? nullptr : plan.experts.get();
  if (reader == nullptr) reader = plan.shared ? plan.shared.get() : plan.residual.get();
  facts.reads_hidden_rows = !facts.has_expert_input || plan.shared || plan.residual;
  if (facts.reads_hidden_rows) facts.hidden_rows = reader->requirements();
  // Residual MLPs alone take no adapters.
  const bool adapts = reader == plan.experts.get() || plan.shared;
  facts.marks_hidden_rows = facts.reads_hidden_rows && adapts && plan.options.max_adapter_rank > 0;
  facts.floats = facts.hidden_rows_are_float() ? kHiddenRows : kHiddenFloats;
  facts.expert_input = facts.has_expert_input ? kExpertInput : kHiddenRows;
  facts.ids = plan.part.has_replicas() ? kPhysicalIds : kTopkIds;
  facts.weights = spec.weight_on == WeightOn::kInput ? kUnitWeights : kTopkWeights;
  return facts;
}

HostStages declare_stages(const LayerPlan& plan) { return Declaration(plan).all(); }

void book_workspace(LayerPlan& plan) {
  plan.stages = declare_stages(plan);
  const std::array<size_t, kHostBuffers> bytes = Sizes(plan).all();
  plan.chunk_workspace_bytes = book_by_lifetime(plan.stages.list, bytes, plan.slices);
  // Chunks by twos have a half each.
  plan.workspace_bytes =
      plan.chunk_workspace_bytes * (plan.chunk_order == ChunkOrder::kInTurn ? 1 : 2);
  plan.summary.stages = listed_stages(plan.stages.list);
  plan.summary.buffers = describe_buffers(plan.stages.list, kNames, plan.slices);
}

}  // namespace conclave::inline v0
