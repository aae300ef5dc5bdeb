#include "core/check_disjoint.h"
#include "record/rows.h"

#include "conclave/error.h"
#include "conclave/routing_record.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

template <class Element>
void write_row(const std::vector<Element>& from, int64_t row, int64_t slots, const TensorView& to,
               int64_t to_row) {
  const int64_t stride = to.row_stride != 0 ? to.row_stride : slots;
  std::copy_n(from.begin() + row * slots, slots, static_cast<Element*>(to.data) + to_row * stride);
}

std::string text_of(const TokenKey& token) {
  return "sequence " + std::to_string(token.sequence) + ", position " +
         std::to_string(token.position);
}

}  // namespace

struct RoutingReplay::Impl {
  RoutingRecord record;
  std::vector<record::TokenIndex> indices;  // one for each of record.layers

  explicit Impl(RoutingRecord given) : record(std::move(given)) {
    record::check_record(record);
    for (const RecordedRows& rows : record.layers) indices.emplace_back(rows);
  }
  // -1 for a layer that was not recorded.
  std::ptrdiff_t place_of(int64_t layer) const noexcept {
    const RecordedRows* const rows = record.find(layer);
    return rows != nullptr ? rows - record.layers.data() : -1;
  }
  size_t place_or_refuse(int64_t layer) const {
    if (const std::ptrdiff_t place = place_of(layer); place >= 0) {
      return static_cast<size_t>(place);
    }
    std::vector<int64_t> layers;
    for (const RecordedRows& rows : record.layers) layers.push_back(rows.layer.layer);
    throw Error(ErrorCode::kInvalidArgument, {.what = "this layer was not recorded",
                                              .tensor = "layer",
                                              .found = std::to_string(layer),
                                              .limit = record::layers_text(layers)});
  }
};

RoutingReplay::RoutingReplay(RoutingRecord record) : impl_(new Impl(std::move(record))) {}
RoutingReplay::RoutingReplay(RoutingReplay&&) noexcept = default;
RoutingReplay& RoutingReplay::operator=(RoutingReplay&&) noexcept = default;
RoutingReplay::~RoutingReplay() = default;

const RoutingRecord& RoutingReplay::record() const noexcept { return impl_->record; }

bool RoutingReplay::has(int64_t layer, const TokenKey& token) const noexcept {
  const std::ptrdiff_t place = impl_->place_of(layer);
  return place >= 0 && impl_->indices[static_cast<size_t>(place)].row_of(token) >= 0;
}

void RoutingReplay::find(int64_t layer, std::span<const TokenKey> tokens,
                         const TensorView& topk_ids, const TensorView& topk_weights) const {
  const size_t place = impl_->place_or_refuse(layer);
  const RecordedRows& rows = impl_->record.layers[place];
  const int64_t slots = rows.layer.num_slots;
  const auto count = static_cast<int64_t>(tokens.size());
  const bool wants_ids = !topk_ids.empty();
  const bool wants_weights = !topk_weights.empty();
  if (wants_ids) record::check_argument("topk_ids", topk_ids, count, slots, {DType::kI32});
  if (wants_weights) {
    record::check_argument("topk_weights", topk_weights, count, slots, {DType::kF32});
  }
  check_disjoint("topk_ids", topk_ids, "topk_weights", topk_weights);
  std::vector<int64_t> found;
  found.reserve(tokens.size());
  for (const TokenKey& token : tokens) {
    found.push_back(impl_->indices[place].row_of(token));
    if (found.back() >= 0) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a token was not recorded in layer " + std::to_string(layer) +
                         ", at row " + std::to_string(found.size() - 1),
                 .tensor = "tokens",
                 .found = text_of(token),
                 .limit = "the " + std::to_string(rows.num_tokens()) + " tokens of the record, " +
                          std::to_string(rows.dropped_tokens) + " dropped"});
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = found[static_cast<size_t>(i)];
    if (wants_ids) write_row(rows.topk_ids, row, slots, topk_ids, i);
    if (wants_weights) write_row(rows.topk_weights, row, slots, topk_weights, i);
  }
}

}  // namespace conclave::inline v0
