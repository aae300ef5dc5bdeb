// Two steps: how many rows come from whom, then exactly those rows with their ids and weights.
#include "core/checked.h"
#include "dispatch/ep_exchange.h"
#include "dispatch/ep_transport.h"
#include "dispatch/ep_wire.h"

#include <string_view>

namespace conclave::inline v0::dispatch {
namespace {

constexpr std::string_view kWeightsPhase = "dispatch.weights";
constexpr std::string_view kIdsPhase = "dispatch.ids";
constexpr std::string_view kRowsPhase = "dispatch.rows";

class VariableTransport final : public RowTransport {
 public:
  VariableTransport(const EpPlan& plan, WorkspaceLayout& layout)
      : plan_(plan),
        header_exchange_(plan.ranks(), MovesBytes::kInCalls, layout),
        row_exchange_(plan.ranks(), plan.moves_rows(), layout),
        id_exchange_(plan.ranks(), plan.moves_rows(), layout),
        weight_exchange_(plan.ranks(), plan.moves_rows(), layout),
        sent_headers_(layout.book<WireHeader>(plan.ranks())),
        received_headers_(layout.book<WireHeader>(plan.ranks())),
        handles_(layout.book<Handles>(1)),
        one_each_(layout.book<int64_t>(int64_t{2} * plan.ranks())),
        sent_(book(plan, plan.max_send_rows, layout)),
        received_(book(plan, plan.max_received_rows, layout)) {}

  void open(const EpTables& tables, std::span<std::byte> workspace) const override {
    const Region region = at(sent_, workspace);
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      const int64_t base = tables.send_base[rank];
      tables.send_blocks[rank] = {
          region.rows + base * plan_.problem.row_bytes, region.ids + base * plan_.problem.top_k,
          plan_.reduced ? region.weights + base * plan_.problem.top_k : nullptr};
    }
  }

  void begin(const EpTables& tables, std::span<std::byte> workspace) const override {
    exchange_headers(tables, workspace);
    begin_rows(tables, workspace);
  }

  bool has_come(std::span<std::byte> workspace) const override {
    Communicator& communicator = *plan_.problem.communicator;
    const Handles& handles = *slice_as<Handles>(workspace, handles_);
    return (!plan_.reduced || communicator.test(handles.weights, kWeightsPhase)) &&
           communicator.test(handles.ids, kIdsPhase) && communicator.test(handles.rows, kRowsPhase);
  }

  BundleRows await(const EpTables& tables, std::span<std::byte> workspace) const override {
    await_rows(*slice_as<Handles>(workspace, handles_));
    const Region region = at(received_, workspace);
    int64_t base = 0;
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      const int64_t rows = tables.recv_rows[rank];
      tables.received[rank] = {
          rows, base, region.ids + base * plan_.problem.top_k,
          plan_.reduced ? region.weights + base * plan_.problem.top_k : nullptr};
      base += rows;
    }
    return {region.rows, base};
  }

 private:
  struct Slices {
    WorkspaceSlice rows, ids, weights;
  };
  struct Handles {
    CommHandle rows, ids, weights;
  };
  struct Region {
    std::byte* rows;
    int32_t* ids;
    float* weights;
  };

  static Slices book(const EpPlan& plan, int64_t rows, WorkspaceLayout& layout) {
    const int64_t ids = bounded_product(rows, plan.problem.top_k);
    return {layout.book_bytes(rows, static_cast<size_t>(plan.problem.row_bytes)),
            layout.book<int32_t>(ids), layout.book<float>(plan.reduced ? ids : 0)};
  }

  static Region at(const Slices& slices, std::span<std::byte> workspace) {
    return {slice_as<std::byte>(workspace, slices.rows), slice_as<int32_t>(workspace, slices.ids),
            slice_as<float>(workspace, slices.weights)};
  }

  // Fills recv_rows and recv_base from what the peers announce.
  void exchange_headers(const EpTables& tables, std::span<std::byte> workspace) const {
    Communicator& communicator = *plan_.problem.communicator;
    auto* const sent = slice_as<WireHeader>(workspace, sent_headers_);
    auto* const received = slice_as<WireHeader>(workspace, received_headers_);
    int64_t* const ones = slice_as<int64_t>(workspace, one_each_);
    int64_t* const ordinals = ones + plan_.ranks();
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      sent[rank] = make_header(plan_, *tables.epoch, tables.send_rows[rank]);
      ones[rank] = 1;
      ordinals[rank] = rank;
    }
    const CommHandle handle = header_exchange_.begin(communicator, {ones, ordinals, ones, ordinals},
                                                     sizeof(WireHeader), sent, received, workspace);
    communicator.wait(handle, communicator.timeout(), "dispatch.counts");
    int64_t base = 0;
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      tables.recv_rows[rank] = checked_rows(plan_, *tables.epoch, received[rank], rank);
      tables.recv_base[rank] = base;
      base += tables.recv_rows[rank];
    }
  }

  void begin_rows(const EpTables& tables, std::span<std::byte> workspace) const {
    Communicator& communicator = *plan_.problem.communicator;
    const Region from = at(sent_, workspace);
    const Region to = at(received_, workspace);
    const RowCounts counts{tables.send_rows, tables.send_base, tables.recv_rows, tables.recv_base};
    const int64_t id_bytes = plan_.problem.top_k * static_cast<int64_t>(sizeof(int32_t));
    const int64_t weight_bytes = plan_.problem.top_k * static_cast<int64_t>(sizeof(float));
    Handles& handles = *slice_as<Handles>(workspace, handles_);
    handles.rows = row_exchange_.begin(communicator, counts, plan_.problem.row_bytes, from.rows,
                                       to.rows, workspace);
    handles.ids = id_exchange_.begin(communicator, counts, id_bytes, from.ids, to.ids, workspace);
    if (plan_.reduced) {
      handles.weights = weight_exchange_.begin(communicator, counts, weight_bytes, from.weights,
                                               to.weights, workspace);
    }
  }

  void await_rows(const Handles& handles) const {
    Communicator& communicator = *plan_.problem.communicator;
    if (plan_.reduced) {
      communicator.wait(handles.weights, communicator.timeout(), kWeightsPhase);
    }
    communicator.wait(handles.ids, communicator.timeout(), kIdsPhase);
    communicator.wait(handles.rows, communicator.timeout(), kRowsPhase);
  }

  const EpPlan& plan_;
  Exchange header_exchange_, row_exchange_, id_exchange_, weight_exchange_;
  WorkspaceSlice sent_headers_, received_headers_, handles_, one_each_;
  Slices sent_, received_;
};

}  // namespace

std::unique_ptr<RowTransport> make_variable_transport(const EpPlan& plan, WorkspaceLayout& layout) {
  return std::make_unique<VariableTransport>(plan, layout);
}

}  // namespace conclave::inline v0::dispatch
