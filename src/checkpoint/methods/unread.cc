// Methods that are known by name and not read, with what stands against it.
#include "checkpoint/methods/method.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

struct Unread {
  std::string_view name;
  std::string_view reason;
};
constexpr std::array kUnread = {
    Unread{"aqlm", "additive codebooks of several vectors each"},
    Unread{"bitnet", "ternary weights with a packing of their own"},
    Unread{"eetq", "int8 weights in the tile order of its kernels"},
    Unread{"exl2", "rows of mixed widths in the tile order of its kernels"},
    Unread{"exl3", "trellis codes of rotated weights"},
    Unread{"fbgemm_fp8", "e4m3 with bounds on rows"},
    Unread{"fp_quant", "weights under Hadamard transforms"},
    Unread{"higgs", "vector codebooks under Hadamard transforms"},
    Unread{"hqq", "scales and zero points along an axis of its choice"},
    Unread{"marlin", "weights in the tile order of its kernels"},
    Unread{"quanto", "subclasses of tensors, each with a packing of its own"},
    Unread{"quip", "lattice codebooks under Hadamard transforms"},
    Unread{"sinq", "scales along both axes"},
    Unread{"spqr", "sparse outliers beside codes of two levels"},
    Unread{"torchao", "subclasses of tensors, each with a packing of its own"},
    Unread{"vptq", "codebooks of vectors"},
};

}  // namespace

std::string_view unread_method(std::string_view name) {
  const auto found = std::ranges::find(kUnread, name, &Unread::name);
  return found == kUnread.end() ? std::string_view() : found->reason;
}

}  // namespace conclave::inline v0::checkpoint
