// Compares layers on a GPU, whose codes have zeros or a global scale, with float64.

#include "coded_forms.h"
#include "device_layer.h"
#include "layer/cuda/few_tokens.h"
#include "layer/known_scales.h"
#include "quant/weight_format.h"

#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::coded_forms;
using testing::CodedForm;
using testing::copy_rows;
using testing::CudaLayerTest;
using testing::DeviceLayer;
using testing::make_spec;
using testing::one_launch_table;
using testing::random_tensor;

void expect_accurate(DeviceLayer& owned, int64_t tokens) {
  testing::expect_accurate(owned, tokens,
                           accuracy_bar(owned.layer.spec().weight_dtype, DType::kBF16));
}

class CudaCodeMeaning : public CudaLayerTest {
 protected:
  // In shapes that no block divides, with shared experts of slices of the routed ones' width.
  static void expect_every_format_accurate(const QuantSpec& form) {
    const auto catalog = quant::format_catalog();
    for (const quant::WeightFormat& format : catalog.rows()) {
      if (format.codes == nullptr || !format.takes(form)) continue;
      SCOPED_TRACE(std::string(format.name));
      MoeSpec odd = make_spec(5, 2, 127, 65, format.element);
      MoeSpec shared = make_spec(6, 2, 264, 136, format.element);
      shared.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 272};
      for (MoeSpec spec : {odd, shared}) {
        spec.quant = form;
        DeviceLayer owned(spec, {.max_tokens = 64});
        for (const int64_t tokens : {1, 8, 40}) expect_accurate(owned, tokens);
      }
    }
  }
};

TEST_F(CudaCodeMeaning, Zeros_AreWithinTheBar) {
  for (const WeightZero zeros : {WeightZero::kPoint, WeightZero::kOffset}) {
    expect_every_format_accurate({.weights = WeightScale::kTensor, .zeros = zeros});
    expect_every_format_accurate({.weights = WeightScale::kChannel, .zeros = zeros});
    expect_every_format_accurate({.weights = WeightScale::kBlock, .zeros = zeros});
    expect_every_format_accurate({.weights = WeightScale::kBlock,
                                  .block_rows = 1,
                                  .block_cols = 32,
                                  .zeros = zeros,
                                  .has_global_scale = true});
  }
}

TEST_F(CudaCodeMeaning, GlobalScales_AreWithinTheBarOnEveryKernel) {
  for (const QuantSpec& quant :
       {QuantSpec{.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup},
        QuantSpec{.weights = WeightScale::kChannel, .activations = ActivationScale::kToken},
        QuantSpec{.weights = WeightScale::kTensor}}) {
    QuantSpec with_global = quant;
    with_global.has_global_scale = true;
    expect_every_format_accurate(with_global);
  }
}

// Rows behind a projection are float32.
TEST_F(CudaCodeMeaning, CodesBehindProjections_AreWithinTheBar) {
  for (const CodedForm& form : coded_forms()) {
    SCOPED_TRACE(form.name);
    MoeSpec spec = make_spec(5, 2, 264, 72, form.dtype);
    spec.latent = {.size = 128, .has_norm = true};
    spec.quant = form.quant;
    DeviceLayer owned(spec, {.max_tokens = 64});
    for (const int64_t tokens : {1, 8, 40}) expect_accurate(owned, tokens);
  }
}

constexpr const char* kManyRows = "cuda.tile_codes_sm90";

// Those of rows have one scale, no offset, and values that bf16 holds. Floats of a byte have no
// zero points.
bool has_kernel_of_many_rows(const CodedForm& form) {
  const QuantSpec& quant = form.quant;
  if (form.dtype == DType::kF8E4M3 && quant.zeros != WeightZero::kNone) return false;
  if (quant.weights == WeightScale::kBlock) return quant.block_cols <= 128;
  return quant.zeros != WeightZero::kOffset && quant::format_of(form.dtype).codes->exact_in_bf16;
}

