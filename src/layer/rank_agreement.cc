#include "layer/rank_agreement.h"

#include "layer/chunks.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <exception>
#include <span>
#include <string>

namespace conclave::inline v0 {
namespace {

constexpr const char* kTokensPhase = "forward: agree on the tokens";
constexpr const char* kChunksPhase = "forward: agree on the chunks";

template <size_t kCount>
std::array<int64_t, kCount> largest_of(const std::array<int64_t, kCount>& mine,
                                       Communicator& communicator, const char* phase) {
  std::array<int64_t, kCount> largest{};
  communicator.all_reduce(std::as_bytes(std::span(mine)),
                          std::as_writable_bytes(std::span(largest)), DType::kI64, ReduceOp::kMax,
                          phase);
  return largest;
}

// The epochs of a group of ranks: the one that each has, and the last that is ready on all.
struct EpochBounds {
  int64_t least_current = 0;
  int64_t most_current = 0;
  int64_t ready = 0;
};

EpochBounds bounds_of(const EpochOffer& offer) {
  const auto current = static_cast<int64_t>(offer.current->number);
  return {.least_current = current,
          .most_current = current,
          .ready = static_cast<int64_t>(offer.ready())};
}

void check_budgets(int64_t least, int64_t most, const char* phase) {
  if (least == most) return;
  throw CommError(ErrorCode::kCommMismatch, -1, phase,
                  "ranks were given budgets of " + std::to_string(least) + " to " +
                      std::to_string(most) + " experts; they must have the same one");
}

void check_adapters(int64_t largest, int64_t least, const char* phase) {
  if (largest == least) return;
  throw CommError(ErrorCode::kCommMismatch, -1, phase,
                  "ranks have added or removed other adapters; all must do the same in the same "
                  "order, between the same forwards");
}

void check_refits(int64_t least, int64_t most, const char* phase) {
  if (least == most) return;
  throw CommError(ErrorCode::kCommMismatch, -1, phase,
                  "ranks have weights of refit epochs " + std::to_string(least) + " to " +
                      std::to_string(most) +
                      "; refit all of them to one epoch, larger than each of these");
}

// Equal for equal lists: -1 for none, else not negative.
int64_t key_of(std::span<const int64_t> rank_tokens) {
  if (rank_tokens.empty()) return -1;
  uint64_t key = 0xcbf29ce484222325U;
  for (const int64_t tokens : rank_tokens) {
    key = (key ^ static_cast<uint64_t>(tokens)) * 0x100000001b3U;
    key ^= key >> 29U;
  }
  return static_cast<int64_t>(key >> 1U);
}

void check_lists(int64_t least, int64_t most, const char* phase) {
  if (least == most) return;
  const char* const what = least < 0 ? "some ranks were given rank_tokens and others none; "
                                     : "ranks were given different rank_tokens; ";
  throw CommError(ErrorCode::kCommMismatch, -1, phase,
                  std::string(what) + "all must have the same list, or none");
}

// One exchange of the largest numbers and of the smallest, negated, shows whether all are equal.
// Slices whose experts are on their way to different places stay where they are.
EpochBounds agree_over_slices(const CallOffer& call, const EpochOffer& offer,
                              const RankPart& part) {
  const int64_t tokens = call.tokens;
  const EpochBounds mine = bounds_of(offer);
  const int64_t key = offer.next != nullptr ? offer.next->key : -1;
  const auto refit = static_cast<int64_t>(call.refit_epoch);
  const int64_t list = key_of(call.rank_tokens);
  const auto largest =
      largest_of(std::array{tokens, -tokens, mine.most_current, -mine.least_current, -mine.ready,
                            key, -key, call.expert_budget, -call.expert_budget, call.adapters,
                            -call.adapters, refit, -refit, list, -list},
                 *part.tensor_communicator, kTokensPhase);
  if (largest[0] != -largest[1]) {
    throw CommError(ErrorCode::kCommMismatch, -1, kTokensPhase,
                    "tensor-parallel ranks were given " + std::to_string(-largest[1]) + " to " +
                        std::to_string(largest[0]) + " tokens; they must have the same ones");
  }
  check_budgets(-largest[8], largest[7], kTokensPhase);
  check_adapters(largest[9], -largest[10], kTokensPhase);
  check_refits(-largest[12], largest[11], kTokensPhase);
  check_lists(-largest[14], largest[13], kTokensPhase);
  const bool same_target = largest[5] == -largest[6];
  return {.least_current = -largest[3],
          .most_current = largest[2],
          .ready = same_target ? -largest[4] : -largest[3]};
}

void check_epochs(const EpochBounds& bounds) {
  if (bounds.least_current == bounds.most_current) return;
  throw CommError(ErrorCode::kCommMismatch, -1, kChunksPhase,
                  "ranks are in placement epochs " + std::to_string(bounds.least_current) + " to " +
                      std::to_string(bounds.most_current));
}

// A rank tells this to the others before its rows gather with theirs.
struct RankWord {
  int64_t tokens = 0;
  int64_t refit_epoch = 0;
  int64_t epoch = 0;  // where its experts lie now
  int64_t ready = 0;  // the one that it could take up
};

// The caller says it, or all ranks tell each other: `bounds`, of this rank's placement, become
// those of all. Where nobody is asked, nobody takes up another.
RankCounts tokens_of_ranks(const CallOffer& call, EpochBounds& bounds, Communicator& communicator) {
  RankCounts counts(communicator.size());
  if (!call.rank_tokens.empty()) {
    std::ranges::copy(call.rank_tokens, counts.all().begin());
    bounds.ready = bounds.most_current;
    return counts;
  }
  const RankWord mine{.tokens = call.tokens,
                      .refit_epoch = static_cast<int64_t>(call.refit_epoch),
                      .epoch = bounds.most_current,
                      .ready = bounds.ready};
  std::array<RankWord, kMostGatheringRanks> memory;
  const std::span<RankWord> words = std::span(memory).first(counts.all().size());
  communicator.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(words),
                          kTokensPhase);
  const auto [least, most] = std::ranges::minmax(words, {}, &RankWord::refit_epoch);
  check_refits(least.refit_epoch, most.refit_epoch, kTokensPhase);
  const auto [oldest, newest] = std::ranges::minmax(words, {}, &RankWord::epoch);
  bounds = {.least_current = oldest.epoch,
            .most_current = newest.epoch,
            .ready = std::ranges::min(words, {}, &RankWord::ready).ready};
  std::ranges::transform(words, counts.all().begin(), &RankWord::tokens);
  return counts;
}

void end_exchanges(Communicator& communicator, const char* why) {
  constexpr const char* kGiveUpPhase = "forward: give up";
  try {
    communicator.check(kGiveUpPhase);
    communicator.abort(why);
    communicator.barrier(kGiveUpPhase);
  } catch (const std::exception&) {
    // The error that made us give up is the one to report; this one says that nothing is under way.
    return;
  }
}

}  // namespace

