// Describes one MoE layer: sizes, router, activation, shared experts, and its split over ranks.
// Plain values: no call here keeps a pointer. Letters used in all docs: T tokens, E experts, Z zero
// experts, S shared experts, k choices per token, H hidden, I intermediate.
#pragma once

#include "conclave/dtype.h"
#include "conclave/version.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace conclave::inline v0 {

enum class RouterScore : uint8_t {
  kSoftmax,
  kSigmoid,
  kSqrtSoftplus,  // sqrt(log(1 + exp(l)))
  kNone,          // the logit itself
};
enum class RouterOrder : uint8_t {
  kScoreThenTopk,
  kTopkThenScore,  // the k highest logits; softmax then runs over the chosen ones only
};
enum class GroupScore : uint8_t { kMax, kTop2Sum };
// The value with which experts of a dropped group are compared. Some families published kZero: an
// excluded expert then beats a kept one of negative score.
enum class GroupMask : uint8_t { kNegInf, kZero };
enum class Renormalize : uint8_t {
  kNone,
  kSum,      // w / sum(w)
  kPNorm,    // w / (sum |w|^p)^(1/p)
  kSoftmax,  // softmax over the k chosen scores
};
enum class EpsilonMode : uint8_t {
  kAdd,       // divide by (norm + epsilon)
  kClampMin,  // divide by max(norm, epsilon)
};

// The gate reads g(x) = x / sqrt(mean(x^2) + epsilon) * weight * H^-0.5 instead of x, weight [H]
// from weights::kRouterInputScale (Gemma 4).
struct RouterInputNorm {
  bool enabled = false;
  double epsilon = 1e-6;
};

enum class SimulatedDistribution : uint8_t {
  kUniform,  // k distinct experts, all equally likely
  kNormal,   // logits drawn from N(0, 1) for each token
  kZipf,     // expert of rank r drawn with probability ~ (r + 1)^-exponent
  kReplay,   // rows of `replay_ids`, repeated
};

// Routing for load tests (router "simulated"), which reads no logits. The ids of a token depend
// only on the seed and the token's number; weights are 1 / k, or `replay_weights`.
struct SimulatedRouting {
  SimulatedDistribution distribution = SimulatedDistribution::kUniform;
  uint64_t seed = 0;
  double zipf_exponent = 1.0;
  std::vector<int32_t> replay_ids = {};    // [N, k] row-major, -1 to E - 1
  std::vector<float> replay_weights = {};  // [N, k], or empty
};

// The router, as values; docs/routing.md has every formula. `name` is a row of the router catalog
// (or of Context::add_router). A field that the rule does not read must keep its default.
// - "topk": logits l = x W^T (+ bias), soft cap, score, selection bias, group limit, the k best,
//   renormalise, scale.
// - "hash": ids = table[token id] (weights::kHashTable), weighed as in "topk"; no bias, no groups.
// - "top_any": of the k best those above "expert_threshold" of their expert, with equal weights.
// - "sparse_mixer": two choices from separate masked softmaxes (PhiMoE, arXiv 2409.12136); k = 2;
//   jitter_epsilon applies.
// - "softmax_threshold": the k best, without those whose share of the softmax is below
//   options["ratio"] of the best one's.
// - "sink_softmax": chosen by sigmoid(l) + selection bias; the weights are a softmax over
//   log-sigmoid of the k chosen and the S shared logits; the last S weigh the shared experts
//   (SharedMode::kRouterWeight); logits are [T, E + S].
// - "simulated": see SimulatedRouting.
struct RouterSpec {
  std::string name = "topk";
  RouterScore score = RouterScore::kSoftmax;
  RouterOrder order = RouterOrder::kScoreThenTopk;
  bool has_logit_bias = false;      // weights::kRouterBias: added to the product
  double soft_cap = 0;              // c > 0: l = c tanh(l / c)
  bool has_selection_bias = false;  // weights::kSelectionBias: chooses, never weighs

  int64_t num_groups = 1;   // E % num_groups == 0; above 1 only without zero experts
  int64_t topk_groups = 1;  // groups kept; k <= topk_groups * E / num_groups
  GroupScore group_score = GroupScore::kTop2Sum;  // needs two experts in a group
  GroupMask group_mask = GroupMask::kNegInf;