// A result does not depend on the tile, and so not on the batch that chooses it. Shapes that no
// tile, stage or group divides.
void expect_same_bits_of_tiles(const std::string& kernel, const MoeSpec& spec, int64_t tokens) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 5);
  std::vector<std::byte> first;
  int tiles = 0;
  for (const TuningEntry& entry :
       tuning_candidates(context, spec, {.max_tokens = tokens}, {}, tokens)) {
    if (entry.kernel != kernel) continue;
    SCOPED_TRACE(entry.kernel + ", " + entry.tile + ", T" + std::to_string(tokens));
    auto table = std::make_shared<TuningTable>();
    table->set(entry);
    DeviceLayer owned(spec, {.max_tokens = tokens, .tuning = table});
    ASSERT_EQ(owned.layer.plan().ladder.back().tile, entry.tile);
    const Tensor out = testing::run_device_layer(owned, hidden.view(), DType::kBF16).out;
    const std::vector<std::byte> bytes(out.as<std::byte>(), out.as<std::byte>() + out.size_bytes());
    if (tiles++ == 0) {
      expect_accurate(owned, tokens);
      first = bytes;
    }
    EXPECT_EQ(bytes, first);
  }
  EXPECT_GE(tiles, 2) << kernel;
}

TEST_F(CudaCodeMeaning, EveryTileOfCodes_GivesTheSameBits) {
  for (const CodedForm& form : coded_forms()) {
    SCOPED_TRACE(form.name);
    for (MoeSpec spec :
         {make_spec(5, 2, 712, 328, form.dtype), make_spec(4, 2, 1160, 72, form.dtype)}) {
      spec.quant = form.quant;
      spec.has_bias = true;
      for (const int64_t tokens : {1, 37, 290}) {
        expect_same_bits_of_tiles("cuda.stream_codes_sm90", spec, tokens);
      }
    }
  }
}

// The same of kernels of many rows, which round weights where scales are those of groups. Tiles of
// every width, and several to an expert.
TEST_F(CudaCodeMeaning, EveryTileOfManyRows_GivesTheSameBits) {
  for (const CodedForm& form : coded_forms()) {
    SCOPED_TRACE(form.name);
    MoeSpec biased = make_spec(4, 2, 1032, 776, form.dtype);
    biased.has_bias = true;
    MoeSpec plain = make_spec(3, 2, 776, 840, form.dtype);
    plain.activation = {.name = "relu2_no_mul"};
    for (MoeSpec spec : {biased, plain}) {
      spec.quant = form.quant;
      if (!has_kernel_of_many_rows(form)) {
        EXPECT_THROW(DeviceLayer(spec, {.max_tokens = 8, .kernel = kManyRows}), Error);
        continue;
      }
      for (const int64_t tokens : {1, 200, 490, 1100}) {
        expect_same_bits_of_tiles(kManyRows, spec, tokens);
      }
    }
    if (!has_kernel_of_many_rows(form)) continue;
    // With so many experts each tile has a down product of its own.
    MoeSpec many = make_spec(40, 2, 776, 776, form.dtype);
    many.quant = form.quant;
    expect_same_bits_of_tiles(kManyRows, many, 490);
  }
}

// Rows whose scales are few, or few columns, would not average out what rounding weights costs.
TEST_F(CudaCodeMeaning, KernelsOfManyRows_RefuseFewScalesAndFewColumns) {
  const auto expect_refused = [](int64_t hidden, int64_t intermediate, int64_t columns,
                                 const char* reason) {
    MoeSpec spec = make_spec(4, 2, hidden, intermediate, DType::kI4);
    spec.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns};
    try {
      const DeviceLayer refused(spec, {.max_tokens = 8, .kernel = kManyRows});
      ADD_FAILURE() << hidden << " " << intermediate << " " << columns;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  };
  expect_refused(504, 1024, 32, "at least 512 columns; found 504");
  expect_refused(1024, 504, 32, "at least 512 columns; found 504");
  expect_refused(1024, 640, 128, "at least 6 scales");
  expect_refused(2048, 2048, 256, "up to 128 columns each; found one for 256");
}

