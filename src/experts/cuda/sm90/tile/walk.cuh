// The order of items, the counter from which clusters draw them, and how their blocks are told.
#pragma once

#include "core/device_flow.h"
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/common/ticket_counter.cuh"
#include "experts/cuda/sm90/tile/config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::tile {

__device__ __forceinline__ uint32_t cluster_index(int cluster) {
  return blockIdx.x / static_cast<uint32_t>(cluster);
}
__device__ __forceinline__ uint32_t num_clusters(int cluster) {
  return gridDim.x / static_cast<uint32_t>(cluster);
}

struct Item {
  TokenTile tile;
  int32_t first_feature = 0;  // the first weight row
  bool half = false;          // only half of the features
  bool shared = false;        // the other block of the cluster multiplies the same weights
  bool valid = false;
};

// The meaning of a ticket, in the words that the blocks of a cluster are told. Each block derives
// its own item from them.
struct ClusterItem {
  int32_t expert = 0;
  int32_t begin = 0;   // sorted row of the first block's tile
  int32_t end = 0;     // end of the expert's rows
  uint32_t where = 0;  // half feature tile, then kBesides, kHalf, kValid; 0: none is left
  static constexpr uint32_t kValid = 1;
  static constexpr uint32_t kHalf = 2;
  static constexpr uint32_t kBesides = 4;  // the blocks take the same rows, neighbouring features
  static constexpr int kFlagBits = 3;
};

// The order of items: expert by expert, within one by groups of its token tiles; within a group,
// all token tiles of a feature tile, then of the next. Tiles that run at one time thus share rows
// and weights in L2. A cluster takes pairs of an expert's token tiles; for an odd last one, its
// blocks take two feature tiles at once, one each.
//
// An expert has `each` tickets per token tile, so that the token tile at ticket / each belongs to
// the right expert and nothing need be searched.
template <class Config>
struct Walk {
  const Params& params;
  int32_t each;   // tickets per token tile
  int32_t whole;  // tickets of whole tiles, which come first
  int32_t tickets;

  __device__ explicit Walk(const Params& p)
      : params(p), each((p.feature_tiles + Config::kCluster - 1) / Config::kCluster) {
    const auto clusters = static_cast<int32_t>(num_clusters(Config::kCluster));
    whole = tickets = *p.num_tiles * each;
    // If the last round leaves half of the clusters idle, halves of its tiles take half the time.
    const int32_t last = whole % clusters;
    if (Config::kHalves && 2 * last <= clusters) {
      whole -= last;
      tickets += last;
    }
  }

  __device__ __forceinline__ ClusterItem at(uint32_t ticket) const {
    if (ticket >= static_cast<uint32_t>(tickets)) return {};
    auto index = static_cast<int32_t>(ticket);
    uint32_t second = 0;
    const bool half = Config::kHalves && index >= whole;
    if (half) {
      second = static_cast<uint32_t>(index - whole) % 2;
      index = whole + (index - whole) / 2;
    }
    const int32_t position = index / each;
    const int4 tile = __ldg(reinterpret_cast<const int4*>(params.tiles) + position);
    const int32_t* begin = params.expert_begin + tile.x;
    const int32_t first_row = __ldg(begin);
    ClusterItem told = {.expert = tile.x, .begin = first_row, .end = __ldg(begin + 1)};
    const int32_t first_tile = position - (tile.y - first_row) / Config::kTokens;
    const Place place = find(told, index - first_tile * each);
    told.begin += place.tile * Config::kTokens;
    told.where = (2 * static_cast<uint32_t>(place.features) + second) << ClusterItem::kFlagBits |
                 (place.besides ? ClusterItem::kBesides : 0) | (half ? ClusterItem::kHalf : 0) |
                 ClusterItem::kValid;
    return told;
  }

  // This block's item.
  __device__ __forceinline__ Item mine(const ClusterItem& told) const {
    constexpr int32_t kHalfTile = Config::kFeatures / 2;
    Item item;
    item.valid = told.where != 0;
    item.half = (told.where & ClusterItem::kHalf) != 0;
    item.tile = {told.expert, told.begin, 0, 0};
    item.first_feature = static_cast<int32_t>(told.where >> ClusterItem::kFlagBits) * kHalfTile;
    if constexpr (Config::kCluster > 1) {
      const auto rank = static_cast<int32_t>(ptx::cluster_rank());
      const bool besides = (told.where & ClusterItem::kBesides) != 0;
      item.shared = !besides && !item.half;
      (besides ? item.first_feature : item.tile.begin) +=
          rank * (besides ? Config::kFeatures : Config::kTokens);
      // A block beyond the last feature tile has no rows and only accompanies its partner.
      if (item.first_feature >= params.feature_tiles * Config::kFeatures) return item;
    }
    item.tile.count = min(Config::kTokens, told.end - item.tile.begin);
    return item;
  }

  // An odd number of feature tiles is rounded up to pairs, which leaves tickets without items.
  __device__ __forceinline__ bool is_empty(const ClusterItem& told) const {
    return Config::kCluster > 1 &&
           static_cast<int32_t>(told.where >> ClusterItem::kFlagBits) >= 2 * params.feature_tiles;
  }

 private:
  struct Place {
    int32_t tile;  // index within the expert; the first of a pair
    int32_t features;
    bool besides;
  };

