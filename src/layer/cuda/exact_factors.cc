#include "layer/cuda/exact_factors.h"

#include "core/checked.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/scale_bytes.h"
#include "layer/cuda/byte_columns.h"
#include "layer/cuda/scale_rows.h"
#include "quant/code_meaning.h"
#include "quant/scale_type.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Rows that are worked on together: a cache line of each column.
constexpr int64_t kRowsAtOnce = 64;

// Factors of the codes of one expert's gate and up, or of its down.
class ExactBuffer {
 public:
  ExactBuffer(const MlpSource& mlp, experts::ByteForm form, const experts::FactorPlanes& planes,
              int64_t skipped, const WeightUpload& upload)
      : quant_(mlp.problem.quant),
        must_be_near_(mlp.forms.near_scales),
        form_(form),
        planes_(planes),
        upload_(upload),
        scales_(mlp.problem.quant, upload),
        width_(round_up(planes.groups, kByteSquare)),
        some_(static_cast<size_t>(kRowsAtOnce * width_)),
        bytes_(static_cast<size_t>(exact_bytes(planes))),
        sum_factors_(static_cast<size_t>(planes.parts)) {
    for (int64_t group = 0; group < planes.groups; ++group) {
      stored_.push_back(
          static_cast<int32_t>((skipped + group * planes.columns) / quant_.block_cols));
    }
  }

  // Returns whether the scales have bytes of the form.
  bool set_part(int64_t part, WeightId id, int64_t expert, const WeightBlock& block) {
    scales_.load(id, expert, block);
    const experts::ScaleBytes scale_bytes = bytes_of_range();
    if (must_be_near_) check_span(scale_bytes.span(), id.with(WeightPlane::kScale), expert);
    if (!scale_bytes.fit()) return false;
    put_rows(part, table_of(scale_bytes));
    float factor = scale_bytes.sum_factor();
    if (quant_.has_global_scale) {
      const WeightId global = id.with(WeightPlane::kGlobalScale);
      factor *= load_scales(quant_, upload_.on_host(), global, expert, {0, 1, 0, 1}).front();
    }
    sum_factors_[static_cast<size_t>(part)] = factor;
    return true;
  }
  void copy_to(int64_t place, WeightUpload& upload, const CudaMatrixMemory& memory) const {
    upload.copy_bytes(bytes_, memory.factor_scale.as() + place * exact_bytes(planes_));
    upload.copy_floats(sum_factors_, memory.sum_factor.as<float>() + place * planes_.parts);
  }

 private:
  using Table = std::array<std::byte, 256>;

  float number(int32_t byte) const {
    return quant::scale_of_byte(quant::type_of_scales(quant_.scale_values),
                                static_cast<uint8_t>(byte));
  }
  // The least scale and the largest one decide what there is to decide.
  experts::ScaleBytes bytes_of_range() const {
    const std::array ends = {number(scales_.least()), number(scales_.most())};
    const size_t count = scales_.least() <= scales_.most() ? ends.size() : 0;
    return {quant_.scale_values, form_, std::span(ends).first(count)};
  }
  // Each stored byte's own.
  Table table_of(const experts::ScaleBytes& scale_bytes) const {
    Table table{};
    for (int32_t byte = scales_.least(); byte <= scales_.most(); ++byte) {
      table[static_cast<size_t>(byte)] = static_cast<std::byte>(scale_bytes.of(number(byte)));
    }
    return table;
  }

  void put_rows(int64_t part, const Table& table) {
    for (int64_t first = 0; first < scales_.rows(); first += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, scales_.rows() - first);
      for (int64_t row = 0; row < count; ++row) look_up(first + row, table, at(row));
      // A square's rows beyond the last one lie where nothing else does.
      const int64_t squares = ceil_div(count, kByteSquare);
      std::fill(at(count), at(squares * kByteSquare), std::byte{});
      for (int64_t group = 0; group < planes_.groups; group += kByteSquare) {
        for (int64_t square = 0; square < squares; ++square) {
          put_square(part, first, square * kByteSquare, group);
        }
      }
    }
  }
  std::byte* at(int64_t row) { return some_.data() + row * width_; }
  void look_up(int64_t row, const Table& table, std::byte* to) const {
    const std::byte* const from = scales_.row(row);
    for (const int32_t stored : stored_) *to++ = table[std::to_integer<size_t>(from[stored])];
  }
  void put_square(int64_t part, int64_t first, int64_t row, int64_t group) {
    const ByteSquare square(at(row) + group, width_);
    std::byte* const to = bytes_.data() + experts::exact_row(first + row, part, planes_.parts);
    const int64_t count = std::min(kByteSquare, planes_.groups - group);
    for (int64_t i = 0; i < count; ++i) square.store(i, to + (group + i) * planes_.byte_stride);
  }

  void check_span(int32_t span, WeightId id, int64_t expert) const {
    if (span <= experts::kMostNearSpan) return;
    throw Error(ErrorCode::kTensorValue,
                {.what = "scales lie too far apart for the kernels of the layer",
                 .tensor = upload_.on_host().locate(id, expert),
                 .expected = fmt::format("powers of two within 2^{} of the largest",
                                         experts::kMostNearSpan),
                 .found = fmt::format("one at 2^-{} of it", span),
                 .hint = "create another layer for these weights"});
  }

  const QuantSpec& quant_;
  bool must_be_near_;
  experts::ByteForm form_;
  experts::FactorPlanes planes_;
  const WeightUpload& upload_;
  ScaleRows scales_;
  std::vector<int32_t> stored_;  // the stored group of each
  int64_t width_;
  std::vector<std::byte> some_;  // rows of a few scales' bytes
  std::vector<std::byte> bytes_;
  std::vector<float> sum_factors_;
};