// In shapes that no box, tile or pass divides, with and without a gate.
void expect_one_launch_accurate(const CodedForm& form) {
  SCOPED_TRACE(form.name);
  MoeSpec odd = make_spec(6, 3, 131, 67, form.dtype);
  MoeSpec biased = make_spec(5, 2, 712, 328, form.dtype);
  biased.has_bias = true;
  MoeSpec deep = make_spec(9, 8, 1160, 1544, form.dtype);
  MoeSpec plain = make_spec(4, 1, 264, 520, form.dtype);
  plain.activation = {.name = "relu2_no_mul"};
  plain.weight_on = WeightOn::kInput;
  for (MoeSpec spec : {odd, biased, deep, plain}) {
    spec.quant = form.quant;
    DeviceLayer owned(spec, {.max_tokens = 8, .tuning = one_launch_table(spec)});
    for (int64_t tokens = 1; tokens <= 8; ++tokens) expect_accurate(owned, tokens);
    const Tensor hidden = random_tensor(DType::kBF16, 4, spec.hidden_size, 5);
    const testing::GivenRouting routing =
        testing::random_routing(4, spec.num_experts, spec.top_k, 3);
    testing::DeviceForward forward(owned, hidden.view(), DType::kF32);
    forward.route_by(routing.ids, routing.weights);
    forward.enqueue();
    const Tensor first = forward.out();
    int different = 0;
    for (int run = 0; run < 50; ++run) {
      forward.enqueue();
      different += testing::same_bits(forward.out(), first) ? 0 : 1;
    }
    EXPECT_EQ(different, 0);
  }
}

// A token's bits do not depend on the others of its call.
void expect_tokens_have_own_bits(const CodedForm& form) {
  SCOPED_TRACE(form.name);
  MoeSpec spec = make_spec(9, 3, 712, 840, form.dtype);
  spec.quant = form.quant;
  DeviceLayer owned(spec, {.max_tokens = 8, .tuning = one_launch_table(spec)});
  const Tensor hidden = random_tensor(DType::kBF16, 8, spec.hidden_size, 5);
  const testing::GivenRouting routing = testing::random_routing(8, 9, 3, 3);
  const auto run = [&](int64_t begin, int64_t count) {
    const Tensor rows = copy_rows(hidden, begin, count);
    testing::DeviceForward forward(owned, rows.view(), DType::kF32);
    forward.route_by(copy_rows(routing.ids, begin, count),
                     copy_rows(routing.weights, begin, count));
    forward.enqueue();
    return forward.out();
  };
  const Tensor together = run(0, 8);
  for (int64_t token = 0; token < 8; ++token) {
    const Tensor alone = run(token, 1);
    for (int64_t i = 0; i < spec.hidden_size; ++i) {
      ASSERT_EQ(alone.as<float>()[i], together.as<float>()[token * spec.hidden_size + i])
          << token << " " << i;
    }
  }
}

const CodedForm kIntegers{
    "int8, rows by token",
    DType::kI8,
    {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken}};

// Few tokens take one launch, whose sums run in an order of their own.
TEST_F(CudaCodeMeaning, OneLaunchOfCodes_IsWithinTheBarAndRepeatsItsBits) {
  for (const CodedForm& form : coded_forms()) expect_one_launch_accurate(form);
}
TEST_F(CudaCodeMeaning, OneLaunchOfIntegers_IsWithinTheBarAndRepeatsItsBits) {
  expect_one_launch_accurate(kIntegers);
}

TEST_F(CudaCodeMeaning, OneLaunchOfCodes_GivesATokenItsOwnBits) {
  for (const CodedForm& form : coded_forms()) expect_tokens_have_own_bits(form);
}
TEST_F(CudaCodeMeaning, OneLaunchOfIntegers_GivesATokenItsOwnBits) {
  expect_tokens_have_own_bits(kIntegers);
}

