// Tests what a rank reads from a source, and how much memory loading takes.

#include "support/layer_fixture.h"
#include "support/role_sources.h"
#include "support/sanitizers.h"

#include "conclave/placement.h"
#include "conclave/refit.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

using testing::make_spec;
using testing::NanGate;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

struct Read {
  WeightId role;
  int64_t expert;
  WeightBlock block;
};

// Passes reads on and records them.
class RecordingSource final : public WeightSource {
 public:
  explicit RecordingSource(const WeightSource& source) : source_(source) {}
  WeightInfo describe(WeightId role) const override { return source_.describe(role); }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    source_.read(role, expert, block, destination);
    const std::lock_guard lock(mutex_);
    reads_.push_back({role, expert, block});
  }
  const std::vector<Read>& reads() const { return reads_; }

 private:
  const WeightSource& source_;
  mutable std::mutex mutex_;
  mutable std::vector<Read> reads_;
};

class Warnings final : public LogSink {
 public:
  void log(LogLevel level, std::string_view message) override {
    if (level == LogLevel::kWarning) texts.emplace_back(message);
  }

  std::vector<std::string> texts;
};

// Results do not show it: the expert is never chosen.
TEST(Loading, AGateWithNan_IsToldToTheLog) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const MoeSpec spec = make_spec(12, 2, 40, 24, dtype);
    const auto whole = make_synthetic_source(spec, 11);
    Warnings warnings;
    const Context context({.num_threads = 1, .log = &warnings});
    MoeLayer layer = MoeLayer::create(context, spec, *whole);
    EXPECT_TRUE(warnings.texts.empty());
    layer.reload(NanGate(*whole, {3, 7}), ReloadMode::kStaged);
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_NE(warnings.texts.front().find("2 of 12 rows of the gate have NaN, 3, 7:"),
              std::string::npos)
        << warnings.texts.front();
    const Tensor hidden = random_tensor(DType::kF32, 50, 40, 3);
    const auto output = run_layer(layer, hidden.view(), DType::kF32);
    for (int64_t slot = 0; slot < int64_t{50} * spec.top_k; ++slot) {
      const int32_t id = output.ids.as<int32_t>()[slot];
      EXPECT_TRUE(id != 3 && id != 7) << "slot " << slot;
    }
    // More than a line has room for.
    const NanGate all(*whole, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
    static_cast<void>(MoeLayer::create(context, spec, all));
    ASSERT_EQ(warnings.texts.size(), 2U);
    EXPECT_NE(warnings.texts.back().find("12 of 12 rows"), std::string::npos);
    EXPECT_NE(warnings.texts.back().find("6, 7, ...:"), std::string::npos) << warnings.texts.back();
  }
}

TEST(Loading, AGateWithNan_IsCountedWhileTheLayerHasIt) {
  const MoeSpec spec = make_spec(12, 2, 40, 24, DType::kF32);
  const auto whole = make_synthetic_source(spec, 11);
  const NanGate damaged(*whole, {3, 7});
  const Context context({.num_threads = 1});
  MoeLayer layer = MoeLayer::create(context, spec, damaged);
  EXPECT_EQ(layer.status().gate_rows_with_nan, 2);
  EXPECT_EQ(layer.on_ranks(context, {}).status().gate_rows_with_nan, 2);
  layer.reload(*whole, ReloadMode::kStaged);
  EXPECT_EQ(layer.status().gate_rows_with_nan, 0);
  layer.reload(NanGate(*whole, {0, 5, 11}), ReloadMode::kInPlace);
  EXPECT_EQ(layer.status().gate_rows_with_nan, 3);
  {
    Refit refit(layer);
    refit.stage(*whole);
    EXPECT_EQ(layer.status().gate_rows_with_nan, 3);
    refit.commit();
  }
  EXPECT_EQ(layer.status().gate_rows_with_nan, 0);
  // A refit that leaves the gate alone leaves its count.
  layer.reload(damaged, ReloadMode::kStaged);
  {
    Refit refit(layer, {.scope = {.experts = {1}}});
    refit.stage(*whole);
    refit.commit();
  }
  EXPECT_EQ(layer.status().gate_rows_with_nan, 2);
}

bool is_routed(WeightId role) {
  return role == weights::kGate || role == weights::kUp || role == weights::kDown;
}

