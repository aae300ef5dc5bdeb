// GPTQ's first format, rounded to nearest.
#include "convert/forms/catalog.h"
#include "convert/forms/method_form.h"
#include "convert/forms/method_options.h"

#include "conclave/quantise.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

constexpr const char* kGptqMethod = "gptq";

struct GptqOptions {
  DType codes = DType::kI4;
  int64_t bits = 4;     // as stored; the type may have more
  int64_t group = 128;  // 0: a scale for each row
  bool symmetric = true;
};

MethodForm form_of(const GptqOptions& options) {
  QuantSpec spec{.weights = WeightScale::kChannel};
  if (options.group > 0) {
    spec = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = options.group};
  }
  spec.zeros = options.symmetric ? WeightZero::kNone : WeightZero::kPoint;
  return {.method = kGptqMethod,
          .codes = options.codes,
          .code_bits = options.bits,
          .quant = spec,
          .scale_dtype = DType::kF16};
}

// Takes "group", "sym" and "asym" out of the options.
void take_options(OptionTaker& taker, GptqOptions& gptq) {
  taker.take_group(gptq.group);
  if (taker.take("asym")) {
    gptq.symmetric = false;
  } else {
    taker.take("sym");
  }
}

MethodForm ordered(MethodForm form) {
  form.quant.has_column_order = true;
  return form;
}

// Columns of a group lie apart, as where GPTQ has sorted them by what rows have (desc_act). Which
// are together is drawn by their number: no rows are known that could tell.
class ShuffledColumns final : public MethodTarget {
 public:
  ShuffledColumns(std::string name, const MethodForm& form, ScaleRule rule)
      : MethodTarget(std::move(name), ordered(form), form, rule) {}

  QuantisedRows encode(std::span<const float> values, int64_t rows, int64_t cols,
                       float matrix_scale) const override {
    const std::vector<int64_t> places = places_of(cols);
    std::vector<float> sorted(values.size());
    move_columns(rows, cols, [&](int64_t row, int64_t col) {
      sorted[static_cast<size_t>(row + places[static_cast<size_t>(col)])] =
          values[static_cast<size_t>(row + col)];
    });
    QuantisedRows made = MethodTarget::encode(sorted, rows, cols, matrix_scale);
    std::vector<std::byte> codes(made.codes.size());
    move_columns(rows, packed_cols(cols), [&](int64_t row, int64_t col) {
      const int64_t place = row + (col < cols ? places[static_cast<size_t>(col)] : col);
      set_code(codes, row + col, code(made.codes, place));
    });
    made.codes = std::move(codes);
    return made;
  }

 protected:
  std::vector<int32_t> order_of(int64_t cols) const override {
    std::vector<int32_t> groups;
    for (const int64_t place : places_of(cols)) {
      groups.push_back(static_cast<int32_t>(place / form().quant.block_cols));
    }
    return groups;
  }

 private:
  // Every column of a row has another place among those of its groups.
  static std::vector<int64_t> places_of(int64_t cols) {
    int64_t stride = std::max<int64_t>(cols * 5 / 8, 1);
    while (std::gcd(stride, cols) != 1) ++stride;
    std::vector<int64_t> places;
    for (int64_t col = 0; col < cols; ++col) places.push_back(col * stride % cols);
    return places;
  }

  // Calls move(the number of a row's first column, column).
  template <class Move>
  static void move_columns(int64_t rows, int64_t cols, const Move& move) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) move(row * cols, col);
    }
  }

  int64_t codes_in_a_byte() const { return 8 / bit_size(form().codes); }
  int64_t packed_cols(int64_t cols) const {
    return (cols + codes_in_a_byte() - 1) / codes_in_a_byte() * codes_in_a_byte();
  }
  unsigned shift_of(int64_t index) const {
    return static_cast<unsigned>(index % codes_in_a_byte() * bit_size(form().codes));
  }
  std::byte code(const std::vector<std::byte>& codes, int64_t index) const {
    const auto mask = static_cast<std::byte>((1U << bit_size(form().codes)) - 1);
    return codes[static_cast<size_t>(index / codes_in_a_byte())] >> shift_of(index) & mask;
  }
  void set_code(std::vector<std::byte>& codes, int64_t index, std::byte code) const {
    codes[static_cast<size_t>(index / codes_in_a_byte())] |= code << shift_of(index);
  }
};

}  // namespace

std::vector<FormRow> gptq_forms() {
  std::vector<FormRow> rows;
  struct Row {
    const char* name;
    DType codes;
    int64_t bits;
  };
  for (const auto& [name, codes, bits] :
       {Row{"gptq-int4", DType::kI4, 4}, Row{"gptq-int8", DType::kI8, 8},
        Row{"gptq-int3", DType::kI4, 3}, Row{"gptq-int2", DType::kI4, 2}}) {
    const GptqOptions usual{.codes = codes, .bits = bits};
    rows.push_back({.name = name,
                    .method = kGptqMethod,
                    .options = "group=N or group=row; sym or asym",
                    .make = [=](FormOptions& options, ScaleRule rule) -> FormPointer {
                      GptqOptions gptq = usual;
                      OptionTaker taker(options, name);
                      take_options(taker, gptq);
                      return std::make_shared<MethodTarget>(taker.name(), form_of(gptq), rule);
                    }});
    const std::string shuffled = std::string(name) + "-act-order";
    rows.push_back({.name = shuffled,
                    .method = kGptqMethod,
                    .of_random_models = true,
                    .options = "group=N; sym or asym",
                    .make = [=](FormOptions& options, ScaleRule rule) -> FormPointer {
                      GptqOptions gptq = usual;
                      OptionTaker taker(options, shuffled);
                      take_options(taker, gptq);
                      return std::make_shared<ShuffledColumns>(taker.name(), form_of(gptq), rule);
                    }});
  }
  return rows;
}

}  // namespace conclave::inline v0::conversion
