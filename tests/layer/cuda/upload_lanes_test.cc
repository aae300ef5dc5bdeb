// Threads that bring weights to a device together, in the host's memory: every byte arrives
// whatever the threads, and what one of them throws is what one thread alone would throw.
#include "layer/cuda/upload_lanes.h"

#include "core/weight_types.h"
#include "layer/refit_sources.h"
#include "support/layer_fixture.h"

#include "conclave/synthetic.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::make_spec;

// An application's own, whose workers run one after the other.
class OneAfterTheOther final : public Executor {
 public:
  explicit OneAfterTheOther(int32_t workers) : workers_(workers) {}
  int32_t concurrency() const noexcept override { return workers_; }
  void run(ParallelTask task) override {
    for (int32_t worker = workers_; worker-- > 0;) task.invoke(task.state, worker);
  }

 private:
  int32_t workers_;
};

std::vector<std::unique_ptr<Executor>> executors() {
  std::vector<std::unique_ptr<Executor>> all;
  all.push_back(make_thread_pool({.num_threads = 1}));
  all.push_back(make_thread_pool({.num_threads = 3}));
  all.push_back(std::make_unique<OneAfterTheOther>(40));
  return all;
}

// Has no views, so that rows are read to where the copy begins.
class WithoutViews final : public WeightSource {
 public:
  explicit WithoutViews(const WeightSource& inner) : inner_(inner) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner_.read(id, expert, block, destination);
  }

 private:
  const WeightSource& inner_;
};

void expect_every_byte(int64_t hidden_size, int64_t inner_size) {
  const MoeSpec spec = make_spec(3, 2, hidden_size, inner_size, DType::kBF16);
  const auto random = make_synthetic_source(spec, 3);
  const WeightInfo info = random->describe(weights::kDown);
  const auto row_bytes = packed_bytes(info.dtype, info.cols);
  const auto matrix = static_cast<size_t>(info.rows * row_bytes);
  ASSERT_GT(matrix, PinnedRing::kPieceBytes);
  std::vector<std::byte> expected(matrix * 3);
  for (int64_t expert = 0; expert < 3; ++expert) {
    random->read(weights::kDown, expert, {0, info.rows, 0, info.cols},
                 std::span(expected).subspan(static_cast<size_t>(expert) * matrix, matrix));
  }
  const WithoutViews hidden(*random);
  for (const WeightSource* source : {static_cast<const WeightSource*>(random.get()),
                                     static_cast<const WeightSource*>(&hidden)}) {
    for (const auto& executor : executors()) {
      SCOPED_TRACE(executor->concurrency());
      std::vector<std::byte> arrived(expected.size());
      PinnedRings rings;
      UploadLanes lanes(*source, nullptr, 0, *executor, rings);
      EXPECT_LE(rings.size(), 16U);
      lanes.for_each(3, [&](WeightUpload& lane) {
        return [&](int64_t expert) {
          lane.copy({.id = weights::kDown, .expert = expert, .block = {0, info.rows, 0, info.cols}},
                    {.data = arrived.data() + static_cast<size_t>(expert) * matrix,
                     .stride_bytes = row_bytes});
        };
      });
      lanes.finish();
      EXPECT_TRUE(arrived == expected);
    }
  }
}

// Matrices of 1.2 MB, which one piece does not hold, in rows of 776 bytes; then such rows.
TEST(UploadLanes, EveryByte_ArrivesOverAnyThreads) {
  expect_every_byte(1552, 388);
  expect_every_byte(3, 600000);
}

TEST(UploadLanes, EachNumber_ComesOnce) {
  const MoeSpec spec = make_spec(3, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 3);
  for (const auto& executor : executors()) {
    for (const int64_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
      PinnedRings rings;
      UploadLanes lanes(*source, nullptr, 0, *executor, rings);
      std::atomic<int> workers{0};
      lanes.for_each(count, [&](WeightUpload&) {
        ++workers;
        return [&](int64_t number) { ++seen[static_cast<size_t>(number)]; };
      });
      for (const std::atomic<int>& times : seen) EXPECT_EQ(times.load(), 1);
      EXPECT_LE(workers.load(), executor->concurrency());
      EXPECT_EQ(workers.load() > 0, count > 0);
    }
  }
}

// Whichever thread is first.
TEST(UploadLanes, SeveralFail_TheLeastNumberIsThrown) {
  const MoeSpec spec = make_spec(3, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 3);
  for (const auto& executor : executors()) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      PinnedRings rings;
      UploadLanes lanes(*source, nullptr, 0, *executor, rings);
      const auto run = [&](int64_t least) {
        lanes.for_each(200, [&](WeightUpload&) {
          return [&, least](int64_t number) {
            if (number >= least) throw std::runtime_error(std::to_string(number));
          };
        });
      };
      try {
        run(20);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "20");
      }
      run(200);
    }
  }
}

}  // namespace
}  // namespace conclave
