#include "capi/wording.h"

#include "capi/words.h"

#include <array>
#include <optional>

namespace conclave::inline v0::capi {
namespace {

constexpr bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
constexpr bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
constexpr bool is_of_a_name(char c) {
  return is_upper(c) || is_lower(c) || (c >= '0' && c <= '9') || c == '_' || c == ':';
}

template <class... Enums>
std::optional<std::string_view> word_of_any(std::string_view spelling) {
  std::optional<std::string_view> found;
  const auto look = [&](const auto& words) {
    for (const auto& word : words) {
      if (word.spelling == spelling) found = word.text;
    }
  };
  (look(kWords<Enums>), ...);
  return found;
}

std::optional<std::string_view> find_word(std::string_view spelling) {
  return word_of_any<RouterScore, RouterOrder, GroupScore, GroupMask, Renormalize, EpsilonMode,
                     SimulatedDistribution, SharedMode, WeightScale, WeightZero, ActivationScale,
                     ScaleValues, RowScaleRule, WeightOn>(spelling);
}

// "ID_POLICY" of "IdPolicy".
std::string in_capitals(std::string_view name) {
  std::string result;
  for (size_t i = 0; i < name.size(); ++i) {
    if (i > 0 && is_upper(name[i]) && is_lower(name[i - 1])) result += '_';
    result += is_lower(name[i]) ? static_cast<char>(name[i] - 'a' + 'A') : name[i];
  }
  return result;
}

struct StructName {
  std::string_view name;
  std::string_view in_c;
};
constexpr std::array kStructs = {StructName{"ContextOptions", "conclave_context_options"},
                                 StructName{"LayerOptions", "conclave_layer_options"},
                                 StructName{"ParallelSpec", "conclave_parallel"},
                                 StructName{"MigrationOptions", "conclave_migration_options"},
                                 StructName{"RecorderOptions", "conclave_recorder_options"},
                                 StructName{"RefitOptions", "conclave_refit_options"},
                                 StructName{"RefitScope", "conclave_refit_scope"},
                                 StructName{"BalancerOptions", "conclave_balancer_options"},
                                 StructName{"BalanceRequest", "conclave_balance_options"}};

// The name of C, or the name as it is where C has no other.
std::string name_of(std::string_view name) {
  for (const StructName& row : kStructs) {
    if (row.name == name) return std::string(row.in_c);
  }
  const size_t colons = name.find("::k");
  const bool is_enumerator = colons != std::string_view::npos && is_upper(name[0]) &&
                             name.size() > colons + 3 && is_upper(name[colons + 3]);
  if (!is_enumerator) return std::string(name);
  if (const auto word = find_word(name)) return "\"" + std::string(*word) + "\"";
  return "CONCLAVE_" + in_capitals(name.substr(0, colons)) + "_" +
         in_capitals(name.substr(colons + 3));
}

}  // namespace

std::string in_c_words(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    size_t length = 0;
    while (length < text.size() && is_of_a_name(text[length]) == is_of_a_name(text[0])) ++length;
    const std::string_view name = text.substr(0, length);
    const size_t last = name.find_last_not_of(':');
    const std::string_view bare = name.substr(0, last == std::string_view::npos ? 0 : last + 1);
    result += name_of(bare);
    result += name.substr(bare.size());
    text.remove_prefix(length);
  }
  return result;
}

}  // namespace conclave::inline v0::capi
