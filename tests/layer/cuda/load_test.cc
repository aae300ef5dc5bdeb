// Loads codes whose columns have orders and factors into memory laid out for a GPU, and multiplies
// them as its kernels do, in float64: the results are those of the weights as they are stored.

#include "core/code_bits.h"
#include "core/float_convert.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/lane_codes.h"
#include "layer/cuda/expert_places.h"
#include "layer/cuda/h200_plan.h"
#include "layer/cuda/mlp_weights.h"
#include "layer/cuda/ordered_source.h"
#include "quant/weight_format.h"
#include "support/layer_fixture.h"

#include "conclave/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::make_spec;

class HostMemory final : public DeviceAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment, Stream) override {
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* data, size_t, Stream) noexcept override { std::free(data); }
};

using Row = std::vector<double>;

// The experts of one rank as they lie on its device.
class Loaded {
 public:
  Loaded(const MoeSpec& spec, const WeightSource& source, const ParallelSpec& parallel,
         const std::string& kernel)
      : plan_(plan_of(spec, source, parallel, kernel)), mlp_(routed_source(plan_)) {
    weights_ = allocate_mlp(DeviceArrays(memory_, {}), mlp_, &source);
    fill(source);
  }

  void fill(const WeightSource& source) {
    PinnedRings rings;
    UploadLanes lanes(source, nullptr, 0, context_.executor(), rings);
    fill_mlp(mlp_, source, lanes, weights_, context_);
  }

  // The output of a local expert for a token's row, without the bias of down.
  Row run(int64_t expert, const float* x) const {
    const experts::ExpertsProblem& problem = mlp_.problem;
    const Row row = own_row(expert, x);
    const int64_t inner = problem.intermediate_size;
    const float* const bias = weights_.view.gate_up.bias;
    Row h(static_cast<size_t>(inner));
    for (int64_t feature = 0; feature < inner; ++feature) {
      const auto product = [&](int64_t part) {
        const int64_t at = (expert * mlp_.halves() + part) * inner + feature;
        return dot(weights_.view.gate_up, {expert, part, feature, at}, row) +
               (bias != nullptr ? static_cast<double>(bias[at]) : 0.0);
      };
      const double gate = problem.activation.gated ? product(0) : 0.0;
      const double up = product(mlp_.halves() - 1);
      double value = problem.activation.gated ? gate / (1 + std::exp(-gate)) * up
                                              : std::max(up, 0.0) * std::max(up, 0.0);
      if (const float* factors = weights_.view.down.column_factors) {
        value *= static_cast<double>(factors[expert * inner + feature]);
      }
      h[static_cast<size_t>(feature)] = value;
    }
    Row out(static_cast<size_t>(problem.hidden_size));
    for (int64_t feature = 0; feature < problem.hidden_size; ++feature) {
      out[static_cast<size_t>(feature)] =
          dot(weights_.view.down, {expert, 0, feature, expert * problem.hidden_size + feature}, h);
    }
    return out;
  }

  bool has_steps() const { return weights_.view.down.factors.steps != nullptr; }
  int64_t count() const { return mlp_.count(); }
  int32_t expert_at(int64_t local) const { return mlp_.experts[static_cast<size_t>(local)].expert; }

 private:
  static CudaPlan plan_of(const MoeSpec& spec, const WeightSource& source,
                          const ParallelSpec& parallel, const std::string& kernel) {
    const LayerOptions options{.max_tokens = 64, .kernel = kernel};
    const cuda::DeviceInfo device = testing::h200();
    CudaPlanRequest request{
        .spec = spec, .options = options, .parallel = parallel, .device = device};
    CudaPlan assumed = plan_cuda_layer(request);
    if (!spec.quant.has_column_order) return assumed;
    request.orders = LayerOrders();
    request.orders->routed = read_order(routed_source(assumed), source);
    return plan_cuda_layer(request);
  }

