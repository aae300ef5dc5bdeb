// Experts that move between the weights of two ranks, in the host's memory where a device's would
// be: every plane of every format goes along, and from a source the same bytes come.
#include "coded_forms.h"
#include "h200_plan.h"
#include "layer/cuda/content_hash.h"
#include "layer/cuda/expert_mover.h"
#include "layer/cuda/plan.h"
#include "layer/cuda/weights.h"
#include "layer/migration/pace.h"
#include "refit_cases.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave {
namespace {

class HostMemory final : public DeviceAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment, Stream) override {
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* data, size_t, Stream) noexcept override { std::free(data); }
};

ParallelSpec half(int32_t rank) {
  return {.ep_size = 2, .ep_rank = rank, .reduce = Reduce::kPartial};
}

// The weights of one rank of two, with two spare places.
class Held {
 public:
  // `places`: the expert in each; none: as planned.
  Held(const MoeSpec& spec, const WeightSource& source, int32_t rank,
       const std::vector<int32_t>& places = {})
      : plan_(testing::plan(spec, {.spare_experts = 2}, half(rank))) {
    weights_ = allocate_cuda_weights(memory_, plan_, source, {});
    fill_cuda_weights(context_, plan_, source, places.empty() ? first_places() : places, {},
                      weights_);
  }

  uint64_t hash(std::span<const int32_t> places) const {
    return hash_cuda_weights(plan_, weights_, places, fence_);
  }
  const std::vector<int32_t>& first_places() const { return plan_.part.local_experts; }
  int64_t key() const { return key_of_planes(plan_, weights_); }
  MovedWeights lent() {
    return {.context = context_,
            .allocator = memory_,
            .plan = plan_,
            .live = weights_,
            .memory = moves_,
            .fence = fence_,
            .gate = gate_};
  }

 private:
  HostMemory memory_;
  Context context_{{.num_threads = 1}};
  CudaPlan plan_;
  CudaWeights weights_;
  MoveMemory moves_;
  WeightFence fence_;
  ForwardGate gate_;
};

std::vector<testing::RefitCase> moved_cases() {
  std::vector<testing::RefitCase> cases = testing::refit_cases();
  for (const testing::CodedForm& form : testing::coded_forms()) {
    cases.push_back({form.name, testing::coded_layer(form.dtype, form.quant, 256, 128)});
  }
  return cases;
}

// Experts 0 to 2 lie on rank 0. Expert 1 goes to a spare place of rank 1, 4 comes to one of rank 0,
// and 2 goes to another place of its rank.
constexpr std::array kMoves = {
    ExpertMove{.expert = 1, .from_rank = 0, .from_place = 1, .to_rank = 1, .to_place = 3},
    ExpertMove{.expert = 4, .from_rank = 1, .from_place = 1, .to_rank = 0, .to_place = 4},
    ExpertMove{.expert = 2, .from_rank = 0, .from_place = 2, .to_rank = 0, .to_place = 3}};
const std::array<std::vector<int32_t>, 2> kAfter = {{{0, -1, -1, 2, 4}, {3, -1, 5, 1, -1}}};

void move(Held& held, int32_t rank, Communicator& comm, const WeightSource* source,
          double share = 1) {
  CudaExpertMover mover(held.lent());
  const std::atomic<bool> stopped{false};
  Pace pace(share);
  const PackPlace pack;
  const PlaceMemory none({});
  mover.open();
  const MoveHashes hashes = mover.move({.moves = kMoves,
                                        .rank = rank,
                                        .from = none,
                                        .to = none,
                                        .communicator = &comm,
                                        .pack = pack,
                                        .piece_bytes = 4096,
                                        .pace = pace,
                                        .stopped = stopped,
                                        .source = source});
  mover.close();
  std::array<uint64_t, 4> ends = {hashes.sent[0], hashes.received[1], hashes.received[0],
                                  hashes.sent[1]};
  std::array<uint64_t, 8> all{};
  comm.all_gather(std::as_bytes(std::span(ends)), std::as_writable_bytes(std::span(all)), "hash");
  EXPECT_EQ(all[0], all[6]) << "expert 1, sent and received";
  EXPECT_EQ(all[1], all[7]) << "expert 4, received and sent";
  EXPECT_EQ(hashes.sent[2], hashes.received[2]);
  EXPECT_NE(all[0], all[1]);
}

TEST(MovedPlanes, OfEveryFormat_GoAlong_OrComeFromASource) {
  for (const testing::RefitCase& it : moved_cases()) {
    for (const bool reads : {false, true}) {
      SCOPED_TRACE(it.name + (reads ? ", read" : ", sent"));
      const auto source = make_synthetic_source(it.spec, 3);
      std::array<std::unique_ptr<Held>, 2> ranks;
      for (int32_t rank = 0; rank < 2; ++rank) {
        ranks[static_cast<size_t>(rank)] = std::make_unique<Held>(it.spec, *source, rank);
      }
      ASSERT_EQ(ranks[0]->key(), ranks[1]->key());
      const auto outcomes = testing::run_ranks(
          make_local_group({.num_ranks = 2}), [&](int32_t rank, Communicator& comm) {
            Held& held = *ranks[static_cast<size_t>(rank)];
            move(held, rank, comm, reads ? source.get() : nullptr);
            const auto& after = kAfter[static_cast<size_t>(rank)];
            const Held made(it.spec, *source, rank, after);
            EXPECT_EQ(held.hash(after), made.hash(after)) << it.name << ", rank " << rank;
            EXPECT_NE(held.hash(after), held.hash(held.first_places())) << it.name;
          });
      EXPECT_EQ(testing::first_failure(outcomes), "");
    }
  }
}

