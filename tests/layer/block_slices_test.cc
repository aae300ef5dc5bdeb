// Tensor-parallel slices that begin and end inside blocks of scales and groups of columns.
#include "experts/slab_layout.h"
#include "quant/activation_rows.h"
#include "quant/code_meaning.h"
#include "quant/weight_block.h"
#include "quant/weight_format.h"
#include "support/layer_fixture.h"

#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

// The intermediate columns of one rank as a layer of their own. It has a scale, and a zero, for
// each element, so that blocks need not begin with the slice and columns need no order.
class SlicedSource final : public WeightSource {
 public:
  SlicedSource(const WeightSource& whole, const QuantSpec& quant, const TensorSlice& inner)
      : whole_(whole), quant_(quant), inner_(inner) {}

  WeightInfo describe(WeightId id) const override {
    WeightInfo info = whole_.describe(id);
    if (info.count == 0 || !id.mlp()) return info;
    if (is_by_element(id)) {
      const WeightInfo matrix = whole_.describe(id.with(WeightPlane::kWeights));
      info.rows = matrix.rows;
      info.cols = matrix.cols;
    }
    if (is_whole(id)) return info;
    (is_down(id) ? info.cols : info.rows) = inner_.size();
    return info;
  }

  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    WeightBlock part = block;
    if (id.mlp() && !is_whole(id)) {
      (is_down(id) ? part.col_begin : part.row_begin) += inner_.begin;
      (is_down(id) ? part.col_end : part.row_end) += inner_.begin;
    }
    if (!is_by_element(id)) return whole_.read(id, expert, part, destination);
    const WeightInfo stored = whole_.describe(id);
    const auto bytes = static_cast<size_t>(byte_size(stored.dtype));
    const std::vector<std::byte> values = read_all(id, expert);
    const std::vector<int32_t> order = order_of(id, expert);
    std::byte* out = destination.data();
    for (int64_t row = part.row_begin; row < part.row_end; ++row) {
      for (int64_t col = part.col_begin; col < part.col_end; ++col, out += bytes) {
        const auto group = static_cast<int64_t>(order[static_cast<size_t>(col)]);
        const auto place = static_cast<size_t>(row / quant_.block_rows * stored.cols + group);
        std::memcpy(out, values.data() + place * bytes, bytes);
      }
    }
  }

 private:
  static bool is_down(WeightId id) { return id.matrix() == WeightMatrix::kDown; }
  static bool is_by_element(WeightId id) {
    return id.plane() == WeightPlane::kScale || id.plane() == WeightPlane::kZero;
  }
  // Whether a slice has all of it. Factors of gate and up belong to columns, which are not cut.
  static bool is_whole(WeightId id) {
    return id.plane() == WeightPlane::kInputScale || id.plane() == WeightPlane::kGlobalScale ||
           (id.plane() == WeightPlane::kColumnFactor && !is_down(id));
  }

  std::vector<std::byte> read_all(WeightId id, int64_t expert) const {
    const WeightInfo info = whole_.describe(id);
    std::vector<std::byte> values(
        static_cast<size_t>(info.rows * info.cols * byte_size(info.dtype)));
    whole_.read(id, expert, {0, info.rows, 0, info.cols}, values);
    return values;
  }

  // The group of each column of the whole matrix.
  std::vector<int32_t> order_of(WeightId id, int64_t expert) const {
    std::vector<int32_t> order(
        static_cast<size_t>(whole_.describe(id.with(WeightPlane::kWeights)).cols));
    for (size_t col = 0; col < order.size(); ++col) {
      order[col] = static_cast<int32_t>(static_cast<int64_t>(col) / quant_.block_cols);
    }
    if (!quant_.has_column_order) return order;
    const std::vector<std::byte> stored = read_all(id.with(WeightPlane::kColumnOrder), expert);
    std::memcpy(order.data(), stored.data(), stored.size());
    return order;
  }

  const WeightSource& whole_;
  QuantSpec quant_;
  TensorSlice inner_;
};

