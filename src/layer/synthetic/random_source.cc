#include "core/checked.h"
#include "core/dcheck.h"
#include "core/float8.h"
#include "core/float_convert.h"
#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "quant/activation_rows.h"
#include "quant/scale_type.h"
#include "quant/weight_format.h"
#include "routing/router_tensors.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"
#include "conclave/synthetic.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

// SplitMix64: every counter value gives an independent 64-bit word, so any element can be computed
// alone (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

// The sum of four uniform 16-bit numbers, centred and odd so that it is never zero: variance
// 4 * 65536^2 / 12, close to normal, and cheap.
float normal_like(uint64_t stream, uint64_t index) {
  const uint64_t word = mix(stream ^ mix(index));
  const auto sum = static_cast<int32_t>((word & 0xffff) + ((word >> 16) & 0xffff) +
                                        ((word >> 32) & 0xffff) + (word >> 48));
  const int32_t centred = (sum - 2 * 65535) | 1;
  constexpr float kInverseDeviation = 1.0F / 37837.2F;  // sqrt(65536^2 / 3)
  return static_cast<float>(centred) * kInverseDeviation;
}

// The distribution of the values: matrices keep the magnitude of the rows they multiply,
// biases are small beside it, factors lie around 1.
struct Distribution {
  float mean = 0;
  float deviation = 0;
};

// The deviation of the codes of quantised matrices: the largest in a block comes near the largest
// code.
float code_deviation(const quant::CodeBook& codes) { return codes.largest * (96.0F / 448.0F); }

// Codes without a sign lie around their middle, and so do their zeros: weights lie around 0.
float middle_of(const quant::CodeBook& codes) {
  const bool has_sign = !codes.whole.fit || codes.whole.least < 0;
  return has_sign ? 0.0F : codes.largest / 2;
}

// Scales lie around `mean` with a deviation of an eighth of it.
Distribution around(float mean) { return {.mean = mean, .deviation = mean / 8}; }

// The matrix that a plane belongs to: its reduction axis and its form, as narrow as it is known.
struct ScaledMatrix {
  int64_t cols = 0;
  const quant::WeightFormat* format = nullptr;
  DType layer_dtype = DType::kF32;  // which rows follow
  QuantSpec quant = {};
  int64_t groups_of_number = 1;  // neighbours that have the same

  // The type whose codes decide how wide steps are: the layer's, if it is not narrower still.
  DType step_dtype() const {
    return format != nullptr && bit_size(format->element) < 4 ? format->element : layer_dtype;
  }
};
ScaledMatrix scaled_matrix(const WeightShape& shape, const QuantSpec& layer) {
  const bool is_down = shape.id.matrix() == WeightMatrix::kDown;
  const MatrixForm form =
      is_down ? down_form(shape.dtype, layer) : gate_up_form(shape.dtype, layer);
  return {.cols = shape.cols,
          .format = &quant::known_format_of(form.dtype),
          .layer_dtype = shape.dtype,
          .quant = form.quant,
          .groups_of_number = form.quant.block_cols / layer.block_cols};
}

// The factor that brings codes to the magnitude of plain weights.
float scale_of(const ScaledMatrix& matrix) {
  return 1.0F /
         (code_deviation(*matrix.format->codes) * std::sqrt(static_cast<float>(matrix.cols)));
}

// Zeros lie around the middle of the codes, half as far apart as these: codes lie around 0.
Distribution zeros_of(const ScaledMatrix& matrix) {
  const quant::CodeBook& codes = *matrix.format->codes;
  const float unit = matrix.quant.zeros == WeightZero::kPoint ? 1.0F : scale_of(matrix);
  return {.mean = middle_of(codes) * unit, .deviation = code_deviation(codes) / 2 * unit};
}

// Zero points are whole numbers, unless codes are fractions of 1.
bool has_whole_points(const ScaledMatrix& matrix) {
  return matrix.quant.zeros == WeightZero::kPoint && matrix.format->codes->largest > 1;
}

