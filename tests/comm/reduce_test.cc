#include "comm/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace conclave {
namespace {

template <class T>
T reduce(T a, T b, DType dtype, ReduceOp op) {
  // The data is one byte off alignment, as a message may be.
  std::vector<std::byte> left(sizeof(T) + 1);
  std::vector<std::byte> right(sizeof(T) + 1);
  std::memcpy(left.data() + 1, &a, sizeof(T));
  std::memcpy(right.data() + 1, &b, sizeof(T));
  comm::reduce_into(left.data() + 1, right.data() + 1, sizeof(T), dtype, op);
  T result{};
  std::memcpy(&result, left.data() + 1, sizeof(T));
  return result;
}

TEST(Reduce, Sum_AddsAndIntegersWrap) {
  EXPECT_EQ(reduce(1.5F, 2.25F, DType::kF32, ReduceOp::kSum), 3.75F);
  EXPECT_EQ(reduce(1.5, 2.25, DType::kF64, ReduceOp::kSum), 3.75);
  EXPECT_EQ(reduce(int64_t{1} << 40, int64_t{3}, DType::kI64, ReduceOp::kSum),
            (int64_t{1} << 40) + 3);
  EXPECT_EQ(reduce(std::numeric_limits<int32_t>::max(), 1, DType::kI32, ReduceOp::kSum),
            std::numeric_limits<int32_t>::min());
}

TEST(Reduce, Max_PropagatesNanFromEitherSide) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(reduce(1.0F, 2.0F, DType::kF32, ReduceOp::kMax), 2.0F);
  EXPECT_EQ(reduce(2.0F, 1.0F, DType::kF32, ReduceOp::kMax), 2.0F);
  EXPECT_TRUE(std::isnan(reduce(nan, 1.0F, DType::kF32, ReduceOp::kMax)));
  EXPECT_TRUE(std::isnan(reduce(1.0F, nan, DType::kF32, ReduceOp::kMax)));
  EXPECT_EQ(reduce(-5, -7, DType::kI32, ReduceOp::kMax), -5);
}

TEST(Reduce, Types_AreTheFourOfTheContract) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kI32, DType::kI64}) {
    EXPECT_TRUE(comm::is_reducible(dtype));
  }
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kU8, DType::kBool, DType::kF4}) {
    EXPECT_FALSE(comm::is_reducible(dtype));
  }
}

}  // namespace
}  // namespace conclave