// It carries the memory of the host as that of a device, and counts what each rank begins.
struct Begun {
  std::atomic<int> words{0};   // one byte from the host
  std::atomic<int> pieces{0};  // from a device
};
class AsOfDevices final : public Communicator {
 public:
  AsOfDevices(Communicator& inner, std::array<Begun, 2>& begun) : inner_(inner), begun_(begun) {}

  std::string_view name() const noexcept override { return inner_.name(); }
  int32_t rank() const noexcept override { return inner_.rank(); }
  int32_t size() const noexcept override { return inner_.size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return inner_.timeout(); }
  Support supports(CommFeature feature) const override {
    return feature == CommFeature::kDeviceMemory ? Support::yes() : inner_.supports(feature);
  }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    inner_.wait(handle, deadline, phase);
  }
  bool test(CommHandle handle, std::string_view phase) override {
    return inner_.test(handle, phase);
  }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }
  // Whether each piece of this rank found the other one ready for it.
  bool waits_for_peers() const { return waits_for_peers_; }

 protected:
  CommHandle start(const CommOperation& operation) override {
    Begun& own = begun_[static_cast<size_t>(rank())];
    const Begun& other = begun_[static_cast<size_t>(1 - rank())];
    CommOperation on_host = operation;
    const bool is_piece = operation.send.memory == MemoryKind::kDevice ||
                          operation.recv.memory == MemoryKind::kDevice;
    if (is_piece && other.words < ++own.pieces) waits_for_peers_ = false;
    if (operation.kind == CommKind::kSend && operation.send.size() == 1) ++own.words;
    on_host.send.memory = MemoryKind::kHost;
    on_host.recv.memory = MemoryKind::kHost;
    return inner_.begin(on_host);
  }

 private:
  Communicator& inner_;
  std::array<Begun, 2>& begun_;
  bool waits_for_peers_ = true;
};

// No kernel waits for a peer that rests: a piece begins when both ends have come.
TEST(MovedPlanes, OnTheDeviceAndInTheBackground_GoOnceBothEndsAreReady) {
  const testing::RefitCase it = moved_cases().front();
  const auto source = make_synthetic_source(it.spec, 3);
  for (const double share : {0.9, 1.0}) {
    std::array<Begun, 2> begun;
    const auto outcomes = testing::run_ranks(
        make_local_group({.num_ranks = 2}), [&](int32_t rank, Communicator& local) {
          Held held(it.spec, *source, rank);
          AsOfDevices comm(local, begun);
          move(held, rank, comm, nullptr, share);
          const auto& after = kAfter[static_cast<size_t>(rank)];
          const Held made(it.spec, *source, rank, after);
          EXPECT_EQ(held.hash(after), made.hash(after)) << share << ", rank " << rank;
          EXPECT_TRUE(share >= 1 || comm.waits_for_peers()) << "rank " << rank;
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
    EXPECT_GT(begun[0].pieces, 1);
    EXPECT_EQ(begun[0].pieces, begun[1].pieces);
    for (const Begun& rank : begun) EXPECT_EQ(rank.words, share < 1 ? rank.pieces.load() : 0);
  }
}

// A sum of every plane, so that no byte of one goes unnoticed.
TEST(MovedPlanes, OtherWeights_HaveOtherHashes) {
  const MoeSpec spec = testing::refit_cases().front().spec;
  const auto source = make_synthetic_source(spec, 3);
  const auto other = make_synthetic_source(spec, 4);
  std::array<MoveHashes, 2> hashes;
  for (const bool is_other : {false, true}) {
    Held held(spec, *source, 0);
    CudaExpertMover mover(held.lent());
    const std::atomic<bool> stopped{false};
    Pace pace(1);
    const PackPlace pack;
    const PlaceMemory none({});
    mover.open();
    hashes[is_other ? 1 : 0] = mover.move({.moves = std::span(kMoves).subspan(2),
                                           .rank = 0,
                                           .from = none,
                                           .to = none,
                                           .pack = pack,
                                           .piece_bytes = 4096,
                                           .pace = pace,
                                           .stopped = stopped,
                                           .source = is_other ? other.get() : source.get()});
    mover.close();
  }
  EXPECT_EQ(hashes[0].sent, hashes[0].received);
  EXPECT_EQ(hashes[0].sent, hashes[1].sent);
  EXPECT_NE(hashes[1].sent, hashes[1].received);
}

}  // namespace
}  // namespace conclave
