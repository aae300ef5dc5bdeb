#include "core/checked.h"
#include "io/new_file.h"
#include "io/safetensors_rules.h"
#include "io/text.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr uint64_t kHeaderAlignment = 8;

void append_json_string(std::string& json, std::string_view text) {
  json += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      json += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    } else {
      json += c;
    }
  }
  json += '"';
}

}  // namespace

struct SafetensorsWriter::Impl {
  Impl(std::filesystem::path path, std::map<std::string, std::string> metadata_in)
      : file(std::move(path)), metadata(std::move(metadata_in)) {}

  [[noreturn]] void fail(ErrorCode code, ErrorDetail detail) const {
    detail.file = file.path().string();
    throw Error(code, std::move(detail));
  }

  std::string header() const {
    std::string json = "{";
    if (!metadata.empty()) {
      json += "\"__metadata__\":{";
      for (const auto& [key, value] : metadata) {
        if (io::find_invalid_utf8(key) || io::find_invalid_utf8(value)) {
          fail(ErrorCode::kSafetensorsUtf8, {.what = "the metadata is not UTF-8"});
        }
        append_json_string(json, key);
        json += ':';
        append_json_string(json, value);
        json += ',';
      }
      json.back() = '}';
      json += ',';
    }
    uint64_t begin = 0;
    for (const TensorInfo& tensor : tensors) {
      append_json_string(json, tensor.name);
      json += fmt::format(R"(:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}},)",
                          to_string(tensor.dtype), fmt::join(tensor.shape, ","), begin,
                          begin + tensor.bytes);
      begin += tensor.bytes;
    }
    if (json.back() == ',') json.pop_back();
    json += '}';
    json.append((kHeaderAlignment - json.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
    if (json.size() > io::kMaxHeaderBytes) {
      fail(ErrorCode::kSafetensorsHeaderTooLarge,
           {.what = "the header would be too large",
            .found = fmt::format("{} bytes", json.size()),
            .limit = fmt::format("{} bytes", io::kMaxHeaderBytes)});
    }
    return json;
  }

  // Creates the file and writes the header; called for the first byte of data, or at the end.
  void start() {
    if (file.is_begun()) return;
    const std::string json = header();
    file.begin();
    std::array<std::byte, io::kLengthBytes> length{};
    for (size_t i = 0; i < length.size(); ++i) {
      length[i] = static_cast<std::byte>((json.size() >> (8 * i)) & 0xFF);
    }
    file.write(length);
    file.write(std::as_bytes(std::span(json)));
  }

  io::NewFile file;
  std::map<std::string, std::string> metadata;
  std::vector<TensorInfo> tensors;
  std::set<std::string, std::less<>> names;
  uint64_t declared_bytes = 0;
  uint64_t written_bytes = 0;
  bool is_finished = false;
};

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path,
                                     std::map<std::string, std::string> metadata)
    : impl_(std::make_unique<Impl>(std::move(path), std::move(metadata))) {}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::declare(std::string name, DType dtype, std::vector<int64_t> shape) {
  const std::string file = impl_->file.path().string();
  if (impl_->file.is_begun()) {
    impl_->fail(ErrorCode::kState,
                {.what = "a tensor is declared after the first write", .tensor = std::move(name)});
  }
  io::check_tensor_name(name, file);
  if (name == "__metadata__" || impl_->names.contains(name)) {
    impl_->fail(ErrorCode::kSafetensorsDuplicateKey,
                {.what = "the name is already taken", .tensor = std::move(name)});
  }
  if (shape.size() > io::kMaxTensorRank ||
      std::ranges::any_of(shape, [](int64_t dim) { return dim < 0; })) {
    impl_->fail(
        ErrorCode::kSafetensorsShape,
        {.what = "the shape cannot be stored",
         .tensor = std::move(name),
         .expected = fmt::format("at most {} dimensions, none negative", io::kMaxTensorRank),
         .found = io::describe_tensor(dtype, shape)});
  }
  if (!io::is_safetensors_type(dtype)) {
    impl_->fail(ErrorCode::kSafetensorsDType, {.what = "files have no elements of this type",
                                               .tensor = std::move(name),
                                               .found = std::string(to_string(dtype)),
                                               .hint = "store codes in bytes, as U8"});
  }
  const uint64_t bytes = io::tensor_bytes(name, dtype, shape, file);
  const auto total =
      checked_add(static_cast<int64_t>(impl_->declared_bytes), static_cast<int64_t>(bytes));
  if (!total) {
    impl_->fail(ErrorCode::kSafetensorsSizeOverflow,
                {.what = "the file would be too large", .tensor = std::move(name)});
  }
  impl_->declared_bytes = static_cast<uint64_t>(*total);
  impl_->names.insert(name);
  impl_->tensors.push_back(
      {.name = std::move(name), .dtype = dtype, .shape = std::move(shape), .bytes = bytes});
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (impl_->is_finished) impl_->fail(ErrorCode::kState, {.what = "the file is finished"});
  if (bytes.size() > impl_->declared_bytes - impl_->written_bytes) {
    impl_->fail(ErrorCode::kInvalidArgument,
                {.what = "more data is written than was declared",
                 .found = fmt::format("{} bytes", impl_->written_bytes + bytes.size()),
                 .limit = fmt::format("{} bytes", impl_->declared_bytes)});
  }
  impl_->start();
  impl_->file.write(bytes);
  impl_->written_bytes += bytes.size();
}

void SafetensorsWriter::finish() {
  if (impl_->is_finished) impl_->fail(ErrorCode::kState, {.what = "the file is finished"});
  if (impl_->written_bytes != impl_->declared_bytes) {
    impl_->fail(ErrorCode::kState, {.what = "less data was written than was declared",
                                    .expected = fmt::format("{} bytes", impl_->declared_bytes),
                                    .found = fmt::format("{} bytes", impl_->written_bytes)});
  }
  impl_->start();
  impl_->file.publish();
  impl_->is_finished = true;
}

void SafetensorsWriter::finish_with_zeros() {
  if (impl_->is_finished) impl_->fail(ErrorCode::kState, {.what = "the file is finished"});
  impl_->start();
  impl_->file.resize(io::kLengthBytes + impl_->header().size() + impl_->declared_bytes);
  impl_->file.publish();
  impl_->is_finished = true;
}

void save_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                      std::map<std::string, std::string> metadata) {
  SafetensorsWriter writer(path, std::move(metadata));
  // Wide elements come first, so that every tensor starts aligned, as other readers prefer.
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& named : tensors) order.push_back(&named);
  std::ranges::stable_sort(order, std::greater{},
                           [](const NamedTensor* named) { return bit_size(named->tensor.dtype); });
  for (const NamedTensor* named : order) {
    const std::span<const int64_t> dims = named->tensor.shape.dims();
    writer.declare(named->name, named->tensor.dtype, {dims.begin(), dims.end()});
  }
  for (const NamedTensor* named : order) {
    const ConstTensorView& tensor = named->tensor;
    const size_t bytes = dense_bytes(tensor.dtype, tensor.shape);
    if (bytes == 0) continue;
    if (tensor.data == nullptr) {
      throw Error(ErrorCode::kNullPointer,
                  {.what = "the tensor has no data", .file = path.string(), .tensor = named->name});
    }
    const std::span data(static_cast<const std::byte*>(tensor.data), bytes);
    const bool is_strided =
        tensor.row_stride != 0 && tensor.shape.rank() == 2 && tensor.row_stride != tensor.shape[1];
    if (!is_strided) {
      writer.write(data);
      continue;
    }
    if (bit_size(tensor.dtype) % 8 != 0 || tensor.row_stride < tensor.shape[1]) {
      throw Error(ErrorCode::kStride, {.what = "the rows overlap or do not start at whole bytes",
                                       .file = path.string(),
                                       .tensor = named->name,
                                       .expected = "at least one row of bytes between rows",
                                       .found = std::to_string(tensor.row_stride)});
    }
    const auto row_bytes = bytes / static_cast<size_t>(tensor.shape[0]);
    const auto stride_bytes =
        static_cast<size_t>(tensor.row_stride) * static_cast<size_t>(byte_size(tensor.dtype));
    for (int64_t row = 0; row < tensor.shape[0]; ++row) {
      writer.write({data.data() + static_cast<size_t>(row) * stride_bytes, row_bytes});
    }
  }
  writer.finish();
}

}  // namespace conclave::inline v0
