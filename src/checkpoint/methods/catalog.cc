#include "checkpoint/methods/methods.h"
#include "checkpoint/quantization_keys.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

// Keys of modules that stay as they are, as packages and as vLLM's configurations have them.
constexpr std::array kNotConverted = {std::string_view("modules_to_not_convert")};
constexpr std::array kFp8Kept = {std::string_view("ignored_layers"),
                                 std::string_view("modules_to_not_convert")};
constexpr std::array kIgnored = {std::string_view("ignore")};
constexpr std::array kModeloptKept = {std::string_view("exclude_modules"),
                                      std::string_view("ignore")};
constexpr std::array kRules = {std::string_view("dynamic")};
constexpr std::array kSkipped = {std::string_view("llm_int8_skip_modules")};
constexpr std::array kExcluded = {std::string_view("exclude")};

constexpr std::array kMethods = {
    Method{.name = "fp8",
           .read = read_fp4_experts,
           .experts = "fp4",
           .scale = "_scale_inv",
           .step = "activation_scale",
           .kept = kFp8Kept},
    Method{.name = "fp8",
           .read = read_fp8,
           .scale = "_scale_inv",
           .step = "activation_scale",
           .kept = kFp8Kept,
           .write = write_fp8},
    Method{.name = "compressed-tensors",
           .read = read_compressed_tensors,
           .kept = kIgnored,
           .write = write_compressed_tensors},
    Method{.name = "modelopt",
           .read = read_modelopt,
           .file = "hf_quant_config.json",
           .kept = kModeloptKept},
    Method{.name = "modelopt_fp4", .read = read_modelopt, .kept = kModeloptKept},
    Method{.name = "modelopt_mxfp8", .read = read_modelopt, .kept = kModeloptKept},
    Method{.name = "gptq",
           .read = read_gptq,
           .file = "quantize_config.json",
           .kept = kRules,
           .write = write_gptq},
    Method{.name = "awq",
           .read = read_awq,
           .file = "quant_config.json",
           .kept = kNotConverted,
           .write = write_awq},
    Method{.name = "auto-round", .read = read_auto_round, .kept = kRules},
    Method{.name = "mxfp4", .read = read_mxfp4, .kept = kNotConverted, .write = write_mxfp4},
    Method{.name = "bitsandbytes",
           .read = read_bitsandbytes,
           .kept = kSkipped,
           .write = write_bitsandbytes},
    Method{.name = "quark", .read = read_quark, .kept = kExcluded},
    Method{.name = "mlx",
           .read = read_mlx,
           .wrote = wrote_mlx,
           .write = write_mlx,
           .own_key = kMlxKey},
};

}  // namespace

std::span<const Method> known_methods() { return kMethods; }

const Method* find_method(std::string_view name) {
  const auto* const found = std::ranges::find(kMethods, name, &Method::name);
  return found == kMethods.end() ? nullptr : found;
}

}  // namespace conclave::inline v0::checkpoint
