// Makes one exchange of one block per pair of ranks, its size known at plan time: max_tokens rows,
// then header, ids and weights, padded to whole rows so that all blocks form one bundle.
#include "core/checked.h"
#include "dispatch/ep_exchange.h"
#include "dispatch/ep_transport.h"
#include "dispatch/ep_wire.h"

#include "conclave/error.h"

#include <string_view>

namespace conclave::inline v0::dispatch {
namespace {

constexpr int64_t kHeaderBytes = round_up(sizeof(WireHeader), kWorkspaceAlignment);

constexpr std::string_view kPhase = "dispatch.slots";

class FixedSlotTransport final : public RowTransport {
 public:
  FixedSlotTransport(const EpPlan& plan, WorkspaceLayout& layout)
      : plan_(plan),
        block_rows_(plan.problem.max_tokens + description_rows(plan)),
        exchange_(plan.ranks(), plan.moves_rows(), layout),
        handle_(layout.book<CommHandle>(1)),
        counts_(layout.book<int64_t>(int64_t{2} * plan.ranks())),
        sent_(book(plan, block_rows_, layout)),
        received_(book(plan, block_rows_, layout)) {}

  void open(const EpTables& tables, std::span<std::byte> workspace) const override {
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      const Block block = block_of(sent_, rank, workspace);
      *block.header = make_header(plan_, *tables.epoch, tables.send_rows[rank]);
      tables.send_blocks[rank] = {block.rows, block.ids, block.weights};
    }
  }

  void begin(const EpTables&, std::span<std::byte> workspace) const override {
    int64_t* const counts = slice_as<int64_t>(workspace, counts_);
    int64_t* const bases = counts + plan_.ranks();
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      counts[rank] = block_rows_;
      bases[rank] = rank * block_rows_;
    }
    *slice_as<CommHandle>(workspace, handle_) =
        exchange_.begin(*plan_.problem.communicator, {counts, bases, counts, bases},
                        plan_.problem.row_bytes, slice_as<std::byte>(workspace, sent_),
                        slice_as<std::byte>(workspace, received_), workspace);
  }

  bool has_come(std::span<std::byte> workspace) const override {
    return plan_.problem.communicator->test(*slice_as<CommHandle>(workspace, handle_), kPhase);
  }

  BundleRows await(const EpTables& tables, std::span<std::byte> workspace) const override {
    Communicator& communicator = *plan_.problem.communicator;
    communicator.wait(*slice_as<CommHandle>(workspace, handle_), communicator.timeout(), kPhase);
    const int64_t* const bases = slice_as<int64_t>(workspace, counts_) + plan_.ranks();
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      const Block block = block_of(received_, rank, workspace);
      tables.received[rank] = {checked_rows(plan_, *tables.epoch, *block.header, rank), bases[rank],
                               block.ids, block.weights};
    }
    return {slice_as<std::byte>(workspace, received_), plan_.ranks() * block_rows_};
  }

 private:
  struct Block {
    std::byte* rows;
    WireHeader* header;
    int32_t* ids;
    float* weights;
  };

  static int64_t id_bytes(const EpPlan& plan) {
    return bounded_product(bounded_product(plan.problem.max_tokens, plan.problem.top_k),
                           static_cast<int64_t>(sizeof(int32_t)));
  }

  static int64_t description_rows(const EpPlan& plan) {
    static_assert(sizeof(int32_t) == sizeof(float));
    const int64_t bytes = kHeaderBytes + bounded_product(id_bytes(plan), plan.reduced ? 2 : 1);
    return ceil_div(bytes, plan.problem.row_bytes);
  }

  static WorkspaceSlice book(const EpPlan& plan, int64_t block_rows, WorkspaceLayout& layout) {
    return layout.book_bytes(bounded_product(plan.ranks(), block_rows),
                             static_cast<size_t>(plan.problem.row_bytes));
  }

  Block block_of(const WorkspaceSlice& slice, int32_t rank, std::span<std::byte> workspace) const {
    std::byte* const rows =
        slice_as<std::byte>(workspace, slice) + rank * block_rows_ * plan_.problem.row_bytes;
    std::byte* const header = rows + plan_.problem.max_tokens * plan_.problem.row_bytes;
    std::byte* const ids = header + kHeaderBytes;
    std::byte* const weights = plan_.reduced ? ids + id_bytes(plan_) : nullptr;
    return {rows, static_cast<WireHeader*>(static_cast<void*>(header)),
            static_cast<int32_t*>(static_cast<void*>(ids)),
            static_cast<float*>(static_cast<void*>(weights))};
  }

  const EpPlan& plan_;
  int64_t block_rows_;
  Exchange exchange_;
  WorkspaceSlice handle_, counts_, sent_, received_;
};

}  // namespace

std::unique_ptr<RowTransport> make_fixed_slot_transport(const EpPlan& plan,
                                                        WorkspaceLayout& layout) {
  return std::make_unique<FixedSlotTransport>(plan, layout);
}

}  // namespace conclave::inline v0::dispatch
