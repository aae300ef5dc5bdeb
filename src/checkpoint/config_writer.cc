#include "checkpoint/config_writer.h"

#include "checkpoint/layer_rule.h"
#include "checkpoint/spec_reader.h"
#include "core/shared_facts.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

class ConfigWriter {
 public:
  ConfigWriter(const Architecture& architecture, int64_t num_layers,
               std::span<const DescribedLayer> layers)
      : table_(architecture), num_layers_(num_layers), layers_(layers) {
    for (const DescribedLayer& layer : layers) moe_.insert(layer.index);
  }

  Json write(std::string_view model_type) {
    config_["model_type"] = model_type;
    config_["dtype"] = "float32";
    write_sizes();
    write_layer_rule();
    write_router();
    write_activation(table_.activation, [](const MoeSpec& spec) { return spec.activation; });
    write_shared();
    put(table_.expert_bias.key, first().has_bias);
    put(table_.weight_on_input.key, first().weight_on == WeightOn::kInput);
    put(table_.residual.enabled.key, first().residual.intermediate_size > 0);
    if (first().residual.intermediate_size > 0) {
      put(table_.residual.size, first().residual.intermediate_size);
    }
    return std::move(config_);
  }

 private:
  using Value = std::function<Json(const MoeSpec&)>;

  const MoeSpec& first() const { return layers_.front().spec; }

