// Methods that are known by name and not read, with what stands against it.
#include "checkpoint/methods/method.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

struct Unread {
  std::string_view name;
  std::string_view reason;
  std::string_view kernel_order = {};
};
constexpr std::string_view kTiles = "weights in the tile order of its kernels";
constexpr std::array kUnread = {
    Unread{"aqlm", "additive codebooks of several vectors each"},
    Unread{"bitblas", kTiles, "bitblas"},
    Unread{"bitnet", "ternary weights with a packing of their own"},
    Unread{"eetq", "int8 weights in the tile order of its kernels"},
    Unread{"exl2", "rows of mixed widths in the tile order of its kernels"},
    Unread{"exl3", "trellis codes of rotated weights"},
    Unread{"fbgemm_fp8", "e4m3 with bounds on rows"},
    Unread{"fp_quant", "weights under Hadamard transforms"},
    Unread{"gptq_bitblas", kTiles, "bitblas"},
    Unread{"gptq_marlin_24", kTiles, "marlin's for 2:4 sparse weights"},
    Unread{"higgs", "vector codebooks under Hadamard transforms"},
    Unread{"hqq", "scales and zero points along an axis of its choice"},
    Unread{"marlin", kTiles, "marlin"},
    Unread{"quanto", "subclasses of tensors, each with a packing of its own"},
    Unread{"quip", "lattice codebooks under Hadamard transforms"},
    Unread{"sinq", "scales along both axes"},
    Unread{"spqr", "sparse outliers beside codes of two levels"},
    Unread{"torchao", "subclasses of tensors, each with a packing of its own"},
    Unread{"vptq", "codebooks of vectors"},
};

}  // namespace

NotRead unread_method(std::string_view name) {
  const auto* const found = std::ranges::find(kUnread, name, &Unread::name);
  if (found == kUnread.end()) return {};
  return {.reason = std::string(found->reason), .kernel_order = std::string(found->kernel_order)};
}

}  // namespace conclave::inline v0::checkpoint