Distribution distribution_of(LayerWeight weight, const WeightInfo& info) {
  switch (weight) {
    case LayerWeight::kExpertScale:
    case LayerWeight::kGlobalScale:
    case LayerWeight::kRouterInputScale:
    case LayerWeight::kLatentNorm:
      return {.mean = 1.0F, .deviation = 0.125F};
    case LayerWeight::kRouterBias:
    case LayerWeight::kSelectionBias:
    case LayerWeight::kMixGateBias:
    case LayerWeight::kOutputBias:
      return {.deviation = 0.25F};
    default:
      return {.deviation = 1.0F / std::sqrt(static_cast<float>(info.cols))};
  }
}

Distribution distribution_of(WeightId id, const WeightInfo& info, const ScaledMatrix& scaled) {
  if (const routing::RouterTensor* own = routing::find_router_tensor(id)) {
    return {.mean = own->mean, .deviation = own->deviation};
  }
  if (const auto layer = id.layer()) return distribution_of(*layer, info);
  if (id.plane() == WeightPlane::kBias) return {.deviation = 0.25F};
  // A global scale has the magnitude that scales have otherwise: those may have few bits.
  const WeightPlane magnitude =
      scaled.quant.has_global_scale ? WeightPlane::kGlobalScale : WeightPlane::kScale;
  if (id.plane() == magnitude) return around(scale_of(scaled));
  if (id.plane() == WeightPlane::kZero) return zeros_of(scaled);
  const bool is_factor = id.plane() == WeightPlane::kColumnFactor;
  if (id.plane() == WeightPlane::kScale || is_factor) return around(1.0F);
  if (id.plane() == WeightPlane::kInputScale) {
    // Steps that make good use of the codes for rows of deviation 1 and their activated products.
    const float rows = id.matrix() == WeightMatrix::kDown ? 3.0F : 4.0F;
    const quant::ActivationRule rule = quant::activation_rule(scaled.layer_dtype, scaled.quant);
    return around(rows / quant::largest_over_step(rule));
  }
  if (scaled.format != nullptr) {
    const quant::CodeBook& codes = *scaled.format->codes;
    return {.mean = middle_of(codes), .deviation = code_deviation(codes)};
  }
  return {.deviation = 1.0F / std::sqrt(static_cast<float>(info.cols))};
}

// The number of the random stream that a weight takes its values from. A seed must go on to mean
// the same layer, so these numbers never change; those of gate, up and down follow each other.
uint64_t stream_number(WeightId id) {
  struct Row {
    WeightId first;
    uint64_t number;
  };
  using namespace weights;
  constexpr std::array kRows = {Row{kGate, 0},
                                Row{kRouter, 3},
                                Row{kSharedGate, 4},
                                Row{kSharedExpertGate, 7},
                                Row{kGate.with(WeightPlane::kBias), 8},
                                Row{kSharedGate.with(WeightPlane::kBias), 11},
                                Row{kRouterBias, 14},
                                Row{kSelectionBias, 15},
                                Row{kExpertScale, 16},
                                Row{kGlobalScale, 17},
                                Row{kRouterInputScale, 18},
                                Row{router_tensor(0), 19},
                                Row{kMixGate, 20},
                                Row{kMixGateBias, 21},
                                Row{kLatentDown, 22},
                                Row{kLatentNorm, 23},
                                Row{kLatentUp, 24},
                                Row{kOutputBias, 25},
                                Row{kResidualGate, 26},
                                Row{kGate.with(WeightPlane::kScale), 29},
                                Row{kGate.with(WeightPlane::kInputScale), 32},
                                Row{kSharedGate.with(WeightPlane::kScale), 35},
                                Row{kSharedGate.with(WeightPlane::kInputScale), 38},
                                Row{kGate.with(WeightPlane::kZero), 41},
                                Row{kGate.with(WeightPlane::kGlobalScale), 44},
                                Row{kGate.with(WeightPlane::kColumnOrder), 47},
                                Row{kSharedGate.with(WeightPlane::kZero), 50},
                                Row{kSharedGate.with(WeightPlane::kGlobalScale), 53},
                                Row{kSharedGate.with(WeightPlane::kColumnOrder), 56},
                                Row{kGate.with(WeightPlane::kColumnFactor), 59},
                                Row{kSharedGate.with(WeightPlane::kColumnFactor), 62},
                                Row{router_tensor(1), 65},
                                Row{router_tensor(2), 66},
                                Row{router_tensor(3), 67},
                                Row{router_tensor(4), 68},
                                Row{router_tensor(5), 69},
                                Row{router_tensor(6), 70},
                                Row{router_tensor(7), 71}};
  WeightId first = id;
  uint64_t place = 0;
  if (id.mlp()) {
    first = WeightId(*id.mlp(), WeightMatrix::kGate, *id.plane());
    // Gate and up have the same factors: they read the same rows.
    const bool is_factor = id.plane() == WeightPlane::kColumnFactor;
    if (id.matrix() == WeightMatrix::kUp) place = is_factor ? 0 : 1;
    if (id.matrix() == WeightMatrix::kDown) place = 2;
  }
  const auto* const row = std::ranges::find(kRows, first, &Row::first);
  CONCLAVE_DCHECK(row != kRows.end());
  return row->number + place;
}

