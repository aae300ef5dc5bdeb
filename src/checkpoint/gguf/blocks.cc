#include "checkpoint/gguf/layer_form.h"
#include "checkpoint/gguf/layer_tensors.h"
#include "checkpoint/gguf/row_reader.h"
#include "checkpoint/gguf/source.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "io/gguf/types.h"
#include "io/text.h"
#include "quant/gguf/block_type.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"
#include "conclave/gguf.h"
#include "conclave/gguf_blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

using checkpoint::GgufLayer;
using checkpoint::GgufMatrix;
using checkpoint::GgufStored;

std::string name_of(WeightId id, int64_t expert) {
  return id.mlp() ? fmt::format("{}[{}]", to_string(id), expert) : to_string(id);
}

// Whether a weight may be stored in blocks; the others are small and hold values.
bool may_have_blocks(WeightId id) { return id.plane() == WeightPlane::kWeights; }

const io::GgufType& readable_type(const WeightShape& shape, const std::string& name,
                                  std::string_view type) {
  const io::GgufType* found = io::find_gguf_type(type);
  const bool may_be_blocks = may_have_blocks(shape.id);
  const bool is_block = may_be_blocks && quant::find_block_type(type) != nullptr;
  const std::optional<DType> plain =
      found != nullptr ? checkpoint::plain_type(*found) : std::nullopt;
  const bool is_index = shape.type == quant::PlaneType::kIndex;
  if (is_block || (plain && is_plain(*plain) != is_index)) return *found;
  throw Error(ErrorCode::kTensorDType, {.what = "blocks of a type that is not read",
                                        .tensor = name,
                                        .expected = is_index        ? "I32 or I64"
                                                    : may_be_blocks ? "F32, F16, BF16 or blocks"
                                                                    : "F32, F16 or BF16",
                                        .found = io::show_text(type)});
}

void check_bytes(const GgufStored& stored, const std::string& name, std::string_view type,
                 size_t bytes) {
  const auto expected = static_cast<uint64_t>(stored.rows) * gguf_row_bytes(type, stored.cols);
  if (bytes == expected) return;
  throw Error(ErrorCode::kShape, {.what = fmt::format("rows of {} of another size", type),
                                  .tensor = name,
                                  .expected = fmt::format("{} bytes, {} rows of {} elements",
                                                          expected, stored.rows, stored.cols),
                                  .found = fmt::format("{} bytes", bytes)});
}

}  // namespace

struct GgufBlocks::Impl {
  MoeSpec spec;
  std::vector<WeightShape> shapes;
  std::deque<io::GgufTensor> tensors;  // what `layer` points to
  GgufLayer layer;

  void check_complete() const {
    for (const WeightShape& shape : shapes) {
      const std::vector<GgufMatrix>& matrices = layer.stored[shape.id].matrices;
      for (size_t expert = 0; expert < matrices.size(); ++expert) {
        if (matrices[expert].place) continue;
        throw Error(ErrorCode::kTensorMissing,
                    {.what = "blocks of a layer were not put",
                     .tensor = name_of(shape.id, static_cast<int64_t>(expert)),
                     .expected = fmt::format("[{}, {}]", shape.rows, shape.cols)});
      }
    }
  }
};

GgufBlocks::GgufBlocks(const MoeSpec& spec) : impl_(std::make_unique<Impl>()) {
  validate(spec);
  if (!is_plain(spec.weight_dtype)) {
    throw Error(ErrorCode::kUnsupportedQuantization,
                {.what = "a spec of codes",
                 .tensor = "MoeSpec.weight_dtype",
                 .expected = "F32, F16 or BF16, as without blocks",
                 .found = std::string(to_string(spec.weight_dtype))});
  }
  impl_->spec = spec;
  impl_->layer.num_experts = spec.num_experts;
  impl_->layer.layout = "per_expert";
  for (const WeightShape& shape : layer_weights(spec)) {
    if (shape.is_optional) continue;
    impl_->shapes.push_back(shape);
    GgufStored& stored = impl_->layer.stored[shape.id];
    stored.rows = shape.rows;
    stored.cols = shape.cols;
    stored.matrices.resize(static_cast<size_t>(shape.count));
  }
}

GgufBlocks::GgufBlocks(GgufBlocks&&) noexcept = default;
GgufBlocks& GgufBlocks::operator=(GgufBlocks&&) noexcept = default;
GgufBlocks::~GgufBlocks() = default;

void GgufBlocks::put(WeightId id, int64_t expert, std::string_view type,
                     std::span<const std::byte> rows) {
  GgufStored& stored = impl_->layer.stored[id];
  const std::string name = name_of(id, expert);
  if (expert < 0 || expert >= static_cast<int64_t>(stored.matrices.size())) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "the layer has no such matrix",
                 .tensor = name,
                 .limit = fmt::format("{} matrices of this kind", stored.matrices.size())});
  }
  const auto shape = std::ranges::find(impl_->shapes, id, &WeightShape::id);
  const io::GgufType& found = readable_type(*shape, name, type);
  check_bytes(stored, name, type, rows.size());
  impl_->tensors.push_back({.name = name, .type = &found, .bytes = rows.size()});
  stored.matrices[static_cast<size_t>(expert)] = {
      .place = {.tensor = &impl_->tensors.back(), .bytes = rows}};
}

MoeSpec GgufBlocks::spec() const {
  impl_->check_complete();
  const checkpoint::GgufForm form = checkpoint::form_of(impl_->layer);
  MoeSpec spec = impl_->spec;
  spec.weight_dtype = form.routed;
  spec.quant = form.quant;
  if (shared_facts(spec).is_there && form.shared != form.routed) {
    spec.shared.weight_dtype = form.shared;
  }
  if (spec.residual.intermediate_size > 0) spec.residual.weight_dtype = form.residual;
  return spec;
}

std::unique_ptr<WeightSource> GgufBlocks::source() const {
  impl_->check_complete();
  return std::make_unique<checkpoint::GgufSource>(impl_->layer, checkpoint::form_of(impl_->layer));
}

}  // namespace conclave::inline v0