  Row own_row(int64_t expert, const float* x) const {
    const OwnRowTables& own = weights_.own_rows;
    Row row(static_cast<size_t>(mlp_.problem.input_columns()));
    for (size_t i = 0; i < row.size(); ++i) {
      const auto at = static_cast<size_t>(expert * own.stride) + i;
      const int32_t column =
          own.columns.empty() ? static_cast<int32_t>(i) : own.columns.as<int32_t>()[at];
      if (column < 0) continue;
      float value = x[column];
      if (!own.factors.empty()) value *= own.factors.as<float>()[at];
      row[i] = static_cast<double>(value);
    }
    return row;
  }

  struct Place {
    int64_t expert = 0;
    int64_t part = 0;
    int64_t row = 0;     // in the part
    int64_t of_all = 0;  // among the rows of all experts
  };

  double dot(const experts::DeviceExpertMatrix& matrix, const Place& at, const Row& row) const {
    const DType dtype = mlp_.problem.weight_dtype;
    const int64_t bits = bit_size(dtype);
    const auto* const codes =
        static_cast<const std::byte*>(matrix.data) + at.of_all * matrix.stride * bits / 8;
    double sum = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      const auto column = static_cast<int64_t>(i);
      const auto code = static_cast<std::byte>(code_of(codes, column, bits));
      float value = 0;
      quant::format_of(dtype).decode(&code, 0, 1, &value);
      sum += row[i] * weight(matrix, at, column, std::ssize(row), static_cast<double>(value));
    }
    return sum;
  }

  // The code of a column of a row, as it lies on a device.
  uint32_t code_of(const std::byte* row, int64_t column, int64_t bits) const {
    const experts::CodeOrder order = experts::code_order(mlp_.problem);
    if (order == experts::CodeOrder::kStored) return code_at(row, column, bits);
    EXPECT_NE(order, experts::CodeOrder::kLanesOfFloats);
    const auto in_block = static_cast<int32_t>(column % experts::kLaneColumns);
    if (order == experts::CodeOrder::kLanesOfSmallNumbers) {
      uint32_t word = 0;
      const int64_t at =
          (column - in_block) / 4 + experts::small_lane_word(in_block) * int64_t{sizeof(word)};
      std::memcpy(&word, row + at, sizeof(word));
      const auto small = static_cast<int32_t>(word >> experts::small_lane_bit(in_block) & 3U);
      // The stored code of the same number.
      const auto& codes = *quant::format_of(mlp_.problem.weight_dtype).codes;
      return static_cast<uint32_t>(small - codes.whole.least);
    }
    const experts::LanePlace place = experts::lane_place(in_block);
    uint32_t word = 0;
    std::memcpy(&word, row + (column - in_block) / 2 + place.word * int64_t{sizeof(word)},
                sizeof(word));
    return order == experts::CodeOrder::kLanesOfNumbers
               ? experts::lane_code<experts::CodeOrder::kLanesOfNumbers>(place, word)
               : experts::lane_code<experts::CodeOrder::kLanesOfPairs>(place, word);
  }

  double weight(const experts::DeviceExpertMatrix& matrix, const Place& at, int64_t column,
                int64_t columns, double value) const {
    if (matrix.factors.steps != nullptr) return weight_of_steps(matrix.factors, at, column, value);
    if (matrix.factors.scales == nullptr) {
      const int64_t block = mlp_.problem.quant.block_cols;
      const int64_t index = at.of_all * ((columns + block - 1) / block) + column / block;
      const double offset =
          matrix.offset != nullptr ? static_cast<double>(matrix.offset[index]) : 0.0;
      return value * static_cast<double>(matrix.scale[index]) - offset;
    }
    const experts::FactorPlanes& planes = matrix.factors;
    const int64_t group = planes.columns == 0 ? 0 : column / planes.columns;
    EXPECT_LT(group, planes.groups);
    const int64_t index =
        ((at.expert * planes.groups + group) * planes.parts + at.part) * planes.row_stride + at.row;
    const auto scale = static_cast<double>(planes.scales[index]);
    if (planes.offsets != nullptr) {
      return value * scale - static_cast<double>(planes.offsets[index]);
    }
    if (planes.zeros == nullptr) return value * scale;
    const float zero = bf16_to_float(static_cast<const uint16_t*>(planes.zeros)[index]);
    return (value - static_cast<double>(zero)) * scale;
  }

  double weight_of_steps(const experts::FactorPlanes& planes, const Place& at, int64_t column,
                         double value) const {
    const experts::FactorForm form = experts::factor_form(mlp_.problem);
    if (form == experts::FactorForm::kSmallSteps) return weight_of_small(planes, at, column, value);
    const int64_t numbers = form == experts::FactorForm::kSteps ? 2 : 1;
    const int64_t group = column / planes.columns;
    const int64_t unit = group / experts::groups_of_unit(mlp_.problem);
    EXPECT_LT(group, planes.groups);
    EXPECT_LT(unit, planes.units);
    const auto row_of = [&](int64_t along, int64_t count) {
      return ((at.expert * count + along) * planes.parts + at.part) * planes.row_stride + at.row;
    };
    const int64_t pairs = experts::step_words(form, planes.groups);
    const auto* const steps = static_cast<const uint8_t*>(planes.steps);
    const auto* const units = static_cast<const float*>(planes.step_units);
    const auto number = [&](int64_t i) {
      const int64_t byte = group * numbers + i;
      const int step = steps[2 * row_of(byte / 2, pairs) + byte % 2];
      return static_cast<double>(units[row_of(unit, planes.units) * numbers + i]) * (step - 128);
    };
    return numbers == 2 ? value * number(0) - number(1) : value * number(0);
  }

  static double weight_of_small(const experts::FactorPlanes& planes, const Place& at,
                                int64_t column, double value) {
    const int64_t group = column / planes.columns;
    EXPECT_LT(group, planes.groups);
    const int64_t words = experts::step_words(experts::FactorForm::kSmallSteps, planes.groups);
    const auto row_of = [&](int64_t along, int64_t count) {
      return ((at.expert * count + along) * planes.parts + at.part) * planes.row_stride + at.row;
    };
    const auto* const steps = static_cast<const uint8_t*>(planes.steps);
    const auto* const units = static_cast<const uint16_t*>(planes.step_units);
    const int step = steps[4 * row_of(group / 4, words) + group % 4];
    const int64_t unit = 2 * row_of(column / 256, planes.units);
    return value * static_cast<double>(f16_to_float(units[unit])) * (step % 16) -
           static_cast<double>(f16_to_float(units[unit + 1])) * (step / 16);
  }

  HostMemory memory_;
  Context context_{{.num_threads = 2}};
  CudaPlan plan_;
  MlpSource mlp_;
  CudaMlpWeights weights_;
};

