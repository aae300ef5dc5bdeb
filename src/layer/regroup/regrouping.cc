#include "layer/regroup/regrouping.h"

#include "layer/agreed_values.h"
#include "layer/migration/move_rounds.h"
#include "layer/migration/move_wave.h"
#include "layer/migration/pace.h"
#include "layer/regroup/gather.h"

#include "conclave/balance.h"
#include "conclave/comm.h"
#include "conclave/device.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr const char* kAgreePhase = "regroup: agree on the request";
constexpr const char* kPlanPhase = "regroup: tell where experts are";
constexpr const char* kStepPhase = "regroup: wait for the others";

Communicator& everyone_of(const RegroupOptions& options) {
  if (options.everyone != nullptr) return *options.everyone;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "ranks that change need a communicator that joins all of them",
               .tensor = "everyone"});
}

[[noreturn]] void refuse(const std::string& reason) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "the weights of this layer do not go from rank to rank", .found = reason});
}

class Regrouping {
 public:
  explicit Regrouping(const RegroupRequest& request)
      : request_(request),
        everyone_(everyone_of(request.options)),
        rank_(everyone_.rank()),
        pace_(request.options.processor_share > 0 ? request.options.processor_share : 1) {}

  std::optional<LayerAfter> run() {
    try {
      agree_on_request(prepare());
      tell_places();
      plan_split();
      join_new_group();
      moves_ = plan_regroup(ranks_);
      take_what_is_here();
      for (const auto& wave : waves_of(moves_.experts)) move_experts(wave);
      bring_rest();
      agree_over_slices();
    } catch (const Error& error) {
      end_for_others(error.what());
      throw;
    } catch (const std::exception& error) {
      // Nobody else knows of it.
      everyone_.abort(error.what());
      end_for_others(error.what());
      throw;
    }
    if (is_leaving()) return std::nullopt;
    return LayerAfter{request_.spec, std::move(engine_), std::move(weights_)};
  }

 private:
  bool is_leaving() const { return request_.context == nullptr; }
  const PeerWeights* peers_before() const {
    return request_.before == nullptr ? nullptr : request_.before->engine.peer_weights();
  }

  // The split that this rank has in common with the others, whatever their number.
  ParallelSpec basis() const {
    if (request_.before != nullptr) return request_.before->engine.plan().parallel;
    if (request_.options.parallel) return *request_.options.parallel;
    const Communicator* slices = request_.context->tensor_communicator();
    if (slices == nullptr) return {};
    return {.tp_size = slices->size(), .tp_rank = slices->rank()};
  }

  void check_request() const {
    check_migration_options({.processor_share = request_.options.processor_share,
                             .piece_bytes = request_.options.piece_bytes});
    if (basis().reduce == Reduce::kPartial) {
      refuse("the caller adds up (Reduce::kPartial): on_ranks and a source are there");
    }
    if (request_.context != nullptr) check_context(*request_.context);
    if (request_.before == nullptr) return;
    if (request_.before->refusal) std::rethrow_exception(request_.before->refusal);
    if (peers_before() == nullptr) refuse("on this device they stay where they were loaded");
    if (const Support support = peers_before()->supported(); !support) refuse(support.reason());
  }

  void check_context(const Context& context) const {
    if (engine_row(context).make_unfilled == nullptr) {
      refuse("on this device they are loaded from a source");
    }
    if (request_.before == nullptr || context.device() == request_.before->context.device()) return;
    throw Error(ErrorCode::kDevice, {.what = "a layer stays on its device when its ranks change",
                                     .tensor = "context",
                                     .expected = std::string(request_.before->context.device()),
                                     .found = std::string(context.device())});
  }

  // An error of this rank is thrown only after the others have learnt of it.
  std::exception_ptr prepare() {
    try {
      check_request();
      if (request_.before == nullptr) return nullptr;
      claim_.emplace(request_.before->epochs);
      static_cast<void>(request_.before->epochs.offer());
    } catch (const Error&) {
      return std::current_exception();
    }
    return nullptr;
  }

  void agree_on_request(const std::exception_ptr& refusal) const {
    const ParallelSpec split = basis();
    std::vector<AgreedValue> values = values_to_agree(
        request_.spec, request_.layer_options, {.tp_size = split.tp_size, .reduce = split.reduce});
    values.push_back({"the tensor-parallel rank", split.tp_rank});
    values.push_back({"piece_bytes", static_cast<int64_t>(request_.options.piece_bytes)});
    values.push_back({"whether they can do as they were asked", refusal ? 0 : 1});
    try {
      compare_values(values, everyone_, kAgreePhase);
    } catch (const CommError&) {
      if (!refusal) throw;
    }
    if (refusal) std::rethrow_exception(refusal);
  }

