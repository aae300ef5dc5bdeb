#include "layer/cuda/step_factors.h"

#include "experts/cuda/factor_planes.h"
#include "quant/code_meaning.h"
#include "quant/number_steps.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Kernels read steps as unsigned bytes.
constexpr int kStepOfZero = 128;

// Factors of the codes of one expert's gate and up, or of its down.
class StepBuffer {
 public:
  StepBuffer(const experts::ExpertsProblem& problem, const experts::FactorPlanes& planes)
      : quant_(problem.quant),
        planes_(planes),
        groups_of_unit_(experts::groups_of_unit(problem)),
        // A pair has two groups' scales, or one's scale and offset.
        numbers_(experts::factor_form(problem) == experts::FactorForm::kSteps ? 2 : 1),
        steps_(
            static_cast<size_t>(experts::step_pairs(experts::factor_form(problem), planes.groups) *
                                rows() * experts::kBytesOfStepPair)),
        units_(static_cast<size_t>(planes.units * rows() * numbers_)) {}

  void set_part(int64_t part, const WeightSource& source, WeightId id, int64_t expert,
                const WeightBlock& block, int64_t rows_at_once) {
    WeightBlock rows = block;
    for (; rows.row_begin < block.row_end; rows.row_begin = rows.row_end) {
      rows.row_end = std::min(rows.row_begin + rows_at_once, block.row_end);
      set_rows(part, source, id, expert, rows, rows.row_begin - block.row_begin);
    }
  }
  void copy_to(int64_t place, WeightUpload& upload, const CudaMatrixMemory& memory) const {
    upload.copy_bytes(steps_, memory.factor_scale.as() + place * std::ssize(steps_));
    upload.copy_floats(units_, memory.step_units.as<float>() + place * std::ssize(units_));
  }

 private:
  struct Place {
    int64_t part = 0;
    int64_t row = 0;
    int64_t unit = 0;
    int64_t number = 0;  // 1: offsets
  };
  struct Named {
    const WeightSource& source;
    WeightId id;
    int64_t expert;
  };

  int64_t rows() const { return planes_.parts * planes_.row_stride; }

  // Rows of a part from `first` on.
  void set_rows(int64_t part, const WeightSource& source, WeightId id, int64_t expert,
                const WeightBlock& block, int64_t first) {
    const CodeMeaning meaning = load_meaning(quant_, source, id, expert, block);
    for (int64_t row = 0; row < block.row_end - block.row_begin; ++row) {
      const auto own = [&](const std::vector<float>& numbers) {
        return std::span(numbers).subspan(static_cast<size_t>(row * meaning.groups),
                                          static_cast<size_t>(meaning.groups));
      };
      for (int64_t unit = 0; unit < planes_.units; ++unit) {
        set_unit(own(meaning.scales), {.part = part, .row = first + row, .unit = unit}, [&] {
          return Named{source, id.with(WeightPlane::kScale), expert};
        });
        if (numbers_ == 1) continue;
        set_unit(own(meaning.offsets),
                 {.part = part, .row = first + row, .unit = unit, .number = 1}, [&] {
                   return Named{source, id.with(WeightPlane::kZero), expert};
                 });
      }
    }
  }

  template <class Name>
  void set_unit(std::span<const float> row_numbers, const Place& at, const Name& name) {
    const int64_t first = at.unit * groups_of_unit_;
    const int64_t count = std::min(groups_of_unit_, std::ssize(row_numbers) - first);
    const auto own = row_numbers.subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    const float unit = quant::unit_of_steps(own);
    const int64_t row = at.part * planes_.row_stride + at.row;
    units_[static_cast<size_t>((at.unit * rows() + row) * numbers_ + at.number)] = unit;
    for (int64_t i = 0; i < groups_of_unit_; ++i) {
      const int64_t byte = (first + i) * numbers_ + at.number;
      const auto to = static_cast<size_t>((byte / 2 * rows() + row) * 2 + byte % 2);
      if (to >= steps_.size()) break;
      int8_t step = 0;
      if (i < count && !quant::find_step(own[static_cast<size_t>(i)], unit, step)) {
        refuse(own[static_cast<size_t>(i)], name());
      }
      steps_[to] = static_cast<std::byte>(step + kStepOfZero);
    }
  }

  [[noreturn]] static void refuse(float number, const Named& name) {
    throw Error(ErrorCode::kTensorValue,
                {.what = "a scale or zero is none that the layer holds",
                 .tensor = name.source.locate(name.id, name.expert),
                 .expected = "whole multiples, from -128 to 127, of one number for 256 columns",
                 .found = fmt::format("{}", number),
                 .hint = "a layer holds any if it is made with ScaleValues::kFloat of a source of "
                         "float32 scales"});
  }

  const QuantSpec& quant_;
  experts::FactorPlanes planes_;
  int64_t groups_of_unit_;
  int64_t numbers_;
  std::vector<std::byte> steps_;
  std::vector<float> units_;
};

void fill_half(MlpHalf half, const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const bool is_down = half == MlpHalf::kDown;
  const experts::FactorPlanes& planes =
      (is_down ? weights.view.down : weights.view.gate_up).factors;
  lanes.for_each(mlp.count(), [&](WeightUpload& lane) {
    return [&, buffer = StepBuffer(problem, planes)](int64_t index) mutable {
      const LocalExpert& expert = mlp.experts[static_cast<size_t>(index)];
      const auto set = [&](int64_t part, WeightMatrix matrix) {
        const WeightBlock block = expert.block_of(matrix, problem.hidden_size);
        buffer.set_part(part, lane.on_host(), expert.id(matrix), expert.expert, block,
                        lane.scale_rows(block.row_end - block.row_begin));
      };
      if (is_down) {
        set(0, WeightMatrix::kDown);
      } else {
        if (problem.activation.gated) set(0, WeightMatrix::kGate);
        set(mlp.halves() - 1, WeightMatrix::kUp);
      }
      buffer.copy_to(expert.place, lane, weights.of(half));
    };
  });
}

}  // namespace

void fill_step_factors(const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights) {
  for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
    if (mlp.has(half)) fill_half(half, mlp, lanes, weights);
  }
}

}  // namespace conclave::inline v0