  Renormalize renormalize = Renormalize::kSum;
  double renormalize_p = 1;  // p of kPNorm
  double epsilon = 0;        // for kSum and kPNorm
  EpsilonMode epsilon_mode = EpsilonMode::kAdd;
  double scale = 1;               // multiplies every weight after renormalising
  bool has_expert_scale = false;  // weights::kExpertScale: multiplies its expert's weight
  bool has_global_scale = false;  // weights::kGlobalScale: multiplies every weight

  double jitter_epsilon = 0;  // for "sparse_mixer"; needed at inference
  int64_t vocab_size = 0;     // for "hash": rows of the table
  SimulatedRouting simulated = {};

  RouterInputNorm input_norm = {};
  // The layer's own gate rounds its float32 product (and the sum with the bias) to this type first,
  // as the model family's published code does; logits given by the caller are used as they are.
  DType logits_dtype = DType::kF32;
  // Scores are rounded to this type before they are compared, for families whose published code
  // computes them in it; the weights stay unrounded. Unused when logits choose
  // (RouterOrder::kTopkThenScore).
  DType score_dtype = DType::kF32;
  // Numbers that only this router reads, by name (docs/routing.md); those left out have its
  // defaults. A router of the application may be given any finite ones.
  std::map<std::string, double> options = {};
};

// `name` is a row of the activation list; g and u are the gate and up products with their biases:
//   "silu"              silu(g) u                       silu(g) = g sigmoid(g)
//   "gelu"              gelu(g) u                       exact, by erf
//   "gelu_tanh"         gelu_tanh(g) u                  tanh form
//   "swiglu_oai"        (clamp(u, -L, L) + beta) g' sigmoid(alpha g'), g' = min(g, L)
//   "silu_clamp_before" silu(min(g, L)) clamp(u, -L, L)
//   "silu_clamp_after"  min(silu(g), L) clamp(u, -L, L)
//   "situ"              beta tanh(g / beta) sigmoid(g) u', u' = lb tanh(u / lb), lb = linear_beta;
//                       u' = u where linear_beta = 0
// and without a gate, h being the one product: "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul",
// "relu2_no_mul" = max(h, 0)^2.
// Parameters are rounded to float32. Those that the formula reads lie in [0.001, 1e6], all others
// stay 0: MoeLayer::create throws Error(kInvalidArgument) naming the field, the value and the
// limit.
struct ActivationSpec {
  std::string name = "silu";
  double limit = 0;        // L of the clamped formulas; 0 in swiglu_oai: no clamp
  double alpha = 0;        // for swiglu_oai: 1.702 as published
  double beta = 0;         // for swiglu_oai (1) and situ (4)
  double linear_beta = 0;  // for situ (25), or 0
};
// True if the activation takes a gate and an up product; names that end in "_no_mul" take one.
CONCLAVE_API bool is_gated(const ActivationSpec& activation);

enum class SharedMode : uint8_t {
  kNone,
  kAdd,           // out = routed + shared(x)
  kSigmoidGate,   // out = routed + sigmoid(x . w) * shared(x), w = weights::kSharedExpertGate
  kAverage,       // out = (routed + shared(x)) / 2
  kSoftmaxMix,    // out = c0 routed + c1 shared(x), c = softmax(x W^T + b): weights::kMixGate
  kRouterWeight,  // out = routed + sum_i w_i shared_i(x), w from router "sink_softmax"
  kFusedSlots,    // shared expert i is slot k + i with id E + i and weight `slot_weight`; excludes
                  // zero experts, which would have the same ids
};

struct SharedExpertSpec {
  SharedMode mode = SharedMode::kNone;
  // Width of one shared expert. Checkpoints whose shared experts are simply added store them as one
  // expert of the summed width: count is then 1.
  int64_t intermediate_size = 0;
  int64_t count = 1;                         // S; above 1 only for kRouterWeight and kFusedSlots
  ActivationSpec activation = {.name = ""};  // empty: that of the routed experts
  bool has_bias = false;                     // WeightPlane::kBias of each shared matrix
  double slot_weight = 1;                    // for kFusedSlots
  // Type of the shared matrices; unset: MoeSpec::weight_dtype. A checkpoint of quantised experts
  // may leave the shared ones in f32, f16 or bf16. A type of codes is valid only if the routed
  // experts have it, under the same QuantSpec.
  std::optional<DType> weight_dtype = std::nullopt;
};

