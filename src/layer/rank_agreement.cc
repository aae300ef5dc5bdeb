#include "layer/rank_agreement.h"

#include "layer/chunks.h"

#include "conclave/error.h"

#include <array>
#include <bit>
#include <concepts>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr const char* kPhase = "create: agree on the plan";

constexpr std::array kFieldNames = {"the library version",
                                    "num_experts",
                                    "top_k",
                                    "hidden_size",
                                    "intermediate_size",
                                    "weight_dtype",
                                    "quant, shared.weight_dtype or residual.weight_dtype",
                                    "shared.mode",
                                    "shared.intermediate_size",
                                    "shared.count",
                                    "latent.size",
                                    "residual.intermediate_size",
                                    "num_zero_experts",
                                    "router",
                                    "the activation of an expert",
                                    "how parts are weighed and added",
                                    "max_tokens",
                                    "arithmetic",
                                    "transport",
                                    "ep_combine",
                                    "placement",
                                    "rank_of or replica_of",
                                    "num_redundant_experts",
                                    "reduce",
                                    "ep_size",
                                    "tp_size",
                                    "the rank in the other group"};
using Fingerprint = std::array<int64_t, kFieldNames.size()>;

// FNV-1a over 64-bit words.
class Hash {
 public:
  void add(std::integral auto value) {
    hash_ = (hash_ ^ static_cast<uint64_t>(value)) * 0x100000001B3;
  }
  void add(double value) { add(std::bit_cast<uint64_t>(value)); }
  template <class Choice>
    requires std::is_enum_v<Choice>
  void add(Choice value) {
    add(static_cast<int64_t>(value));
  }
  void add(std::string_view text) {
    add(text.size());
    for (const char letter : text) add(letter);
  }
  template <class Entry>
  void add(const std::vector<Entry>& list) {
    add(list.size());
    for (const Entry& entry : list) add(entry);
  }
  void add(const std::map<std::string, double>& options) {
    add(options.size());
    for (const auto& [name, value] : options) {
      add(std::string_view(name));
      add(value);
    }
  }
  int64_t value() const { return static_cast<int64_t>(hash_); }

 private:
  uint64_t hash_ = 0xCBF29CE484222325;
};

template <class... Values>
int64_t hash_of(const Values&... values) {
  Hash hash;
  (hash.add(values), ...);
  return hash.value();
}

// Hashes the lists that say where experts lie.
int64_t hash_of_lists(const ParallelSpec& parallel) {
  return hash_of(parallel.rank_of, parallel.replica_of);
}

// Leaves out the settings of "simulated": ranks with tokens of their own may draw differently.
int64_t hash_of_router(const RouterSpec& r) {
  return hash_of(std::string_view(r.name), r.score, r.order, r.has_logit_bias, r.soft_cap,
                 r.has_selection_bias, r.num_groups, r.topk_groups, r.group_score, r.group_mask,
                 r.renormalize, r.renormalize_p, r.epsilon, r.epsilon_mode, r.scale,
                 r.has_expert_scale, r.has_global_scale, r.jitter_epsilon, r.vocab_size,
                 r.input_norm.enabled, r.input_norm.epsilon, r.logits_dtype, r.score_dtype,
                 r.options);
}

int64_t hash_of_activations(const MoeSpec& spec) {
  Hash hash;
  for (const ActivationSpec* a :
       {&spec.activation, &spec.shared.activation, &spec.residual.activation}) {
    hash.add(hash_of(std::string_view(a->name), a->limit, a->alpha, a->beta, a->linear_beta));
  }
  return hash.value();
}

int64_t hash_of_sums(const MoeSpec& spec) {
  return hash_of(spec.has_bias, spec.has_output_bias, spec.weight_on, spec.output_scale,
                 spec.shared.has_bias, spec.shared.slot_weight, spec.latent.has_norm,
                 spec.latent.norm_epsilon);
}

int64_t hash_of_quant(const MoeSpec& spec) {
  const QuantSpec& quant = spec.quant;
  return hash_of(quant.weights, quant.block_rows, quant.block_cols, quant.activations,
                 quant.power_of_two_scales, shared_weight_dtype(spec),
                 spec.residual.weight_dtype.value_or(spec.weight_dtype));
}

Fingerprint fingerprint(const LayerPlan& plan, int32_t rank_in_other_group) {
  const MoeSpec& spec = plan.spec;
  const ParallelSpec& parallel = plan.parallel;
  return {CONCLAVE_VERSION_MAJOR * 10000 + CONCLAVE_VERSION_MINOR * 100 + CONCLAVE_VERSION_PATCH,
          spec.num_experts,
          spec.top_k,
          spec.hidden_size,
          spec.intermediate_size,
          static_cast<int64_t>(spec.weight_dtype),
          hash_of_quant(spec),
          static_cast<int64_t>(spec.shared.mode),
          spec.shared.intermediate_size,
          spec.shared.count,
          spec.latent.size,
          spec.residual.intermediate_size,
          spec.num_zero_experts,
          hash_of_router(spec.router),
          hash_of_activations(spec),
          hash_of_sums(spec),
          plan.options.max_tokens,
          static_cast<int64_t>(plan.arithmetic),
          static_cast<int64_t>(plan.options.transport),
          static_cast<int64_t>(plan.options.ep_combine),
          static_cast<int64_t>(parallel.placement),
          hash_of_lists(parallel),
          parallel.num_redundant_experts,
          static_cast<int64_t>(parallel.reduce),
          parallel.ep_size,
          parallel.tp_size,
          rank_in_other_group};
}

void check_group(const Fingerprint& mine, Communicator& communicator) {
  std::vector<Fingerprint> all(static_cast<size_t>(communicator.size()));
  communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)),
                          kPhase);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (size_t field = 0; field < mine.size(); ++field) {
      if (all[rank][field] == mine[field]) continue;
      throw CommError(ErrorCode::kCommMismatch, static_cast<int32_t>(rank), kPhase,
                      std::string("ranks differ in ") + kFieldNames[field] + ": " +
                          std::to_string(all[rank][field]) + " there, " +
                          std::to_string(mine[field]) + " here");
    }
  }
}

bool exchanges_tokens(const LayerPlan& plan) {
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

}  // namespace

void check_ranks_agree(const LayerPlan& plan, Communicator* communicator) {
  if (exchanges_tokens(plan)) {
    check_group(fingerprint(plan, plan.parallel.tp_rank), *communicator);
  }
  if (plan.part.reduces()) {
    check_group(fingerprint(plan, plan.parallel.ep_rank), *plan.part.tensor_communicator);
  }
}

int64_t agree_on_chunks(int64_t tokens, const LayerPlan& plan, Communicator* communicator) {
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
