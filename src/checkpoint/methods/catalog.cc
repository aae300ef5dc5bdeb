#include "checkpoint/methods/methods.h"

#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kMethods = {
    Method{.name = "fp8", .read = read_fp4_experts, .experts = "fp4"},
    Method{.name = "fp8", .read = read_fp8},
    Method{.name = "compressed-tensors", .read = read_compressed_tensors},
    Method{.name = "modelopt", .read = read_modelopt, .file = "hf_quant_config.json"},
    Method{.name = "modelopt_fp4", .read = read_modelopt},
    Method{.name = "modelopt_mxfp8", .read = read_modelopt},
    Method{.name = "gptq", .read = read_gptq, .file = "quantize_config.json"},
    Method{.name = "awq", .read = read_awq, .file = "quant_config.json"},
    Method{.name = "auto-round", .read = read_auto_round},
    Method{.name = "mxfp4", .read = read_mxfp4},
    Method{.name = "bitsandbytes", .read = read_bitsandbytes},
    Method{.name = "quark", .read = read_quark},
    Method{.name = "mlx", .read = read_mlx, .wrote = wrote_mlx},
};

}  // namespace

std::span<const Method> known_methods() { return kMethods; }

}  // namespace conclave::inline v0::checkpoint
