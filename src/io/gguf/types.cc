#include "io/gguf/types.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace conclave::inline v0::io {
namespace {

// Q8_1, of id 9, is no type of a file: it holds rows while a product runs, and readers disagree
// about its size (36 bytes in ggml, 40 in gguf-py).
constexpr std::array kTypes = {
    GgufType{0, "F32", 1, 4},         GgufType{1, "F16", 1, 2},
    GgufType{2, "Q4_0", 32, 18},      GgufType{3, "Q4_1", 32, 20},
    GgufType{6, "Q5_0", 32, 22},      GgufType{7, "Q5_1", 32, 24},
    GgufType{8, "Q8_0", 32, 34},      GgufType{10, "Q2_K", 256, 84},
    GgufType{11, "Q3_K", 256, 110},   GgufType{12, "Q4_K", 256, 144},
    GgufType{13, "Q5_K", 256, 176},   GgufType{14, "Q6_K", 256, 210},
    GgufType{15, "Q8_K", 256, 292},   GgufType{16, "IQ2_XXS", 256, 66},
    GgufType{17, "IQ2_XS", 256, 74},  GgufType{18, "IQ3_XXS", 256, 98},
    GgufType{19, "IQ1_S", 256, 50},   GgufType{20, "IQ4_NL", 32, 18},
    GgufType{21, "IQ3_S", 256, 110},  GgufType{22, "IQ2_S", 256, 82},
    GgufType{23, "IQ4_XS", 256, 136}, GgufType{24, "I8", 1, 1},
    GgufType{25, "I16", 1, 2},        GgufType{26, "I32", 1, 4},
    GgufType{27, "I64", 1, 8},        GgufType{28, "F64", 1, 8},
    GgufType{29, "IQ1_M", 256, 56},   GgufType{30, "BF16", 1, 2},
    GgufType{34, "TQ1_0", 256, 54},   GgufType{35, "TQ2_0", 256, 66},
    GgufType{39, "MXFP4", 32, 17},    GgufType{40, "NVFP4", 64, 36},
    GgufType{41, "Q1_0", 128, 18},    GgufType{42, "Q2_0", 64, 18},
};
static_assert(std::is_sorted(kTypes.begin(), kTypes.end(),
                             [](const GgufType& a, const GgufType& b) { return a.id < b.id; }));

constexpr std::array<std::pair<uint32_t, std::string_view>, 8> kRemoved = {{
    {4, "Q4_2"},
    {5, "Q4_3"},
    {31, "Q4_0_4_4"},
    {32, "Q4_0_4_8"},
    {33, "Q4_0_8_8"},
    {36, "IQ4_NL_4_4"},
    {37, "IQ4_NL_4_8"},
    {38, "IQ4_NL_8_8"},
}};

}  // namespace

const GgufType* find_gguf_type(uint32_t id) noexcept {
  const auto at =
      std::lower_bound(kTypes.begin(), kTypes.end(), id,
                       [](const GgufType& type, uint32_t wanted) { return type.id < wanted; });
  return at != kTypes.end() && at->id == id ? &*at : nullptr;
}

const GgufType* find_gguf_type(std::string_view name) noexcept {
  const auto* at = std::ranges::find(kTypes, name, &GgufType::name);
  return at != kTypes.end() ? at : nullptr;
}

std::string_view removed_gguf_type(uint32_t id) noexcept {
  const auto* at = std::find_if(kRemoved.begin(), kRemoved.end(),
                                [id](const auto& removed) { return removed.first == id; });
  return at != kRemoved.end() ? at->second : std::string_view();
}

}  // namespace conclave::inline v0::io
