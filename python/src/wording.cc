#include "wording.h"

#include "names.h"

#include <cctype>
#include <map>

namespace conclave::python {
namespace {

using Wording = std::map<std::string, std::string, std::less<>>;

template <class Enum>
void add_words(std::string_view option, Wording& wording) {
  for (const Word<Enum>& word : words(Enum{})) {
    wording.emplace(word.spelling, std::string(option) + "=\"" + std::string(word.text) + "\"");
  }
}

Wording make_wording() {
  Wording wording = {{"Checkpoint::write_manifest", "python -m conclave manifest"},
                     {"ContextOptions.device", "device"},
                     {"ContextOptions.num_threads", "num_threads"},
                     {"ExistingModel::kRefuse", "replace=False"},
                     {"ExistingModel::kReplace", "replace=True"}};
  add_words<RouterScore>("score", wording);
  add_words<RouterOrder>("order", wording);
  add_words<GroupScore>("group_score", wording);
  add_words<GroupMask>("group_mask", wording);
  add_words<Renormalize>("renormalize", wording);
  add_words<EpsilonMode>("epsilon_mode", wording);
  add_words<SimulatedDistribution>("distribution", wording);
  add_words<SharedMode>("mode", wording);
  add_words<WeightScale>("weights", wording);
  add_words<ScaleValues>("scale_values", wording);
  add_words<WeightZero>("zeros", wording);
  add_words<ActivationScale>("activations", wording);
  add_words<RowScaleRule>("activation_scale_rule", wording);
  add_words<WeightOn>("weight_on", wording);
  add_words<PlacementStrategy>("placement", wording);
  add_words<Reduce>("reduce", wording);
  add_words<IdPolicy>("id_policy", wording);
  add_words<EpTransport>("transport", wording);
  add_words<EpCombine>("ep_combine", wording);
  add_words<ChunkOrder>("chunk_order", wording);
  add_words<Determinism>("determinism", wording);
  add_words<GateUpOrder>("gate_up_order", wording);
  add_words<ReloadMode>("mode", wording);
  add_words<RefitMode>("mode", wording);
  add_words<WhenFull>("when_full", wording);
  add_words<ExpertSet>("experts", wording);
  add_words<ModelContainer>("container", wording);
  add_words<ScaleRule>("scales", wording);
  return wording;
}

const Wording& wording() {
  static const Wording table = make_wording();
  return table;
}

bool is_of_a_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == ':' || c == '.';
}

}  // namespace

std::string in_python_words(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    size_t length = 0;
    while (length < text.size() && is_of_a_name(text[length]) == is_of_a_name(text[0])) ++length;
    const std::string_view name = text.substr(0, length);
    // The sentence may end in a full stop or colon.
    const size_t last = name.find_last_not_of(".:");
    const std::string_view bare = name.substr(0, last == std::string_view::npos ? 0 : last + 1);
    const auto found = wording().find(bare);
    result += found == wording().end() ? bare : std::string_view(found->second);
    result += name.substr(bare.size());
    text.remove_prefix(length);
  }
  return result;
}

void bind_wording(nb::module_& module) {
  nb::dict table;
  for (const auto& [spelling, words] : wording()) table[spelling.c_str()] = words;
  module.attr("python_words") = table;
}

}  // namespace conclave::python
