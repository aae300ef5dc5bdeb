#include "layer/refit/content_hash.h"

#include "core/row_stride.h"
#include "core/weight_types.h"
#include "layer/migration/slab_hash.h"

#include <cstddef>
#include <map>
#include <vector>

namespace conclave::inline v0 {
namespace {

class Contents {
 public:
  void add(std::span<const std::byte> bytes) { hash_.update(bytes); }
  void add_number(uint64_t number) { add(std::as_bytes(std::span(&number, 1))); }
  // With its length, so that neighbours cannot trade bytes.
  void add_floats(std::span<const float> values) {
    add_number(values.size());
    add(std::as_bytes(values));
  }
  void add_slab(const ExpertSlabs& slabs, size_t place) {
    if (!slabs.each().empty()) add({slabs.each()[place], slabs.slab_bytes()});
  }
  void add_slabs(const ExpertSlabs& slabs) {
    for (size_t place = 0; place < slabs.each().size(); ++place) add_slab(slabs, place);
  }
  void add_matrix(const ConstTensorView& matrix) {
    if (matrix.empty()) return;
    const int64_t stride = row_stride(matrix);
    const auto* row = static_cast<const std::byte*>(matrix.data);
    for (int64_t i = 0; i < matrix.shape[0]; ++i, row += packed_bytes(matrix.dtype, stride)) {
      add({row, static_cast<size_t>(packed_bytes(matrix.dtype, matrix.shape[1]))});
    }
  }
  void add_lent(const experts::ExpertMatrices& expert) {
    for (const experts::ExpertMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      add_matrix(matrix->weights);
      add_matrix(matrix->bias);
    }
  }
  void add_router(const RouterVectors& router) {
    for (const auto* values : {&router.logit_bias, &router.input_scale, &router.selection_bias,
                               &router.expert_scale, &router.global_scale}) {
      add_floats(*values);
    }
    for (const RouterVectors::Own& own : router.own) {
      add({own.values.as<std::byte>(), own.values.size_bytes()});
    }
  }
  void add_steps(const StaticScales& steps) {
    const std::array both = {steps.input, steps.intermediate};
    add_floats(both);
  }
  uint64_t digest() const { return hash_.digest(); }

 private:
  SlabHash hash_;
};

}  // namespace

uint64_t content_hash(const LayerPlan& plan, const PackedWeights& weights,
                      std::span<const int32_t> places) {
  Contents contents;
  // A rank may have an expert twice; either place will do.
  std::map<int32_t, size_t> place_of;
  for (size_t place = 0; place < places.size(); ++place) {
    if (places[place] >= 0) place_of.emplace(places[place], place);
  }
  for (const auto& [expert, place] : place_of) {
    contents.add_number(static_cast<uint64_t>(expert));
    contents.add_slab(weights.gate_up, place);
    contents.add_slab(weights.down, place);
    if (InPlaceParts::is(plan.in_place.routed)) {
      contents.add_lent(weights.lent_experts.matrices[place]);
    }
  }
  for (const auto slabs : {&PackedWeights::shared_gate_up, &PackedWeights::shared_down,
                           &PackedWeights::residual_gate_up, &PackedWeights::residual_down}) {
    contents.add_slabs(weights.*slabs);
  }
  for (const auto lent : {&PackedWeights::lent_shared, &PackedWeights::lent_residual}) {
    for (const experts::ExpertMatrices& expert : (weights.*lent).matrices) {
      contents.add_lent(expert);
    }
  }
  for (const WeightId id : weights::kAll) contents.add_number(weights.stored_hashes[id]);
  contents.add_floats(weights.mix_gate_bias);
  contents.add_floats(weights.latent_norm);
  contents.add_floats(weights.output_bias);
  contents.add_router(weights.router);
  contents.add_steps(weights.static_scales);
  contents.add_steps(weights.shared_static_scales);
  return contents.digest();
}

}  // namespace conclave::inline v0