// Routed experts work on a projection: x -> down [Hl, H] -> experts on Hl -> weighted sum -> (rms
// norm) -> up [H, Hl]. Router and shared experts read the full x. The projections are float32
// products with weights::kLatentDown and kLatentUp.
struct LatentSpec {
  int64_t size = 0;  // Hl; 0: no projection
  // Normalises the weighted sum z: z / sqrt(mean(z^2) + norm_epsilon) * weight, with
  // weights::kLatentNorm [Hl] (Kimi-K3). It needs the whole sum: Error(kUnsupported) with
  // Reduce::kPartial over several ranks.
  bool has_norm = false;
  double norm_epsilon = 1e-6;
};

// A dense MLP beside the experts, on ForwardArgs::residual_input (or hidden): out += mlp(r).
struct ResidualMlpSpec {
  int64_t intermediate_size = 0;             // 0: none
  ActivationSpec activation = {.name = ""};  // empty: that of the routed experts
  // f32, f16 or bf16; unset: MoeSpec::weight_dtype, which must then be one of these.
  std::optional<DType> weight_dtype = std::nullopt;
};

// The part of a matrix of codes that shares one scale: w = code * scale unless WeightZero says
// more. Scales are a plane of their matrix, WeightPlane::kScale. docs/quantisation.md has the
// arithmetic.
enum class WeightScale : uint8_t {
  kNone,     // plain types: no scales
  kTensor,   // one per matrix (an expert's gate, up and down each have their own)
  kChannel,  // one per row of a matrix
  kBlock,    // one per block_rows x block_cols of a matrix; blocks at its ends may be partial
};
// A number is taken from codes, or from their products with scales. The numbers lie as the scales
// do, in the plane WeightPlane::kZero.
enum class WeightZero : uint8_t {
  kNone,
  kPoint,   // zero points: w = (code - zero) * scale
  kOffset,  // w = code * scale - zero, as in GGUF and MLX files
};
// What numbers of WeightPlane::kScale, or of WeightPlane::kZero, are for sure. Kernels may hold
// such numbers in fewer bytes; a layer refuses weights that have others.
enum class ScaleValues : uint8_t {
  kFloat,       // any float32
  kF16,         // float16 numbers
  kPowerOfTwo,  // 2^-127 to 2^127, as e8m0 has them
  kSteps,   // q t for q of -128 to 127, and a t for each 256 columns of a row, as in GGUF's K types
  kFloat8,  // numbers of e4m3, before a global scale multiplies them
};
// The type in which an expert's products read their input rows.
enum class ActivationScale : uint8_t {
  kNone,          // unchanged: only the weights are quantised
  kTensorStatic,  // codes of x / s; s is the largest WeightPlane::kInputScale of gate and up of any
                  // expert, for intermediate rows the largest of down
  kToken,         // codes of x / s, s = amax of the row / the largest code: 448, or 127
  kGroup,         // the same with an s for each QuantSpec::activation_group columns of the row
};
// How a scale of ActivationScale::kGroup is made of `amax`, the largest magnitude of its columns.
// Powers of two are those of e8m0, 2^-127 to 2^127; e is the exponent of the largest code.
enum class RowScaleRule : uint8_t {
  kQuotient,    // amax / the largest code, in float32
  kFloorPower,  // 2^(floor(log2(amax)) - e), as OCP Microscaling Formats 1.0 has it
  kEvenPower,   // the same, with amax rounded to as many mantissa bits as codes have first
  kHalfPower,   // the same, with amax rounded to one mantissa bit first
  kCeilPower,   // 2^(ceil(log2(amax)) - e): amax is rounded up to a power of two first
  // amax / the largest code / t, rounded to e4m3, times t ("nvfp4"). t is the largest
  // WeightPlane::kInputScale of gate and up of any expert, for intermediate rows that of down.
  kTwoLevel,
};
// Quantisation of the routed and shared experts' matrices, for a weight_dtype of codes
// (weight_forms() lists them). A row of zeros has the scale 1. Checkpoints that say "per tensor,
// dynamic" are kToken: a scale over the batch would make a token's result depend on the others.
// Codes of gate and up, or those of down, may be known to be less than another matrix of the layer
// asks for. On a CPU they are held as such, in less memory; a layer refuses weights that are
// otherwise.
struct MatrixCodes {
  std::optional<DType> dtype = std::nullopt;  // has fewer bits, and all of their values
  // Neighbouring columns that share scale and zero, a multiple of QuantSpec::block_cols for
  // WeightScale::kBlock with block_rows 1; 0: as many as that.
  int64_t block_cols = 0;
  bool has_zeros = true;  // false: all are 0
  // kFloat: those of the QuantSpec.
  ScaleValues scale_values = ScaleValues::kFloat;
  ScaleValues zero_values = ScaleValues::kFloat;