struct SliceCase {
  ParallelSpec parallel;
  int64_t inner;
};

// Every element of this rank's slices is read once, and none of another rank's.
void expect_exact_reads(const SliceCase& c) {
  const MoeSpec spec = make_spec(7, 2, 200, c.inner, DType::kF32);
  const auto synthetic = make_synthetic_source(spec, 3);
  const RecordingSource source(*synthetic);
  const Context context({.num_threads = 3});
  MoeLayer::create(context, spec, source, {.max_tokens = 4}, c.parallel);
  const ExpertPlacement placement = make_placement(7, c.parallel);
  const TensorSlice inner = tensor_slice(c.inner, c.parallel.tp_rank, c.parallel.tp_size);
  std::map<std::pair<size_t, int64_t>, int64_t> elements;
  for (const Read& read : source.reads()) {
    if (!is_routed(read.role)) continue;
    const bool down = read.role == weights::kDown;
    EXPECT_GE(down ? read.block.col_begin : read.block.row_begin, inner.begin);
    EXPECT_LE(down ? read.block.col_end : read.block.row_end, inner.end);
    elements[{read.role.index(), read.expert}] +=
        (read.block.row_end - read.block.row_begin) * (read.block.col_end - read.block.col_begin);
  }
  size_t matrices = 0;
  for (const int32_t physical : placement.experts_of[static_cast<size_t>(c.parallel.ep_rank)]) {
    const int32_t expert = placement.logical_of[static_cast<size_t>(physical)];
    for (const WeightId role : {weights::kGate, weights::kUp, weights::kDown}) {
      if (inner.size() == 0) continue;
      EXPECT_EQ((elements[{role.index(), expert}]), inner.size() * 200);
      ++matrices;
    }
  }
  EXPECT_EQ(elements.size(), matrices);
}

TEST(Loading, EveryRank_ReadsItsOwnExpertsAndColumnsOnce) {
  for (const int64_t inner : {150, 33, 2}) {
    for (int32_t rank = 0; rank < 3; ++rank) {
      constexpr auto kPartial = Reduce::kPartial;
      expect_exact_reads({{.ep_size = 3, .ep_rank = rank, .reduce = kPartial}, inner});
      expect_exact_reads({{.tp_size = 3, .tp_rank = rank, .reduce = kPartial}, inner});
      expect_exact_reads(
          {{.ep_size = 2, .ep_rank = 1, .tp_size = 3, .tp_rank = rank, .reduce = kPartial}, inner});
    }
  }
}

TEST(Loading, SharedExpertsAndResidual_AreReadWhereTheyCount) {
  MoeSpec spec = make_spec(4, 2, 64, 20, DType::kF32);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 11};
  spec.residual.intermediate_size = 9;
  const auto synthetic = make_synthetic_source(spec, 3);
  const Context context({.num_threads = 2});
  for (int32_t ep = 0; ep < 2; ++ep) {
    for (int32_t tp = 0; tp < 2; ++tp) {
      const RecordingSource source(*synthetic);
      MoeLayer::create(
          context, spec, source, {.max_tokens = 4},
          {.ep_size = 2, .ep_rank = ep, .tp_size = 2, .tp_rank = tp, .reduce = Reduce::kPartial});
      int64_t shared_rows = 0;
      int64_t residual_rows = 0;
      for (const Read& read : source.reads()) {
        const int64_t rows = read.block.row_end - read.block.row_begin;
        if (read.role == weights::kSharedUp) shared_rows += rows;
        if (read.role == weights::kResidualUp) residual_rows += rows;
      }
      EXPECT_EQ(shared_rows, ep == 0 ? tensor_slice(11, tp, 2).size() : 0);
      EXPECT_EQ(residual_rows, ep == 0 ? tensor_slice(9, tp, 2).size() : 0);
    }
  }
}

