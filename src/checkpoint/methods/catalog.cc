#include "checkpoint/methods/methods.h"

#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kMethods = {
    Method{.name = "fp8", .read = read_fp8},
    Method{.name = "compressed-tensors", .read = read_compressed_tensors},
    Method{.name = "modelopt", .read = read_modelopt, .file = "hf_quant_config.json"},
    Method{.name = "gptq", .read = read_gptq, .file = "quantize_config.json"},
    Method{.name = "awq", .read = read_awq, .file = "quant_config.json"},
};

}  // namespace

Catalog<Method> method_catalog() { return Catalog<Method>(kMethods); }

}  // namespace conclave::inline v0::checkpoint
