// Sums of rows over ranks in one launch against the launches that it stands for: the sum of slots
// of each rank, the sum of these in rank order, the rounding. All ranks are on one device.
#include "dispatch/cuda/window_sums.h"

#include "comm/nccl/nccl_bytes.h"
#include "comm/nccl/one_device_ranks.h"
#include "core/float_convert.h"
#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/stream.h"
#include "dispatch/cuda/combine.h"
#include "dispatch/cuda/rank_rows.h"
#include "dispatch/cuda/sum_rows.h"

#include "conclave/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

namespace conclave::dispatch {
namespace {

using testing::Bytes;
using testing::OnDevice;
using testing::RanksOnOneDevice;

constexpr int32_t kExpertsOfRank = 3;
constexpr int32_t kTopK = 4;
constexpr auto kUntouched = std::byte{0x5a};

size_t index(int64_t at) { return static_cast<size_t>(at); }

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

// Rows of finite values of the type; whatever their bits, the sums of two ways must agree.
Bytes random_rows(DType dtype, int64_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> value(-2, 2);
  std::vector<float> floats(index(count));
  for (float& it : floats) it = value(random);
  if (dtype == DType::kF32) return bytes_of(floats);
  std::vector<uint16_t> halves(index(count));
  for (size_t at = 0; at < halves.size(); ++at) {
    const float it = floats[at];
    halves[at] = dtype == DType::kF16 ? float_to_f16(it) : float_to_bf16(it);
  }
  return bytes_of(halves);
}

struct Form {
  DType rows = DType::kBF16;
  DType travels = DType::kF32;
  DType out = DType::kBF16;
  int64_t columns = 264;
  float scale = 1;
  bool same_rows = false;  // as tensor-parallel ranks have
  bool is_made = false;    // the parts are sums already
  bool has_terms = false;  // a scale, a bias, a residual and a mask join the slots
  int64_t live = -1;       // this many of each rank's own rows count; below 0: all
};

int64_t stride_of(int64_t columns, DType dtype) {
  const int64_t unit = 16 / byte_size(dtype);
  return (columns + unit - 1) / unit * unit;
}

// One rank of a call: its experts' rows of the tokens of all, and room for its own sums.
class Subject {
 public:
  Subject(const Form& form, const std::vector<int64_t>& counts, int32_t rank)
      : form_(form),
        rank_(rank),
        counts_(counts),
        first_(counts.size(), 0),
        all_(form.same_rows ? counts[0]
                            : std::accumulate(counts.begin(), counts.end(), int64_t{0})) {
    if (!form.same_rows)
      std::exclusive_scan(counts.begin(), counts.end(), first_.begin(), int64_t{0});
    const auto ranks = static_cast<int32_t>(counts.size());
    // Choices are the same on every rank, which has its own experts' rows.
    std::mt19937 choices(7);
    std::uniform_int_distribution<int32_t> expert(-1, ranks * kExpertsOfRank);
    std::uniform_real_distribution<float> weight(-1, 1);
    std::vector<int32_t> ids(index(all_ * kTopK));
    std::vector<float> weights(ids.size());
    std::ranges::generate(ids, [&] { return expert(choices); });
    std::ranges::generate(weights, [&] { return weight(choices); });
    std::vector<int32_t> local(index(ranks * kExpertsOfRank), -1);
    std::iota(local.begin() + rank * kExpertsOfRank, local.begin() + (rank + 1) * kExpertsOfRank,
              0);
    std::mt19937 random(static_cast<uint32_t>(100 + rank));
    const int64_t row_stride = stride_of(form.columns, form.rows);
    add(random_rows(form.rows, all_ * kTopK * row_stride, random));
    add(bytes_of(ids));
    add(bytes_of(weights));
    add(bytes_of(local));
    add(random_rows(DType::kF32, all_ * sum_stride(), random));
    add(bytes_of(std::vector<int64_t>{form.live}));
    add(Bytes(index(window_sum_bytes(own(), form.columns, form.travels)), std::byte{0xff}));
    add(Bytes(index(own() * out_stride() * byte_size(form.out)), kUntouched));
    add(random_rows(DType::kF32, form.columns, random));
    add(random_rows(form.rows, all_ * row_stride, random));
    add(mask());
    sums_ = std::make_unique<WindowSums>(WindowSums{.part = part(),
                                                    .travels = form.travels,
                                                    .rank = rank,
                                                    .first_rows = first_,
                                                    .num_rows = counts_,
                                                    .own = memory_[6].data(),
                                                    .scale = form.scale,
                                                    .live_tokens = live(),
                                                    .out = memory_[7].data(),
                                                    .out_dtype = form.out,
                                                    .out_stride = out_stride()});
    kernel_ = std::make_unique<WindowSumKernel>(*sums_);
  }

