// Scales lie where kernels of a GPU read them, in the host's memory: bytes one by one against the
// numbers that are stored, and steps by vectors against those without.
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/scale_bytes.h"
#include "layer/cuda/byte_columns.h"
#include "layer/cuda/h200_plan.h"
#include "layer/cuda/mlp_weights.h"
#include "layer/refit_sources.h"
#include "quant/code_meaning.h"
#include "quant/scale_type.h"
#include "support/layer_fixture.h"

#include "conclave/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using experts::ByteForm;
using testing::code_of;
using testing::make_spec;

class HostMemory final : public DeviceAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment, Stream) override {
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* data, size_t, Stream) noexcept override { std::free(data); }
};

// The experts of a layer as they lie on its device.
class Loaded {
 public:
  Loaded(const MoeSpec& spec, const WeightSource& source, std::string_view isa = "",
         const ParallelSpec& part = {})
      : context_({.num_threads = 2, .isa = std::string(isa)}),
        plan_(testing::plan(spec, {.max_tokens = 64}, part)),
        mlp_(routed_source(plan_)) {
    weights_ = allocate_mlp(DeviceArrays(memory_, {}), mlp_, &source);
    fill(source);
  }

  void fill(const WeightSource& source) {
    PinnedRings rings;
    UploadLanes lanes(source, nullptr, 0, context_.executor(), rings);
    fill_mlp(mlp_, source, lanes, weights_, context_);
  }
  const MlpSource& mlp() const { return mlp_; }
  const CudaMlpWeights& weights() const { return weights_; }

 private:
  HostMemory memory_;
  Context context_;
  CudaPlan plan_;
  MlpSource mlp_;
  CudaMlpWeights weights_;
};

// Scales in the bytes of their type, or as float32. Bytes count up from `first` through `count` of
// them, but for one of expert 1.
class ScalesInOrder final : public WeightSource {
 public:
  struct Bytes {
    int32_t first = 0;
    int32_t count = 1;
    std::optional<uint8_t> other = {};
  };

  ScalesInOrder(const MoeSpec& spec, Bytes bytes, bool as_floats)
      : inner_(make_synthetic_source(spec, 7)),
        values_(spec.quant.scale_values),
        bytes_(bytes),
        as_floats_(as_floats) {}

  WeightInfo describe(WeightId id) const override {
    WeightInfo info = inner_->describe(id);
    if (id.plane() != WeightPlane::kScale) return info;
    info.dtype = as_floats_ ? DType::kF32 : quant::type_of_scales(values_);
    return info;
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (id.plane() != WeightPlane::kScale) return inner_->read(id, expert, block, destination);
    std::byte* out = destination.data();
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      for (int64_t col = block.col_begin; col < block.col_end; ++col) {
        const uint8_t byte = byte_at(id, expert, row, col);
        if (!as_floats_) {
          *out++ = std::byte{byte};
          continue;
        }
        const float number = quant::scale_of_byte(quant::type_of_scales(values_), byte);
        std::memcpy(out, &number, sizeof(number));
        out += sizeof(number);
      }
    }
  }
  uint8_t byte_at(WeightId id, int64_t expert, int64_t row, int64_t col) const {
    const bool is_other = expert == 1 && row == 2 && col == 1;
    if (is_other && bytes_.other) return *bytes_.other;
    const int64_t number = row * 31 + col * 7 + expert + (id.matrix() == WeightMatrix::kUp ? 3 : 0);
    return static_cast<uint8_t>(bytes_.first + number % bytes_.count);
  }

 private:
  std::unique_ptr<WeightSource> inner_;
  ScaleValues values_;
  Bytes bytes_;
  bool as_floats_;
};

MoeSpec spec_of(ScaleValues values, int64_t hidden, int64_t inner, bool gated) {
  const bool in_powers = values == ScaleValues::kPowerOfTwo;
  MoeSpec spec = make_spec(3, 1, hidden, inner, DType::kF4);
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = in_powers ? 32 : 16,
                .scale_values = values,
                .has_global_scale = !in_powers};
  if (!gated) spec.activation = {.name = "relu2_no_mul"};
  return spec;
}