  // Finds the place of ticket `index` of an expert.
  __device__ __forceinline__ Place find(const ClusterItem& expert, int32_t index) const {
    const int32_t kept = each * Config::kCluster;  // feature tiles, rounded up
    const int32_t tiles = (expert.end - expert.begin + Config::kTokens - 1) / Config::kTokens;
    const int32_t units = tiles / Config::kCluster;
    // The last group takes the rest: from half to one and a half times the size of the others.
    const int32_t groups = max(1, (units + params.group / 2) / params.group);
    const int32_t group = min(index / (params.group * kept), groups - 1);
    const int32_t first = group * params.group;
    const bool is_last = group == groups - 1;
    const int32_t width = is_last ? units - first : params.group;
    const int32_t within = index - first * kept;
    if constexpr (Config::kCluster == 1) {
      const int32_t features = within / width;
      return {first + within - features * width, features, false};
    } else {
      const int32_t turn = 2 * width + (is_last ? tiles % 2 : 0);  // tickets per two feature tiles
      const int32_t two = within / turn;
      const int32_t of_turn = within - two * turn;
      if (of_turn >= 2 * width) return {tiles - 1, 2 * two, true};
      const int32_t odd = of_turn >= width ? 1 : 0;
      return {2 * (first + of_turn - odd * width), 2 * two + odd, false};
    }
  }
};

// A cluster's tickets; one thread of each cluster draws them.
struct ClusterTickets {
  TicketCounter counter;
  uint32_t clusters;
  uint32_t tickets;  // all of the launch's
  uint32_t drawn = 0;

  // A cluster's position gives its first two tickets; the counter gives those beyond.
  __device__ __forceinline__ void draw() { drawn = 2 * clusters + counter.draw(); }

  // Every cluster draws until it has a ticket past the end.
  __device__ __forceinline__ bool past_end() const { return drawn >= tickets; }
  __device__ __forceinline__ void reset_if_last() const {
    const uint32_t first_past_end = max(tickets, 2 * clusters);
    if (drawn == first_past_end + clusters - 1) counter.reset();
  }
};

// The thread that draws for a cluster and tells both blocks what to do, one item ahead, so that
// nobody waits for its draws and look-ups.
template <class Config>
struct ItemTeller {
  const Walk<Config>& walk;
  SharedStorage<Config>& shared;
  ClusterTickets tickets;
  ClusterItem next;
  RingPosition<Config::kItems> ring;

  __device__ ItemTeller(const Params& params, const Walk<Config>& items,
                        SharedStorage<Config>& storage)
      : walk(items),
        shared(storage),
        tickets{
            {params.queue}, num_clusters(Config::kCluster), static_cast<uint32_t>(items.tickets)} {}

  __device__ __forceinline__ void begin() {
    tickets.counter.mark();
    draw();
    next = walk.at(cluster_index(Config::kCluster) + num_clusters(Config::kCluster));
    if (walk.is_empty(next)) look_up();
  }
  // Returns false if what it told says that no item is left.
  __device__ __forceinline__ bool tell() {
    ptx::mbarrier_wait(&shared.item_empty[ring.slot], ring.phase ^ 1);
    uint64_t* full = &shared.item_full[ring.slot];
    const int4 words = {next.expert, next.begin, next.end, static_cast<int32_t>(next.where)};
    if constexpr (Config::kCluster == 1) {
      shared.items[ring.slot] = words;
      ptx::mbarrier_arrive(full);
    } else {
      for (uint32_t rank = 0; rank < Config::kCluster; ++rank) {
        ptx::publish_to_cluster(&shared.items[ring.slot], words, full, rank);
      }
    }
    ring.advance();
    const bool more = next.where != 0;
    if (more) look_up();
    return more;
  }

 private:
  __device__ __forceinline__ void draw() {
    tickets.draw();
    if (tickets.past_end()) tickets.reset_if_last();
  }
  __device__ __forceinline__ void look_up() {
    do {
      next = walk.at(tickets.drawn);
      if (!tickets.past_end()) draw();
    } while (walk.is_empty(next));
  }
};

// A role's sequence of items; `single` if one thread reads instead of a warp.
template <class Config>
struct ItemReader {
  const Walk<Config>& walk;
  SharedStorage<Config>& shared;
  bool single;
  RingPosition<Config::kItems> ring;

  // The cluster's position says which it is, so nobody waits for the counter. It may have no rows.
  __device__ __forceinline__ Item first() const {
    return walk.mine(walk.at(cluster_index(Config::kCluster)));
  }
  __device__ __forceinline__ Item next() {
    uint64_t* full = &shared.item_full[ring.slot];
    if constexpr (Config::kCluster == 1) {
      ptx::mbarrier_wait(full, ring.phase);
    } else {
      ptx::mbarrier_wait_cluster(full, ring.phase);
    }
    const uint4 words = ptx::load_shared(ptx::shared_address(&shared.items[ring.slot]));
    if (!single) __syncwarp();
    if (single || threadIdx.x % 32 == 0) {
      uint64_t* empty = &shared.item_empty[ring.slot];
      if constexpr (Config::kCluster == 1) {
        ptx::mbarrier_arrive(empty);
      } else {
        ptx::mbarrier_arrive_cluster(empty, 0);
      }
    }
    ring.advance();
    return walk.mine({static_cast<int32_t>(words.x), static_cast<int32_t>(words.y),
                      static_cast<int32_t>(words.z), words.w});
  }
};

}  // namespace conclave::inline v0::experts::tile
