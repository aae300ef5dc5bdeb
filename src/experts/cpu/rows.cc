#include "experts/cpu/rows.h"

#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "cpu/isa.h"
#include "experts/cpu/expert_mlp.h"
#include "quant/activation_rows.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::experts {
namespace {

Support needs_isa(const ExpertsProblem& problem, cpu::Isa isa) {
  if (problem.cpu().isa >= isa) return Support::yes();
  return Support::no("needs " + std::string(cpu::to_string(isa)) + "; allowed is " +
                     std::string(cpu::to_string(problem.cpu().isa)));
}

Support needs_known_weights(const ExpertsProblem& problem) {
  const quant::WeightFormat* format = quant::find_format(problem.weight_dtype);
  if (format == nullptr) {
    return Support::no("takes " + quant::known_formats(true) + " weights; found " +
                       std::string(to_string(problem.weight_dtype)));
  }
  if (format->codes == nullptr) return Support::yes();
  if (problem.quant.weights == WeightScale::kNone) {
    return Support::no(std::string(to_string(format->element)) + " weights need scales");
  }
  return format->takes(problem.quant);
}

// Only bf16 weights must have the arithmetic that was asked for: others are widened to float32 by
// any row that comes to them.
Support needs_f32_arithmetic(const ExpertsProblem& problem, cpu::Isa isa) {
  if (Support weights = needs_known_weights(problem); !weights) return weights;
  if (problem.weight_dtype == DType::kBF16 &&
      problem.cpu().arithmetic != cpu::Arithmetic::kF32Fma) {
    return Support::no("computes f32_fma; asked for " +
                       std::string(cpu::to_string(problem.cpu().arithmetic)));
  }
  return needs_isa(problem, isa);
}

Support needs_bf16_weights(const ExpertsProblem& problem) {
  if (problem.weight_dtype == DType::kBF16) return Support::yes();
  return Support::no("takes BF16 weights; found " + std::string(to_string(problem.weight_dtype)));
}

// Rows that become codes must do so in float32, and be exact in bf16.
Support needs_rows_for_pairs(const ExpertsProblem& problem) {
  const QuantSpec& quant = problem.quant;
  if (quant.activations == ActivationScale::kNone) {
    // Rows of bf16 would be rounded once more.
    return quant.has_column_factors ? Support::no("does not support column factors of plain rows")
                                    : Support::yes();
  }
  const quant::ActivationRule rule = quant::activation_rule(problem.weight_dtype, quant);
  if (rule.is_exact()) return Support::no("takes rows of whole numbers as int8_dot only");
  if (!rule.codes->exact_in_bf16) return Support::no("takes rows whose codes are exact in bf16");
  if (rule.form == ActivationScale::kGroup && rule.group % 2 != 0) {
    return Support::no("takes rows in pairs of columns that share a scale");
  }
  return Support::yes();
}

Support needs_paired_codes(const ExpertsProblem& problem) {
  if (Support weights = needs_known_weights(problem); !weights) return weights;
  if (!problem.cpu().permutes_bytes) return Support::no("needs avx512_vbmi to look codes up");
  const QuantSpec& quant = problem.quant;
  if (Support rows = needs_rows_for_pairs(problem); !rows) return rows;
  const bool may_part = quant.weights == WeightScale::kBlock && quant.block_cols % 2 != 0;
  if (may_part || quant.has_column_order) {
    return Support::no("takes codes in pairs of columns that share a scale");
  }
  // A zero point shared by many weights adds a common term, so rounding errors of the input
  // accumulate instead of cancelling.
  const bool has_small_groups = quant.weights == WeightScale::kBlock && quant.block_rows == 1;
  if (quant.zeros != WeightZero::kNone && !has_small_groups) {
    return Support::no("zero points must belong to groups within one row");
  }
  return Support::yes();
}

Support needs_whole_codes(const ExpertsProblem& problem) {
  if (Support weights = needs_known_weights(problem); !weights) return weights;
  if (problem.quant.activations == ActivationScale::kNone) {
    return Support::no("takes weights beside quantised rows");
  }
  if (problem.quant.has_column_factors) {
    return Support::no("does not support column factors");
  }
  if (!quant::activation_rule(problem.weight_dtype, problem.quant).is_exact()) {
    return Support::no("takes codes of weights and rows that are whole numbers; found " +
                       std::string(to_string(problem.weight_dtype)));
  }
  return Support::yes();
}

// Weights of bf16, or codes that become such. Plain parts beside quantised rows are computed in
// float32.
Support needs_weights_for_pairs(const ExpertsProblem& problem) {
  if (problem.is_beside_quantised_rows) return needs_known_weights(problem);
  return is_plain(problem.weight_dtype) ? needs_bf16_weights(problem) : needs_paired_codes(problem);
}

Support needs_arithmetic(const ExpertsProblem& problem, cpu::Arithmetic arithmetic, cpu::Isa isa) {
  if (problem.cpu().arithmetic != arithmetic) {
    return Support::no("computes " + std::string(cpu::to_string(arithmetic)) + "; asked for " +
                       std::string(cpu::to_string(problem.cpu().arithmetic)));
  }
  return needs_isa(problem, isa);
}

// Plain parts beside such experts are computed in float32.
Support needs_integers(const ExpertsProblem& problem, cpu::Isa isa) {
  Support weights =
      problem.is_beside_quantised_rows ? needs_known_weights(problem) : needs_whole_codes(problem);
  if (!weights) return weights;
  return needs_arithmetic(problem, cpu::Arithmetic::kInt8Dot, isa);
}

// Where scales end within the 32 columns of a tile, it is multiplied for each: one row is then
// slower than in float32.
Support needs_scales_of_tiles(const ExpertsProblem& problem) {
  constexpr int64_t kTileColumns = 32;
  const QuantSpec& quant = problem.quant;
  if (quant.activations == ActivationScale::kNone) return Support::yes();
  const bool ends_within =
      (quant.weights == WeightScale::kBlock && quant.block_cols < kTileColumns) ||
      (quant.activations == ActivationScale::kGroup && quant.activation_group < kTileColumns);
  return ends_within ? Support::no("takes quantised rows where 32 columns or more share scales")
                     : Support::yes();
}

// Rows that read a panel once are limited by memory: whether fetching ahead helps them depends on
// the CPU. With more rows per panel, the CPU's prefetcher would start on the next one too late.
// Decoding leaves no time to wait for codes, so that they are fetched on any CPU.
int64_t fetch_above(const ExpertsProblem& problem, int64_t rows_of_one_pass) {
  static const bool kAlways = cpu::fetch_instructions_speed_streams(cpu::cpu_id());
  return kAlways || !is_plain(problem.weight_dtype) ? 0 : rows_of_one_pass;
}

// Rows of bf16 that go past a panel together: as many as half of a second-level cache of 2 MiB
// holds, since each block reads all weights of its expert. Strips of decoded codes serve fewer.
int64_t rows_of_tile_block(const ExpertsProblem& problem) {
  constexpr int64_t kBlockBytes = 1 << 20;
  constexpr int64_t kMostRows = 256;
  constexpr int64_t kFewestRows = RowTiling{}.block;
  if (!is_plain(problem.weight_dtype)) return kFewestRows;
  const int64_t fitting = kBlockBytes / (problem.hidden_size * byte_size(DType::kBF16));
  return std::clamp(fitting, kFewestRows, kMostRows);
}

// The functions that `make` has for the types of gate and up, and of down.
template <class Make>
MlpFunctions of_matrices(const ExpertsProblem& problem, const Make& make) {
  const DType gate_up = gate_up_form(problem.weight_dtype, problem.quant).dtype;
  const DType down = down_form(problem.weight_dtype, problem.quant).dtype;
  MlpFunctions functions = make(gate_up);
  if (down != gate_up) functions.down_product = make(down).product;
  return functions;
}
// The same of functions that need nothing but the activation.
MlpFunctions of_matrices(const ExpertsProblem& problem,
                         MlpFunctions (*make)(DType, const activation::Activation&) noexcept) {
  return of_matrices(problem, [&](DType type) { return make(type, problem.activation); });
}
// Or the type of activated rows, too.
MlpFunctions of_matrices(const ExpertsProblem& problem,
                         MlpFunctions (*make)(DType, const activation::Activation&, DType) noexcept,
                         DType activated) {
  return of_matrices(problem,
                     [&](DType type) { return make(type, problem.activation, activated); });
}

// Config for products of whole numbers with 8 lanes.
ExpertMlpConfig narrow_config(const ExpertsProblem& problem, const MlpFunctions& functions) {
  return {.functions = functions,
          .tiling = {.tile = 6},
          .tile = "6x16",
          .fetch_above_rows = fetch_above(problem, 2)};
}

}  // namespace