// Powers of two hold scales only, and are no format of weights.
void encode(std::span<const float> values, DType dtype, std::byte* out) {
  const auto power_of_two = [](float value) { return std::byte{float_to_e8m0(value)}; };
  if (dtype == DType::kF8E8M0) {
    std::ranges::transform(values, out, power_of_two);
  } else {
    quant::format_of(dtype).encode(values.data(), 0, std::ssize(values), out);
  }
}

// Whether any numbers are of a kind that float32 alone has for sure: the usual type of scales may
// have just those that the spec promises.
bool have_narrow_numbers(const MoeSpec& spec) {
  const QuantSpec& quant = spec.quant;
  const auto narrow = [](const auto& numbers) {
    return numbers.scale_values != ScaleValues::kFloat ||
           numbers.zero_values != ScaleValues::kFloat;
  };
  const bool usual = quant.scale_values == quant::values_of_scales(quant::scale_dtype(spec)) &&
                     quant.zero_values == ScaleValues::kFloat;
  return (narrow(quant) && !usual) || narrow(quant.gate_up_codes) || narrow(quant.down_codes);
}

// Draws numbers that are what QuantSpec says of them. Steps count a unit that neighbouring columns
// share: a small part of the numbers' magnitude, and another one for each 256 columns.
class NumberForm {
 public:
  NumberForm(const QuantSpec& quant, DType dtype, WeightId id, const Distribution& values,
             uint64_t stream)
      : form_(id.plane() == WeightPlane::kScale  ? quant.scale_values
              : id.plane() == WeightPlane::kZero ? quant.zero_values
                                                 : ScaleValues::kFloat),
        columns_(quant.block_cols),
        range_(steps_of(quant, dtype)),
        unit_(std::max(values.mean, values.deviation) / range_.usual),
        least_(values.mean > 0 ? 1.0F : range_.least),
        stream_(mix(stream)) {}

  // The values are those of a row from column `col` on.
  void apply(int64_t row, int64_t col, std::span<float> values) const {
    switch (form_) {
      case ScaleValues::kF16:
        for (float& value : values) value = f16_to_float(float_to_f16(value));
        break;
      case ScaleValues::kPowerOfTwo:
        for (float& value : values) value = e8m0_to_float(float_to_e8m0(value));
        break;
      case ScaleValues::kSteps:
        for (float& value : values) {
          const float unit = unit_at(row, col++);
          value = std::clamp(std::nearbyint(value / unit), least_, range_.most) * unit;
        }
        break;
      case ScaleValues::kFloat8:
        for (float& value : values) value = quant::round_scale(quant::type_of_scales(form_), value);
        break;
      case ScaleValues::kFloat:
        break;
    }
  }

 private:
  struct StepRange {
    float usual = 40;
    float least = -128;
    float most = 127;
  };
  // Codes of up to 4 bits in groups of 16 columns are those of files that have no wider steps.
  static StepRange steps_of(const QuantSpec& quant, DType dtype) {
    constexpr int64_t kColumns = 16;
    if (bit_size(dtype) > 4 || quant.block_cols != kColumns) return {};
    if (bit_size(dtype) == 2) return {.usual = 9, .least = 0, .most = 15};
    return {.usual = 20, .least = -32, .most = 31};
  }