struct Case {
  std::string name;
  DType dtype;
  int64_t inner;
  QuantSpec quant;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// For every format of codes. No size is a multiple of its block, nor of a group of 128 columns, nor
// of most numbers of ranks.
std::vector<Case> cases() {
  std::vector<Case> cases;
  const auto catalog = quant::format_catalog();
  for (const quant::WeightFormat& format : catalog.rows()) {
    if (format.codes == nullptr) continue;
    const auto add_form = [&](const char* form, int64_t inner, const QuantSpec& quant) {
      if (!format.takes(quant)) return;
      cases.push_back({std::string(format.name) + "_" + form, format.element, inner, quant});
    };
    const auto add = [&](const char* form, int64_t inner, int64_t block_rows, int64_t block_cols,
                         ActivationScale rows) {
      add_form(form, inner,
               {.weights = WeightScale::kBlock,
                .block_rows = block_rows,
                .block_cols = block_cols,
                .activations = rows});
    };
    add("Blocks", 301, 128, 128, ActivationScale::kNone);
    add("BlocksRowsByGroup", 301, 128, 128, ActivationScale::kGroup);
    add("BlocksRowsByToken", 150, 128, 128, ActivationScale::kToken);
    add("OneBlock", 101, 128, 128, ActivationScale::kNone);
    add("OddBlocks", 77, 7, 48, ActivationScale::kGroup);
    add("Groups", 91, 1, 32, ActivationScale::kNone);
    const QuantSpec groups{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
    if (quant::takes_int8_rows(format.element)) {
      QuantSpec int8_rows = groups;
      int8_rows.activations = ActivationScale::kGroup;
      int8_rows.activation_group = 32;
      int8_rows.activation_dtype = DType::kI8;
      add_form("GroupsInt8Rows", 91, int8_rows);
      add_form("BlocksInt8Rows", 301,
               {.weights = WeightScale::kBlock,
                .activations = ActivationScale::kToken,
                .activation_dtype = DType::kI8});
    }
    QuantSpec zeros = groups;
    zeros.zeros = WeightZero::kPoint;
    add_form("GroupsWithZeros", 91, zeros);
    QuantSpec ordered = groups;
    ordered.has_column_order = true;
    add_form("GroupsInAnOrder", 91, ordered);
    QuantSpec factors{.weights = WeightScale::kBlock,
                      .activations = ActivationScale::kGroup,
                      .has_column_factors = true};
    add_form("BlocksRowsByGroupWithFactors", 301, factors);
    ordered.zeros = WeightZero::kOffset;
    ordered.has_global_scale = ordered.has_column_factors = true;
    add_form("GroupsInAnOrderWithAll", 75, ordered);
  }
  return cases;
}

class BlockSlices : public ::testing::TestWithParam<Case> {
 protected:
  static MoeSpec spec() {
    const Case& c = GetParam();
    MoeSpec spec = make_spec(5, 2, 200, c.inner, c.dtype);
    spec.quant = c.quant;
    return spec;
  }
  static ParallelSpec rank(int32_t rank, int32_t ranks) {
    return {.tp_size = ranks, .tp_rank = rank, .reduce = Reduce::kPartial};
  }
};
INSTANTIATE_TEST_SUITE_P(Forms, BlockSlices, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

// Scales of rows are those of a rank's own columns, so the oracle of a rank is that of its slice.
TEST_P(BlockSlices, EveryRank_IsWithinTheBarOfItsSlice_AndTheirSumOfTheLayer) {
  const Context context({.num_threads = 2});
  const MoeSpec whole = spec();
  const auto source = make_synthetic_source(whole, 4);
  const Tensor hidden = random_tensor(DType::kBF16, 9, whole.hidden_size, 9);
  const double bar = accuracy_bar(whole.weight_dtype, DType::kF32);
  for (const int32_t ranks : {2, 3, 4}) {
    Tensor sum(DType::kF32, {9, whole.hidden_size});
    for (int32_t r = 0; r < ranks; ++r) {
      SCOPED_TRACE(::testing::Message() << "rank " << r << " of " << ranks);
      const MoeLayer layer = MoeLayer::create(context, whole, *source, {}, rank(r, ranks));
      const Tensor out = run_layer(layer, hidden.view(), DType::kF32).out;
      const TensorSlice inner = tensor_slice(whole.intermediate_size, r, ranks);
      MoeSpec slice = whole;
      slice.intermediate_size = inner.size();
      slice.quant.block_rows = slice.quant.block_cols = 1;
      slice.quant.has_column_order = false;
      const SlicedSource own(*source, whole.quant, inner);
      const ReferenceResult expected =
          reference_forward(context, slice, own, {.hidden = hidden.view()});
      EXPECT_LE(worst(token_errors(out.view(), expected.output)), bar);
      for (int64_t i = 0; i < 9 * whole.hidden_size; ++i) {
        sum.as<float>()[i] += out.as<float>()[i];
      }
    }
    const ReferenceResult expected =
        reference_forward(context, whole, *source, {.hidden = hidden.view(), .tp_size = ranks});
    EXPECT_LE(worst(token_errors(sum.view(), expected.output)), bar) << ranks << " ranks";
    if (ranks != 2 || whole.quant.activations != ActivationScale::kToken) continue;
    const ReferenceResult unsliced =
        reference_forward(context, whole, *source, {.hidden = hidden.view()});
    EXPECT_NE(expected.output, unsliced.output) << "codes by the scale of the whole row";
  }
}

TEST_P(BlockSlices, EveryIsa_HasTheSameBits) {
  const MoeSpec whole = spec();
  const auto source = make_synthetic_source(whole, 4);
  for (const int64_t tokens : {2, 37}) {
    const Tensor hidden = random_tensor(DType::kF32, tokens, whole.hidden_size, 5);
    const auto run = [&](const std::string& isa) {
      const Context context({.num_threads = 1, .isa = isa});
      const MoeLayer layer =
          MoeLayer::create(context, whole, *source, {.arithmetic = "f32_fma"}, rank(2, 3));
      return run_layer(layer, hidden.view(), DType::kF32).out;
    };
    const Tensor expected = run("scalar");
    for (const std::string& isa : testing::usable_isas()) {
      EXPECT_TRUE(same_bits(run(isa), expected)) << isa << " T" << tokens;
    }
  }
}

// A slab of down, packed from columns [begin, end) of the matrix.
struct PackedDown {
  PackedDown(const MoeSpec& spec, const WeightSource& source, const TensorSlice& inner)
      : layout({.num_local_experts = 1,
                .hidden_size = spec.hidden_size,
                .intermediate_size = inner.size(),
                .weight_dtype = spec.weight_dtype,
                .quant = spec.quant,
                .skipped_columns = inner.begin % spec.quant.block_cols,
                .whole_intermediate_size = spec.intermediate_size}),
        slab((layout.bytes().down + sizeof(float) - 1) / sizeof(float)) {
    const WeightBlock block{0, spec.hidden_size, inner.begin, inner.end};
    BlockLoader loader(source);
    const BlockRequest request{.id = weights::kDown, .expert = 1, .block = block};
    ConstTensorView codes;
    loader.load({&request, 1}, {&codes, 1});
    const CodeMeaning meaning = load_meaning(spec.quant, source, weights::kDown, 1, block);
    const ConstTensorView none{.dtype = spec.weight_dtype, .shape = {0, spec.hidden_size}};
    const auto numbers = [&](const std::vector<float>& values) {
      if (values.empty()) return ConstTensorView{};
      return ConstTensorView{.data = values.data(),
                             .shape = {spec.hidden_size, layout.down.num_groups()}};
    };
    ConstTensorView order;
    if (!meaning.order.empty()) {
      order = {.data = meaning.order.data(), .dtype = DType::kI32, .shape = {1, inner.size()}};
    }
    layout.pack({.gate = {.weights = none},
                 .up = {.weights = none},
                 .down = {.weights = codes,
                          .scale = numbers(meaning.scales),
                          .offset = numbers(meaning.offsets),
                          .order = order}},
                nullptr, bytes());
  }
  std::byte* bytes() { return static_cast<std::byte*>(static_cast<void*>(slab.data())); }
  const std::byte* panel(int64_t index) {
    return bytes() + static_cast<size_t>(index) * layout.stride(layout.down);
  }
  float code(int64_t row, int64_t k) {
    return panel_value(layout.down, panel(row / 64), k, row % 64);
  }
  int64_t group(int64_t k) {
    const int32_t* const table = layout.down_places().order(bytes()).lower;
    return table != nullptr ? table[k] : layout.down.group_of(k);
  }
  float scale(int64_t row, int64_t k) {
    return layout.down.scale(panel(row / 64), group(k), row % 64);
  }
  float offset(int64_t row, int64_t k) {
    if (!layout.down.has_offsets) return 0.0F;
    return layout.down.offset(panel(row / 64), group(k), row % 64);
  }

  experts::SlabLayout layout;
  std::vector<float> slab;
};

TEST_P(BlockSlices, PackedSlice_HoldsTheCodesAndScalesOfTheWholeMatrix) {
  const MoeSpec whole = spec();
  const auto source = make_synthetic_source(whole, 4);
  PackedDown unsliced(whole, *source, {.begin = 0, .end = whole.intermediate_size});
  for (const int32_t ranks : {2, 3, 4}) {
    for (int32_t r = 0; r < ranks; ++r) {
      const TensorSlice inner = tensor_slice(whole.intermediate_size, r, ranks);
      PackedDown sliced(whole, *source, inner);
      for (int64_t row = 0; row < whole.hidden_size; ++row) {
        for (int64_t k = 0; k < inner.size(); ++k) {
          ASSERT_EQ(sliced.code(row, k), unsliced.code(row, inner.begin + k)) << row << " " << k;
          ASSERT_EQ(sliced.scale(row, k), unsliced.scale(row, inner.begin + k)) << row << " " << k;
          ASSERT_EQ(sliced.offset(row, k), unsliced.offset(row, inner.begin + k)) << row;
        }
      }
    }
  }
}

}  // namespace
}  // namespace conclave
