#include "layer/cuda/step_factors.h"

#include "cpu/isa.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/short_scales.h"
#include "gemm/cpu/pack_numbers.h"
#include "gemm/panel_scales.h"
#include "layer/cuda/small_steps.h"
#include "quant/code_meaning.h"
#include "quant/number_steps.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Kernels read steps as unsigned bytes.
constexpr int kStepOfZero = 128;
constexpr int64_t kBytesOfPair = experts::bytes_of_step_word(experts::FactorForm::kSteps);

// Factors of the codes of one expert's gate and up, or of its down.
class StepBuffer {
 public:
  StepBuffer(const experts::ExpertsProblem& problem, const experts::FactorPlanes& planes,
             gemm::NumbersFunction pack)
      : quant_(problem.quant),
        planes_(planes),
        pack_(pack),
        groups_of_unit_(experts::groups_of_unit(problem)),
        least_(quant::format_of(problem.weight_dtype).codes->whole.least),
        // A pair has two groups' scales, or one's scale and offset.
        numbers_(experts::factor_form(problem) == experts::FactorForm::kSteps ? 2 : 1),
        steps_(
            static_cast<size_t>(experts::step_words(experts::factor_form(problem), planes.groups) *
                                rows() * kBytesOfPair),
            std::byte{kStepOfZero}),
        units_(static_cast<size_t>(planes.units * rows() * numbers_)) {
    for (std::vector<std::byte>& packed : packed_) packed.resize(plane().bytes());
  }

  void set_part(int64_t part, const WeightSource& source, WeightId id, int64_t expert,
                const WeightBlock& block, int64_t rows_at_once) {
    WeightBlock rows = block;
    for (; rows.row_begin < block.row_end; rows.row_begin = rows.row_end) {
      rows.row_end = std::min(rows.row_begin + rows_at_once, block.row_end);
      set_rows(part, source, id, expert, rows, rows.row_begin - block.row_begin);
    }
  }
  void copy_to(int64_t place, WeightUpload& upload, CudaMatrixMemory& memory) const {
    if (!memory.has_short_scales.empty()) {
      memory.has_short_scales[static_cast<size_t>(place)] = has_short_steps() ? 1 : 0;
    }
    upload.copy_bytes(steps_, memory.factor_scale.as() + place * std::ssize(steps_));
    upload.copy_floats(units_, memory.step_units.as<float>() + place * std::ssize(units_));
  }

 private:
  struct Place {
    int64_t row = 0;  // counts those of all parts
    int64_t unit = 0;
    int64_t number = 0;  // 1: offsets
  };
  struct Named {
    const WeightSource& source;
    WeightId id;
    int64_t expert;
  };
  struct RowRange {
    int64_t first = 0;
    int64_t end = 0;
  };

  int64_t rows() const { return planes_.parts * planes_.row_stride; }

  bool has_short_steps() const {
    const auto stride = static_cast<size_t>(numbers_);  // past offsets
    std::byte least{kStepOfZero};
    std::byte most = least;
    for (size_t i = 0; i < steps_.size(); i += stride) {
      least = std::min(least, steps_[i]);
      most = std::max(most, steps_[i]);
    }
    return is_short(least) && is_short(most);
  }
  bool is_short(std::byte stored) const {
    return experts::is_short_step(std::to_integer<int>(stored) - kStepOfZero, least_);
  }

  // Rows of a part from `first` on.
  void set_rows(int64_t part, const WeightSource& source, WeightId id, int64_t expert,
                const WeightBlock& block, int64_t first) {
    const CodeMeaning meaning = load_meaning(quant_, source, id, expert, block);
    const int64_t rows = block.row_end - block.row_begin;
    for (int64_t row = 0; row < rows; row += gemm::kPanelColumns) {
      const RowRange some{.first = row, .end = std::min(row + gemm::kPanelColumns, rows)};
      const int64_t to = part * planes_.row_stride + first;
      // Numbers without steps are found once more, and named, by the code that has no vectors.
      if (!pack_rows(meaning, some, to)) set_each(meaning, some, to, {source, id, expert});
    }
  }