  float unit_at(int64_t row, int64_t col) const {
    const int64_t shared = col * columns_ / kStepColumns;
    const uint64_t word = mix(stream_ ^ mix(static_cast<uint64_t>(row << 24 | shared)));
    const float spread = 1.0F + static_cast<float>(word & 0x3ff) / 2048.0F;
    return f16_to_float(float_to_f16(unit_ * spread));
  }

  ScaleValues form_;
  int64_t columns_;
  StepRange range_;
  float unit_;
  float least_;
  uint64_t stream_;
};

void draw(const Distribution& values, uint64_t stream, uint64_t first, std::span<float> drawn) {
  for (float& value : drawn) {
    value = values.mean + values.deviation * normal_like(stream, first++);
  }
}

// Values become the nearest that codes have.
void round_to(const quant::CodeBook& codes, std::span<float> values) {
  for (float& value : values) value = codes.decode(codes.encode(value));
}

class RandomSource final : public WeightSource {
 public:
  RandomSource(const MoeSpec& spec, uint64_t seed) : seed_(seed), spec_(spec) {
    for (const WeightShape& shape : layer_weights(spec)) {
      infos_[shape.id] = {shape.count, shape.rows, shape.cols, dtype_of(shape, spec)};
      if (shape.type != quant::PlaneType::kWeights || is_plain(shape.dtype)) continue;
      scaled_[shape.id] = scaled_matrix(shape, spec.quant);
      for (const WeightPlane plane : quant::kCodePlanes) {
        scaled_[shape.id.with(plane)] = scaled_[shape.id];
      }
    }
  }

