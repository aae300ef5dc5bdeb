#include "layer/cuda/small_steps.h"

#include "core/float_convert.h"
#include "experts/cuda/factor_planes.h"
#include "quant/code_meaning.h"
#include "quant/number_steps.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr int64_t kGroupsOfWord = 4;

[[noreturn]] void refuse(const WeightSource& source, WeightId id, int64_t expert,
                         std::string found) {
  throw Error(ErrorCode::kTensorValue,
              {.what = "scales or zeros are none that the layer holds beside codes of 2 bits",
               .tensor = source.locate(id, expert),
               .expected = fmt::format("whole multiples, from 0 to {}, of one number of float16 "
                                       "for 256 columns",
                                       experts::kMostSmallStep),
               .found = std::move(found),
               .hint = "a layer without dtype in gate_up_codes and down_codes holds any steps"});
}

}  // namespace

SmallStepBuffer::SmallStepBuffer(const experts::ExpertsProblem& problem,
                                 const experts::FactorPlanes& planes)
    : quant_(problem.quant), planes_(planes), groups_of_unit_(experts::groups_of_unit(problem)) {
  const experts::FactorForm form = experts::factor_form(problem);
  steps_.resize(static_cast<size_t>(experts::step_words(form, planes.groups) * rows() *
                                    experts::bytes_of_step_word(form)));
  units_.resize(static_cast<size_t>(2 * planes.units * rows()));
}

void SmallStepBuffer::set_part(int64_t part, const WeightSource& source, WeightId id,
                               int64_t expert, const WeightBlock& block, int64_t rows_at_once) {
  WeightBlock some = block;
  for (; some.row_begin < block.row_end; some.row_begin = some.row_end) {
    some.row_end = std::min(some.row_begin + rows_at_once, block.row_end);
    const CodeMeaning meaning = load_meaning(quant_, source, id, expert, some);
    const int64_t first = part * planes_.row_stride + some.row_begin - block.row_begin;
    for (int64_t row = 0; row < some.row_end - some.row_begin; ++row) {
      const auto set = [&](const std::vector<float>& numbers, int64_t number, WeightPlane plane) {
        const auto own = std::span(numbers).subspan(static_cast<size_t>(row * meaning.groups),
                                                    static_cast<size_t>(meaning.groups));
        if (set_row({.numbers = own, .row = first + row, .number = number})) return;
        refuse(source, id.with(plane), expert,
               fmt::format("others in row {}", some.row_begin + row));
      };
      set(meaning.scales, 0, WeightPlane::kScale);
      set(meaning.offsets, 1, WeightPlane::kZero);
    }
  }
}

bool SmallStepBuffer::set_row(const OfRow& own) {
  const int shift = own.number == 0 ? 0 : 4;
  for (int64_t unit = 0; unit < planes_.units; ++unit) {
    const int64_t first = unit * groups_of_unit_;
    const int64_t count = std::min(groups_of_unit_, std::ssize(own.numbers) - first);
    const auto numbers =
        own.numbers.subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    const std::optional<float> found = quant::unit_of_small_steps(numbers, experts::kMostSmallStep);
    if (!found) return false;
    units_[static_cast<size_t>(2 * (unit * rows() + own.row) + own.number)] = float_to_f16(*found);
    for (int64_t i = 0; i < count; ++i) {
      int8_t step = 0;
      quant::find_step(numbers[static_cast<size_t>(i)], *found, step);
      const int64_t group = first + i;
      std::byte& to = steps_[static_cast<size_t>(
          (group / kGroupsOfWord * rows() + own.row) * kGroupsOfWord + group % kGroupsOfWord)];
      to = (to & std::byte(0xf0 >> shift)) | std::byte(step << shift);
    }
  }
  return true;
}

void SmallStepBuffer::copy_to(int64_t place, WeightUpload& upload, CudaMatrixMemory& memory) const {
  upload.copy_bytes(steps_, memory.factor_scale.as() + place * std::ssize(steps_));
  upload.copy_bytes(std::as_bytes(std::span(units_)),
                    memory.step_units.as<uint16_t>() + place * std::ssize(units_));
}

}  // namespace conclave::inline v0
