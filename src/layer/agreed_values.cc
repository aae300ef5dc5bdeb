#include "layer/agreed_values.h"

#include "conclave/error.h"

#include <array>
#include <bit>
#include <concepts>
#include <map>
#include <string>
#include <type_traits>

namespace conclave::inline v0 {
namespace {

constexpr const char* kPhase = "create: agree on the plan";
constexpr int64_t kVersion =
    CONCLAVE_VERSION_MAJOR * 10000 + CONCLAVE_VERSION_MINOR * 100 + CONCLAVE_VERSION_PATCH;

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
                 quant.activation_group, quant.activation_dtype.value_or(spec.weight_dtype),
                 quant.power_of_two_scales, quant.signed_scales, quant.zeros,
                 quant.has_global_scale, quant.has_column_order, quant.has_column_factors,
                 shared_weight_dtype(spec), spec.residual.weight_dtype.value_or(spec.weight_dtype));
}

[[noreturn]] void report(size_t rank, std::string_view name, int64_t theirs, int64_t mine) {
  throw CommError(ErrorCode::kCommMismatch, static_cast<int32_t>(rank), kPhase,
                  "ranks differ in " + std::string(name) + ": " + std::to_string(theirs) +
                      " there, " + std::to_string(mine) + " here");
}

template <class Entry>
std::vector<Entry> gather(std::span<const Entry> mine, Communicator& communicator) {
  std::vector<Entry> all(mine.size() * static_cast<size_t>(communicator.size()));
  communicator.all_gather(std::as_bytes(mine), std::as_writable_bytes(std::span(all)), kPhase);
  return all;
}

// Values can be compared in order only where all ranks list the same names.
void compare_lists(std::span<const AgreedValue> values, Communicator& communicator) {
  constexpr std::array<std::string_view, 3> kNames = {
      "the library version", "the number of values that they compare", "what they compare"};
  Hash names;
  for (const AgreedValue& value : values) names.add(value.name);
  const std::array<int64_t, kNames.size()> mine = {kVersion, static_cast<int64_t>(values.size()),
                                                   names.value()};
  const std::vector<int64_t> all = gather(std::span<const int64_t>(mine), communicator);
  for (size_t at = 0; at < all.size(); ++at) {
    const size_t field = at % mine.size();
    if (all[at] != mine[field]) report(at / mine.size(), kNames[field], all[at], mine[field]);
  }
}

}  // namespace

std::vector<AgreedValue> values_to_agree(const MoeSpec& spec, const LayerOptions& options,
                                         const ParallelSpec& parallel) {
  const auto number = [](auto choice) { return static_cast<int64_t>(choice); };
  return {{"num_experts", spec.num_experts},
          {"top_k", spec.top_k},
          {"hidden_size", spec.hidden_size},
          {"intermediate_size", spec.intermediate_size},
          {"weight_dtype", number(spec.weight_dtype)},
          {"quant, shared.weight_dtype or residual.weight_dtype", hash_of_quant(spec)},
          {"shared.mode", number(spec.shared.mode)},
          {"shared.intermediate_size", spec.shared.intermediate_size},
          {"shared.count", spec.shared.count},
          {"latent.size", spec.latent.size},
          {"residual.intermediate_size", spec.residual.intermediate_size},
          {"num_zero_experts", spec.num_zero_experts},
          {"router", hash_of_router(spec.router)},
          {"the activation of an expert", hash_of_activations(spec)},
          {"how parts are weighed and added", hash_of_sums(spec)},
          {"max_tokens", options.max_tokens},
          {"id_policy", number(options.id_policy)},
          {"transport", number(options.transport)},
          {"ep_combine", number(options.ep_combine)},
          {"chunk_order", number(options.chunk_order)},
          {"placement", number(parallel.placement)},
          {"rank_of or replica_of", hash_of_lists(parallel)},
          {"num_redundant_experts", parallel.num_redundant_experts},
          {"reduce", number(parallel.reduce)},
          {"ep_size", parallel.ep_size},
          {"tp_size", parallel.tp_size}};
}

void compare_values(std::span<const AgreedValue> values, Communicator& communicator) {
  compare_lists(values, communicator);
  std::vector<int64_t> mine;
  for (const AgreedValue& value : values) mine.push_back(value.value);
  const std::vector<int64_t> all = gather(std::span<const int64_t>(mine), communicator);
  for (size_t at = 0; at < all.size(); ++at) {
    const size_t field = at % mine.size();
    if (all[at] != mine[field]) {
      report(at / mine.size(), values[field].name, all[at], mine[field]);
    }
  }
}

}  // namespace conclave::inline v0
