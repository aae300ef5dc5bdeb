#include "checkpoint/methods/methods.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kMethods = {
    Method{.name = "fp8",
           .read = read_fp4_experts,
           .experts = "fp4",
           .scale = "_scale_inv",
           .step = "activation_scale"},
    Method{.name = "fp8",
           .read = read_fp8,
           .scale = "_scale_inv",
           .step = "activation_scale",
           .write = write_fp8},
    Method{.name = "compressed-tensors",
           .read = read_compressed_tensors,
           .write = write_compressed_tensors},
    Method{.name = "modelopt", .read = read_modelopt, .file = "hf_quant_config.json"},
    Method{.name = "modelopt_fp4", .read = read_modelopt},
    Method{.name = "modelopt_mxfp8", .read = read_modelopt},
    Method{.name = "gptq", .read = read_gptq, .file = "quantize_config.json", .write = write_gptq},
    Method{.name = "awq", .read = read_awq, .file = "quant_config.json"},
    Method{.name = "auto-round", .read = read_auto_round},
    Method{.name = "mxfp4", .read = read_mxfp4, .write = write_mxfp4},
    Method{.name = "bitsandbytes", .read = read_bitsandbytes},
    Method{.name = "quark", .read = read_quark},
    Method{.name = "mlx", .read = read_mlx, .wrote = wrote_mlx},
};

}  // namespace

std::span<const Method> known_methods() { return kMethods; }

const Method* find_method(std::string_view name) {
  const auto* const found = std::ranges::find(kMethods, name, &Method::name);
  return found == kMethods.end() ? nullptr : found;
}

}  // namespace conclave::inline v0::checkpoint