// Rows of every kind that checkpoints have beside codes, in the form that they have it.
std::vector<CodedForm> forms_with_rows() {
  const auto by_token = [](DType dtype, int64_t columns, std::optional<DType> rows = {}) {
    QuantSpec quant{.activations = ActivationScale::kToken, .activation_dtype = rows};
    quant.weights = columns == 0 ? WeightScale::kChannel : WeightScale::kBlock;
    if (columns != 0) quant.block_rows = 1;
    if (columns != 0) quant.block_cols = columns;
    return CodedForm{"by token", dtype, quant};
  };
  const auto by_group = [](const char* name, DType dtype, int64_t columns, DType rows,
                           RowScaleRule rule) {
    return CodedForm{name,
                     dtype,
                     {.weights = WeightScale::kBlock,
                      .block_rows = 1,
                      .block_cols = columns,
                      .activations = ActivationScale::kGroup,
                      .activation_group = columns,
                      .activation_dtype = rows,
                      .activation_scale_rule = rule}};
  };
  CodedForm nvfp4 = by_group("nvfp4", DType::kF4, 16, DType::kF4, RowScaleRule::kTwoLevel);
  nvfp4.quant.has_global_scale = true;
  CodedForm exact_nvfp4 = nvfp4;
  exact_nvfp4.name = "nvfp4, scales of e4m3";
  exact_nvfp4.quant.scale_values = ScaleValues::kFloat8;
  CodedForm exact_mxfp4 = by_group("mxfp4, mxfp8 rows, scales of powers of two", DType::kF4, 32,
                                   DType::kF8E4M3, RowScaleRule::kFloorPower);
  exact_mxfp4.quant.scale_values = ScaleValues::kPowerOfTwo;
  CodedForm mxfp4_by_token = by_token(DType::kF4, 32);
  mxfp4_by_token.name = "mxfp4, e4m3 rows by token, scales of powers of two";
  mxfp4_by_token.quant.scale_values = ScaleValues::kPowerOfTwo;
  CodedForm blocks{"e4m3, 64x32 blocks, rows of powers of two",
                   DType::kF8E4M3,
                   {.weights = WeightScale::kBlock,
                    .block_rows = 64,
                    .block_cols = 32,
                    .activations = ActivationScale::kGroup,
                    .power_of_two_scales = true}};
  CodedForm e2m1_blocks = blocks;
  e2m1_blocks.name = "e2m1, e4m3 rows in groups of 128, powers of two";
  e2m1_blocks.dtype = DType::kF4;
  CodedForm fixed{
      "int8, one step",
      DType::kI8,
      {.weights = WeightScale::kChannel, .activations = ActivationScale::kTensorStatic}};
  CodedForm fixed_e4m3 = fixed;
  fixed_e4m3.name = "e2m1, e4m3 rows with one step";
  fixed_e4m3.dtype = DType::kF4;
  return {by_token(DType::kI8, 0),
          by_token(DType::kI8, 64),
          by_token(DType::kI4, 32),
          by_token(DType::kI4, 128),
          by_token(DType::kF4, 32),
          by_token(DType::kF4, 32, DType::kI8),
          by_group("mxfp8", DType::kF8E4M3, 32, DType::kF8E4M3, RowScaleRule::kFloorPower),
          by_group("mxfp4", DType::kF4, 32, DType::kF4, RowScaleRule::kEvenPower),
          by_group("mxfp4, mxfp8 rows", DType::kF4, 32, DType::kF8E4M3, RowScaleRule::kFloorPower),
          by_group("mxfp4, e5m2 rows", DType::kF4, 32, DType::kF8E5M2, RowScaleRule::kHalfPower),
          by_group("mxfp4, e2m3 rows", DType::kF4, 32, DType::kF6E2M3, RowScaleRule::kEvenPower),
          by_group("mxfp4, e3m2 rows", DType::kF4, 32, DType::kF6E3M2, RowScaleRule::kFloorPower),
          nvfp4,
          exact_nvfp4,
          exact_mxfp4,
          mxfp4_by_token,
          blocks,
          e2m1_blocks,
          fixed,
          fixed_e4m3};
}

// int8 by token beside int8 rows of weights goes through tensor cores as integers, too, and many
// rows through kernels that round no weight of these forms.
std::vector<const char*> kernels_of(const CodedForm& form) {
  std::vector<const char*> kernels = {"cuda.stream_codes_sm90", "cuda.reference"};
  const QuantSpec& quant = form.quant;
  const bool is_exact =
      quant.scale_values == ScaleValues::kPowerOfTwo || quant.scale_values == ScaleValues::kFloat8;
  if (is_exact || quant.weights == WeightScale::kChannel) kernels.push_back(kManyRows);
  if (form.dtype == DType::kI8 && form.quant.weights == WeightScale::kChannel &&
      form.quant.activations == ActivationScale::kToken) {
    kernels.insert(kernels.end(), {"cuda.stream_int8_sm90", "cuda.tile_int8_sm90"});
  }
  return kernels;
}

