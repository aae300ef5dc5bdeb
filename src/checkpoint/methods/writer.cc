// Writes matrices by the rows with which they are read: a form is what its method reads of the
// configuration that it writes.
#include "checkpoint/methods/inputs.h"
#include "checkpoint/methods/tensor_rows.h"
#include "io/json.h"

#include "conclave/error.h"
#include "conclave/methods.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>
#include <utility>

namespace conclave::inline v0 {

using checkpoint::MatrixForm;
using checkpoint::Method;
using checkpoint::PlaneInput;
using checkpoint::QuantizedWeights;
using checkpoint::StoredPlane;
using checkpoint::TensorRow;

namespace {

[[noreturn]] void refuse(const MethodForm& form, std::string reason) {
  throw Error(ErrorCode::kUnsupported,
              {.what = fmt::format("the method {} does not store such weights", form.method),
               .found = std::move(reason)});
}

const Method& written_method(const MethodForm& form) {
  const auto methods = checkpoint::known_methods();
  const auto found = std::ranges::find_if(methods, [&](const Method& method) {
    return method.name == form.method && method.write != nullptr;
  });
  if (found == methods.end()) refuse(form, "a method that is not written");
  return *found;
}

// Whether the two give codes the same meaning.
bool agree(const QuantSpec& one, const QuantSpec& other) {
  const bool same_blocks =
      one.weights != WeightScale::kBlock ||
      (one.block_rows == other.block_rows && one.block_cols == other.block_cols);
  return one.weights == other.weights && same_blocks && one.activations == other.activations &&
         one.activation_scale_rule == other.activation_scale_rule &&
         one.activation_dtype == other.activation_dtype && one.zeros == other.zeros &&
         one.has_global_scale == other.has_global_scale &&
         one.has_column_order == other.has_column_order &&
         one.has_column_factors == other.has_column_factors;
}

QuantizedWeights read_back(const Method& method, const MethodForm& form) {
  const io::JsonDocument config =
      io::JsonDocument::parse(method.write(form, {}), "quantization_config");
  try {
    QuantizedWeights found = method.read(config.root());
    const bool other = found.element != form.codes || !agree(found.spec, form.quant);
    if (other) refuse(form, fmt::format("{} with other scales", to_string(form.codes)));
    return found;
  } catch (const checkpoint::NotRead& refusal) {
    refuse(form, refusal.reason);
  }
}

bool is_written(const TensorRow& tensor) {
  return tensor.use == MethodTensor::Use::kPlane || tensor.row->encode != nullptr;
}

// A tensor has the bytes of its plane.
bool is_plane(const TensorRow& tensor, const MatrixForm& form) {
  if (tensor.row == nullptr) return true;
  const StoredPlane& row = *tensor.row;
  if (row.encode != nullptr || row.convert != nullptr) return false;
  return row.decode == nullptr || (row.lies_in_place != nullptr && row.lies_in_place(form));
}

DType type_of(const TensorRow& tensor, const MatrixForm& form, DType scale_dtype) {
  const bool follows = tensor.row != nullptr && tensor.row->has_scale_type;
  if (tensor.plane == WeightPlane::kScale || follows) {
    if (tensor.row == nullptr) return scale_dtype;
    const auto& types = tensor.row->types;
    const bool any = follows || !tensor.row->type;
    if (any && std::ranges::find(types, scale_dtype) != types.end()) return scale_dtype;
  }
  return types_of(tensor, form).front();
}

uint64_t bytes_of(const std::vector<int64_t>& shape, DType dtype) {
  auto bytes = static_cast<uint64_t>(byte_size(dtype));
  for (const int64_t size : shape) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

// The fewest codes whose line fills whole elements: `bits_left` says how many bits a matrix of so
// many lines of codes leaves unused. Words have at most 32 codes.
template <class BitsLeft>
int64_t fewest_that_fill(const BitsLeft& bits_left) {
  int64_t codes = 1;
  while (codes < 64 && bits_left(codes) != 0) codes *= 2;
  return codes;
}

}  // namespace

struct MethodWriter::Impl {
  explicit Impl(MethodForm given) : form(std::move(given)), method(written_method(form)) {
    if (form.code_bits == 0) form.code_bits = bit_size(form.codes);
    quant = read_back(method, form);
    const std::vector<TensorRow> rows = tensor_rows(quant, form.method, kAnyMatrix);
    whole_cols = whole_of(rows, WeightPlane::kWeights, false);
    // Blocks that go over the ends of rows would be cut where a row ends.
    const bool whole_blocks = quant.whole_groups || quant.stored.flat_block != 0;
    if (whole_blocks && quant.spec.weights == WeightScale::kBlock) {
      whole_cols = std::lcm(whole_cols, quant.spec.block_cols);
    }
    whole_rows = std::max(whole_of(rows, WeightPlane::kWeights, true),
                          whole_of(rows, WeightPlane::kZero, true));
  }

  // Codes along an axis of the matrix that a tensor holds without unused bits.
  int64_t whole_of(const std::vector<TensorRow>& rows, WeightPlane plane, bool along_rows) const {
    const auto found = std::ranges::find_if(rows, [&](const TensorRow& row) {
      return row.row != nullptr && row.row->shapes != nullptr && row.plane == plane;
    });
    if (found == rows.end()) return 1;
    return fewest_that_fill([&](int64_t codes) {
      const MatrixForm sizes =
          matrix_form(quant, along_rows ? codes : kManyCodes, along_rows ? kManyCodes : codes);
      const int64_t count = plane == WeightPlane::kWeights ? sizes.rows * sizes.cols
                                                           : sizes.scale_rows * sizes.groups;
      const auto stored =
          static_cast<int64_t>(bytes_of(shape_of(*found, sizes), found->row->types.front()));
      return 8 * stored - count * form.code_bits;
    });
  }

