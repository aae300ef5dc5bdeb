#include "layer/rank_agreement.h"

#include "layer/chunks.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <exception>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr const char* kTokensPhase = "forward: agree on the tokens";
constexpr const char* kChunksPhase = "forward: agree on the chunks";

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

// The ranks that compare something, and when.
struct Group {
  Communicator& communicator;
  const char* phase;
};

template <size_t kCount>
std::array<int64_t, kCount> largest_of(const std::array<int64_t, kCount>& mine,
                                       const Group& group) {
  std::array<int64_t, kCount> largest{};
  group.communicator.all_reduce(std::as_bytes(std::span(mine)),
                                std::as_writable_bytes(std::span(largest)), DType::kI64,
                                ReduceOp::kMax, group.phase);
  return largest;
}

// The first rank whose number is another than this one's, or -1 where only ranks of another group
// differ. Collective: every rank has seen that the numbers are not all alike.
int32_t rank_that_differs(int64_t mine, const Group& group) {
  std::vector<int64_t> numbers(static_cast<size_t>(group.communicator.size()));
  group.communicator.all_gather(std::as_bytes(std::span(&mine, 1)),
                                std::as_writable_bytes(std::span(numbers)), group.phase);
  const auto other = std::ranges::find_if(numbers, [mine](int64_t it) { return it != mine; });
  return other == numbers.end() ? -1 : static_cast<int32_t>(other - numbers.begin());
}

[[noreturn]] void refuse(int64_t mine, const Group& group, const std::string& what) {
  throw CommError(ErrorCode::kCommMismatch, rank_that_differs(mine, group), group.phase, what);
}

// A number of this rank, and those of all.
struct Compared {
  int64_t mine = 0;
  int64_t least = 0;
  int64_t most = 0;

  bool all_alike() const { return least == most; }
  std::string range() const { return std::to_string(least) + " to " + std::to_string(most); }
};

void check_tokens(const Compared& tokens, const Group& group) {
  if (tokens.all_alike()) return;
  refuse(tokens.mine, group,
         "tensor-parallel ranks were given " + tokens.range() +
             " tokens; they must have the same ones");
}

void check_budgets(const Compared& budgets, const Group& group) {
  if (budgets.all_alike()) return;
  refuse(
      budgets.mine, group,
      "ranks were given budgets of " + budgets.range() + " experts; they must have the same one");
}

void check_adapters(const Compared& keys, const Group& group) {
  if (keys.all_alike()) return;
  refuse(keys.mine, group,
         "it has added or removed other adapters than this one; all ranks must do the same in the "
         "same order, between the same forwards");
}