  WeightInfo describe(WeightId id) const override { return infos_[id]; }

  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const WeightInfo info = describe(id);
    if (expert < 0 || expert >= info.count) {
      throw Error(ErrorCode::kInvalidArgument, {.what = "no such weight matrix",
                                                .tensor = locate(id, expert),
                                                .limit = std::to_string(info.count - 1)});
    }
    const uint64_t stream =
        mix(seed_ ^ mix(stream_number(id) << 32 | static_cast<uint64_t>(expert)));
    if (id.plane() == WeightPlane::kColumnOrder) {
      return read_order(info, scaled_[id].quant.block_cols, stream, block, destination);
    }
    if (info.dtype == DType::kI32) {
      const routing::RouterTensor& own = *routing::find_router_tensor(id);
      return read_indices(info, own.index_limit(spec_), stream, block, destination);
    }
    const bool whole_numbers = id.plane() == WeightPlane::kZero && has_whole_points(scaled_[id]);
    const ScaledMatrix& scaled = scaled_[id];
    const Distribution values = distribution_of(id, info, scaled);
    const NumberForm form(scaled.quant, scaled.step_dtype(), id, values, stream);
    const bool is_number = id.plane() == WeightPlane::kScale || id.plane() == WeightPlane::kZero;
    const int64_t width = is_number ? scaled.groups_of_number : 1;
    const bool is_zero =
        id.plane() == WeightPlane::kZero && scaled.quant.zeros == WeightZero::kNone;
    const bool has_narrow_codes = id.plane() == WeightPlane::kWeights && scaled.format != nullptr &&
                                  scaled.format->element != info.dtype;
    const int64_t cols = block.col_end - block.col_begin;
    // Groups of `width` share one number.
    const int64_t begin = block.col_begin / width;
    std::vector<float> drawn(static_cast<size_t>(ceil_div(block.col_end, width) - begin));
    std::vector<float> spread(width == 1 ? 0 : static_cast<size_t>(cols));
    std::byte* out = destination.data();
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      const auto first = static_cast<uint64_t>(row * ceil_div(info.cols, width) + begin);
      draw(values, stream, first, drawn);
      if (is_zero) {
        std::ranges::fill(drawn, 0.0F);
      } else if (whole_numbers) {
        for (float& value : drawn) value = std::nearbyint(value);
      } else {
        form.apply(row, begin, drawn);
      }
      if (has_narrow_codes) round_to(*scaled.format->codes, drawn);
      for (int64_t col = 0; width != 1 && col < cols; ++col) {
        spread[static_cast<size_t>(col)] =
            drawn[static_cast<size_t>((block.col_begin + col) / width - begin)];
      }
      encode(width == 1 ? drawn : spread, info.dtype, out);
      out += packed_bytes(info.dtype, cols);
    }
  }

 private:
  static DType dtype_of(const WeightShape& shape, const MoeSpec& spec) {
    switch (shape.type) {
      case quant::PlaneType::kWeights:
        return shape.dtype;
      case quant::PlaneType::kScale:
        if (have_narrow_numbers(spec)) return DType::kF32;
        return shape.plane.plane == WeightPlane::kScale ? quant::scale_dtype(spec) : DType::kF32;
      case quant::PlaneType::kIndex:
        return DType::kI32;
      case quant::PlaneType::kFloat:
        if (have_narrow_numbers(spec)) return DType::kF32;
        break;
    }
    return natural_row_dtype(spec);
  }

  // Each row holds distinct indices: a start, and a stride that its columns do not bring around.
  static void read_indices(const WeightInfo& info, int64_t limit, uint64_t stream,
                           const WeightBlock& block, std::span<std::byte> destination) {
    const auto indices = static_cast<uint64_t>(limit);
    const uint64_t strides = std::max<uint64_t>(1, indices / static_cast<uint64_t>(info.cols));
    std::byte* out = destination.data();
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      const uint64_t word = mix(stream ^ mix(static_cast<uint64_t>(row)));
      const uint64_t stride = 1 + (word >> 40) % strides;
      for (int64_t col = block.col_begin; col < block.col_end; ++col, out += sizeof(int32_t)) {
        const auto id = static_cast<int32_t>(
            ((word & 0xffffffff) + stride * static_cast<uint64_t>(col)) % indices);
        std::memcpy(out, &id, sizeof(id));
      }
    }
  }

  // Every group has as many columns as it would have of neighbours: columns are shuffled (Fisher,
  // Yates), then each run of group_cols places is a group.
  static void read_order(const WeightInfo& info, int64_t group_cols, uint64_t stream,
                         const WeightBlock& block, std::span<std::byte> destination) {
    std::vector<int32_t> groups(static_cast<size_t>(info.cols));
    for (int64_t col = 0; col < info.cols; ++col) {
      groups[static_cast<size_t>(col)] = static_cast<int32_t>(col / group_cols);
    }
    for (size_t last = groups.size(); last > 1; --last) {
      std::swap(groups[last - 1], groups[mix(stream ^ mix(last)) % last]);
    }
    std::memcpy(destination.data(), groups.data() + block.col_begin, destination.size());
  }

  uint64_t seed_;
  MoeSpec spec_;
  WeightTable<WeightInfo> infos_;
  WeightTable<ScaledMatrix> scaled_;  // for planes of scales
};

}  // namespace

std::unique_ptr<WeightSource> make_synthetic_source(const MoeSpec& spec, uint64_t seed) {
  validate(spec);
  return std::make_unique<RandomSource>(spec, seed);
}

void fill_random(const TensorView& tensor, uint64_t seed) {
  const DType dtype = tensor.dtype;
  if (!is_plain(dtype)) {
    throw Error(ErrorCode::kDType, {.what = "cannot fill this element type",
                                    .expected = "F32, F16 or BF16",
                                    .found = std::string(to_string(dtype))});
  }
  const int64_t cols = tensor.shape.rank() > 0 ? tensor.shape[tensor.shape.rank() - 1] : 1;
  const int64_t rows = cols > 0 ? tensor.shape.num_elements() / cols : 0;
  const int64_t stride = tensor.row_stride != 0 ? tensor.row_stride : cols;
  const uint64_t stream = mix(seed);
  const quant::WeightFormat& format = quant::format_of(dtype);
  std::vector<float> drawn(static_cast<size_t>(cols));
  for (int64_t row = 0; row < rows; ++row) {
    auto* out = static_cast<std::byte*>(tensor.data) + row * stride * byte_size(dtype);
    for (int64_t col = 0; col < cols; ++col) {
      drawn[static_cast<size_t>(col)] =
          normal_like(stream, static_cast<uint64_t>(row * cols + col));
    }
    format.encode(drawn.data(), 0, cols, out);
  }
}

}  // namespace conclave::inline v0