  // Under the first spelling; a dot leads into a nested object.
  void put(const KeyNames& key, Json value) {
    if (key.empty()) return;
    std::string_view name = key.names().front();
    Json* object = &config_;
    for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
      object = &(*object)[std::string(name.substr(0, dot))];
      name.remove_prefix(dot + 1);
    }
    (*object)[std::string(name)] = std::move(value);
  }

  // One value, or a list with one for each layer of the model where MoE layers differ.
  void put_each(const KeyNames& key, const Value& value_of) {
    const Json usual = value_of(first());
    const bool same = std::ranges::all_of(
        layers_, [&](const DescribedLayer& layer) { return value_of(layer.spec) == usual; });
    if (same) return put(key, usual);
    Json list = Json::array();
    auto layer = layers_.begin();
    for (int64_t index = 0; index < num_layers_; ++index) {
      const bool is_moe = layer != layers_.end() && layer->index == index;
      list.push_back(is_moe ? value_of((layer++)->spec) : usual);
    }
    put(key, std::move(list));
  }

  void write_sizes() {
    const SizeKeys& sizes = table_.sizes;
    put(sizes.num_layers, num_layers_);
    put(sizes.hidden_size, first().hidden_size);
    put_each(sizes.num_experts, [](const MoeSpec& spec) { return Json(spec.num_experts); });
    put_each(sizes.top_k, [](const MoeSpec& spec) { return Json(spec.top_k); });
    put_each(sizes.intermediate_size,
             [](const MoeSpec& spec) { return Json(spec.intermediate_size); });
    if (sizes.zero_experts.otherwise) put(sizes.zero_experts.key, first().num_zero_experts);
    if (first().latent.size > 0) {
      put(sizes.latent_size, first().latent.size);
      put(sizes.latent_norm.key, first().latent.has_norm);
    }
    const bool has_norm = first().latent.has_norm;
    if (!has_norm && !first().router.input_norm.enabled) return;
    put("rms_norm_eps", shortest_decimal(has_norm ? first().latent.norm_epsilon
                                                  : first().router.input_norm.epsilon));
  }

  bool is_moe(int64_t layer) const { return moe_.contains(layer); }

  Json each_layer(const std::function<Json(int64_t layer)>& value_of) const {
    Json list = Json::array();
    for (int64_t layer = 0; layer < num_layers_; ++layer) list.push_back(value_of(layer));
    return list;
  }

  // All conditions of the table must hold, so that each is written as weak as it can be; a list of
  // layers decides alone, and is written where the others do not say it.
  void write_layer_rule() {
    const LayerRule& rule = table_.layer_rule;
    const int64_t begin = *moe_.begin();
    const bool to_the_end = static_cast<int64_t>(moe_.size()) == num_layers_ - begin;
    put(rule.enabled.key, true);
    put(rule.first_moe.key, begin);
    if (!rule.dense_layers.empty()) {
      Json dense = Json::array();
      for (int64_t layer = 0; layer < num_layers_; ++layer) {
        if (!is_moe(layer)) dense.push_back(layer);
      }
      put(rule.dense_layers, std::move(dense));
    }
    const int64_t period = rule.dense_layers.empty() ? period_of_layers() : 1;
    // Steps end with a MoE layer.
    const int64_t step = begin == period - 1 ? period : 1;
    if (rule.sparse_step.otherwise) put(rule.sparse_step.key, step);
    put(rule.period.key, period);
    put(rule.offset.key, begin % period);
    const bool by_first = to_the_end && (begin == 0 || !rule.first_moe.key.empty());
    if (by_first) {
      put(rule.frequency, 1);
    } else {
      put(rule.frequency, each_layer([&](int64_t layer) { return Json(is_moe(layer) ? 1 : 0); }));
    }
    put(rule.last_moe, to_the_end ? int64_t{-1} : *moe_.rbegin());
    const bool fixed_begin = rule.first_moe.key.empty() && rule.first_moe.otherwise.has_value();
    const bool by_period =
        period > 1 && (!rule.period.key.empty() || (step > 1 && rule.sparse_step.otherwise));
    const bool by_list = !rule.dense_layers.empty() || !rule.frequency.empty();
    if (!by_list && (!by_first || fixed_begin) && !by_period) write_layer_list(rule);
  }

  // The distance between MoE layers, if all have one; otherwise 1.
  int64_t period_of_layers() const {
    const int64_t begin = *moe_.begin();
    if (moe_.size() == 1) return std::max(begin + 1, num_layers_ - begin);
    const int64_t period = *std::next(moe_.begin()) - begin;
    for (int64_t layer = begin; layer < num_layers_; ++layer) {
      if (is_moe(layer) != ((layer - begin) % period == 0)) return 1;
    }
    return begin < period ? period : 1;
  }

  void write_layer_list(const LayerRule& rule) {
    if (!rule.kinds.empty()) {
      put(rule.kinds, each_layer([&](int64_t layer) {
            return Json(is_moe(layer) ? kSparseKind : kDenseKind);
          }));
    } else if (!rule.pattern.empty()) {
      std::string letters;
      for (int64_t layer = 0; layer < num_layers_; ++layer) {
        letters += is_moe(layer) ? kMoeLetter : kOtherLetter;
      }
      put(rule.pattern, letters);
    } else {
      put(rule.moe_layers, Json(moe_));
    }
  }

  void write_router() {
    const RouterRule& rule = table_.router;
    const RouterSpec& router = first().router;
    put(rule.score_key, config_score(router.score));
    put(rule.logit_bias.key, router.has_logit_bias);
    put(rule.selection_bias.key, router.has_selection_bias);
    put(rule.soft_cap.key, shortest_decimal(router.soft_cap));
    put(rule.num_groups.key, router.num_groups);
    // Classes of transformers have several groups where nothing is stated.
    put(rule.topk_groups.key, router.num_groups > 1 ? router.topk_groups : int64_t{1});
    put(rule.renormalize.key, router.renormalize != Renormalize::kNone);
    put(rule.scale.key,
        shortest_decimal(rule.scale_on == ScaleOn::kWeights ? router.scale : first().output_scale));
    const auto by_table = std::ranges::count_if(
        layers_, [](const DescribedLayer& layer) { return layer.spec.router.vocab_size > 0; });
    put(rule.hash.first_layers, static_cast<int64_t>(by_table));
    if (by_table > 0) put("vocab_size", router.vocab_size);
  }

  template <class Activation>
  void write_activation(const ActivationRule& rule, Activation activation_of) {
    put(rule.key, config_activation(rule.form, activation_of(first()).name));
    const auto number = [&](const KeyNames& key, double ActivationSpec::*member) {
      put_each(key,
               [&](const MoeSpec& spec) { return shortest_decimal(activation_of(spec).*member); });
    };
    number(rule.limit.key, &ActivationSpec::limit);
    number(rule.alpha.key, &ActivationSpec::alpha);
    number(rule.beta.key, &ActivationSpec::beta);
    number(rule.linear_beta.key, &ActivationSpec::linear_beta);
  }

  // With a key for their width there is one; with a number of them only, each has the width of a
  // routed expert.
  void write_shared() {
    const SharedRule& rule = table_.shared;
    const auto counts_columns = [](const MoeSpec& spec) {
      return shared_facts(spec.shared).is_there ? spec.shared.intermediate_size : 0;
    };
    if (!shared_facts(rule.mode).is_there) return;
    put(rule.enabled.key, counts_columns(first()) > 0);
    put(table_.shared_bias.key, first().shared.has_bias);
    if (!rule.size.key.empty()) {
      put_each(rule.size.key, [&](const MoeSpec& spec) { return Json(counts_columns(spec)); });
      put_each(rule.count.key,
               [&](const MoeSpec& spec) { return Json(counts_columns(spec) > 0 ? 1 : 0); });
    } else {
      put_each(rule.count.key, [&](const MoeSpec& spec) {
        return Json(counts_columns(spec) / spec.intermediate_size);
      });
    }
    if (!rule.activation) return;
    write_activation(*rule.activation, [](const MoeSpec& spec) {
      return spec.shared.activation.name.empty() ? spec.activation : spec.shared.activation;
    });
  }

  const Architecture& table_;
  int64_t num_layers_;
  std::span<const DescribedLayer> layers_;
  std::set<int64_t> moe_;
  Json config_ = Json::object();
};

}  // namespace

double shortest_decimal(double number) {
  const auto narrow = static_cast<float>(number);
  if (double{narrow} != number) return number;
  return std::stod(fmt::format("{}", narrow));
}

std::string write_config(const Architecture& architecture, std::string_view model_type,
                         int64_t num_layers, std::span<const DescribedLayer> layers) {
  return ConfigWriter(architecture, num_layers, layers).write(model_type).dump(2) + "\n";
}

}  // namespace conclave::inline v0::checkpoint
