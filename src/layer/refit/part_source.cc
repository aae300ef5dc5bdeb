// Weights in memory of which a refit takes a part: some tensors, of some experts.
#include "layer/pointer_source.h"

#include "conclave/error.h"
#include "conclave/refit.h"

#include <map>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

bool is_by_expert(WeightId id) { return id.mlp() == WeightMlp::kRouted; }

class PartSource final : public WeightSource {
 public:
  PartSource(std::unique_ptr<WeightSource> given, int64_t num_experts,
             std::span<const int32_t> experts)
      : given_(std::move(given)), num_experts_(num_experts) {
    for (const int32_t expert : experts) add(expert);
    const auto count = experts.empty() ? num_experts : std::ssize(experts);
    for (const WeightId id : weights::kAll) {
      if (is_by_expert(id)) check_count(id, count);
    }
  }

  WeightInfo describe(WeightId id) const override {
    WeightInfo info = given_->describe(id);
    if (is_by_expert(id) && info.count > 0) info.count = num_experts_;
    return info;
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const int64_t index = index_of(id, expert);
    if (index < 0) {
      throw Error(ErrorCode::kTensorMissing,
                  {.what = "an expert has no weights here", .tensor = locate(id, expert)});
    }
    given_->read(id, index, block, destination);
  }
  ConstTensorView view(WeightId id, int64_t expert) const override {
    const int64_t index = index_of(id, expert);
    return index < 0 ? ConstTensorView{} : given_->view(id, index);
  }
  MemoryKind memory() const override { return given_->memory(); }

 private:
  void add(int32_t expert) {
    const bool is_known = expert >= 0 && expert < num_experts_;
    const auto next = static_cast<int64_t>(index_.size());
    if (is_known && index_.emplace(expert, next).second) return;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = is_known ? "an expert comes twice" : "the layer has no such expert",
                 .tensor = "experts",
                 .found = std::to_string(expert),
                 .limit = "0 to " + std::to_string(num_experts_ - 1)});
  }

  // Steps of rows count over all experts, and may come for all.
  bool has_all(WeightId id) const {
    return id.plane() == WeightPlane::kInputScale && given_->describe(id).count == num_experts_;
  }

  void check_count(WeightId id, int64_t expected) const {
    const int64_t found = given_->describe(id).count;
    if (found == 0 || found == expected || has_all(id)) return;
    throw Error(ErrorCode::kShape, {.what = "a tensor holds another number of experts",
                                    .tensor = to_string(id),
                                    .expected = std::to_string(expected),
                                    .found = std::to_string(found)});
  }

  // -1: it is not here.
  int64_t index_of(WeightId id, int64_t expert) const {
    if (!is_by_expert(id) || index_.empty() || has_all(id)) return expert;
    const auto found = index_.find(expert);
    return found == index_.end() ? -1 : found->second;
  }

  std::unique_ptr<WeightSource> given_;
  int64_t num_experts_;
  std::map<int64_t, int64_t> index_;  // empty: as they are numbered
};

}  // namespace

std::unique_ptr<WeightSource> make_part_source(const ExpertWeights& weights, int64_t num_experts,
                                               std::span<const int32_t> experts) {
  if (num_experts < 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a layer has experts",
                                              .tensor = "num_experts",
                                              .found = std::to_string(num_experts),
                                              .limit = "at least 1"});
  }
  return std::make_unique<PartSource>(make_pointer_source(weights, GivenTensors::kPart),
                                      num_experts, experts);
}

WeightId refit_tensor(std::string_view name) {
  constexpr std::string_view kBoth = "gate_up";
  std::string own(name);
  if (const size_t both = own.find(kBoth); both != std::string::npos) {
    own.replace(both, kBoth.size(), "up");
  }
  for (const WeightId id : weights::kAll) {
    if (to_string(id) == own) return id;
  }
  throw Error(ErrorCode::kInvalidArgument, {.what = "there are no weights of this name",
                                            .tensor = "tensors",
                                            .found = std::string(name)});
}

}  // namespace conclave::inline v0