// Every byte, by the formula of a number; no row of a plane but those of the matrix has any.
void expect_bytes(const Loaded& loaded, const WeightSource& source, MlpHalf half) {
  const MlpSource& mlp = loaded.mlp();
  QuantSpec local = mlp.problem.quant;
  local.has_global_scale = false;
  const bool is_down = half == MlpHalf::kDown;
  const CudaMatrixMemory& memory = loaded.weights().of(half);
  const experts::FactorPlanes& planes =
      (is_down ? loaded.weights().view.down : loaded.weights().view.gate_up).factors;
  const int64_t bytes = planes.groups * planes.byte_stride;
  for (const LocalExpert& expert : mlp.experts) {
    std::vector<uint8_t> expected(static_cast<size_t>(bytes));
    for (int64_t part = 0; part < planes.parts; ++part) {
      const WeightMatrix matrix = is_down                          ? WeightMatrix::kDown
                                  : part == 0 && planes.parts == 2 ? WeightMatrix::kGate
                                                                   : WeightMatrix::kUp;
      const CodeMeaning meaning = load_meaning(local, source, expert.id(matrix), expert.expert,
                                               expert.block_of(matrix, mlp.problem.hidden_size));
      const experts::ScaleBytes scales(local.scale_values, *memory.form, meaning.scales);
      ASSERT_TRUE(scales.fit());
      for (int64_t row = 0; row < planes.rows; ++row) {
        for (int64_t group = 0; group < planes.groups; ++group) {
          const int64_t at =
              group * planes.byte_stride + experts::exact_row(row, part, planes.parts);
          const int64_t stored = group * planes.columns / local.block_cols;
          expected[static_cast<size_t>(at)] =
              scales.of(meaning.scales[static_cast<size_t>(row * meaning.groups + stored)]);
        }
      }
    }
    const auto* const found =
        reinterpret_cast<const uint8_t*>(memory.factor_scale.as()) + expert.place * bytes;
    EXPECT_TRUE(std::ranges::equal(expected, std::span(found, expected.size())));
  }
}

struct BytesCase {
  ScaleValues values;
  ScalesInOrder::Bytes bytes;
  ByteForm form;
};
std::vector<BytesCase> bytes_cases() {
  using enum ScaleValues;
  return {{kPowerOfTwo, {.first = 120, .count = 20}, ByteForm::kNear},
          {kPowerOfTwo, {.first = 0, .count = 255}, ByteForm::kAsStored},
          {kPowerOfTwo, {.first = 254}, ByteForm::kNear},
          {kFloat8, {.first = 1, .count = 126}, ByteForm::kNear},
          {kFloat8, {.first = 0, .count = 127}, ByteForm::kAsStored},
          // A zero with a sign is zero.
          {kFloat8, {.first = 1, .count = 50, .other = uint8_t{0x80}}, ByteForm::kAsStored}};
}

TEST(CudaScalePlanes, BytesOfScales_LieWhereKernelsReadThem) {
  for (const BytesCase& each : bytes_cases()) {
    for (const auto& [hidden, inner] :
         {std::pair<int64_t, int64_t>{136, 72}, {127, 65}, {1096, 328}}) {
      for (const bool gated : {true, false}) {
        for (const bool as_floats : {false, true}) {
          SCOPED_TRACE(::testing::Message()
                       << "first byte " << each.bytes.first << ", H" << hidden
                       << (gated ? "" : ", plain") << (as_floats ? ", float32" : ""));
          const MoeSpec spec = spec_of(each.values, hidden, inner, gated);
          const ScalesInOrder source(spec, each.bytes, as_floats);
          const Loaded loaded(spec, source);
          for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
            ASSERT_EQ(loaded.weights().of(half).form, each.form);
            expect_bytes(loaded, source, half);
          }
        }
      }
    }
  }
}

// Groups of scales that are longer than those of the planes stand there several times.
TEST(CudaScalePlanes, LongGroups_AreRepeated) {
  MoeSpec spec = spec_of(ScaleValues::kPowerOfTwo, 672, 288, true);
  spec.quant.block_cols = 96;
  const ScalesInOrder source(spec, {.first = 120, .count = 20}, false);
  const Loaded loaded(spec, source);
  ASSERT_EQ(experts::factor_form(loaded.mlp().problem), experts::FactorForm::kExact);
  for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) expect_bytes(loaded, source, half);
}

