// ERNIE 4.5: softmax in float32, a bias that only chooses, the sum of the weights bounded from
// below. The multimodal form has a second set of experts for images beside each text one.
#include "checkpoint/architectures/tables.h"
#include "checkpoint/spec_reader.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kTextTypes = {"ernie4_5_moe"};
constexpr std::array<std::string_view, 4> kVlTypes = {
    "ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_moe_vl", "ernie4_5_vl_moe_text_model"};
constexpr std::array kTextOnce = {NamePattern{.text = "{base}moe_statics.e_score_correction_bias",
                                              .part = Part::kSelectionBias,
                                              .is_one_row = true}};
// Routers are stored as [H, E]; both biases share one tensor.
constexpr std::array kVlOnce = {
    NamePattern{"{base}gate.weight", Part::kRouter, RowOrder::kConcatenated, AxisOrder::kColsFirst},
    NamePattern{"{base}moe_statics.e_score_correction_bias", Part::kSelectionBias,
                RowOrder::kConcatenated, AxisOrder::kByShape, 2},
    NamePattern{"{base}gate.weight_1", Part::kNotRead},
};

constexpr std::array kVisionOnce = {
    NamePattern{"{base}gate.weight_1", Part::kRouter, RowOrder::kConcatenated,
                AxisOrder::kColsFirst},
    NamePattern{"{base}moe_statics.e_score_correction_bias", Part::kSelectionBias,
                RowOrder::kConcatenated, AxisOrder::kByShape, 2, 1},
    NamePattern{"{base}gate.weight", Part::kNotRead},
};

constexpr Architecture text_table() {
  return {
      .name = "ernie4_5_moe",
      .model_types = kTextTypes,
      .bases = kMlpBase,
      .sizes = {.num_experts = {"moe_num_experts", "num_experts"},
                .top_k = {"moe_k", "num_experts_per_tok"},
                .intermediate_size = "moe_intermediate_size"},
      .layer_rule = {.sparse_step = {"moe_layer_interval", 1},
                     .first_moe = {"moe_layer_start_index", 1},
                     .last_moe = "moe_layer_end_index",
                     .kinds = "mlp_layer_types"},
      .router = {.logits = RouterPrecision::kF32,
                 .selection_bias = {"moe_use_aux_free", true},
                 .epsilon = {"moe_norm_min", 1e-12},
                 .epsilon_mode = EpsilonMode::kClampMin},
      .shared = {.mode = SharedMode::kAdd, .count = {"moe_num_shared_experts", 2}},
      .shared_bias = {"use_bias", false},
      .once = kTextOnce,
  };
}

constexpr Architecture vl_table() {
  Architecture table = text_table();
  table.name = "ernie4_5_vl_moe";
  table.model_types = kVlTypes;
  table.sizes.lists = SizeKeys::Lists::kText;
  table.once = kVlOnce;
  table.modality = Architecture::Modality::kFirst;
  table.vision = &kErnie45VlMoeVision;
  return table;
}

// The shared experts are those of the text part.
void read_shared_width(const ConfigReader& config, int64_t, MoeSpec& spec, Support&) {
  const auto widths = config.find("moe_intermediate_size");
  if (spec.shared.mode == SharedMode::kNone || !widths || !widths->is_array()) return;
  const int64_t text_width =
      checked_size(config.list(*widths, 1).front(), {.low = 1, .high = kMaxWidth});
  const int64_t count = spec.shared.intermediate_size / spec.intermediate_size;
  spec.shared.intermediate_size = text_width * count;
}

constexpr Architecture vision_table() {
  Architecture table = vl_table();
  table.sizes.lists = SizeKeys::Lists::kVision;
  table.once = kVisionOnce;
  table.modality = Architecture::Modality::kSecond;
  table.vision = nullptr;
  table.adjust = read_shared_width;
  return table;
}

}  // namespace

constinit const Architecture kErnie45Moe = text_table();
constinit const Architecture kErnie45VlMoe = vl_table();
constinit const Architecture kErnie45VlMoeVision = vision_table();

}  // namespace conclave::inline v0::checkpoint
