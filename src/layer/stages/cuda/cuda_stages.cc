#include "layer/stages/cuda/cuda_stages.h"

#include "core/part_spec.h"
#include "layer/cuda/plan.h"

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

constexpr std::array<std::string_view, kCudaBuffers> kNames = {
    "live tokens",   "gate scratch",  "logits",        "topk_ids",       "topk_weights",
    "given ids",     "physical ids",  "router ids",    "router weights", "identity weights",
    "shared factor", "mix logits",    "mix",           "group",          "expert scratch",
    "expert input",  "expert scales", "expert rows",   "expert sums",    "shared input",
    "shared scales", "shared rows",   "shared sums",   "residual input", "residual scales",
    "residual rows", "residual sums", "weighted rows", "latent rows",    "projected"};

BufferSet inputs_of(const MlpBuffers& mlp) { return BufferSet(mlp.rows) | mlp.scales; }
BufferSet results_of(const MlpBuffers& mlp) { return BufferSet(mlp.output) | mlp.sums; }

std::string experts_text(const CudaPlan& plan) {
  if (plan.fused.slots() == 0) return "experts";
  return fmt::format("experts, {} slots of shared ones", plan.fused.slots());
}

}  // namespace

std::vector<Stage> declare_stages(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  const bool projects = spec.latent.size != 0;
  const BufferSet routing = BufferSet(kTopkIds) | kTopkWeights | kPhysicalIds;
  const BufferSet factors = BufferSet(kSharedFactor) | kMix;
  std::vector<Stage> stages;
  const auto add = [&](std::string name, BufferSet reads, BufferSet writes) {
    stages.push_back({.name = std::move(name), .reads = reads, .writes = writes});
  };
  const auto add_unlisted = [&](std::string name, BufferSet reads, BufferSet writes) {
    add(std::move(name), reads, writes);
    stages.back().listed = false;
  };
  const auto add_mlp = [&](std::string name, const MlpBuffers& mlp) {
    add(std::move(name), kLiveTokens,
        inputs_of(mlp) | results_of(mlp) | BufferSet(kGroup) | kExperts);
  };
  add_unlisted("factors", {}, BufferSet(kLiveTokens) | kMixLogits | factors);
  if (spec.has_gate) {
    add(fmt::format("gate product [{}]", num_logits(spec)), {}, BufferSet(kGate) | kLogits);
  }
  add("route", BufferSet(kLogits) | kLiveTokens | factors,
      routing | BufferSet(kGivenIds) | kRouterIds | kRouterWeights | kIdentity | kSharedFactor);
  add("group", routing | kLiveTokens, kGroup);
  if (projects) add(fmt::format("latent down {}", spec.latent.size), {}, kLatent);
  if (plan.weighs_rows) add_unlisted("weigh rows", routing | kLatent, kWeighted);
  if (plan.routed.quantises()) {
    add("quantise", BufferSet(kLatent) | kWeighted | kGroup,
        inputs_of(kRoutedBuffers) | kRoutedOutput);
  }
  add(experts_text(plan),
      routing | inputs_of(kRoutedBuffers) | BufferSet(kGroup) | kLatent | kWeighted,
      inputs_of(kRoutedBuffers) | results_of(kRoutedBuffers) | kExperts);
  if (plan.shared) {
    const auto& shared = plan.shared->problem;
    add_mlp(fmt::format("{} shared of {}", shared.num_local_experts, shared.intermediate_size),
            kSharedBuffers);
  }
  if (plan.residual) {
    add_mlp(fmt::format("residual MLP {}", plan.residual->problem.intermediate_size),
            kResidualBuffers);
  }
  const BufferSet terms = factors | results_of(kSharedBuffers) | results_of(kResidualBuffers) |
                          BufferSet(kIdentity) | kLiveTokens;
  const BufferSet sums = results_of(kRoutedBuffers) | routing;
  add("combine", projects ? sums : sums | terms, when(projects, kLatent));
  if (projects && spec.latent.has_norm) add("rms norm", kLatent, kLatent);
  if (projects) {
    add(fmt::format("latent up {}, finish", spec.hidden_size), BufferSet(kLatent) | terms,
        kProjected);
  }
  return stages;
}

std::vector<PlanBuffer> describe_buffers(const CudaPlan& plan, const CudaSlices& slices) {
  return describe_buffers(declare_stages(plan), kNames, slices);
}

}  // namespace conclave::inline v0