Support amx_supports(const ExpertsProblem& problem) {
  if (Support weights = needs_weights_for_pairs(problem); !weights) return weights;
  if (Support scales = needs_scales_of_tiles(problem); !scales) return scales;
  return needs_arithmetic(problem, cpu::Arithmetic::kAmxBf16, cpu::Isa::kAmx);
}
std::unique_ptr<ExpertsKernel> make_amx(const ExpertsProblem& problem) {
  if (problem.is_beside_quantised_rows) return make_avx512(problem);
  const int64_t fetch_above_rows = fetch_above(problem, 16);
  if (problem.quant.activations != ActivationScale::kNone) {
    return make_expert_mlp(
        problem,
        coded_tile_config(of_matrices(problem, mlp_functions_amx, DType::kF32), fetch_above_rows));
  }
  return make_expert_mlp(problem,
                         tile_mlp_config(of_matrices(problem, mlp_functions_amx, DType::kBF16),
                                         fetch_above_rows, rows_of_tile_block(problem)));
}

Support avx512_bf16_supports(const ExpertsProblem& problem) {
  if (Support weights = needs_weights_for_pairs(problem); !weights) return weights;
  return needs_arithmetic(problem, cpu::Arithmetic::kDpBf16, cpu::Isa::kAvx512Bf16);
}
std::unique_ptr<ExpertsKernel> make_avx512_bf16(const ExpertsProblem& problem) {
  if (problem.is_beside_quantised_rows) return make_avx512(problem);
  const bool plain_rows = problem.quant.activations == ActivationScale::kNone;
  const DType row_dtype = plain_rows ? DType::kBF16 : DType::kF32;
  return make_expert_mlp(problem,
                         {.functions = of_matrices(problem, mlp_functions_avx512_bf16, row_dtype),
                          .row_dtype = row_dtype,
                          .code_dtype = DType::kBF16,
                          .tiling = {.tile = 6},
                          .tile = "6x64",
                          .fetch_above_rows = fetch_above(problem, 6)});
}