// Fills one half of the experts; returns false, midway, if some scales have no bytes of the form.
bool fill_in(experts::ByteForm form, MlpHalf half, const MlpSource& mlp, UploadLanes& lanes,
             CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const bool is_down = half == MlpHalf::kDown;
  CudaMatrixMemory& memory = weights.of(half);
  const experts::FactorPlanes& planes =
      (is_down ? weights.view.down : weights.view.gate_up).factors;
  std::atomic<bool> fit{true};
  lanes.for_each(mlp.count(), [&](WeightUpload& lane) {
    return [&, buffer = std::make_shared<ExactBuffer>(
                   mlp, form, planes, is_down ? problem.skipped_columns : 0, lane)](int64_t index) {
      const LocalExpert& expert = mlp.experts[static_cast<size_t>(index)];
      const auto set = [&](int64_t part, WeightMatrix matrix) {
        if (!fit.load(std::memory_order_relaxed)) return;
        const WeightBlock block = expert.block_of(matrix, problem.hidden_size);
        const bool is_good = buffer->set_part(part, expert.id(matrix), expert.expert, block);
        if (!is_good) fit.store(false, std::memory_order_relaxed);
      };
      if (is_down) {
        set(0, WeightMatrix::kDown);
      } else {
        if (problem.activation.gated) set(0, WeightMatrix::kGate);
        set(mlp.halves() - 1, WeightMatrix::kUp);
      }
      if (fit.load(std::memory_order_relaxed)) buffer->copy_to(expert.place, lane, memory);
    };
  });
  if (!fit.load()) return false;
  lanes.own().copy_ints({static_cast<int32_t>(form)}, memory.byte_form.as<int32_t>());
  memory.form = form;
  return true;
}

void fill_half(MlpHalf half, const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights) {
  const experts::ByteForm first = mlp.byte_form.value_or(experts::ByteForm::kNear);
  if (fill_in(first, half, mlp, lanes, weights)) return;
  if (!mlp.byte_form) {
    fill_in(experts::ByteForm::kAsStored, half, mlp, lanes, weights);
    return;
  }
  throw Error(ErrorCode::kTensorValue,
              {.what = "scales of some experts have no bytes in the form that the layer has for "
                       "those of the others",
               .hint = "stage all experts in one call"});
}

}  // namespace

// One form serves a matrix of all experts, so that kernels ask for it once.
void fill_exact_factors(const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights) {
  for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
    if (mlp.has(half)) fill_half(half, mlp, lanes, weights);
  }
}

int32_t scale_span(const MlpSource& mlp, const WeightSource& source) {
  const experts::ExpertsProblem& problem = mlp.problem;
  QuantSpec local = problem.quant;
  local.has_global_scale = false;
  int32_t most = 0;
  const auto add = [&](const LocalExpert& expert, WeightMatrix matrix) {
    const CodeMeaning meaning = load_meaning(local, source, expert.id(matrix), expert.expert,
                                             expert.block_of(matrix, problem.hidden_size));
    const experts::ScaleBytes bytes(local.scale_values, experts::ByteForm::kNear, meaning.scales);
    most = std::max(most, bytes.span());
  };
  for (const LocalExpert& expert : mlp.experts) {
    if (problem.activation.gated) add(expert, WeightMatrix::kGate);
    add(expert, WeightMatrix::kUp);
    add(expert, WeightMatrix::kDown);
  }
  return most;
}

}  // namespace conclave::inline v0