// On tensor cores and by the plain kernel, which rounds rows by the same rule.
TEST_F(CudaCodeMeaning, QuantisedRowsBesideCodes_AreWithinTheBarOnEveryKernel) {
  for (const CodedForm& form : forms_with_rows()) {
    for (const char* kernel : kernels_of(form)) {
      SCOPED_TRACE(std::string(form.name) + " of " + std::string(to_string(form.dtype)) + ", " +
                   kernel);
      MoeSpec shared = make_spec(6, 2, 264, 136, form.dtype);
      shared.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 272};
      MoeSpec on_input = make_spec(6, 3, 136, 72, form.dtype);
      on_input.weight_on = WeightOn::kInput;
      MoeSpec biased = make_spec(5, 2, 712, 328, form.dtype);
      biased.has_bias = true;
      MoeSpec plain = make_spec(5, 2, 127, 65, form.dtype);
      plain.activation = {.name = "relu2_no_mul"};
      for (MoeSpec spec : {shared, on_input, biased, plain}) {
        spec.quant = form.quant;
        DeviceLayer owned(spec, {.max_tokens = 700, .kernel = kernel});
        for (const int64_t tokens : {1, 8, 40, 700}) expect_accurate(owned, tokens);
      }
    }
  }
}

// A result does not depend on the tile with quantised rows either.
TEST_F(CudaCodeMeaning, EveryTileBesideQuantisedRows_GivesTheSameBits) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  for (const CodedForm& form : forms_with_rows()) {
    MoeSpec spec = make_spec(5, 2, 712, 328, form.dtype);
    spec.quant = form.quant;
    spec = with_known_scales(spec, *make_synthetic_source(spec, 11));
    const Tensor hidden = random_tensor(DType::kBF16, 90, spec.hidden_size, 5);
    std::vector<std::byte> first;
    int tiles = 0;
    for (const TuningEntry& entry : tuning_candidates(context, spec, {.max_tokens = 90}, {}, 90)) {
      if (entry.kernel != "cuda.stream_codes_sm90") continue;
      SCOPED_TRACE(std::string(form.name) + ", " + entry.tile);
      auto table = std::make_shared<TuningTable>();
      table->set(entry);
      DeviceLayer owned(spec, {.max_tokens = 90, .tuning = table});
      const Tensor out = testing::run_device_layer(owned, hidden.view(), DType::kBF16).out;
      const std::vector<std::byte> bytes(out.as<std::byte>(),
                                         out.as<std::byte>() + out.size_bytes());
      if (tiles++ == 0) first = bytes;
      EXPECT_EQ(bytes, first);
    }
    EXPECT_GE(tiles, 2) << form.name;
  }
}

// Sums of integers are exact: every tile of either kernel gives the same bits, whether the up
// product makes codes of its rows or, where these are too wide for it, a launch of its own.
TEST_F(CudaCodeMeaning, EveryTileOfIntegers_GivesTheSameBits) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  for (MoeSpec spec :
       {make_spec(5, 2, 720, 328, DType::kI8), make_spec(3, 1, 2064, 1040, DType::kI8),
        make_spec(4, 2, 272, 330, DType::kI8), make_spec(4, 2, 256, 2064, DType::kI8),
        make_spec(3, 2, 256, 4112, DType::kI8)}) {
    spec.quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
    spec.has_bias = true;
    for (const int64_t tokens : {1, 37, 290}) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 5);
      std::vector<std::byte> first;
      int tiles = 0;
      for (const TuningEntry& entry :
           tuning_candidates(context, spec, {.max_tokens = tokens}, {}, tokens)) {
        if (!entry.kernel.ends_with("int8_sm90")) continue;
        SCOPED_TRACE(entry.kernel + " " + entry.tile + ", T" + std::to_string(tokens));
        auto table = std::make_shared<TuningTable>();
        table->set(entry);
        DeviceLayer owned(spec, {.max_tokens = tokens, .tuning = table});
        const Tensor out = testing::run_device_layer(owned, hidden.view(), DType::kBF16).out;
        const std::vector<std::byte> bytes(out.as<std::byte>(),
                                           out.as<std::byte>() + out.size_bytes());
        if (tiles++ == 0) first = bytes;
        EXPECT_EQ(bytes, first);
      }
      EXPECT_EQ(tiles, 5);
    }
  }
}