// The same in float64 from what is stored, over all ranks.
std::vector<double> reference(const MoeSpec& spec, const WeightSource& source, const Tensor& x,
                              int32_t expert) {
  const Context context({.num_threads = 2});
  Tensor ids(DType::kI32, {1, spec.top_k});
  Tensor weights(DType::kF32, {1, spec.top_k});
  for (int64_t slot = 0; slot < spec.top_k; ++slot) {
    ids.as<int32_t>()[slot] = slot == 0 ? expert : -1;
    weights.as<float>()[slot] = slot == 0 ? 1.0F : 0.0F;
  }
  return reference_forward(
             context, spec, source,
             {.hidden = x.view(), .topk_ids = ids.view(), .topk_weights = weights.view()})
      .output;
}

double distance(const Row& a, const std::vector<double>& b) {
  double difference = 0;
  double length = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    length += b[i] * b[i];
  }
  return std::sqrt(difference / length);
}

// Scales, offsets and products of rows and factors are float32 numbers.
constexpr double kBar = 2e-6;

struct Form {
  DType dtype = DType::kI4;
  int64_t columns = 32;
  WeightZero zeros = WeightZero::kNone;
  bool ordered = true;
  bool scaled = false;
  ScaleValues values = ScaleValues::kFloat;
  std::optional<DType> known = std::nullopt;
};