  gemm::NumberPlane plane() const {
    return {
        .values = ScaleValues::kSteps, .groups = planes_.groups, .unit_groups = groups_of_unit_};
  }
  // Rows of numbers are columns of a panel. Returns false if some have no steps.
  bool pack_rows(const CodeMeaning& meaning, const RowRange& some, int64_t to) {
    if (pack_ == nullptr) return false;
    const std::array numbers = {meaning.scales.data(), meaning.offsets.data()};
    for (int64_t i = 0; i < numbers_; ++i) {
      const auto number = static_cast<size_t>(i);
      gemm::PanelNumbers columns{};
      for (int64_t row = some.first; row < some.end; ++row) {
        columns[static_cast<size_t>(row - some.first)] = numbers[number] + row * meaning.groups;
      }
      if (!pack_(plane(), columns.data(), packed_[number].data())) return false;
    }
    put_steps(some, to);
    put_units(some, to);
    return true;
  }
  // A pair's second step is that of the offset, or that of the next group, if there is one.
  void put_steps(const RowRange& some, int64_t to) {
    std::array<std::byte, gemm::kPanelColumns> none{};
    const int64_t groups_of_pair = numbers_ == 1 ? 2 : 1;
    for (int64_t group = 0; group < planes_.groups; group += groups_of_pair) {
      const std::byte* const first = packed_[0].data() + group * gemm::kPanelColumns;
      const std::byte* second = none.data();
      if (numbers_ == 2) second = packed_[1].data() + group * gemm::kPanelColumns;
      if (numbers_ == 1 && group + 1 < planes_.groups) second = first + gemm::kPanelColumns;
      std::byte* out =
          steps_.data() + (group / groups_of_pair * rows() + to + some.first) * kBytesOfPair;
      for (int64_t row = 0; row < some.end - some.first; ++row) {
        *out++ = as_stored(first[row]);
        *out++ = as_stored(second[row]);
      }
    }
  }
  void put_units(const RowRange& some, int64_t to) {
    for (int64_t number = 0; number < numbers_; ++number) {
      const std::byte* const packed =
          packed_[static_cast<size_t>(number)].data() + plane().units_at();
      for (int64_t unit = 0; unit < planes_.units; ++unit) {
        std::array<float, gemm::kPanelColumns> units;
        std::memcpy(units.data(), packed + unit * int64_t{sizeof(units)}, sizeof(units));
        for (int64_t row = some.first; row < some.end; ++row) {
          units_[static_cast<size_t>((unit * rows() + to + row) * numbers_ + number)] =
              units[static_cast<size_t>(row - some.first)];
        }
      }
    }
  }
  static std::byte as_stored(std::byte step) { return step ^ std::byte{kStepOfZero}; }

  void set_each(const CodeMeaning& meaning, const RowRange& some, int64_t to, const Named& named) {
    for (int64_t row = some.first; row < some.end; ++row) {
      const auto own = [&](const std::vector<float>& numbers) {
        return std::span(numbers).subspan(static_cast<size_t>(row * meaning.groups),
                                          static_cast<size_t>(meaning.groups));
      };
      for (int64_t unit = 0; unit < planes_.units; ++unit) {
        set_unit(own(meaning.scales), {.row = to + row, .unit = unit},
                 {named.source, named.id.with(WeightPlane::kScale), named.expert});
        if (numbers_ == 1) continue;
        set_unit(own(meaning.offsets), {.row = to + row, .unit = unit, .number = 1},
                 {named.source, named.id.with(WeightPlane::kZero), named.expert});
      }
    }
  }

  void set_unit(std::span<const float> row_numbers, const Place& at, const Named& named) {
    const int64_t first = at.unit * groups_of_unit_;
    const int64_t count = std::min(groups_of_unit_, std::ssize(row_numbers) - first);
    const auto own = row_numbers.subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    const float unit = quant::unit_of_steps(own);
    units_[static_cast<size_t>((at.unit * rows() + at.row) * numbers_ + at.number)] = unit;
    for (int64_t i = 0; i < groups_of_unit_; ++i) {
      const int64_t byte = (first + i) * numbers_ + at.number;
      const auto to = static_cast<size_t>((byte / 2 * rows() + at.row) * 2 + byte % 2);
      if (to >= steps_.size()) break;
      int8_t step = 0;
      if (i < count && !quant::find_step(own[static_cast<size_t>(i)], unit, step)) {
        refuse(own[static_cast<size_t>(i)], named);
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
  gemm::NumbersFunction pack_;
  int64_t groups_of_unit_;
  int32_t least_;  // the value of code 0, of numbers in their order
  int64_t numbers_;
  std::array<std::vector<std::byte>, 2> packed_;  // steps and units of scales, and of offsets
  std::vector<std::byte> steps_;
  std::vector<float> units_;
};

// Each lane has a buffer that make_buffer(planes) makes.
template <class MakeBuffer>
void fill_half(MlpHalf half, const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights,
               const MakeBuffer& make_buffer) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const bool is_down = half == MlpHalf::kDown;
  const experts::FactorPlanes& planes =
      (is_down ? weights.view.down : weights.view.gate_up).factors;
  lanes.for_each(mlp.count(), [&](WeightUpload& lane) {
    return [&, buffer = make_buffer(planes)](int64_t index) mutable {
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

void fill_step_factors(const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights,
                       const Context& context) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const bool are_small = experts::factor_form(problem) == experts::FactorForm::kSmallSteps;
  const cpu::Isa isa = context.isa().empty() ? cpu::best_isa() : cpu::parse_isa(context.isa());
  for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
    if (!mlp.has(half)) continue;
    if (are_small) {
      fill_half(half, mlp, lanes, weights, [&](const experts::FactorPlanes& planes) {
        return SmallStepBuffer(problem, planes);
      });
    } else {
      fill_half(half, mlp, lanes, weights, [&](const experts::FactorPlanes& planes) {
        return StepBuffer(problem, planes, gemm::numbers_function(isa));
      });
    }
  }
}

}  // namespace conclave::inline v0