bool exchanges_tokens(const PlanBase& plan) {
  return plan.parallel.ep_size > 1 && plan.parallel.reduce == Reduce::kFull;
}

void check_ranks_agree(const PlanBase& plan, std::span<const AgreedValue> own,
                       Communicator* communicator) {
  std::vector<AgreedValue> values = values_to_agree(plan.spec, plan.options, plan.parallel);
  values.insert(values.end(), own.begin(), own.end());
  values.push_back({"the rank in the other group", plan.parallel.tp_rank});
  if (exchanges_tokens(plan)) compare_values(values, *communicator);
  values.back().value = plan.parallel.ep_rank;
  if (plan.part.reduces()) compare_values(values, *plan.part.tensor_communicator);
}

void give_up(const PlanBase& plan, Communicator* communicator, const char* why) {
  if (exchanges_tokens(plan)) end_exchanges(*communicator, why);
  if (plan.part.reduces()) end_exchanges(*plan.part.tensor_communicator, why);
}

void check_nothing_is_missing(int64_t expert, const PlanBase& plan, Communicator* communicator) {
  constexpr const char* kMissingPhase = "on_ranks: agree that nothing is missing";
  const auto agree_with = [&](Communicator& ranks) {
    const int64_t mine = expert;
    ranks.all_reduce(std::as_bytes(std::span(&mine, 1)),
                     std::as_writable_bytes(std::span(&expert, 1)), DType::kI64, ReduceOp::kMax,
                     kMissingPhase);
  };
  if (exchanges_tokens(plan)) agree_with(*communicator);
  if (plan.part.reduces()) agree_with(*plan.part.tensor_communicator);
  if (expert < 0) return;
  if (expert < plan.spec.num_experts) {
    throw Error(
        ErrorCode::kTensorMissing,
        {.what = "expert " + std::to_string(expert) + " is not packed on a rank that is to have it",
         .tensor = "source",
         .hint = "give a source to read it from, or replicas: balance rule surviving"});
  }
  throw Error(ErrorCode::kTensorMissing,
              {.what = "the packed weights of a rank do not serve this split: other columns, "
                       "another kernel, or weights read in place",
               .tensor = "source",
               .hint = "give a source to read them from"});
}

CallAgreement agree_on_call(const CallOffer& call, const EpochOffer& offer, const PlanBase& plan,
                            Communicator* communicator) {
  EpochBounds bounds = bounds_of(offer);
  if (plan.part.reduces() && plan.part.asks_ranks) {
    try {
      bounds = agree_over_slices(call, offer, plan.part);
    } catch (const CommError& error) {
      // The ranks of the other group have not seen the error: without an abort they would wait for
      // us.
      if (exchanges_tokens(plan)) communicator->abort(error.what());
      throw;
    }
  }
  const ChunkRule uncut{.most_tokens = plan.options.max_tokens};
  const ChunkRule rule = plan.chunk_rule.value_or(uncut);
  if (plan.part.gathers()) {
    const RankCounts tokens = tokens_of_ranks(call, bounds, *plan.part.expert_communicator);
    check_epochs(bounds);
    return {.chunks = num_chunks(std::ranges::max(tokens.all()), rule),
            .epoch = static_cast<uint64_t>(bounds.ready),
            .tokens = tokens};
  }
  int64_t chunks = num_chunks(call.tokens, rule);
  if (exchanges_tokens(plan)) {
    const auto refit = static_cast<int64_t>(call.refit_epoch);
    const int64_t list = key_of(call.rank_tokens);
    const auto largest =
        largest_of(std::array{chunks, bounds.most_current, -bounds.least_current, -bounds.ready,
                              call.expert_budget, -call.expert_budget, call.adapters,
                              -call.adapters, refit, -refit, list, -list},
                   *communicator, kChunksPhase);
    check_budgets(-largest[5], largest[4], kChunksPhase);
    chunks = largest[0];
    check_adapters(largest[6], -largest[7], kChunksPhase);
    check_refits(-largest[9], largest[8], kChunksPhase);
    check_lists(-largest[11], largest[10], kChunksPhase);
    bounds = {.least_current = -largest[2], .most_current = largest[1], .ready = -largest[3]};
  }
  check_epochs(bounds);
  return {.chunks = chunks, .epoch = static_cast<uint64_t>(bounds.ready), .tokens = {}};
}

}  // namespace conclave::inline v0