// The same weights as views of a caller's tensors.
TEST(Loading, ViewsAndReads_GiveTheSameBitsOnEveryRank) {
  MoeSpec spec = make_spec(3, 2, 100, 77, DType::kBF16);
  spec.has_gate = false;
  const auto source = make_synthetic_source(spec, 3);
  Tensor gate_up(DType::kBF16, {3, 154, 100});
  Tensor down(DType::kBF16, {3, 100, 77});
  const auto copy = [&](WeightId role, int64_t expert, std::byte* to) {
    const WeightInfo info = source->describe(role);
    source->read(role, expert, {0, info.rows, 0, info.cols},
                 {to, static_cast<size_t>(info.rows * info.cols) * 2});
  };
  for (int64_t e = 0; e < 3; ++e) {
    copy(weights::kGate, e, gate_up.as<std::byte>() + e * 154 * 100 * 2);
    copy(weights::kUp, e, gate_up.as<std::byte>() + (e * 154 + 77) * 100 * 2);
    copy(weights::kDown, e, down.as<std::byte>() + e * 7700 * 2);
  }
  const auto pointers =
      make_pointer_source({.gate_up = gate_up.const_view(), .down = down.const_view()});
  const Context context({.num_threads = 2});
  const Tensor hidden = random_tensor(DType::kBF16, 9, 100, 1);
  const Tensor logits = random_tensor(DType::kF32, 9, 3, 2);
  for (int32_t rank = 0; rank < 4; ++rank) {
    const ParallelSpec parallel{.tp_size = 4, .tp_rank = rank, .reduce = Reduce::kPartial};
    std::vector<Tensor> outputs;
    for (const WeightSource* from : {source.get(), pointers.get()}) {
      const MoeLayer layer = MoeLayer::create(context, spec, *from, {.max_tokens = 9}, parallel);
      Tensor out(DType::kF32, {9, 100});
      layer.forward({.hidden = hidden.view(), .router_logits = logits.view(), .out = out.view()});
      outputs.push_back(std::move(out));
    }
    EXPECT_TRUE(same_bits(outputs[0], outputs[1])) << "rank " << rank;
  }
}

int64_t anonymous_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return std::stoll(line.substr(8)) * 1024;
  }
  return -1;
}

// Reads cost only their memory; each checks how much memory is in use.
class MeasuringSource final : public WeightSource {
 public:
  explicit MeasuringSource(const MoeSpec& spec) : layout_(make_synthetic_source(spec, 1)) {}
  WeightInfo describe(WeightId role) const override { return layout_->describe(role); }
  void read(WeightId, int64_t, const WeightBlock&,
            std::span<std::byte> destination) const override {
    std::memset(destination.data(), 0x11, destination.size());
    const int64_t now = anonymous_resident_bytes();
    int64_t seen = peak_.load();
    while (now > seen && !peak_.compare_exchange_weak(seen, now)) {
    }
  }
  int64_t peak() const { return peak_.load(); }

 private:
  std::unique_ptr<WeightSource> layout_;
  mutable std::atomic<int64_t> peak_{0};
};

class LoadingMemory : public ::testing::TestWithParam<std::tuple<int32_t, int64_t>> {};

TEST_P(LoadingMemory, Peak_IsATenthAboveThePackedBytesAndOneExpert) {
#if CONCLAVE_TEST_ASAN || CONCLAVE_TEST_TSAN
  GTEST_SKIP() << "sanitizers keep freed memory";
#endif
  const auto [threads, experts] = GetParam();
  if (anonymous_resident_bytes() < 0) GTEST_SKIP() << "this kernel does not tell";
  MoeSpec spec = make_spec(experts, 1, 2048, 768, DType::kF32);
  spec.has_gate = false;
  const MeasuringSource source(spec);
  const Context context({.num_threads = threads});
  const int64_t before = anonymous_resident_bytes();
  const MoeLayer layer = MoeLayer::create(context, spec, source, {.max_tokens = 1});
  const auto packed = static_cast<int64_t>(layer.plan().packed_bytes);
  const int64_t one_expert = packed / experts;
  EXPECT_GE(source.peak() - before, packed / 2);
  EXPECT_LE(source.peak() - before, packed + packed / 10 + one_expert);
}

INSTANTIATE_TEST_SUITE_P(Sizes, LoadingMemory,
                         ::testing::Combine(::testing::Values(1, 4, 16), ::testing::Values(3, 16)),
                         [](const auto& row) {
                           return "Threads" + std::to_string(std::get<0>(row.param)) + "Experts" +
                                  std::to_string(std::get<1>(row.param));
                         });

}  // namespace
}  // namespace conclave