  friend bool operator==(const MatrixCodes&, const MatrixCodes&) = default;
};

struct QuantSpec {
  WeightScale weights = WeightScale::kNone;
  int64_t block_rows = 128;
  int64_t block_cols = 128;
  ActivationScale activations = ActivationScale::kNone;
  int64_t activation_group = 128;  // neighbouring columns of a row, for ActivationScale::kGroup
  // The type of the rows' codes; unset: kI8 beside integers, kF8E4M3 beside all others. kF8E4M3
  // goes beside integers, too, and kI8 beside all weights whose values are whole numbers of a unit;
  // with a scale rule but kQuotient any of kF8E4M3, kF8E5M2, kF6E2M3, kF6E3M2 and kF4.
  std::optional<DType> activation_dtype = std::nullopt;
  // Others are for ActivationScale::kGroup.
  RowScaleRule activation_scale_rule = RowScaleRule::kQuotient;
  bool power_of_two_scales = false;  // dynamic scales rounded up to a power of two ("ue8m0")
  bool signed_scales = false;        // scales of weights may be negative, as in GGUF files
  ScaleValues scale_values = ScaleValues::kFloat;
  WeightZero zeros = WeightZero::kNone;
  ScaleValues zero_values = ScaleValues::kFloat;  // for WeightZero::kOffset
  bool has_global_scale = false;  // every scale is multiplied with WeightPlane::kGlobalScale
  // Column c of a matrix belongs to the group WeightPlane::kColumnOrder[c] of columns, for
  // WeightScale::kBlock with block_rows 1 and rows that stay unchanged ("act-order").
  bool has_column_order = false;
  // Column c of the rows that a matrix multiplies is multiplied by WeightPlane::kColumnFactor[c]
  // first, in float32; where rows are quantised, before that ("pre_quant_scale").
  bool has_column_factors = false;
  MatrixCodes gate_up_codes = {};
  MatrixCodes down_codes = {};

  friend bool operator==(const QuantSpec&, const QuantSpec&) = default;
};

enum class WeightOn : uint8_t {
  kOutput,
  kInput,  // each expert reads w x with its own w, biases unscaled; excludes fused slots
};

struct MoeSpec {
  int64_t num_experts = 0;        // E, over all ranks
  int64_t top_k = 0;              // k, 1 <= k <= E + Z
  int64_t hidden_size = 0;        // H
  int64_t intermediate_size = 0;  // I
  DType weight_dtype = DType::kBF16;
  QuantSpec quant;  // for a weight_dtype of codes
  RouterSpec router;
  ActivationSpec activation;
  SharedExpertSpec shared;
  bool has_gate = true;  // the layer owns a gate, weights::kRouter [num_logits(spec), H]

  bool has_bias = false;         // gate and up [I] and down [H] of every expert have a bias
  bool has_output_bias = false;  // weights::kOutputBias [H], added once to the routed sum
  // Z: ids E..E+Z-1 are identity experts, out += w x. They have logits and a selection bias.
  int64_t num_zero_experts = 0;
  WeightOn weight_on = WeightOn::kOutput;
  double output_scale = 1;  // multiplies the routed sum (not shared experts nor output bias)
  LatentSpec latent;
  ResidualMlpSpec residual;
};

// Columns of the logits: E + Z, plus S for "sink_softmax".
CONCLAVE_API int64_t num_logits(const MoeSpec& spec);
// Slots per token in ids and weights as captured: k, plus S for SharedMode::kFusedSlots.
CONCLAVE_API int64_t num_slots(const MoeSpec& spec);
// The type of the shared experts' matrices.
CONCLAVE_API DType shared_weight_dtype(const MoeSpec& spec);
// The activation type of a model with these weights: that of the weights, or bf16 for codes.
CONCLAVE_API DType natural_row_dtype(const MoeSpec& spec);
// The width that routed experts work on: H, or the latent size.
CONCLAVE_API int64_t expert_width(const MoeSpec& spec);