  const WindowSumKernel& kernel() const { return *kernel_; }
  Bytes found() const { return memory_[7].bytes(); }
  int64_t own() const { return counts_[index(rank_)]; }

  // This rank's part of the rows of all, by the launches of their own.
  Bytes part_alone(CUstream_st* stream) const {
    const int64_t stride = stride_of(form_.columns, form_.travels);
    const OnDevice out(Bytes(index(all_ * stride * byte_size(form_.travels)), std::byte{0}));
    DeviceCombineArgs args = part();
    args.out = out.data();
    args.out_dtype = form_.travels;
    args.out_stride = stride;
    device_combine(args, stream);
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return out.bytes();
  }
  // What this rank's rows must be, of the parts of all.
  Bytes expected(const std::vector<Bytes>& parts, CUstream_st* stream) const {
    const int64_t stride = stride_of(form_.columns, form_.travels);
    const auto row_bytes = index(stride * byte_size(form_.travels));
    const size_t begin = index(first_[index(rank_)]) * row_bytes;
    const size_t size = index(own()) * row_bytes;
    Bytes others;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      if (rank == index(rank_)) continue;
      const auto from = parts[rank].begin() + static_cast<std::ptrdiff_t>(begin);
      others.insert(others.end(), from, from + static_cast<std::ptrdiff_t>(size));
    }
    const auto from = parts[index(rank_)].begin() + static_cast<std::ptrdiff_t>(begin);
    const OnDevice mine(Bytes(from, from + static_cast<std::ptrdiff_t>(size)));
    const OnDevice theirs(others);
    const OnDevice sums(Bytes(index(own() * sum_stride()) * sizeof(float)));
    const OnDevice out(Bytes(memory_[7].bytes().size(), kUntouched));
    add_rank_parts({.own = mine.data(),
                    .others = theirs.data(),
                    .dtype = form_.travels,
                    .rank = rank_,
                    .ranks = static_cast<int32_t>(counts_.size()),
                    .num_rows = own(),
                    .columns = form_.columns,
                    .stride = stride,
                    .out = reinterpret_cast<float*>(sums.data()),
                    .out_stride = sum_stride()},
                   stream);
    round_sums({.num_tokens = own(),
                .live_tokens = live(),
                .routed_rows = reinterpret_cast<const float*>(sums.data()),
                .routed_row_stride = sum_stride(),
                .hidden_size = form_.columns,
                .output_scale = form_.scale,
                .out = out.data(),
                .out_dtype = form_.out,
                .out_stride = out_stride()},
               stream);
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return out.bytes();
  }

 private:
  void add(const Bytes& bytes) { memory_.emplace_back(bytes); }
  // Every third row does not count.
  Bytes mask() const {
    Bytes all(index(all_), std::byte{1});
    for (size_t row = 0; row < all.size(); row += 3) all[row] = std::byte{0};
    return all;
  }
  int64_t sum_stride() const { return stride_of(form_.columns, DType::kF32); }
  int64_t out_stride() const { return form_.columns + 3; }
  const int64_t* live() const {
    return form_.live < 0 ? nullptr : reinterpret_cast<const int64_t*>(memory_[5].data());
  }
  DeviceCombineArgs part() const {
    DeviceCombineArgs args{.num_tokens = all_, .hidden_size = form_.columns};
    args.expert_dtype = form_.rows;
    if (form_.has_terms) {
      args.output_scale = 0.75F;
      args.output_bias = reinterpret_cast<const float*>(memory_[8].data());
      args.residual_rows = memory_[9].data();
      args.residual_dtype = form_.rows;
      args.residual_row_stride = stride_of(form_.columns, form_.rows);
      args.padding_mask = reinterpret_cast<const bool*>(memory_[10].data());
    }
    if (form_.is_made) {
      args.routed_rows = reinterpret_cast<const float*>(memory_[4].data());
      args.routed_row_stride = sum_stride();
      return args;
    }
    args.expert_rows = memory_[0].data();
    args.expert_row_stride = stride_of(form_.columns, form_.rows);
    args.topk_ids = reinterpret_cast<const int32_t*>(memory_[1].data());
    args.topk_weights = reinterpret_cast<const float*>(memory_[2].data());
    args.local_expert = reinterpret_cast<const int32_t*>(memory_[3].data());
    args.num_experts = static_cast<int32_t>(counts_.size()) * kExpertsOfRank;
    args.top_k = kTopK;
    return args;
  }