Support amx_int8_supports(const ExpertsProblem& problem) {
  return needs_integers(problem, cpu::Isa::kAmx);
}
std::unique_ptr<ExpertsKernel> make_amx_int8(const ExpertsProblem& problem) {
  if (is_plain(problem.weight_dtype)) return make_avx512(problem);
  return make_expert_mlp(problem, integer_tile_config(of_matrices(problem, mlp_functions_amx_int8),
                                                      fetch_above(problem, 6)));
}

Support avx512_vnni_supports(const ExpertsProblem& problem) {
  return needs_integers(problem, cpu::Isa::kAvx512Vnni);
}
std::unique_ptr<ExpertsKernel> make_avx512_vnni(const ExpertsProblem& problem) {
  if (is_plain(problem.weight_dtype)) return make_avx512(problem);
  return make_expert_mlp(problem, {.functions = of_matrices(problem, mlp_functions_avx512_vnni),
                                   .tiling = {.tile = 6},
                                   .tile = "6x64",
                                   .fetch_above_rows = fetch_above(problem, 6)});
}

Support avx_vnni_supports(const ExpertsProblem& problem) {
  if (Support integers = needs_integers(problem, cpu::Isa::kAvx2); !integers) return integers;
  return problem.cpu().has_avx_vnni ? Support::yes() : Support::no("CPU lacks avx_vnni");
}
std::unique_ptr<ExpertsKernel> make_avx_vnni(const ExpertsProblem& problem) {
  if (is_plain(problem.weight_dtype)) return make_avx2(problem);
  return make_expert_mlp(problem,
                         narrow_config(problem, of_matrices(problem, mlp_functions_avx_vnni)));
}

Support avx2_int8_supports(const ExpertsProblem& problem) {
  return needs_integers(problem, cpu::Isa::kAvx2);
}
std::unique_ptr<ExpertsKernel> make_avx2_int8(const ExpertsProblem& problem) {
  if (is_plain(problem.weight_dtype)) return make_avx2(problem);
  return make_expert_mlp(problem,
                         narrow_config(problem, of_matrices(problem, mlp_functions_avx2_int8)));
}

Support avx512_supports(const ExpertsProblem& problem) {
  return needs_f32_arithmetic(problem, cpu::Isa::kAvx512);
}
std::unique_ptr<ExpertsKernel> make_avx512(const ExpertsProblem& problem) {
  return make_expert_mlp(problem, {.functions = of_matrices(problem, mlp_functions_avx512),
                                   .tiling = {.tile = 6},
                                   .tile = "6x64",
                                   .fetch_above_rows = fetch_above(problem, 6)});
}

Support avx2_supports(const ExpertsProblem& problem) {
  return needs_f32_arithmetic(problem, cpu::Isa::kAvx2);
}
std::unique_ptr<ExpertsKernel> make_avx2(const ExpertsProblem& problem) {
  return make_expert_mlp(problem, {.functions = of_matrices(problem, mlp_functions_avx2),
                                   .tiling = {.tile = 6},
                                   .tile = "6x16",
                                   .fetch_above_rows = fetch_above(problem, 6)});
}

Support cpu_reference_supports(const ExpertsProblem& problem) {
  return needs_known_weights(problem);
}

}  // namespace conclave::inline v0::experts
