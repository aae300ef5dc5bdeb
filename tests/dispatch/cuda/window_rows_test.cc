// Rows of all ranks in one launch against the launches that it stands for: blocks of bytes that are
// packed, copied to every rank, and unpacked. All ranks are on one device.
#include "dispatch/cuda/window_rows.h"

#include "comm/nccl/nccl_bytes.h"
#include "comm/nccl/one_device_ranks.h"
#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/stream.h"
#include "dispatch/cuda/rank_rows.h"

#include "conclave/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

namespace conclave::dispatch {
namespace {

using testing::Bytes;
using testing::letters;
using testing::OnDevice;
using testing::RanksOnOneDevice;
using testing::values;

constexpr auto kUntouched = std::byte{0x5a};

size_t index(int64_t at) { return static_cast<size_t>(at); }

struct Form {
  DType rows = DType::kBF16;
  DType travels = DType::kBF16;
  int64_t columns = 264;
  int32_t top_k = 3;
  bool is_there = false;  // codes with scales, which lie in their blocks already
  bool has_marks = false;
  int64_t live = -1;  // below 0: all rows count
};

// As rows of bf16 or f16 they are finite, for the two exponents of numbers that are not do not
// come.
Bytes rows_of(DType dtype, int64_t count, int32_t rank) {
  if (dtype == DType::kF32) return values<float>(count, index(rank) + 3);
  Bytes bytes = letters(2 * count, rank, 7);
  for (size_t at = 1; at < bytes.size(); at += 2) bytes[at] &= std::byte{0xbb};
  return bytes;
}

RankRowForm layout_of(const Form& form) {
  const int64_t row_bytes = form.columns * byte_size(form.travels);
  RankRowForm layout{.dtype = form.travels, .columns = form.columns, .top_k = form.top_k};
  layout.ids = (row_bytes + 15) / 16 * 16;
  if (form.is_there) {
    layout.columns = 0;
    layout.ids += 12;  // scales
  }
  int64_t end = layout.ids + 8 * form.top_k;
  if (form.has_marks) {
    layout.mark = end;
    end += 4;
  }
  layout.bytes = (end + 15) / 16 * 16 + 16;
  return layout;
}

class Subject {
 public:
  Subject(const Form& form, const std::vector<int64_t>& counts, int32_t rank)
      : form_(form), layout_(layout_of(form)), rank_(rank), counts_(counts), first_(counts.size()) {
    std::exclusive_scan(counts.begin(), counts.end(), first_.begin(), int64_t{0});
    all_ = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const int64_t slots = own() * form.top_k;
    Bytes blocks(index(all_ * layout_.bytes), kUntouched);
    if (form.is_there) {
      const Bytes mine = letters(own() * layout_.bytes, rank, 1);
      std::ranges::copy(mine, blocks.begin() + first() * layout_.bytes);
    }
    add(rows_of(form.rows, own() * stride(), rank));
    add(values<int32_t>(slots, index(rank) + 20));
    add(values<float>(slots, index(rank) + 40));
    add(values<int32_t>(own(), index(rank) + 60));
    add(values<int64_t>(0, 0));
    add(blocks);
    for (const int64_t words : {all_ * form.top_k, all_ * form.top_k, all_}) {
      add(Bytes(index(words * 4), kUntouched));
    }
    const int64_t live = form.live;
    live_ = std::make_unique<OnDevice>(Bytes(std::as_bytes(std::span(&live, 1)).begin(),
                                             std::as_bytes(std::span(&live, 1)).end()));
    rows_ = std::make_unique<WindowRows>(WindowRows{.pack = pack(memory_[5]),
                                                    .unpack = unpack(),
                                                    .rank = rank,
                                                    .first_rows = first_,
                                                    .num_rows = counts_});
    kernel_ = std::make_unique<WindowRowKernel>(*rows_);
  }

  const WindowRowKernel& kernel() const { return *kernel_; }
  const RankRowForm& layout() const { return layout_; }
  int64_t own() const { return counts_[index(rank_)]; }
  Bytes found(size_t what) const { return memory_[what].bytes(); }

  // This rank's blocks, by a launch of their own.
  Bytes packed(CUstream_st* stream) const {
    const OnDevice blocks(memory_[5].bytes());
    pack_rank_rows(pack(blocks), stream);
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const Bytes all = blocks.bytes();
    const auto begin = all.begin() + first() * layout_.bytes;
    return {begin, begin + own() * layout_.bytes};
  }
  void expect(const Bytes& blocks, CUstream_st* stream) const {
    const OnDevice from(blocks);
    const OnDevice ids(Bytes(index(all_ * form_.top_k * 4)));
    const OnDevice weights(Bytes(index(all_ * form_.top_k * 4)));
    const OnDevice marks(Bytes(index(all_ * 4)));
    UnpackChoices args = unpack();
    args.blocks = from.data();
    args.topk_ids = reinterpret_cast<int32_t*>(ids.data());
    args.topk_weights = reinterpret_cast<float*>(weights.data());
    if (form_.has_marks) args.marks = reinterpret_cast<int32_t*>(marks.data());
    unpack_choices(args, stream);
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    EXPECT_EQ(memory_[6].bytes() == ids.bytes(), true) << "ids of rank " << rank_;
    EXPECT_EQ(memory_[7].bytes() == weights.bytes(), true) << "weights of rank " << rank_;
    if (form_.has_marks) {
      EXPECT_EQ(memory_[8].bytes() == marks.bytes(), true) << "marks of rank " << rank_;
    }
    const Bytes mine = memory_[5].bytes();
    for (int64_t row = 0; row < all_; ++row) {
      const auto begin = row * layout_.bytes;
      const int64_t size =
          layout_.columns == 0 ? layout_.ids : layout_.columns * byte_size(form_.travels);
      EXPECT_EQ(
          std::equal(mine.begin() + begin, mine.begin() + begin + size, blocks.begin() + begin),
          true)
          << "row " << row << " of rank " << rank_;
    }
  }