TEST(CudaScalePlanes, SlicesOfRanks_HaveTheirOwnScales) {
  const MoeSpec spec = spec_of(ScaleValues::kPowerOfTwo, 136, 192, true);
  const ScalesInOrder source(spec, {.first = 120, .count = 20}, false);
  const Loaded loaded(spec, source, "", {.tp_size = 2, .tp_rank = 1, .reduce = Reduce::kPartial});
  for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) expect_bytes(loaded, source, half);
}

// Bytes of no number, and those with a sign, are named whatever else there is.
TEST(CudaScalePlanes, BytesOfNoScale_AreRefused) {
  for (const auto& [values, byte] : {std::pair{ScaleValues::kPowerOfTwo, uint8_t{0xff}},
                                     {ScaleValues::kFloat8, uint8_t{0x7f}},
                                     {ScaleValues::kFloat8, uint8_t{0xff}},
                                     {ScaleValues::kFloat8, uint8_t{0x81}}}) {
    for (const bool as_floats : {false, true}) {
      const MoeSpec spec = spec_of(values, 136, 72, true);
      const ScalesInOrder source(spec, {.first = 100, .count = 3, .other = byte}, as_floats);
      EXPECT_EQ(code_of([&] { Loaded(spec, source); }), ErrorCode::kTensorValue) << int{byte};
    }
  }
}

bool same_bytes(const DeviceMemory& a, const DeviceMemory& b) {
  return std::ranges::equal(std::span(a.as(), a.bytes()), std::span(b.as(), b.bytes()));
}

TEST(CudaScalePlanes, StepsByVectors_AreThoseOfScalarCode) {
  QuantSpec both{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  both.zeros = WeightZero::kOffset;
  both.scale_values = both.zero_values = ScaleValues::kSteps;
  QuantSpec scales{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 16};
  scales.scale_values = ScaleValues::kSteps;
  QuantSpec fine = both;
  fine.block_cols = 16;
  for (const auto& [dtype, quant] : {std::pair{DType::kU4, both},
                                     {DType::kI8, both},
                                     {DType::kI8, scales},
                                     {DType::kI4, scales},
                                     {DType::kI4, fine}}) {
    for (const auto& [hidden, inner] :
         {std::pair<int64_t, int64_t>{136, 72}, {712, 328}, {2064, 200}}) {
      SCOPED_TRACE(::testing::Message() << to_string(dtype) << " H" << hidden);
      MoeSpec spec = make_spec(3, 1, hidden, inner, dtype);
      spec.quant = quant;
      const auto source = make_synthetic_source(spec, 7);
      const Loaded plain(spec, *source, "scalar");
      const Loaded vectors(spec, *source);
      for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
        const CudaMatrixMemory& expected = plain.weights().of(half);
        const CudaMatrixMemory& found = vectors.weights().of(half);
        ASSERT_FALSE(expected.step_units.empty());
        EXPECT_TRUE(same_bytes(expected.factor_scale, found.factor_scale));
        EXPECT_TRUE(same_bytes(expected.step_units, found.step_units));
      }
    }
  }
}

// Weights of a source in the memory of a device, which is the host's here, in rows that lie apart.
class OnDevice final : public WeightSource {
 public:
  explicit OnDevice(const WeightSource& inner) : inner_(inner) {
    for (const WeightId id : weights::kAll) {
      const WeightInfo info = inner.describe(id);
      for (int64_t expert = 0; expert < info.count; ++expert) add(id, expert, info);
    }
  }
  MemoryKind memory() const override { return MemoryKind::kDevice; }
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId, int64_t, const WeightBlock&, std::span<std::byte>) const override {
    ADD_FAILURE() << "the host cannot read the memory of a device";
  }
  ConstTensorView view(WeightId id, int64_t expert) const override {
    const WeightInfo info = inner_.describe(id);
    return {.data = matrices_[id][static_cast<size_t>(expert)].data(),
            .dtype = info.dtype,
            .shape = {info.rows, info.cols},
            .row_stride = stride(info)};
  }

 private:
  static int64_t stride(const WeightInfo& info) { return info.cols + info.cols % 2 + 16; }
  void add(WeightId id, int64_t expert, const WeightInfo& info) {
    const int64_t pitch = packed_bytes(info.dtype, stride(info));
    const auto row_bytes = static_cast<size_t>(packed_bytes(info.dtype, info.cols));
    std::vector<std::byte>& matrix = matrices_[id].emplace_back();
    matrix.resize(static_cast<size_t>(info.rows * pitch), std::byte{0xff});
    for (int64_t row = 0; row < info.rows; ++row) {
      inner_.read(id, expert, {row, row + 1, 0, info.cols},
                  std::span(matrix).subspan(static_cast<size_t>(row * pitch), row_bytes));
    }
  }

  const WeightSource& inner_;
  WeightTable<std::vector<std::vector<std::byte>>> matrices_;
};