  // Ends a step that each rank took by itself. Throws on every rank if one of them failed.
  void settle(const std::exception_ptr& failure) const {
    const std::vector<int64_t> failed =
        gather_numbers(std::array<int64_t, 1>{failure ? 1 : 0}, everyone_, kStepPhase);
    if (failure) std::rethrow_exception(failure);
    const auto other = std::ranges::find(failed, 1);
    if (other == failed.end()) return;
    const auto rank = static_cast<int32_t>(other - failed.begin());
    throw CommError(ErrorCode::kCommAborted, rank, kStepPhase,
                    fmt::format("rank {} could not do its part", rank));
  }

  template <class Step>
  void together(const Step& step) const {
    std::exception_ptr failure;
    try {
      step();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    settle(failure);
  }

  int32_t next_rank() const {
    if (is_leaving()) return -1;
    if (request_.options.parallel) return request_.options.parallel->ep_rank;
    const Communicator* ranks = request_.context->communicator();
    return ranks == nullptr ? 0 : ranks->rank();
  }
  int32_t next_size() const {
    if (is_leaving()) return 0;
    if (request_.options.parallel) return request_.options.parallel->ep_size;
    const Communicator* ranks = request_.context->communicator();
    return ranks == nullptr ? 1 : ranks->size();
  }

  // Fills in what all ranks have, and checks that they are one layer and one new group.
  void tell_places() {
    const PeerWeights* peers = peers_before();
    const QuantSpec& known = request_.before == nullptr ? request_.spec.quant
                                                        : request_.before->engine.plan().spec.quant;
    const std::array<int64_t, 6> mine = {peers != nullptr ? 1 : 0,
                                         next_rank(),
                                         next_size(),
                                         request_.options.source != nullptr ? 1 : 0,
                                         peers != nullptr ? peers->form_key() : 0,
                                         static_cast<int64_t>(known.scale_values)};
    const std::vector<int64_t> all = gather_numbers(mine, everyone_, kPlanPhase);
    if (peers != nullptr) held_ = request_.before->places();
    std::vector<std::vector<int32_t>> held = gather_lists(held_, everyone_, kPlanPhase);
    for (size_t rank = 0; rank < held.size(); ++rank) {
      const auto facts = std::span(all).subspan(rank * mine.size(), mine.size());
      ranks_.push_back({.holds = facts[0] != 0,
                        .next_rank = static_cast<int32_t>(facts[1]),
                        .next_size = static_cast<int32_t>(facts[2]),
                        .has_source = facts[3] != 0,
                        .held = std::move(held[rank])});
      if (facts[0] != 0) take_form(static_cast<int32_t>(rank), facts[4], facts[5]);
    }
    new_ranks_ = ranks_of_new_group(ranks_);
  }

  void take_form(int32_t rank, int64_t form_key, int64_t scale_values) {
    if (!form_key_) form_key_ = form_key;
    const auto values = static_cast<ScaleValues>(scale_values);
    if (!scale_values_) scale_values_ = values;
    if (form_key == form_key_ && values == scale_values_) return;
    throw CommError(ErrorCode::kCommMismatch, rank, kPlanPhase,
                    fmt::format("rank {} has packed the layer in another form", rank));
  }

  // Where experts shall lie: as asked, or spread evenly with as few moves as possible.
  ParallelSpec next_split() const {
    if (request_.options.parallel) return *request_.options.parallel;
    ExpertSlots before{.num_experts = request_.spec.num_experts, .first_of = {0}};
    for (const RegroupRank& rank : ranks_) {
      std::ranges::copy_if(rank.held, std::back_inserter(before.logical_of),
                           [](int32_t expert) { return expert >= 0; });
      before.first_of.push_back(static_cast<int32_t>(before.logical_of.size()));
    }
    ParallelSpec split = with_slots(basis(), spread_over(before, new_ranks_));
    split.ep_rank = next_rank();
    return split;
  }

  void plan_split() {
    std::vector<int32_t> wanted;
    together([&] {
      if (is_leaving()) return;
      split_ = next_split();
      if (split_.tp_size != basis().tp_size || split_.tp_rank != basis().tp_rank ||
          split_.reduce != basis().reduce) {
        refuse("its slices stay when its ranks change: tp_size, tp_rank and reduce are as before");
      }
      const auto own = slots_of(request_.spec.num_experts, split_);
      const auto of_rank = own.of_rank(split_.ep_rank);
      wanted.assign(of_rank.begin(), of_rank.end());
    });
    std::vector<std::vector<int32_t>> all = gather_lists(wanted, everyone_, kPlanPhase);
    for (size_t rank = 0; rank < all.size(); ++rank) ranks_[rank].wanted = std::move(all[rank]);
  }

  // The ranks of the new group agree on their plan as in create.
  void join_new_group() {
    together([&] {
      if (is_leaving()) return;
      MoeSpec spec =
          request_.before == nullptr ? request_.spec : request_.before->engine.plan().spec;
      spec.quant.scale_values = *scale_values_;
      try {
        engine_ = engine_row(*request_.context)
                      .make_unfilled({.context = *request_.context,
                                      .spec = spec,
                                      .options = request_.layer_options,
                                      .parallel = split_});
      } catch (const Error& error) {
        abort_new_group(error.what());
        throw;
      }
      if (engine_->peer_weights()->form_key() == form_key_) return;
      throw Error(ErrorCode::kUnsupported,
                  {.what = "the layer's packed weights do not serve this rank: another processor, "
                           "kernel or slice",
                   .hint = "read the layer from its source there: create and on_ranks"});
    });
  }

  const std::vector<int32_t>& reads() const { return moves_.reads[static_cast<size_t>(rank_)]; }

  void take_what_is_here() {
    together([&] {
      if (is_leaving()) return;
      const PeerWeights& peers = *engine_->peer_weights();
      weights_ = request_.before == nullptr
                     ? peers.begin()
                     : peers.keep(request_.before->engine, request_.before->weights, held_);
      if (std::ranges::all_of(reads(), [](int32_t expert) { return expert < 0; })) return;
      peers.read_experts(*request_.options.source, reads(), *weights_);
    });
  }

  void move(std::span<const ExpertMove> moves, const PlaceMemory& from, const PlaceMemory& to) {
    bool peers_know = false;
    move_wave({.moves = moves,
               .rank = rank_,
               .from = from,
               .to = to,
               .communicator = &everyone_,
               .pack = kNobodyPacks,
               .piece_bytes = request_.options.piece_bytes,
               .pace = pace_,
               .stopped = stopped_},
              peers_know);
  }

  void move_experts(std::span<const ExpertMove> wave) {
    const PlaceMemory none({PlaceMemory::Kind{}, PlaceMemory::Kind{}});
    move(wave, peers_before() == nullptr ? none : peers_before()->places(request_.before->weights),
         weights_ == nullptr ? none : engine_->peer_weights()->places(*weights_));
  }

  // Weights that every rank has go to those that join, in one piece of memory.
  void bring_rest() {
    if (moves_.rest.empty()) return;
    std::vector<std::byte> bytes;
    together([&] {
      const auto gives = [&](const ExpertMove& move) { return move.from_rank == rank_; };
      if (std::ranges::none_of(moves_.rest, gives)) return;
      bytes = peers_before()->rest(request_.before->weights);
    });
    const std::vector<int64_t> sizes =
        gather_numbers(std::array{static_cast<int64_t>(bytes.size())}, everyone_, kPlanPhase);
    const bool joins = request_.before == nullptr;
    const auto size = static_cast<size_t>(std::ranges::max(sizes));
    together([&] {
      check_sizes(sizes);
      if (joins) bytes.resize(size);
    });
    std::byte* const each = bytes.data();
    const PlaceMemory memory(
        {PlaceMemory::Kind{.each = {&each, 1}, .bytes = size}, PlaceMemory::Kind{}});
    for (const auto& wave : waves_of(moves_.rest)) move(wave, memory, memory);
    together([&] {
      if (joins) engine_->peer_weights()->take_rest(bytes, *weights_);
    });
  }

  static void check_sizes(std::span<const int64_t> sizes) {
    const int64_t most = std::ranges::max(sizes);
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      if (sizes[rank] == 0 || sizes[rank] == most) continue;
      throw CommError(ErrorCode::kCommMismatch, static_cast<int32_t>(rank), kPlanPhase,
                      fmt::format("rank {} has other weights beside the experts", rank));
    }
  }

