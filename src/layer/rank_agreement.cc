#include "layer/rank_agreement.h"

#include "layer/chunks.h"

#include "conclave/error.h"

#include <array>
#include <exception>
#include <span>
#include <string>

namespace conclave::inline v0 {
namespace {

bool exchanges_tokens(const PlanBase& plan) {
  return plan.parallel.ep_size > 1 && plan.parallel.reduce == Reduce::kFull;
}

// One exchange of the largest number and the smallest, negated, shows whether all are equal.
void check_same_tokens(int64_t tokens, const RankPart& part) {
  const std::array<int64_t, 2> mine = {tokens, -tokens};
  std::array<int64_t, 2> largest{};
  constexpr const char* kTokensPhase = "forward: agree on the tokens";
  part.tensor_communicator->all_reduce(std::as_bytes(std::span(mine)),
                                       std::as_writable_bytes(std::span(largest)), DType::kI64,
                                       ReduceOp::kMax, kTokensPhase);
  if (largest[0] == -largest[1]) return;
  throw CommError(ErrorCode::kCommMismatch, -1, kTokensPhase,
                  "tensor-parallel ranks were given " + std::to_string(-largest[1]) + " to " +
                      std::to_string(largest[0]) + " tokens; they must have the same ones");
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

int64_t agree_on_chunks(int64_t tokens, const PlanBase& plan, Communicator* communicator) {
  if (plan.part.reduces()) {
    try {
      check_same_tokens(tokens, plan.part);
    } catch (const CommError& error) {
      // The ranks of the other group have not seen the error: without an abort they would wait for
      // us.
      if (exchanges_tokens(plan)) communicator->abort(error.what());
      throw;
    }
  }
  const int64_t chunks = num_chunks(tokens, plan.options.max_tokens);
  if (!exchanges_tokens(plan)) return chunks;
  int64_t largest = 0;
  communicator->all_reduce(std::as_bytes(std::span(&chunks, 1)),
                           std::as_writable_bytes(std::span(&largest, 1)), DType::kI64,
                           ReduceOp::kMax, "forward: agree on the chunks");
  return largest;
}

}  // namespace conclave::inline v0
