#include "layer/refit/host_refit.h"

#include "cpu/parallel.h"
#include "layer/weight_parts.h"

#include "conclave/error.h"

#include <algorithm>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr WeightId gate_up_of(WeightMlp mlp) { return {mlp, WeightMatrix::kUp}; }
constexpr WeightId down_of(WeightMlp mlp) { return {mlp, WeightMatrix::kDown}; }

bool touches(const RefitUnits& units, WeightMlp mlp) {
  return units.has_any(gate_up_of(mlp)) || units.has_any(down_of(mlp));
}

}  // namespace

bool HostRefit::Kind::is_touched() const {
  return std::ranges::any_of(experts, [](int32_t expert) { return expert >= 0; });
}

std::vector<int32_t> HostRefit::Kind::experts_of(const RefitUnits& units) const {
  std::vector<int32_t> named = experts;
  for (int32_t& expert : named) {
    if (expert >= 0 && !units.has(id, expert)) expert = -1;
  }
  return named;
}

HostRefit::HostRefit(const Context& context, const LayerPlan& plan, PackedWeights& live,
                     PackedWeights& spare, const RefitRequest& request)
    : context_(context),
      plan_(plan),
      live_(live),
      spare_(spare),
      keeps_memory_(request.keeps_memory),
      mode_(request.mode),
      scope_(request.scope) {
  if (!keeps_memory_) spare_ = {};
  const InPlaceParts& in_place = plan.in_place;
  const auto add = [&](WeightMlp mlp, const std::optional<Support>& is_lent,
                       ExpertSlabs PackedWeights::*gate_up, ExpertSlabs PackedWeights::*down,
                       LentExperts PackedWeights::*lent, const std::vector<int32_t>& experts) {
    if (InPlaceParts::is(is_lent)) {
      add_lent(mlp, lent, experts, request.scope);
    } else {
      add_kinds(mlp, gate_up, down, experts, request.scope);
    }
  };
  add(WeightMlp::kRouted, in_place.routed, &PackedWeights::gate_up, &PackedWeights::down,
      &PackedWeights::lent_experts, request.places);
  if (plan.shared) {
    add(WeightMlp::kShared, in_place.shared, &PackedWeights::shared_gate_up,
        &PackedWeights::shared_down, &PackedWeights::lent_shared,
        first_experts(plan.spec.shared.count));
  }
  if (plan.residual) {
    add(WeightMlp::kResidual, in_place.residual, &PackedWeights::residual_gate_up,
        &PackedWeights::residual_down, &PackedWeights::lent_residual, first_experts(1));
  }
  next_.router = live.router.copy();
  next_.static_scales = live.static_scales;
  next_.shared_static_scales = live.shared_static_scales;
}

void HostRefit::add_kinds(WeightMlp mlp, ExpertSlabs PackedWeights::*gate_up,
                          ExpertSlabs PackedWeights::*down, const std::vector<int32_t>& places,
                          const RefitUnits& scope) {
  for (const auto& [slabs, id] :
       {std::pair(gate_up, gate_up_of(mlp)), std::pair(down, down_of(mlp))}) {
    Kind kind{.slabs = slabs, .id = id, .experts = places};
    kind.experts = kind.experts_of(scope);
    make_room(kind);
    kinds_.push_back(std::move(kind));
  }
}

// Slabs of all places that nobody else reads are left to the next refit.
HostRefit::~HostRefit() {
  if (!keeps_memory_) return;
  for (const Kind& kind : kinds_) {
    ExpertSlabs& left = next_.*kind.slabs;
    const bool is_whole = left.each().size() == (live_.*kind.slabs).each().size();
    if (is_whole && !left.is_shared()) spare_.*kind.slabs = std::move(left);
  }
}

// For a refit of all places.
bool HostRefit::take_spare(const Kind& kind) {
  ExpertSlabs& spare = spare_.*kind.slabs;
  const bool fits = spare.each().size() == kind.experts.size() &&
                    spare.slab_bytes() == (live_.*kind.slabs).slab_bytes();
  const bool is_whole =
      std::ranges::all_of(kind.experts, [](int32_t expert) { return expert >= 0; });
  if (!keeps_memory_ || !fits || !is_whole) return false;
  next_.*kind.slabs = std::move(spare);
  return true;
}

void HostRefit::make_room(Kind& kind) {
  const ExpertSlabs& live = live_.*kind.slabs;
  const size_t num_places = live.each().size();
  kind.experts.resize(num_places, -1);
  kind.at.assign(live.each().begin(), live.each().end());
  if (!kind.is_touched() || mode_ == RefitMode::kInPlace) return;
  ExpertSlabs& next = next_.*kind.slabs;
  if (take_spare(kind)) {
    kind.at.assign(next.each().begin(), next.each().end());
    return;
  }
  HostAllocator& allocator = context_.host_allocator();
  if (mode_ == RefitMode::kStaged) {
    std::vector<int32_t> kept(num_places);
    for (size_t place = 0; place < num_places; ++place) {
      kept[place] = kind.experts[place] >= 0 ? -1 : static_cast<int32_t>(place);
    }
    CallingThread executor;
    next = live.at_places(kept, allocator, executor);
    kind.at.assign(next.each().begin(), next.each().end());
    return;
  }
  const auto count = std::ranges::count_if(kind.experts, [](int32_t e) { return e >= 0; });
  next = ExpertSlabs(allocator, live.slab_bytes(), static_cast<size_t>(count));
  auto room = next.each().begin();
  for (size_t place = 0; place < num_places; ++place) {
    if (kind.experts[place] >= 0) kind.at[place] = *room++;
  }
}

