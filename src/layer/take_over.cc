#include "layer/take_over.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

namespace conclave::inline v0 {
namespace {

bool equal(const TensorSlice& a, const TensorSlice& b) {
  return a.begin == b.begin && a.end == b.end;
}

bool equal_panels(const experts::ExpertsKernel* a, const experts::ExpertsKernel* b) {
  if (a == nullptr || b == nullptr) return a == b;
  const experts::SlabBytes of_a = a->slab_bytes();
  const experts::SlabBytes of_b = b->slab_bytes();
  return of_a.gate_up == of_b.gate_up && of_a.down == of_b.down &&
         a->packed_layout() == b->packed_layout();
}

std::unique_ptr<gemm::DenseProduct> copy_of(const std::unique_ptr<gemm::DenseProduct>& product,
                                            HostAllocator& allocator) {
  return product == nullptr ? nullptr : product->copy(allocator);
}

std::vector<int32_t> all_places(const ExpertSlabs& slabs) {
  std::vector<int32_t> places(slabs.each().size());
  std::iota(places.begin(), places.end(), 0);
  return places;
}

// Every rank has these whole.
void copy_rest(const PackedWeights& from, HostAllocator& allocator, PackedWeights& to) {
  to.stored_hashes = from.stored_hashes;
  to.gate = copy_of(from.gate, allocator);
  to.gate_rows_with_nan = from.gate_rows_with_nan;
  to.shared_gate = copy_of(from.shared_gate, allocator);
  to.mix_gate = copy_of(from.mix_gate, allocator);
  to.latent_down = copy_of(from.latent_down, allocator);
  to.latent_up = copy_of(from.latent_up, allocator);
  to.mix_gate_bias = from.mix_gate_bias;
  to.latent_norm = from.latent_norm;
  to.output_bias = from.output_bias;
  to.router = from.router.copy();
  to.static_scales = from.static_scales;
  to.shared_static_scales = from.shared_static_scales;
}

// FNV-1a, which gives the same on every rank, whatever its standard library.
class KeyHash {
 public:
  void add(int64_t value) { hash_ = (hash_ ^ static_cast<uint64_t>(value)) * 0x100000001B3; }
  void add(const TensorSlice& slice) {
    add(slice.begin);
    add(slice.end);
  }
  void add(const experts::ExpertsKernel* kernel) {
    add(kernel != nullptr ? 1 : 0);
    if (kernel == nullptr) return;
    const experts::SlabBytes bytes = kernel->slab_bytes();
    add(static_cast<int64_t>(bytes.gate_up));
    add(static_cast<int64_t>(bytes.down));
    for (const char letter : kernel->packed_layout()) add(letter);
  }
  int64_t value() const { return static_cast<int64_t>(hash_ >> 1U); }

 private:
  uint64_t hash_ = 0xCBF29CE484222325;
};

}  // namespace

bool reads_in_place(const LayerPlan& plan) {
  return InPlaceParts::is(plan.in_place.routed) || InPlaceParts::is(plan.in_place.shared) ||
         InPlaceParts::is(plan.in_place.residual);
}

int64_t form_key(const LayerPlan& plan) {
  KeyHash hash;
  hash.add(plan.part.inner);
  hash.add(plan.part.shared_inner);
  hash.add(plan.part.residual_inner);
  hash.add(plan.part.adds_down_bias ? 1 : 0);
  for (const auto* kernel : {&plan.experts, &plan.shared, &plan.residual}) hash.add(kernel->get());
  return hash.value();
}

bool has_same_form(const LayerPlan& plan, const LayerPlan& held) {
  const RankPart& a = plan.part;
  const RankPart& b = held.part;
  return !reads_in_place(plan) && !reads_in_place(held) && equal(a.inner, b.inner) &&
         equal(a.shared_inner, b.shared_inner) && equal(a.residual_inner, b.residual_inner) &&
         a.adds_down_bias == b.adds_down_bias &&
         equal_panels(plan.experts.get(), held.experts.get()) &&
         equal_panels(plan.shared.get(), held.shared.get()) &&
         equal_panels(plan.residual.get(), held.residual.get());
}

std::vector<int32_t> places_held(const LayerPlan& plan, const HeldWeights& held) {
  std::vector<int32_t> places(plan.part.local_experts.size(), -1);
  if (!has_same_form(plan, held.plan)) return places;
  for (size_t local = 0; local < places.size(); ++local) {
    const auto place = std::ranges::find(held.experts, plan.part.local_experts[local]);
    if (place != held.experts.end()) {
      places[local] = static_cast<int32_t>(place - held.experts.begin());
    }
  }
  return places;
}

PackedWeights keep_weights(const Context& context, const LayerPlan& plan, const HeldWeights& held) {
  std::vector<int32_t> places = places_held(plan, held);
  places.resize(static_cast<size_t>(plan.dispatcher->num_local_experts()), -1);
  HostAllocator& allocator = context.host_allocator();
  PackedWeights weights;
  for (const auto slabs : kSlabsOfWeights) {
    const ExpertSlabs& from = held.packed.*slabs;
    const bool is_routed = slabs == &PackedWeights::gate_up || slabs == &PackedWeights::down;
    const std::vector<int32_t> all = all_places(from);
    weights.*slabs = from.at_places(is_routed ? places : all, allocator, context.executor());
  }
  copy_rest(held.packed, allocator, weights);
  return weights;
}

PackedWeights take_over_weights(const Context& context, const LayerPlan& plan,
                                const HeldWeights& held, const WeightSource* source) {
  if (!has_same_form(plan, held.plan)) {
    PackedWeights weights = allocate_weights(context, plan);
    fill_weights(context, plan, *source, plan.part.local_experts, weights);
    return weights;
  }
  std::vector<int32_t> to_read = plan.part.local_experts;
  const std::vector<int32_t> places = places_held(plan, held);
  for (size_t local = 0; local < to_read.size(); ++local) {
    if (places[local] >= 0) to_read[local] = -1;
  }
  PackedWeights weights = keep_weights(context, plan, held);
  if (std::ranges::any_of(to_read, [](int32_t expert) { return expert >= 0; })) {
    pack_routed_experts(context, plan, *source, to_read, weights);
  }
  return weights;
}

}  // namespace conclave::inline v0