// Scales of the largest matrix take more than a piece of pinned memory.
TEST(CudaScalePlanes, ScalesOnADevice_AreThoseOfTheHost) {
  QuantSpec steps{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  steps.zeros = WeightZero::kOffset;
  steps.scale_values = steps.zero_values = ScaleValues::kSteps;
  const QuantSpec floats{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  const QuantSpec bytes = spec_of(ScaleValues::kFloat8, 64, 64, true).quant;
  for (const auto& [dtype, quant] :
       {std::pair{DType::kU4, steps}, {DType::kI4, floats}, {DType::kF4, bytes}}) {
    for (const auto& [hidden, inner] : {std::pair<int64_t, int64_t>{136, 72}, {8448, 1056}}) {
      SCOPED_TRACE(::testing::Message() << to_string(dtype) << " H" << hidden);
      MoeSpec spec = make_spec(1, 1, hidden, inner, dtype);
      spec.quant = quant;
      const auto source = make_synthetic_source(spec, 7);
      const Loaded expected(spec, *source);
      const OnDevice device(*source);
      const Loaded found(spec, device);
      for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
        const CudaMatrixMemory& host = expected.weights().of(half);
        const CudaMatrixMemory& other = found.weights().of(half);
        ASSERT_FALSE(host.factor_scale.empty());
        EXPECT_TRUE(same_bytes(host.data, other.data));
        EXPECT_TRUE(same_bytes(host.factor_scale, other.factor_scale));
        EXPECT_TRUE(same_bytes(host.sum_factor, other.sum_factor));
        EXPECT_TRUE(same_bytes(host.step_units, other.step_units));
      }
    }
  }
}

// All scales of the experts named are 0.
class WithoutScales final : public WeightSource {
 public:
  WithoutScales(const WeightSource& inner, int64_t first) : inner_(inner), first_(first) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner_.read(id, expert, block, destination);
    if (id.plane() == WeightPlane::kScale && expert >= first_) {
      std::ranges::fill(destination, std::byte{0});
    }
  }

 private:
  const WeightSource& inner_;
  int64_t first_;
};

// A thread fills one expert after the other: what it has of the one before says nothing.
TEST(CudaScalePlanes, ZeroPointsOfScalesOfZero_AreZero) {
  MoeSpec spec = make_spec(6, 1, 136, 72, DType::kU4);
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = 32,
                .zeros = WeightZero::kPoint};
  const auto inner = make_synthetic_source(spec, 7);
  const WithoutScales source(*inner, 2);
  const Loaded loaded(spec, source);
  for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
    const DeviceMemory& zeros = loaded.weights().of(half).factor_zero;
    ASSERT_FALSE(zeros.empty());
    const size_t of_two = zeros.bytes() / 3;
    const std::span bytes(zeros.as(), zeros.bytes());
    const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
    EXPECT_FALSE(std::ranges::all_of(bytes.first(of_two), is_zero));
    EXPECT_TRUE(std::ranges::all_of(bytes.subspan(of_two), is_zero));
  }
}

TEST(CudaScalePlanes, SquaresOfBytes_AreTransposed) {
  constexpr int64_t kStride = 11;
  std::array<std::byte, kStride * kByteSquare> rows;
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::byte>(i * 37);
  const ByteSquare square(rows.data(), kStride);
  for (int64_t column = 0; column < kByteSquare; ++column) {
    std::array<std::byte, kByteSquare> found;
    square.store(column, found.data());
    for (int64_t row = 0; row < kByteSquare; ++row) {
      EXPECT_EQ(found[static_cast<size_t>(row)], rows[static_cast<size_t>(row * kStride + column)]);
    }
  }
}

}  // namespace
}  // namespace conclave