  Form form_;
  int32_t rank_;
  std::vector<int64_t> counts_;
  std::vector<int64_t> first_;
  int64_t all_;
  std::vector<OnDevice> memory_;
  std::unique_ptr<WindowSums> sums_;
  std::unique_ptr<WindowSumKernel> kernel_;
};

class CudaWindowSums : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    const cuda::DeviceCount devices = cuda::count_devices();
    if (devices.count == 0) GTEST_SKIP() << devices.reason;
    prepare_window_sums();
  }

  // Ranks with so many rows, one call after another.
  static void check(const Form& form, const std::vector<std::vector<int64_t>>& calls) {
    const auto ranks = static_cast<int32_t>(calls[0].size());
    const RanksOnOneDevice group(ranks);
    const cuda::OwnedStream stream = cuda::make_stream();
    uint32_t so_far = 0;
    for (const std::vector<int64_t>& counts : calls) {
      std::vector<std::unique_ptr<Subject>> subjects;
      std::vector<const comm::WindowKernel*> kernels;
      std::vector<Bytes> parts;
      for (int32_t rank = 0; rank < ranks; ++rank) {
        subjects.push_back(std::make_unique<Subject>(form, counts, rank));
        kernels.push_back(&subjects.back()->kernel());
        parts.push_back(subjects.back()->part_alone(stream.get()));
      }
      group.run(kernels, [&](int32_t, int32_t to) {
        return window_sum_bytes(counts[index(to)], form.columns, form.travels);
      });
      group.expect_marks(++so_far);
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const Subject& subject = *subjects[index(rank)];
        EXPECT_EQ(subject.found() == subject.expected(parts, stream.get()), true)
            << "rank " << rank << " with " << subject.own() << " rows of " << form.columns
            << " columns";
      }
    }
  }
  // So many rows for the ranks of a test, by turns.
  static std::vector<std::vector<int64_t>> calls(const std::vector<int64_t>& rows) {
    std::vector<std::vector<int64_t>> all;
    for (size_t turn = 0; turn < rows.size(); ++turn) {
      std::vector<int64_t> counts;
      for (int32_t rank = 0; rank < GetParam(); ++rank) {
        counts.push_back(rows[(turn + index(rank) * 2) % rows.size()]);
      }
      all.push_back(counts);
    }
    return all;
  }
};

TEST_P(CudaWindowSums, RowsOfEveryType_HaveTheBitsOfTheirLaunches) {
  for (const DType rows : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType travels : {DType::kF32, rows}) {
      for (const DType out : {rows, DType::kF32}) {
        check({.rows = rows, .travels = travels, .out = out, .scale = 2.5F}, calls({5, 0, 33, 1}));
      }
    }
  }
}

TEST_P(CudaWindowSums, RowsOfEveryWidth_HaveTheBitsOfTheirLaunches) {
  for (const int64_t columns : {1, 8, 130, 255, 256, 257, 2880, 7168}) {
    const int64_t most = (testing::kSmallSlot / 4) / window_sum_columns(columns);
    check({.columns = columns}, calls({3, std::min<int64_t>(most, 40), 1, 0}));
  }
}

TEST_P(CudaWindowSums, MessagesAsLongAsASlot_AreWhole) {
  constexpr int64_t kColumns = 512;
  const int64_t most = testing::kSmallSlot / window_sum_bytes(1, kColumns, DType::kF32);
  check({.columns = kColumns}, calls({most, most - 1, most}));
}

TEST_P(CudaWindowSums, TheSameRowsOnAllRanks_AreMadeOnce) {
  for (const bool is_made : {false, true}) {
    for (const int64_t rows : {0, 1, 40}) {
      check({.same_rows = true, .is_made = is_made}, {std::vector<int64_t>(index(GetParam()), rows),
                                                      std::vector<int64_t>(index(GetParam()), 7)});
    }
  }
}

TEST_P(CudaWindowSums, PartsThatAreSums_TravelInEitherType) {
  for (const DType travels : {DType::kF32, DType::kBF16}) {
    check({.travels = travels, .is_made = true}, calls({9, 2, 0}));
  }
}

TEST_P(CudaWindowSums, EveryTermOfACombine_HasTheBitsOfItsLaunch) {
  for (const DType rows : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const bool is_made : {false, true}) {
      const Form form{
          .rows = rows, .out = rows, .same_rows = true, .is_made = is_made, .has_terms = true};
      check(form, {std::vector<int64_t>(index(GetParam()), 40),
                   std::vector<int64_t>(index(GetParam()), 1)});
    }
  }
}

TEST_P(CudaWindowSums, RowsThatDoNotCount_AreNotWritten) { check({.live = 4}, calls({9, 2, 5})); }

INSTANTIATE_TEST_SUITE_P(Ranks, CudaWindowSums, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace conclave::dispatch