void check_refits(const Compared& refits, const Group& group) {
  if (refits.all_alike()) return;
  refuse(refits.mine, group,
         "ranks have weights of refit epochs " + refits.range() +
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

void check_lists(const Compared& lists, const Group& group) {
  if (lists.all_alike()) return;
  const char* const what = lists.least < 0 ? "some ranks were given rank_tokens and others none; "
                                           : "ranks were given different rank_tokens; ";
  refuse(lists.mine, group, std::string(what) + "all must have the same list, or none");
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
  const Group group{*part.tensor_communicator, kTokensPhase};
  const auto largest =
      largest_of(std::array{tokens, -tokens, mine.most_current, -mine.least_current, -mine.ready,
                            key, -key, call.expert_budget, -call.expert_budget, call.adapters,
                            -call.adapters, refit, -refit, list, -list},
                 group);
  check_tokens({.mine = tokens, .least = -largest[1], .most = largest[0]}, group);
  check_budgets({.mine = call.expert_budget, .least = -largest[8], .most = largest[7]}, group);
  check_adapters({.mine = call.adapters, .least = -largest[10], .most = largest[9]}, group);
  check_refits({.mine = refit, .least = -largest[12], .most = largest[11]}, group);
  check_lists({.mine = list, .least = -largest[14], .most = largest[13]}, group);
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
  int64_t adapters = 0;
  int64_t names_adapters = 0;
};

Compared compared(std::span<const RankWord> words, int64_t RankWord::*number, int32_t own) {
  const auto [least, most] = std::ranges::minmax(words, {}, number);
  return {.mine = words[static_cast<size_t>(own)].*number,
          .least = least.*number,
          .most = most.*number};
}

// Adapters that have come or gone since ranks compared them are compared in any case: rows name
// them by their place in the list, which is another one where the lists differ.
bool asks(const CallOffer& call) { return call.rank_tokens.empty() || !call.adapters_are_compared; }

// The caller says the numbers of tokens, or all ranks tell each other: `bounds`, of this rank's
// placement, become those of all. Where nobody is asked, nobody takes up another, and any row of
// others may have an adapter.
CallAgreement agree_on_rows(const CallOffer& call, EpochBounds& bounds,
                            Communicator& communicator) {
  CallAgreement agreed{.tokens = RankCounts(communicator.size())};
  if (!asks(call)) {
    std::ranges::copy(call.rank_tokens, agreed.tokens.all().begin());
    bounds.ready = bounds.most_current;
    agreed.names_adapters = true;
    return agreed;
  }
  const RankWord mine{.tokens = call.tokens,
                      .refit_epoch = static_cast<int64_t>(call.refit_epoch),
                      .epoch = bounds.most_current,
                      .ready = bounds.ready,
                      .adapters = call.adapters,
                      .names_adapters = call.names_adapters ? 1 : 0};
  std::array<RankWord, kMostGatheringRanks> memory;
  const std::span<RankWord> words = std::span(memory).first(agreed.tokens.all().size());
  const Group group{communicator, kTokensPhase};
  communicator.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(words),
                          group.phase);
  const int32_t own = communicator.rank();
  check_adapters(compared(words, &RankWord::adapters, own), group);
  check_refits(compared(words, &RankWord::refit_epoch, own), group);
  const Compared epochs = compared(words, &RankWord::epoch, own);
  bounds = {.least_current = epochs.least,
            .most_current = epochs.most,
            .ready = compared(words, &RankWord::ready, own).least};
  std::ranges::transform(words, agreed.tokens.all().begin(), &RankWord::tokens);
  agreed.names_adapters = compared(words, &RankWord::names_adapters, own).most != 0;
  return agreed;
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
  if (plan.part.reduces() && (plan.part.asks_ranks || !call.adapters_are_compared)) {
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
    CallAgreement agreed = agree_on_rows(call, bounds, *plan.part.expert_communicator);
    check_epochs(bounds);
    agreed.chunks = num_chunks(std::ranges::max(agreed.tokens.all()), rule);
    agreed.epoch = static_cast<uint64_t>(bounds.ready);
    return agreed;
  }
  int64_t chunks = num_chunks(call.tokens, rule);
  bool names_adapters = call.names_adapters;
  if (exchanges_tokens(plan)) {
    const auto refit = static_cast<int64_t>(call.refit_epoch);
    const int64_t list = key_of(call.rank_tokens);
    const Group group{*communicator, kChunksPhase};
    const auto largest = largest_of(
        std::array{chunks, bounds.most_current, -bounds.least_current, -bounds.ready,
                   call.expert_budget, -call.expert_budget, call.adapters, -call.adapters, refit,
                   -refit, list, -list, int64_t{call.names_adapters ? 1 : 0}},
        group);
    check_budgets({.mine = call.expert_budget, .least = -largest[5], .most = largest[4]}, group);
    chunks = largest[0];
    check_adapters({.mine = call.adapters, .least = -largest[7], .most = largest[6]}, group);
    check_refits({.mine = refit, .least = -largest[9], .most = largest[8]}, group);
    check_lists({.mine = list, .least = -largest[11], .most = largest[10]}, group);
    bounds = {.least_current = -largest[2], .most_current = largest[1], .ready = -largest[3]};
    names_adapters = largest[12] != 0;
  }
  check_epochs(bounds);
  return {.chunks = chunks,
          .epoch = static_cast<uint64_t>(bounds.ready),
          .tokens = {},
          .names_adapters = names_adapters};
}

}  // namespace conclave::inline v0
