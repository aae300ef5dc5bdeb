#include "cpu/isa.h"

#include "cpu/cpuid.h"
#include "support/f16c.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>

namespace conclave::cpu {
namespace {

constexpr std::array kAllIsas = {Isa::kScalar,     Isa::kAvx2,       Isa::kAvx512,
                                 Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAmx};

constexpr uint64_t kAllRegisters = 0x600e7;

CpuidWords cpu_with(std::initializer_list<std::string_view> names, uint64_t xcr0) {
  CpuidWords words{.xcr0 = xcr0};
  for (const std::string_view name : names) {
    bool known = false;
    for (const Feature& feature : features()) {
      if (feature.name != name) continue;
      words.*feature.word |= 1U << feature.bit;
      known = true;
    }
    EXPECT_TRUE(known) << name;
  }
  return words;
}

CpuidWords full_cpu(uint64_t xcr0) {
  CpuidWords words{.xcr0 = xcr0};
  for (const Feature& feature : features()) words.*feature.word |= 1U << feature.bit;
  return words;
}

CpuidWords without(CpuidWords words, std::string_view name) {
  for (const Feature& feature : features()) {
    if (feature.name == name) words.*feature.word &= ~(1U << feature.bit);
  }
  return words;
}

TEST(IsaNames, EveryIsa_RoundTrips) {
  for (const Isa isa : kAllIsas) EXPECT_EQ(parse_isa(to_string(isa)), isa);
}

TEST(IsaNames, UnknownName_ListsTheKnown) {
  try {
    parse_isa("avx1024");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnknownName);
    EXPECT_EQ(error.detail().found, "avx1024");
    EXPECT_EQ(error.detail().expected,
              "one of scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx");
  }
}

TEST(ArithmeticNames, EveryArithmetic_RoundTrips) {
  for (const Arithmetic a :
       {Arithmetic::kF32Fma, Arithmetic::kDpBf16, Arithmetic::kAmxBf16, Arithmetic::kInt8Dot}) {
    EXPECT_EQ(parse_arithmetic(to_string(a)), a);
  }
  EXPECT_THROW(parse_arithmetic("f64"), Error);
  EXPECT_THROW(parse_arithmetic(""), Error);
}

TEST(Offered, CpuAndOsWithEverything_OffersAll) {
  for (const Isa isa : kAllIsas) EXPECT_TRUE(offered(full_cpu(kAllRegisters), isa));
}

TEST(Offered, PlainX86_OffersScalarOnly) {
  EXPECT_TRUE(offered({}, Isa::kScalar));
  EXPECT_EQ(offered({}, Isa::kAvx2).reason(), "CPU lacks avx");
}

TEST(Offered, EachMissingFeature_IsNamed) {
  struct Case {
    std::string_view missing;
    Isa isa;
    Isa still;
  };
  const std::array cases = {
      Case{"avx2", Isa::kAvx2, Isa::kScalar},
      Case{"fma", Isa::kAvx2, Isa::kScalar},
      Case{"f16c", Isa::kAvx2, Isa::kScalar},
      Case{"avx512f", Isa::kAvx512, Isa::kAvx2},
      Case{"avx512bw", Isa::kAvx512, Isa::kAvx2},
      Case{"avx512vl", Isa::kAvx512, Isa::kAvx2},
      Case{"avx512dq", Isa::kAvx512, Isa::kAvx2},
      Case{"avx512_vnni", Isa::kAvx512Vnni, Isa::kAvx512},
      Case{"avx512_bf16", Isa::kAvx512Bf16, Isa::kAvx512Vnni},
      Case{"amx_tile", Isa::kAmx, Isa::kAvx512Bf16},
      Case{"amx_bf16", Isa::kAmx, Isa::kAvx512Bf16},
      Case{"amx_int8", Isa::kAmx, Isa::kAvx512Bf16},
      Case{"avx512_vbmi", Isa::kAmx, Isa::kAvx512Bf16},
  };
  for (const Case& c : cases) {
    const CpuidWords words = without(full_cpu(kAllRegisters), c.missing);
    const std::string reason = "CPU lacks " + std::string(c.missing);
    EXPECT_EQ(offered(words, c.isa).reason(), reason);
    EXPECT_EQ(offered(words, Isa::kAmx).reason(), reason) << "each includes the ones before it";
    EXPECT_TRUE(offered(words, c.still)) << c.missing;
    EXPECT_EQ(static_cast<bool>(offers_byte_permutes(words)), c.missing != "avx512_vbmi");
  }
}

// CPUs with AVX-512 may lack it, and CPUs without may have it.
TEST(Offered, AvxVnni_DependsOnNoOtherSet) {
  EXPECT_TRUE(offers_avx_vnni(full_cpu(kAllRegisters)));
  EXPECT_TRUE(offers_avx_vnni(cpu_with({"avx", "avx2", "fma", "f16c", "avx_vnni"}, 0x7)));
  const CpuidWords lacking = without(full_cpu(kAllRegisters), "avx_vnni");
  EXPECT_EQ(offers_avx_vnni(lacking).reason(), "CPU lacks avx_vnni");
  EXPECT_TRUE(offered(lacking, Isa::kAmx));
  EXPECT_EQ(offers_avx_vnni(full_cpu(0)).reason(), "the OS does not save AVX registers");
}

TEST(Offered, OsThatSavesNoZmm_SaysSo) {
  const CpuidWords words = full_cpu(0x7);
  EXPECT_TRUE(offered(words, Isa::kAvx2));
  EXPECT_EQ(offered(words, Isa::kAvx512).reason(), "the OS does not save AVX-512 registers");
}

TEST(Offered, OsThatSavesHalfOfZmm_SaysSo) { EXPECT_FALSE(offered(full_cpu(0x67), Isa::kAvx512)); }

TEST(Offered, OsThatSavesNoTiles_SaysSo) {
  const CpuidWords words = full_cpu(0xe7);
  EXPECT_TRUE(offered(words, Isa::kAvx512Bf16));
  EXPECT_EQ(offered(words, Isa::kAmx).reason(), "the OS does not save AMX tile registers");
}

TEST(Offered, OsWithoutXsave_SaysSo) {
  const CpuidWords words = cpu_with({"avx", "avx2", "fma", "f16c"}, 0);
  EXPECT_EQ(offered(words, Isa::kAvx2).reason(), "the OS does not save AVX registers");
}

TEST(Usable, ThisMachine_IsAscending) {
  EXPECT_TRUE(usable(Isa::kScalar));
  bool before = true;
  for (const Isa isa : kAllIsas) {
    const Support support = usable(isa);
    EXPECT_TRUE(before || !support) << to_string(isa);
    EXPECT_EQ(support.reason().empty(), static_cast<bool>(support));
    before = static_cast<bool>(support);
  }
  EXPECT_TRUE(usable(best_isa()));
}

TEST(Usable, ThisMachine_AgreesWithTheCompiler) {
  EXPECT_EQ(static_cast<bool>(usable(Isa::kAvx2)), __builtin_cpu_supports("avx2") != 0 &&
                                                       __builtin_cpu_supports("fma") != 0 &&
                                                       testing::machine_has_f16c());
  EXPECT_EQ(static_cast<bool>(usable(Isa::kAvx512)),
            __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0);
}

TEST(RequestTiles, ThisMachine_GrantsOrSaysWhyNot) {
  const Support support = request_tiles();
  if (usable(Isa::kAmx)) {
    EXPECT_TRUE(support);
  } else if (!support) {
    EXPECT_TRUE(support.reason().starts_with("Linux refused the AMX tile permission (arch_prctl: "))
        << support.reason();
  }
}

TEST(DecodeSignature, KnownCpus_GiveFamilyAndModel) {
  struct Case {
    uint32_t eax;
    int32_t family, model, stepping;
  };
  for (const Case& c : {
           Case{0x000c06f2, 6, 207, 2},  // Emerald Rapids
           Case{0x000806f8, 6, 143, 8},  // Sapphire Rapids
           Case{0x0005065b, 6, 85, 11},  // Cooper Lake
           Case{0x00a10f11, 25, 17, 1},  // Zen 4 EPYC
           Case{0x00b00f21, 26, 2, 1},   // Zen 5 EPYC
           Case{0x00000f4a, 15, 4, 10},  // NetBurst: base family 15 without extension
       }) {
    const CpuIdentity identity = decode_signature(c.eax);
    EXPECT_EQ(identity.family, c.family) << std::hex << c.eax;
    EXPECT_EQ(identity.model, c.model) << std::hex << c.eax;
    EXPECT_EQ(identity.stepping, c.stepping) << std::hex << c.eax;
  }
}

TEST(ChooseArithmetic, CpusOfTheTable_GetTheirRow) {
  struct Case {
    CpuId cpu;
    Isa isa;
    Arithmetic expected;
    std::string_view row;
  };
  const CpuId sapphire{"GenuineIntel", 6, 143};
  const CpuId emerald{"GenuineIntel", 6, 207};
  const CpuId granite{"GenuineIntel", 6, 173};
  const CpuId virtual_cpu{"GenuineIntel", 6, 167};
  const CpuId later_family{"GenuineIntel", 19, 1};
  const CpuId model85{"GenuineIntel", 6, 85};
  const CpuId zen4{"AuthenticAMD", 25, 17};
  const CpuId zen4_desktop{"AuthenticAMD", 25, 97};
  const CpuId bergamo{"AuthenticAMD", 25, 160};
  const CpuId zen5{"AuthenticAMD", 26, 2};
  for (const Case& c : {
           Case{sapphire, Isa::kAmx, Arithmetic::kAmxBf16, "CPU with AMX"},
           Case{emerald, Isa::kAmx, Arithmetic::kAmxBf16, "CPU with AMX"},
           Case{granite, Isa::kAmx, Arithmetic::kAmxBf16, "CPU with AMX"},
           Case{virtual_cpu, Isa::kAmx, Arithmetic::kAmxBf16, "CPU with AMX"},
           Case{later_family, Isa::kAmx, Arithmetic::kAmxBf16, "CPU with AMX"},
           Case{sapphire, Isa::kAvx512Bf16, Arithmetic::kF32Fma, "Sapphire Rapids without AMX"},
           Case{emerald, Isa::kAvx512Bf16, Arithmetic::kF32Fma, "Emerald Rapids without AMX"},
           Case{granite, Isa::kAvx512Bf16, Arithmetic::kF32Fma, "Granite Rapids without AMX"},
           Case{model85, Isa::kAvx512Bf16, Arithmetic::kDpBf16, "Cooper Lake"},
           Case{zen4, Isa::kAvx512Bf16, Arithmetic::kDpBf16, "Zen 4"},
           Case{zen4_desktop, Isa::kAvx512Bf16, Arithmetic::kDpBf16, "Zen 4"},
           Case{bergamo, Isa::kAvx512Bf16, Arithmetic::kDpBf16, "Zen 4"},
           Case{zen5, Isa::kAvx512Bf16, Arithmetic::kDpBf16, "Zen 5"},
       }) {
    const ArithmeticChoice choice = choose_arithmetic(c.cpu, c.isa);
    EXPECT_EQ(choice.arithmetic, c.expected) << c.row;
    EXPECT_TRUE(choice.reason.starts_with(c.row)) << choice.reason;
  }
}

TEST(ChooseArithmetic, InstructionSetWithoutBf16_Widens) {
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    for (const CpuId& cpu : {CpuId{"AuthenticAMD", 26, 2}, CpuId{"GenuineIntel", 6, 207}}) {
      EXPECT_EQ(choose_arithmetic(cpu, isa).arithmetic, Arithmetic::kF32Fma);
      EXPECT_FALSE(choose_arithmetic(cpu, isa).reason.empty());
    }
  }
}

