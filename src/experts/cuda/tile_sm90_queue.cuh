// The order of tiles, and who draws which.
#pragma once

#include "core/device_flow.h"
#include "experts/cuda/tile_sm90_config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::tile_sm90 {

__device__ __forceinline__ uint32_t cluster_index(int cluster) {
  return blockIdx.x / static_cast<uint32_t>(cluster);
}
__device__ __forceinline__ uint32_t num_clusters(int cluster) {
  return gridDim.x / static_cast<uint32_t>(cluster);
}

struct Work {
  TokenTile tile;
  int32_t first_feature = 0;  // weight row
  bool half = false;          // of the features only
  bool shared = false;        // the other block of the cluster multiplies the same weights
  bool valid = false;
};

// The order of tiles: groups of token tiles; in a group all token tiles of a feature tile, then the
// next feature tile. What runs at one time then shares its rows and its weights in L2. A cluster
// takes pairs of neighbouring token tiles.
template <class Config>
struct TileWalk {
  const Params& params;
  int32_t num_tiles;
  int32_t units;  // token tiles, or pairs of them
  int32_t whole;  // tickets of whole tiles: the first ones
  int32_t tickets;

  __device__ explicit TileWalk(const Params& p)
      : params(p),
        num_tiles(*p.num_tiles),
        units((num_tiles + Config::kCluster - 1) / Config::kCluster) {
    const auto clusters = static_cast<int32_t>(num_clusters(Config::kCluster));
    whole = tickets = units * p.feature_tiles;
    // A last round that leaves half of the blocks idle: as halves it takes half the time.
    const int32_t last = whole % clusters;
    if (Config::kHalves && 2 * last <= clusters) {
      whole -= last;
      tickets += last;
    }
  }

  __device__ __forceinline__ Work at(uint32_t ticket) const {
    Work work;
    if (ticket >= static_cast<uint32_t>(tickets)) return work;
    work.valid = true;
    auto index = static_cast<int32_t>(ticket);
    int32_t second = 0;
    if (Config::kHalves && index >= whole) {
      work.half = true;
      second = (index - whole) % 2;
      index = whole + (index - whole) / 2;
    }
    const int32_t of_group = params.group * params.feature_tiles;
    const int32_t group = index / of_group;
    const int32_t first = group * params.group;
    const int32_t width = min(params.group, units - first);
    const int32_t within = index - group * of_group;
    const int32_t feature_tile = within / width;
    const int32_t unit = first + within - feature_tile * width;
    work.first_feature = feature_tile * Config::kFeatures + second * (Config::kFeatures / 2);
    if constexpr (Config::kCluster == 1) {
      work.tile = load(unit);
    } else {
      const int32_t mine = 2 * unit + static_cast<int32_t>(cluster_rank());
      work.tile = load(min(mine, num_tiles - 1));
      const TokenTile other = load(min(mine ^ 1, num_tiles - 1));
      work.shared = work.tile.expert == other.expert && !work.half;
      if (mine >= num_tiles) work.tile.count = 0;  // only keeps its partner company
    }
    return work;
  }

  __device__ __forceinline__ TokenTile load(int32_t position) const {
    const int4 raw = __ldg(reinterpret_cast<const int4*>(params.tiles) + position);
    return {raw.x, raw.y, raw.z, 0};
  }
};

// The counter of a launch, in 16 bytes of the workspace: a mark of 96 bits, then the number of
// tickets drawn. Whoever finds no mark writes it with a count of 0, and who draws the last ticket
// of a launch sets the count back: nothing need be cleared beforehand. Of one thread a cluster.
struct TicketCounter {
  static constexpr uint64_t kMarkHigh = 0x9D39C8B2E5A1F764;
  static constexpr uint64_t kMarkLow = 0x5BD1E995;  // above the count

  void* memory;
  uint32_t clusters;
  uint32_t tickets;  // of the launch
  uint32_t drawn = 0;

  __device__ __forceinline__ void mark() const {
    const Word128 found = compare_and_swap_128(memory, {}, {});
    if (found.high == kMarkHigh && found.low >> 32 == kMarkLow) return;
    compare_and_swap_128(memory, found, {kMarkLow << 32, kMarkHigh});
  }