 private:
  void add(const Bytes& bytes) { memory_.emplace_back(bytes); }
  std::ptrdiff_t first() const { return first_[index(rank_)]; }
  int64_t stride() const { return form_.columns + (form_.columns % 2 == 0 ? 8 : 1); }
  PackRankRows pack(const OnDevice& blocks) const {
    return {.form = layout_,
            .rows = memory_[0].data(),
            .dtype = form_.rows,
            .row_stride = stride(),
            .num_rows = own(),
            .live_rows = form_.live < 0 ? nullptr : reinterpret_cast<const int64_t*>(live_->data()),
            .topk_ids = reinterpret_cast<const int32_t*>(memory_[1].data()),
            .topk_weights = reinterpret_cast<const float*>(memory_[2].data()),
            // Some ranks have one mark for all rows.
            .marks = rank_ == 1 ? nullptr : reinterpret_cast<const int32_t*>(memory_[3].data()),
            .mark = 11,
            .out = blocks.data() + first() * layout_.bytes};
  }
  UnpackChoices unpack() const {
    return {.form = layout_,
            .blocks = memory_[5].data(),
            .num_rows = all_,
            .topk_ids = reinterpret_cast<int32_t*>(memory_[6].data()),
            .topk_weights = reinterpret_cast<float*>(memory_[7].data()),
            .marks = form_.has_marks ? reinterpret_cast<int32_t*>(memory_[8].data()) : nullptr};
  }

  Form form_;
  RankRowForm layout_;
  int32_t rank_;
  std::vector<int64_t> counts_;
  std::vector<int64_t> first_;
  int64_t all_ = 0;
  std::vector<OnDevice> memory_;
  std::unique_ptr<OnDevice> live_;
  std::unique_ptr<WindowRows> rows_;
  std::unique_ptr<WindowRowKernel> kernel_;
};

class CudaWindowRows : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    const cuda::DeviceCount devices = cuda::count_devices();
    if (devices.count == 0) GTEST_SKIP() << devices.reason;
    prepare_window_rows();
  }

  // Calls in which the ranks have these numbers of rows, by turns.
  static void check(const Form& form, const std::vector<int64_t>& rows) {
    const RanksOnOneDevice group(GetParam());
    const cuda::OwnedStream stream = cuda::make_stream();
    for (size_t turn = 0; turn < rows.size(); ++turn) {
      std::vector<int64_t> counts;
      for (int32_t rank = 0; rank < group.count(); ++rank) {
        counts.push_back(rows[(turn + index(rank) * 2) % rows.size()]);
      }
      std::vector<std::unique_ptr<Subject>> subjects;
      std::vector<const comm::WindowKernel*> kernels;
      Bytes blocks;
      for (int32_t rank = 0; rank < group.count(); ++rank) {
        subjects.push_back(std::make_unique<Subject>(form, counts, rank));
        kernels.push_back(&subjects.back()->kernel());
        const Bytes mine = subjects.back()->packed(stream.get());
        blocks.insert(blocks.end(), mine.begin(), mine.end());
      }
      const int64_t row_bytes = subjects[0]->layout().bytes;
      group.run(kernels, [&](int32_t from, int32_t) { return counts[index(from)] * row_bytes; });
      group.expect_marks(static_cast<uint32_t>(turn + 1));
      for (const auto& subject : subjects) subject->expect(blocks, stream.get());
    }
  }
};

TEST_P(CudaWindowRows, RowsOfEveryType_ArriveAsTheyArePacked) {
  for (const DType rows : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType travels : {DType::kBF16, DType::kF16, DType::kF32}) {
      check({.rows = rows, .travels = travels}, {5, 0, 60, 1});
    }
  }
}

TEST_P(CudaWindowRows, RowsOfEveryWidth_AndChoices_ArriveAsTheyArePacked) {
  for (const int64_t columns : {1, 7, 8, 250, 511, 512, 7168}) {
    for (const int32_t top_k : {1, 8, 33}) {
      check({.columns = columns, .top_k = top_k, .has_marks = top_k != 8}, {3, 8, 1, 0});
    }
  }
}

TEST_P(CudaWindowRows, CodesWithScales_TravelAsTheyLie) {
  for (const int64_t columns : {1, 130, 3584}) {
    check({.columns = columns, .is_there = true, .has_marks = columns == 130}, {3, 15, 1, 0});
  }
}

TEST_P(CudaWindowRows, MessagesAsLongAsASlot_AreWhole) {
  const Form form{.columns = 1024};
  const int64_t most = testing::kSmallSlot / layout_of(form).bytes;
  check(form, {most, most - 1, most});
}

TEST_P(CudaWindowRows, RowsThatDoNotCount_HaveNoChoices) {
  check({.has_marks = true, .live = 4}, {9, 2, 5});
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaWindowRows, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace conclave::dispatch