TEST(ChooseArithmetic, UnknownCpu_WidensAndSaysWhy) {
  for (const CpuId& cpu :
       {CpuId{"GenuineIntel", 6, 250}, CpuId{"AuthenticAMD", 25, 1}, CpuId{"AuthenticAMD", 6, 207},
        CpuId{"GenuineIntel", 26, 2}, CpuId{"CentaurHauls", 7, 1}, CpuId{}}) {
    const ArithmeticChoice choice = choose_arithmetic(cpu, Isa::kAvx512Bf16);
    EXPECT_EQ(choice.arithmetic, Arithmetic::kF32Fma);
    EXPECT_TRUE(choice.reason.starts_with("CPU not in the table")) << choice.reason;
  }
}

TEST(ChooseArithmetic, EveryChoice_IsWithinTheInstructionSet) {
  for (const std::string_view vendor : {"GenuineIntel", "AuthenticAMD"}) {
    for (int32_t family = 0; family < 32; ++family) {
      for (int32_t model = 0; model < 256; ++model) {
        const CpuId cpu{vendor, family, model};
        EXPECT_NE(choose_arithmetic(cpu, Isa::kAvx512Bf16).arithmetic, Arithmetic::kAmxBf16);
        EXPECT_EQ(choose_arithmetic(cpu, Isa::kAvx512).arithmetic, Arithmetic::kF32Fma);
      }
    }
  }
}

TEST(FetchInstructions, DependOnTheCpuAlone) {
  EXPECT_TRUE(
      fetch_instructions_speed_streams({.vendor = "GenuineIntel", .family = 6, .model = 207}));
  EXPECT_FALSE(
      fetch_instructions_speed_streams({.vendor = "AuthenticAMD", .family = 26, .model = 2}));
  EXPECT_FALSE(fetch_instructions_speed_streams({.vendor = "Unknown"}));
}

TEST(ChooseIntegerArithmetic, DotProductsOfBytes_AreTakenWhereTheyExist) {
  for (const Isa isa : {Isa::kScalar, Isa::kAvx512}) {
    EXPECT_EQ(choose_integer_arithmetic(isa).arithmetic, Arithmetic::kF32Fma);
    EXPECT_FALSE(choose_integer_arithmetic(isa).reason.empty());
  }
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAmx}) {
    EXPECT_EQ(choose_integer_arithmetic(isa).arithmetic, Arithmetic::kInt8Dot);
    EXPECT_FALSE(choose_integer_arithmetic(isa).reason.empty());
  }
}

}  // namespace
}  // namespace conclave::cpu
