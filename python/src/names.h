// The words by which Python names enumerators.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/convert.h"
#include "conclave/layer.h"
#include "conclave/methods.h"
#include "conclave/quantise.h"
#include "conclave/refit.h"
#include "conclave/routing_record.h"
#include "conclave/spec.h"
#include "conclave/weights.h"

#include <span>
#include <string>
#include <string_view>

namespace conclave::python {

template <class Enum>
struct Word {
  std::string_view text;
  Enum value;
  std::string_view spelling;  // in the C++ interface: "IdPolicy::kSkip"
};

// Overloads for every enumeration of the spec and the options; `of` only selects among them.
std::span<const Word<RouterScore>> words(RouterScore of);
std::span<const Word<RouterOrder>> words(RouterOrder of);
std::span<const Word<GroupScore>> words(GroupScore of);
std::span<const Word<GroupMask>> words(GroupMask of);
std::span<const Word<Renormalize>> words(Renormalize of);
std::span<const Word<EpsilonMode>> words(EpsilonMode of);
std::span<const Word<SimulatedDistribution>> words(SimulatedDistribution of);
std::span<const Word<SharedMode>> words(SharedMode of);
std::span<const Word<WeightScale>> words(WeightScale of);
std::span<const Word<WeightZero>> words(WeightZero of);
std::span<const Word<ActivationScale>> words(ActivationScale of);
std::span<const Word<ScaleValues>> words(ScaleValues of);
std::span<const Word<RowScaleRule>> words(RowScaleRule of);
std::span<const Word<WeightOn>> words(WeightOn of);
std::span<const Word<PlacementStrategy>> words(PlacementStrategy of);
std::span<const Word<Reduce>> words(Reduce of);
std::span<const Word<IdPolicy>> words(IdPolicy of);
std::span<const Word<EpTransport>> words(EpTransport of);
std::span<const Word<EpCombine>> words(EpCombine of);
std::span<const Word<ChunkOrder>> words(ChunkOrder of);
std::span<const Word<Determinism>> words(Determinism of);
std::span<const Word<GateUpOrder>> words(GateUpOrder of);
std::span<const Word<ReloadMode>> words(ReloadMode of);
std::span<const Word<RefitMode>> words(RefitMode of);
std::span<const Word<WhenFull>> words(WhenFull of);
std::span<const Word<ExpertSet>> words(ExpertSet of);
std::span<const Word<ModelContainer>> words(ModelContainer of);
std::span<const Word<ScaleRule>> words(ScaleRule of);
std::span<const Word<WeightPlane>> words(WeightPlane of);
std::span<const Word<MethodTensor::Use>> words(MethodTensor::Use of);

// Throws Error(kUnknownName) naming the field and listing the words.
[[noreturn]] void throw_unknown_word(std::string_view field, std::string_view found,
                                     std::string_view known);

template <class Enum>
Enum parse_word(std::string_view field, std::string_view text) {
  std::string known;
  for (const Word<Enum>& word : words(Enum{})) {
    if (word.text == text) return word.value;
    known += (known.empty() ? "" : ", ") + std::string(word.text);
  }
  throw_unknown_word(field, text, known);
}

template <class Enum>
std::string_view word_of(Enum value) {
  for (const Word<Enum>& word : words(Enum{})) {
    if (word.value == value) return word.text;
  }
  return "?";
}

}  // namespace conclave::python
