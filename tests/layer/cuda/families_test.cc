// Compares every golden checkpoint of testdata/models on a GPU with the bars of the CPU: with
// float32 weights and rows, and as stored with bf16 rows.

#include "device_layer.h"
#include "support/golden_record.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>

namespace conclave {
namespace {

using testing::Record;

// A source whose floating-point weights are float32.
class WidenedSource final : public WeightSource {
 public:
  explicit WidenedSource(std::unique_ptr<WeightSource> inner) : inner_(std::move(inner)) {}

  WeightInfo describe(WeightId role) const override {
    WeightInfo info = inner_->describe(role);
    if (role != weights::kHashTable) info.dtype = DType::kF32;
    return info;
  }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const DType stored = inner_->describe(role).dtype;
    if (role == weights::kHashTable || stored == DType::kF32) {
      return inner_->read(role, expert, block, destination);
    }
    const Shape shape = {block.row_end - block.row_begin, block.col_end - block.col_begin};
    Tensor part(stored, shape);
    inner_->read(role, expert, block, {part.as<std::byte>(), part.size_bytes()});
    convert(part.view(), {.data = destination.data(), .dtype = DType::kF32, .shape = shape});
  }
  std::string locate(WeightId role, int64_t expert) const override {
    return inner_->locate(role, expert);
  }

 private:
  std::unique_ptr<WeightSource> inner_;
};

// Holds a record's tensors on the device.
struct DeviceRecord {
  DeviceRecord(DeviceQueue& queue, const Record& record) {
    const auto upload = [&](const Tensor& tensor) {
      return tensor.size_bytes() != 0 ? queue.upload(tensor.view()) : DeviceTensor();
    };
    hidden = upload(record.hidden);
    router_input = upload(record.router_input);
    residual_input = upload(record.residual_input);
    token_ids = upload(record.token_ids);
    logits = upload(record.logits);
  }
  ForwardArgs inputs() const {
    return {.hidden = hidden.const_view(),
            .router_input = router_input.const_view(),
            .residual_input = residual_input.const_view(),
            .token_ids = token_ids.const_view()};
  }

  DeviceTensor hidden, router_input, residual_input, token_ids, logits;
};

testing::LayerOutput run(const MoeLayer& layer, DeviceQueue& queue, ForwardArgs args) {
  const MoeSpec& spec = layer.spec();
  const int64_t tokens = args.hidden.shape[0];
  const bool has_logits = args.topk_ids.empty();
  DeviceTensor out = queue.allocate(args.hidden.dtype, {tokens, spec.hidden_size});
  DeviceTensor logits = queue.allocate(DType::kF32, {tokens, num_logits(spec)});
  DeviceTensor ids = queue.allocate(DType::kI32, {tokens, num_slots(spec)});
  DeviceTensor weights = queue.allocate(DType::kF32, {tokens, num_slots(spec)});
  queue.fill(out.view(), 0xFF);
  args.out = out.view();
  if (has_logits) args.captured_logits = logits.view();
  args.captured_ids = ids.view();
  args.captured_weights = weights.view();
  args.stream = queue.stream();
  layer.forward(args);
  const auto download = [&](const DeviceTensor& tensor) {
    Tensor copy(tensor.const_view().dtype, tensor.const_view().shape);
    queue.download(tensor.const_view(), copy.view());
    return copy;
  };
  return {.out = download(out),
          .logits = download(logits),
          .ids = download(ids),
          .weights = download(weights)};
}

class CudaFamily : public testing::CudaLayerTest,
                   public ::testing::WithParamInterface<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    testing::CudaLayerTest::SetUp();
    if (IsSkipped() || std::filesystem::is_directory(testing::kModels)) return;
    GTEST_SKIP() << testing::kModels << " is not here: run from where the sources are";
  }

  static bool is_float_run() { return std::get<1>(GetParam()) == "f32"; }
  static double bar() { return is_float_run() ? 5e-6 : 6e-3; }

  // A float32 run stands for a model loaded in float32: nothing is rounded on the way.
  static MoeSpec spec_of_run(MoeSpec spec) {
    if (!is_float_run()) return spec;
    spec.router.logits_dtype = spec.router.score_dtype = spec.weight_dtype = DType::kF32;
    spec.shared.weight_dtype = spec.residual.weight_dtype = std::nullopt;
    return spec;
  }
  static std::unique_ptr<WeightSource> source_of_run(std::unique_ptr<WeightSource> source) {
    if (!is_float_run()) return source;
    return std::make_unique<WidenedSource>(std::move(source));
  }
};

TEST_P(CudaFamily, EveryLayer_MatchesTheRecords) {
  const auto& [model, run_name] = GetParam();
  const ExpertSet experts = model.ends_with("-vision") ? ExpertSet::kVision : ExpertSet::kText;
  const Checkpoint checkpoint = Checkpoint::open(testing::kModels / model, {.experts = experts});
  const SafetensorsFile golden =
      SafetensorsFile::open(testing::kModels / model / "golden.safetensors");
  const Context context({.device = "cuda:0", .num_threads = 2});
  const Context host({.device = "cpu", .num_threads = 2});
  DeviceQueue queue(context);
  double worst_error = 0;
  for (const CheckpointLayer& entry : checkpoint.layers()) {
    SCOPED_TRACE("layer " + std::to_string(entry.index));
    const Record record = testing::load_record(golden, entry.index, run_name);
    const auto source = source_of_run(checkpoint.layer_source(entry.index));
    const MoeSpec spec = spec_of_run(entry.spec);
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 8});
    const DeviceRecord on_device(queue, record);

    if (record.has_logits()) {
      // Tests routing alone, from the logits that the published code saw.
      ForwardArgs from_logits = on_device.inputs();
      from_logits.router_input = {};
      from_logits.router_logits = on_device.logits.const_view();
      const testing::LayerOutput routed = run(layer, queue, from_logits);
      EXPECT_EQ(testing::differing_tokens(routed.ids, record.ids), 0);
      EXPECT_LE(testing::worst_relative(routed.weights, record.exact_weights), 1e-6);
      const double error = worst(token_errors(routed.out.view(), record.exact_output));
      EXPECT_LE(error, bar());
      worst_error = std::max(worst_error, error);
    }
    if (!spec.has_gate) continue;
    // Tests the layer through its own gate, judged on its own logits.
    const testing::LayerOutput whole = run(layer, queue, on_device.inputs());
    EXPECT_EQ(testing::differing_tokens(whole.ids, record.ids), 0);
    const ForwardArgs inputs = record.inputs();
    LayerResult result = whole.result(record.hidden.view());
    result.router_input = inputs.router_input;
    result.residual_input = inputs.residual_input;
    result.token_ids = inputs.token_ids;
    const StageCheck check = check_against_reference(host, spec, *source, result);
    EXPECT_EQ(check.routing_mismatches, 0);
    EXPECT_LE(check.worst_weight_error, 1e-6);
    EXPECT_LE(check.worst_token_error, bar());
    worst_error = std::max(worst_error, check.worst_token_error);
  }
  RecordProperty("worst_token_error", fmt::format("{:.3g}", worst_error));
}

INSTANTIATE_TEST_SUITE_P(Golden, CudaFamily,
                         ::testing::Combine(::testing::ValuesIn(testing::model_directories()),
                                            ::testing::Values("f32", "bf16")),
                         [](const auto& row) {
                           std::string name = std::get<0>(row.param) + "_" + std::get<1>(row.param);
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); },
                               '_');
                           return name;
                         });

}  // namespace
}  // namespace conclave