// The map from experts to ranks. kLinear: contiguous ranges, the first E % ranks ranks hold one
// more. kRoundRobin: expert e on rank e % ranks. kCustom: ParallelSpec::rank_of names the rank.
enum class PlacementStrategy : uint8_t { kLinear, kRoundRobin, kCustom };

// Says who adds up the parts of a result that lie on several ranks.
enum class Reduce : uint8_t {
  kFull,     // the layer: out is complete on every rank
  kPartial,  // the caller: out is this rank's part, and their sum over ranks is the result. Shared
             // experts, residual MLP and output bias, unless split, are in the part of rank 0 only
};

// The split of a layer. Expert parallelism (ep) gives whole experts to ranks, each with tokens of
// its own; tensor parallelism (tp) gives every rank a slice of each expert's intermediate columns
// and the same tokens. With both, ranks of equal tp_rank form the communicator of
// ContextOptions::communicator, ranks of equal ep_rank that of tensor_communicator.
struct ParallelSpec {
  int32_t ep_size = 1;
  int32_t ep_rank = 0;
  PlacementStrategy placement = PlacementStrategy::kLinear;
  // [E + R], for kCustom: the rank of each physical expert. An expert of rank -1 is on no rank and
  // its slots contribute nothing (Reduce::kPartial only).
  std::vector<int32_t> rank_of = {};
  // R more physical experts, replicas of logical ones: physical p < E is expert p, p >= E is
  // replica_of[p - E], by default (p - E) % E. Placement then counts physical experts.
  int32_t num_redundant_experts = 0;
  std::vector<int32_t> replica_of = {};  // [R], or empty
  int32_t tp_size = 1;
  int32_t tp_rank = 0;
  Reduce reduce = Reduce::kFull;

  // An engine's groups, from which flatten derives the split of its MoE layers.
  struct Groups {
    int32_t tp_size = 1, tp_rank = 0;    // tensor parallel
    int32_t pcp_size = 1, pcp_rank = 0;  // prefill context parallel
    int32_t dp_size = 1, dp_rank = 0;    // data parallel
    bool expert_parallel = false;        // whole experts per rank instead of slices
    bool sequence_parallel = false;      // tokens of a tensor group are split over its ranks
  };
  // The flattened size is dp * pcp * tp and the rank (dp_rank * pcp + pcp_rank) * tp + tp_rank;
  // with expert_parallel and a size above 1 they become those of ep, otherwise of tp.
  // Throws Error(kInvalidArgument) for a rank outside its group, Error(kSizeOverflow) for more than
  // 2^31 - 1 ranks.
  CONCLAVE_API static ParallelSpec flatten(const Groups& groups);
};
// True if ranks must exchange tokens: they are expert parallel, and tokens differ between ranks
// (dp > 1, pcp > 1 or sequence parallel). Throws as flatten.
CONCLAVE_API bool needs_all_to_all(const ParallelSpec::Groups& groups);

// Throw Error(kInvalidArgument; kDType for a type) naming the field, the value and the limit. Names
// of routers and activations are looked up by MoeLayer::create.
CONCLAVE_API void validate(const MoeSpec& spec);
// The same layer with rows in int8 that had been left as they are: groups of 32 columns with
// s = amax / 127, as llama.cpp has them (Q8_0). docs/numerics.md says what that costs in accuracy.
// Throws Error(kInvalidArgument) for weights other than int8, int4 and e2m1, zeros, column orders,
// and rows that are quantised already.
CONCLAVE_API MoeSpec with_int8_rows(const MoeSpec& spec);
// The same layer with rows as they are, whether or not the spec quantises them.
CONCLAVE_API MoeSpec with_plain_rows(const MoeSpec& spec);
CONCLAVE_API void validate(const ParallelSpec& parallel);

// Weight elements of one layer, over all ranks and in every role but the hash table, the bias of
// the mix gate and the scales of quantised matrices; `active` counts those that one token uses.
struct ParameterCount {
  int64_t total = 0;
  int64_t active = 0;
};
// Throws as validate, and Error(kSizeOverflow).
CONCLAVE_API ParameterCount count_parameters(const MoeSpec& spec);

}  // namespace conclave::inline v0