MoeSpec spec_of(const Form& form, int64_t hidden, int64_t inner) {
  MoeSpec spec = make_spec(3, 1, hidden, inner, form.dtype);
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = form.columns,
                .zeros = form.zeros};
  spec.quant.scale_values = form.values;
  if (form.zeros == WeightZero::kOffset) spec.quant.zero_values = form.values;
  spec.quant.has_column_order = form.ordered;
  spec.quant.has_column_factors = form.scaled;
  spec.quant.gate_up_codes.dtype = spec.quant.down_codes.dtype = form.known;
  return spec;
}

void expect_right(const MoeSpec& spec, const WeightSource& source, const Loaded& loaded) {
  const Tensor x = testing::random_tensor(DType::kF32, 1, spec.hidden_size, 5);
  for (int64_t local = 0; local < loaded.count(); ++local) {
    const std::vector<double> expected = reference(spec, source, x, loaded.expert_at(local));
    EXPECT_LE(distance(loaded.run(local, x.as<float>()), expected), kBar) << "expert " << local;
  }
}

std::vector<Form> forms() {
  return {{},
          {.zeros = WeightZero::kPoint},
          {.columns = 128},
          {.columns = 16, .zeros = WeightZero::kPoint},
          {.columns = 48, .zeros = WeightZero::kOffset},
          {.dtype = DType::kNF4, .columns = 64},
          {.dtype = DType::kI8, .zeros = WeightZero::kOffset},
          {.dtype = DType::kF8E4M3},
          {.zeros = WeightZero::kPoint, .scaled = true},
          {.ordered = false, .scaled = true},
          {.zeros = WeightZero::kOffset, .ordered = false, .values = ScaleValues::kSteps},
          {.zeros = WeightZero::kOffset, .values = ScaleValues::kSteps},
          {.dtype = DType::kI8, .columns = 16, .ordered = false, .values = ScaleValues::kSteps},
          {.dtype = DType::kI8,
           .zeros = WeightZero::kOffset,
           .ordered = false,
           .values = ScaleValues::kSteps},
          {.columns = 16, .ordered = false, .values = ScaleValues::kSteps},
          {.columns = 16,
           .zeros = WeightZero::kOffset,
           .ordered = false,
           .values = ScaleValues::kSteps},
          {.columns = 16,
           .zeros = WeightZero::kOffset,
           .ordered = false,
           .values = ScaleValues::kSteps,
           .known = DType::kU2},
          {.dtype = DType::kU4,
           .columns = 16,
           .zeros = WeightZero::kOffset,
           .ordered = false,
           .values = ScaleValues::kSteps,
           .known = DType::kU2},
          {.dtype = DType::kI8, .columns = 64, .ordered = false, .scaled = true}};
}

TEST(CudaLoad, OrdersAndFactors_MeanWhatIsStored) {
  for (const Form& form : forms()) {
    for (const auto& [hidden, inner] : {std::pair<int64_t, int64_t>{127, 65}, {160, 96}}) {
      for (const char* kernel : {"cuda.stream_codes_sm90", "cuda.reference"}) {
        for (const bool gated : {true, false}) {
          SCOPED_TRACE(::testing::Message()
                       << to_string(form.dtype) << " " << form.columns << " H" << hidden << " "
                       << kernel << (form.ordered ? " ordered" : "") << (gated ? "" : " plain"));
          MoeSpec spec = spec_of(form, hidden, inner);
          if (!gated) spec.activation = {.name = "relu2_no_mul"};
          const auto apart = make_synthetic_source(spec, 7);
          expect_right(spec, *apart, Loaded(spec, *apart, {}, kernel));
          const testing::OneOrder alike(*apart);
          if (form.ordered) expect_right(spec, alike, Loaded(spec, alike, {}, kernel));
        }
      }
    }
  }
}