  // The first two tickets of a cluster are its own by position; the counter gives those beyond.
  __device__ __forceinline__ void draw() {
    drawn = 2 * clusters + add_relaxed(static_cast<uint32_t*>(memory), 1);
  }

  // Every cluster draws until it has one past the end.
  __device__ __forceinline__ bool past_end() const { return drawn >= tickets; }
  __device__ __forceinline__ void reset_if_last() const {
    const uint32_t first_past_end = max(tickets, 2 * clusters);
    if (drawn == first_past_end + clusters - 1) {
      *static_cast<volatile uint32_t*>(memory) = 0;
    }
  }
};

// The thread that draws for a cluster and hands each ticket to both blocks.
template <class Config>
struct TicketGiver {
  SharedStorage<Config>& shared;
  TicketCounter counter;
  RingPosition<Config::kTickets> position;

  __device__ __forceinline__ void draw() {
    counter.draw();
    if (counter.past_end()) counter.reset_if_last();
  }
  // Gives the ticket drawn before and asks for the next one, which comes while a tile is computed.
  __device__ __forceinline__ void give() {
    mbarrier_wait(&shared.ticket_empty[position.stage], position.phase ^ 1);
    uint32_t* slot = &shared.tickets[position.stage];
    uint64_t* full = &shared.ticket_full[position.stage];
    if constexpr (Config::kCluster == 1) {
      *static_cast<volatile uint32_t*>(slot) = counter.drawn;
      mbarrier_arrive(full);
    } else {
      for (uint32_t rank = 0; rank < Config::kCluster; ++rank) {
        publish_to_cluster(slot, counter.drawn, full, rank);
      }
    }
    position.advance();
    if (!counter.past_end()) draw();
  }
};

// A role's sequence of tickets; `single` where a lone thread reads and not a warp.
template <class Config>
struct TicketReader {
  SharedStorage<Config>& shared;
  bool single;
  uint32_t order = 0;
  RingPosition<Config::kTickets> position;

  __device__ __forceinline__ uint32_t next() {
    if (order < 2) {
      return cluster_index(Config::kCluster) + order++ * num_clusters(Config::kCluster);
    }
    uint64_t* full = &shared.ticket_full[position.stage];
    if constexpr (Config::kCluster == 1) {
      mbarrier_wait(full, position.phase);
    } else {
      mbarrier_wait_cluster(full, position.phase);
    }
    const uint32_t ticket = *static_cast<volatile uint32_t*>(&shared.tickets[position.stage]);
    if (!single) __syncwarp();
    if (single || threadIdx.x % 32 == 0) {
      uint64_t* empty = &shared.ticket_empty[position.stage];
      if constexpr (Config::kCluster == 1) {
        mbarrier_arrive(empty);
      } else {
        mbarrier_arrive_cluster(empty, 0);
      }
    }
    position.advance();
    return ticket;
  }
};

// The producer's view: thread 0 of the cluster's first block also draws. It begins when the first
// tile's loads are under way, so that nothing waits for the counter.
template <class Config>
struct TicketProducer {
  TicketReader<Config> reader;
  TicketGiver<Config> giver;
  bool gives;
  bool begun = false;

  __device__ TicketProducer(const Params& params, SharedStorage<Config>& shared, int32_t tickets,
                            bool single)
      : reader{shared, single},
        giver{shared,
              {params.queue, num_clusters(Config::kCluster), static_cast<uint32_t>(tickets)}},
        gives(threadIdx.x == 0 && (Config::kCluster == 1 || cluster_rank() == 0)) {}

  __device__ __forceinline__ void begin() {
    begun = true;
    giver.counter.mark();
    giver.draw();
  }
  __device__ __forceinline__ uint32_t next() {
    if (gives && reader.order == 2) {
      if (!begun) begin();
      giver.give();
    }
    return reader.next();
  }
  // Every cluster draws, also one without tiles: the counter knows its last ticket by that.
  __device__ __forceinline__ void finish() {
    if (gives && !begun) begin();
  }
};

}  // namespace conclave::inline v0::experts::tile_sm90