void HostRefit::add_lent(WeightMlp mlp, LentExperts PackedWeights::*lent,
                         const std::vector<int32_t>& experts, const RefitUnits& scope) {
  if (!touches(scope, mlp)) return;
  for (const int32_t expert : experts) {
    if (scope.has(gate_up_of(mlp), expert) && scope.has(down_of(mlp), expert)) continue;
    throw Error(ErrorCode::kUnsupported,
                {.what = "experts that are read in their source's memory are refitted together",
                 .tensor = "RefitScope",
                 .hint = "name all of them"});
  }
  lent_.push_back({.mlp = mlp, .lent = lent, .experts = experts});
}

MlpWeights HostRefit::mlp_of(WeightMlp mlp) const {
  if (mlp == WeightMlp::kRouted) return routed_experts(plan_, live_);
  return mlp == WeightMlp::kShared ? shared_experts(plan_, live_) : residual_mlp(plan_, live_);
}

// Everything is lent before any of it is kept.
void HostRefit::lend(const StageCall& call) {
  for (const LentKind& kind : lent_) {
    if (!touches(call.units, kind.mlp)) continue;
    for (const int32_t expert : kind.experts) {
      if (call.units.has(gate_up_of(kind.mlp), expert) &&
          call.units.has(down_of(kind.mlp), expert)) {
        continue;
      }
      throw Error(ErrorCode::kUnsupported,
                  {.what = "experts that are read in their source's memory are staged together",
                   .tensor = "RefitScope"});
    }
    LentExperts given = lend_experts(lent(mlp_of(kind.mlp)), call.source, kind.experts);
    if (mode_ != RefitMode::kStaged) check_same_place(live_.*kind.lent, given);
    next_.*kind.lent = std::move(given);
  }
}

void HostRefit::stage_small(const StageCall& call) {
  const auto wants = [&](WeightId id) { return call.units.has(id, 0); };
  const auto update = [&](WeightMlp mlp, StaticScales& steps) {
    if (!touches(call.units, mlp)) return;
    const StaticScales read = load_steps(plan_, call.source, mlp);
    if (call.units.has_any(gate_up_of(mlp))) steps.input = read.input;
    if (call.units.has_any(down_of(mlp))) steps.intermediate = read.intermediate;
  };
  update(WeightMlp::kRouted, next_.static_scales);
  update(WeightMlp::kShared, next_.shared_static_scales);
  read_router_vectors(plan_.spec, call.source, wants, next_.router);
  load_dense(context_, plan_, call.source, wants, next_);
}

bool HostRefit::touches_any(const RefitUnits& units) const {
  return std::ranges::any_of(kinds_, [&](const Kind& kind) { return units.has_any(kind.id); });
}

void HostRefit::for_each_mlp(const StageCall& call, const Step& step) const {
  for (size_t i = 0; i < kinds_.size(); i += 2) {
    const Kind& gate_up = kinds_[i];
    const Kind& down = kinds_[i + 1];
    if (!touches(call.units, *gate_up.id.mlp())) continue;
    MlpWeights mlp = mlp_of(*gate_up.id.mlp());
    mlp.gate_up = gate_up.at;
    mlp.down = down.at;
    const auto run = [&](const std::vector<int32_t>& experts, bool packs_gate_up, bool packs_down) {
      if (std::ranges::all_of(experts, [](int32_t expert) { return expert < 0; })) return;
      mlp.packs_gate_up = packs_gate_up;
      mlp.packs_down = packs_down;
      step(mlp, experts);
    };
    const std::vector<int32_t> of_gate_up = gate_up.experts_of(call.units);
    const std::vector<int32_t> of_down = down.experts_of(call.units);
    if (of_gate_up == of_down) {
      run(of_gate_up, true, true);
      continue;
    }
    run(of_gate_up, true, false);
    run(of_down, false, true);
  }
}

void HostRefit::stage(const StageCall& call) {
  CallingThread alone;
  Executor& executor = call.executor != nullptr ? *call.executor : alone;
  // Small weights come first, as their values are checked: nothing has been overwritten then.
  lend(call);
  stage_small(call);
  if (mode_ == RefitMode::kInPlace && touches_any(call.units)) {
    for_each_mlp(call, [&](const MlpWeights& mlp, const std::vector<int32_t>& experts) {
      check_meanings(executor, mlp, call.source, experts);
    });
    call.before_overwriting();
  }
  for_each_mlp(call, [&](const MlpWeights& mlp, const std::vector<int32_t>& experts) {
    pack_experts(context_, executor, mlp, call.source, experts, scratch_bytes_of(plan_));
  });
}

void HostRefit::publish() noexcept {
  const auto wants = [&](WeightId id) { return scope_.has(id, 0); };
  for (const Kind& kind : kinds_) {
    if (!kind.is_touched() || mode_ == RefitMode::kInPlace) continue;
    ExpertSlabs& live = live_.*kind.slabs;
    if (mode_ == RefitMode::kStaged) {
      std::swap(live, next_.*kind.slabs);
      continue;
    }
    cpu::parallel_for(context_.executor(), static_cast<int64_t>(kind.at.size()), 1,
                      [&](int64_t place, int64_t, int32_t) {
                        const auto at = static_cast<size_t>(place);
                        if (kind.experts[at] < 0) return;
                        std::copy_n(kind.at[at], live.slab_bytes(), live.each()[at]);
                      });
  }
  for (const LentKind& kind : lent_) std::swap(live_.*kind.lent, next_.*kind.lent);
  swap_dense(live_, next_, wants);
  // Those that the scope does not touch are copies of what the layer has.
  std::swap(live_.router, next_.router);
  std::swap(live_.static_scales, next_.static_scales);
  std::swap(live_.shared_static_scales, next_.shared_static_scales);
}

}  // namespace conclave::inline v0