// A row with a value that is not finite is NaN, and the others are as without it.
TEST_F(CudaCodeMeaning, ValuesThatAreNotFinite_StayInTheirRow) {
  for (const CodedForm& form : forms_with_rows()) {
    for (const char* kernel : kernels_of(form)) {
      SCOPED_TRACE(std::string(form.name) + " of " + std::string(to_string(form.dtype)) + ", " +
                   kernel);
      MoeSpec spec = make_spec(5, 2, 264, 136, form.dtype);
      spec.quant = form.quant;
      DeviceLayer owned(spec, {.max_tokens = 16, .kernel = kernel});
      testing::expect_bad_rows_stay_apart(owned, 9);
    }
  }
}

TEST_F(CudaCodeMeaning, OneLaunchOfIntegers_ValuesThatAreNotFinite_StayInTheirRow) {
  MoeSpec spec = make_spec(5, 2, 264, 136, DType::kI8);
  spec.quant = kIntegers.quant;
  DeviceLayer owned(spec, {.max_tokens = 8, .tuning = one_launch_table(spec)});
  testing::expect_bad_rows_stay_apart(owned, 8);
}

// Ranks hold columns of groups that begin anywhere, with shared experts beside them.
TEST_F(CudaCodeMeaning, SlicesInsideGroups_AddUpToTheWhole) {
  const auto groups = [](int64_t rows, int64_t columns, WeightZero zeros = WeightZero::kNone) {
    return QuantSpec{
        .weights = WeightScale::kBlock, .block_rows = rows, .block_cols = columns, .zeros = zeros};
  };
  const std::vector<CodedForm> forms = {
      {"int4, 128 columns", DType::kI4, groups(1, 128)},
      {"int4, 64 columns, zero points", DType::kI4, groups(1, 64, WeightZero::kPoint)},
      {"int8, 48 columns, offsets", DType::kI8, groups(1, 48, WeightZero::kOffset)},
      {"e4m3, blocks", DType::kF8E4M3, groups(128, 128)},
      {"nf4, 64 columns", DType::kNF4, groups(1, 64)}};
  for (const CodedForm& form : forms) {
    for (const int32_t ranks : {2, 3}) {
      SCOPED_TRACE(std::string(form.name) + ", " + std::to_string(ranks) + " ranks");
      MoeSpec spec = make_spec(6, 2, 136, 96 * ranks, form.dtype);
      spec.quant = form.quant;
      spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 48 * ranks};
      const Tensor hidden = random_tensor(DType::kBF16, 20, spec.hidden_size, 5);
      const testing::GivenRouting routing = testing::random_routing(20, 6, 2, 9);
      Tensor total(DType::kF32, {20, spec.hidden_size});
      std::fill_n(total.as<float>(), 20 * spec.hidden_size, 0.0F);
      std::unique_ptr<DeviceLayer> last;
      for (int32_t rank = 0; rank < ranks; ++rank) {
        last = std::make_unique<DeviceLayer>(
            spec, LayerOptions{.max_tokens = 32},
            ParallelSpec{.tp_size = ranks, .tp_rank = rank, .reduce = Reduce::kPartial});
        EXPECT_EQ(last->layer.plan().ladder.front().kernel, "cuda.stream_codes_sm90");
        testing::DeviceForward forward(*last, hidden.view(), DType::kF32);
        forward.route_by(routing.ids, routing.weights);
        forward.enqueue();
        const Tensor part = forward.out();
        for (int64_t i = 0; i < 20 * spec.hidden_size; ++i) {
          total.as<float>()[i] += part.as<float>()[i];
        }
      }
      EXPECT_LE(testing::worst_error(*last, hidden, routing, total), 6e-3);
    }
  }
}

}  // namespace
}  // namespace conclave