TEST(CudaLoad, UnevenGroups_MeanWhatIsStored) {
  for (const Form& form : forms()) {
    if (!form.ordered || form.columns > 64) continue;
    SCOPED_TRACE(::testing::Message() << to_string(form.dtype) << " " << form.columns);
    const MoeSpec spec = spec_of(form, 136, 136);
    const auto source = make_synthetic_source(spec, 7);
    const testing::UnevenOrder uneven(*source);
    expect_right(spec, uneven, Loaded(spec, uneven, {}, ""));
  }
}

// Shared experts that run as routed ones are cut where these end, which may be among columns that
// share a unit.
TEST(CudaLoad, SlicesOfSharedExperts_HoldStepsWhereAllBeginWithAUnit) {
  for (const Form& form : forms()) {
    if (form.values != ScaleValues::kSteps || form.ordered) continue;
    for (const int64_t inner : {96, 256}) {
      SCOPED_TRACE(::testing::Message() << to_string(form.dtype) << " " << inner);
      MoeSpec spec = spec_of(form, 160, inner);
      spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 2 * inner};
      MoeSpec in_floats = spec;
      in_floats.quant.scale_values = in_floats.quant.zero_values = ScaleValues::kFloat;
      const auto source = make_synthetic_source(spec, 7);
      const Loaded loaded(spec, *source, {}, "");
      const Loaded wide(in_floats, *source, {}, "");
      EXPECT_EQ(loaded.has_steps(), inner == 256);
      ASSERT_EQ(loaded.count(), spec.num_experts + 2);
      ASSERT_EQ(wide.count(), loaded.count());
      const Tensor x = testing::random_tensor(DType::kF32, 1, spec.hidden_size, 5);
      for (int64_t local = 0; local < loaded.count(); ++local) {
        const Row row = wide.run(local, x.as<float>());
        EXPECT_LE(distance(loaded.run(local, x.as<float>()), {row.begin(), row.end()}), kBar);
      }
    }
  }
}

TEST(CudaLoad, Slices_AddUpToWhatIsStored) {
  for (const Form& form : forms()) {
    SCOPED_TRACE(::testing::Message() << to_string(form.dtype) << " " << form.columns);
    const MoeSpec spec = spec_of(form, 136, 192);
    const auto source = make_synthetic_source(spec, 7);
    const Tensor x = testing::random_tensor(DType::kF32, 1, spec.hidden_size, 5);
    for (const int32_t ranks : {2, 3}) {
      std::vector<Row> sums(3, Row(static_cast<size_t>(spec.hidden_size)));
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const Loaded loaded(spec, *source,
                            {.tp_size = ranks, .tp_rank = rank, .reduce = Reduce::kPartial}, "");
        for (int64_t local = 0; local < loaded.count(); ++local) {
          const Row part = loaded.run(local, x.as<float>());
          Row& sum = sums[static_cast<size_t>(local)];
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
        }
      }
      for (int32_t expert = 0; expert < 3; ++expert) {
        EXPECT_LE(distance(sums[static_cast<size_t>(expert)], reference(spec, *source, x, expert)),
                  kBar)
            << ranks << " ranks, expert " << expert;
      }
    }
  }
}

TEST(CudaLoad, AnotherFill_LeavesNothingOfTheFirst) {
  for (const Form& form : forms()) {
    SCOPED_TRACE(::testing::Message() << to_string(form.dtype) << " " << form.columns);
    MoeSpec spec = spec_of(form, 127, 65);
    spec.has_bias = true;
    const auto first = make_synthetic_source(spec, 7);
    const auto second = make_synthetic_source(spec, 8);
    Loaded loaded(spec, *first, {}, "");
    loaded.fill(*second);
    const Loaded fresh(spec, *second, {}, "");
    const Tensor x = testing::random_tensor(DType::kF32, 1, spec.hidden_size, 5);
    for (int64_t local = 0; local < loaded.count(); ++local) {
      EXPECT_EQ(loaded.run(local, x.as<float>()), fresh.run(local, x.as<float>()));
    }
  }
}

}  // namespace
}  // namespace conclave