  // The groups of other slices have their layer too, or nobody has.
  void agree_over_slices() {
    together([&] {
      if (engine_ == nullptr || !engine_->plan().part.reduces()) return;
      engine_->plan().part.tensor_communicator->barrier(kStepPhase);
    });
  }

  void abort_new_group(const char* why) const {
    for (Communicator* ranks :
         {request_.context->communicator(), request_.context->tensor_communicator()}) {
      if (ranks != nullptr && ranks != &everyone_) ranks->abort(why);
    }
  }

  // Errors that all of everyone share leave that usable. Ranks of other slices may be waiting for
  // this one's, to agree on the plan or at the end.
  void end_for_others(const char* why) const {
    if (!is_leaving() && basis().tp_size > 1) {
      Communicator* const slices = request_.context->tensor_communicator();
      if (slices != nullptr) slices->abort(why);
    }
    try {
      everyone_.check(kStepPhase);
    } catch (const CommError&) {
      everyone_.abort(why);
    }
  }

  static inline const PackPlace kNobodyPacks = {};

  const RegroupRequest& request_;
  Communicator& everyone_;
  const int32_t rank_;
  Pace pace_;
  const std::atomic<bool> stopped_{false};
  std::optional<EpochClaim> claim_;  // keeps migrations and reloads away from the layer before
  std::optional<int64_t> form_key_;
  std::optional<ScaleValues> scale_values_;
  std::vector<int32_t> held_;       // the expert in each place of the layer before
  std::vector<RegroupRank> ranks_;  // everyone's
  std::vector<int32_t> new_ranks_;  // the new group's, as ranks of everyone
  ParallelSpec split_;
  RegroupMoves moves_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<LayerWeights> weights_;
};

}  // namespace

std::optional<LayerAfter> regroup_ranks(const RegroupRequest& request) {
  return Regrouping(request).run();
}

}  // namespace conclave::inline v0
