// The products of bytes whose rows have a scale each. The block that stores the last columns of a
// tile's rows of the intermediate makes their codes, so that the down product may begin on the
// tile.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "experts/cuda/common/stored_rows.cuh"
#include "experts/cuda/sm90/stream/byte_consumer.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Wider rows would keep a block busy for long, while others wait for it.
inline constexpr int64_t kMostRowColumns = 4096;

// Parameters of a product of bytes.
struct ByteParams : Params {
  // Up, with dynamic row scales: [sorted rows, output_stride], codes of the float32 rows in
  // `output`. Null: a launch of its own makes them.
  uint8_t* row_codes = nullptr;
};

template <class Config>
struct RowCodeConsumer : ByteConsumer<Config> {
  using Base = ByteConsumer<Config>;
  using Base::Base;
  using Base::params;
  using Base::shared;
  using Base::warp;
  using Rule = RowRuleOf<typename Config::Element>;

  // Counts this item; one count more than there are items says that the codes are stored as well.
  __device__ __forceinline__ void count_item(const Item& item) {
    const auto& own = static_cast<const ByteParams&>(params);
    if (own.row_codes == nullptr) {
      Base::count_item(item);
      return;
    }
    uint32_t* const done = &params.tiles[item.tile_index].done;
    // Rows that are stored as float32 leave this memory alone.
    auto& is_last = *reinterpret_cast<volatile uint32_t*>(shared.scratch[0]);
    meet();
    if (threadIdx.x == 0) {
      const uint32_t counted = ptx::add_release(done, 1) + 1;
      const bool counted_last = counted == static_cast<uint32_t>(params.feature_tiles);
      // Behind this, rows that other blocks stored before they counted are seen.
      if (counted_last) __threadfence();
      is_last = counted_last ? 1 : 0;
    }
    meet();
    if (is_last == 0) return;
    encode_rows(own, item.tile);
    meet();
    if (threadIdx.x == 0) ptx::add_release(done, 1);
  }

 private:
  static __device__ __forceinline__ void meet() {
    ptx::named_barrier_sync(Base::kConsumerBarrier, Base::kConsumers);
  }

  __device__ __forceinline__ void encode_rows(const ByteParams& own, const TokenTile& tile) const {
    const StoredRows rows{.values = static_cast<const float*>(own.output),
                          .codes = own.row_codes,
                          .scales = own.scales.output,
                          .stride = own.output_stride,
                          .columns = own.features,
                          .power_of_two = own.scales.power_of_two};
    const int32_t end = tile.begin + tile.count;
    encode_stored_rows<Rule>(rows, tile.begin + warp, end, Config::kConsumerWarps);
  }
};

}  // namespace conclave::inline v0::experts::stream