  // Codes may lie under the matrix's own name, with which all others begin: the longest ending
  // counts.
  const StoredPlane& row_of(const WrittenTensor& tensor) const {
    const StoredPlane* found = nullptr;
    for (const StoredPlane& row : quant.planes) {
      const bool is_written = row.encode != nullptr || row.convert != nullptr;
      const bool fits = row.plane == tensor.plane && tensor.name.ends_with(row.suffix);
      if (!is_written || !fits) continue;
      if (found == nullptr || row.suffix.size() > found->suffix.size()) found = &row;
    }
    if (found == nullptr) refuse(form, "another tensor: " + tensor.name);
    return *found;
  }

  static constexpr std::string_view kAnyMatrix = "matrix.weight";
  static constexpr int64_t kManyCodes = 1024;

  MethodForm form;
  const Method& method;
  QuantizedWeights quant;
  int64_t whole_rows = 1;
  int64_t whole_cols = 1;
};

MethodForm method_form(const WeightForm& form) {
  return {.method = std::string(form.method),
          .format = std::string(form.format),
          .codes = form.dtype,
          .quant = form.quant,
          .scale_dtype = form.scale_dtype};
}

std::vector<std::string> MethodWriter::methods() {
  std::vector<std::string> names;
  for (const Method& method : checkpoint::known_methods()) {
    if (method.write != nullptr) names.emplace_back(method.name);
  }
  return names;
}

MethodWriter::MethodWriter(MethodForm form)
    : impl_(std::make_unique<const Impl>(std::move(form))) {}
MethodWriter::MethodWriter(MethodWriter&&) noexcept = default;
MethodWriter::~MethodWriter() = default;

const MethodForm& MethodWriter::form() const { return impl_->form; }

std::string MethodWriter::configuration(const std::vector<std::string>& kept) const {
  return impl_->method.write(impl_->form, kept);
}

std::string_view MethodWriter::file() const { return impl_->method.file; }
std::string_view MethodWriter::own_key() const { return impl_->method.own_key; }

int64_t MethodWriter::whole_rows() const { return impl_->whole_rows; }
int64_t MethodWriter::whole_cols() const { return impl_->whole_cols; }

float MethodWriter::as_read(float matrix_scale) const {
  for (const StoredPlane& row : impl_->quant.planes) {
    if (row.plane != WeightPlane::kGlobalScale || row.encode == nullptr) continue;
    std::array<std::byte, sizeof(float)> stored = {};
    std::array<std::byte, sizeof(float)> read = {};
    row.encode({}, {.matrix_scale = matrix_scale}, stored);
    TensorInfo info;
    info.name = row.suffix;
    const std::array inputs = {PlaneInput{.info = &info, .bytes = stored}};
    row.decode({}, inputs, read);
    return checkpoint::value_at<float>(read, 0);
  }
  return matrix_scale;
}

std::vector<WrittenTensor> MethodWriter::tensors(std::string_view matrix, int64_t rows,
                                                 int64_t cols) const {
  for (const auto& [axis, size, whole] :
       {std::tuple("rows", rows, whole_rows()), std::tuple("columns", cols, whole_cols())}) {
    if (size % whole == 0) continue;
    throw Error(ErrorCode::kUnsupported,
                {.what = fmt::format("the {} do not fill words of codes", axis),
                 .tensor = std::string(matrix),
                 .expected = fmt::format("a multiple of {}", whole),
                 .found = fmt::format("{} {} of {}", size, axis, to_string(impl_->form.codes))});
  }
  const MatrixForm form = matrix_form(impl_->quant, rows, cols);
  std::vector<WrittenTensor> tensors;
  for (const TensorRow& row : tensor_rows(impl_->quant, impl_->form.method, matrix)) {
    if (!is_written(row)) continue;
    const bool whole = is_plane(row, form);
    if (!whole && row.row->encode == nullptr && row.row->convert == nullptr) {
      refuse(impl_->form, "codes that lie across words, in " + row.name);
    }
    WrittenTensor tensor{.name = row.name,
                         .plane = row.plane,
                         .dtype = type_of(row, form, impl_->form.scale_dtype),
                         .shape = shape_of(row, form),
                         .is_plane = whole};
    tensor.bytes = bytes_of(tensor.shape, tensor.dtype);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::vector<std::byte> MethodWriter::encode(const WrittenTensor& tensor, int64_t rows, int64_t cols,
                                            const MatrixPlanes& planes) const {
  const StoredPlane& row = impl_->row_of(tensor);
  std::vector<std::byte> bytes(tensor.bytes);
  if (row.encode != nullptr) {
    MatrixPlanes typed = planes;
    typed.scale_dtype = impl_->form.scale_dtype;
    row.encode(matrix_form(impl_->quant, rows, cols), typed, bytes);
    return bytes;
  }
  std::ranges::copy(planes.codes.first(bytes.size()), bytes.begin());
  row.convert(bytes);
  return bytes;
}

}  // namespace conclave::inline v0
