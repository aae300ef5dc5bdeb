#include "checkpoint/gguf/row_reader.h"

#include "core/code_bits.h"
#include "quant/weight_format.h"

#include "conclave/tensor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

struct Plain {
  std::string_view name;
  DType dtype;
};
constexpr std::array kPlain = {Plain{"F32", DType::kF32}, Plain{"F16", DType::kF16},
                               Plain{"BF16", DType::kBF16}, Plain{"I32", DType::kI32},
                               Plain{"I64", DType::kI64}};

// Rows of values stay as they are.
class SameRows final : public RowReader {
 public:
  explicit SameRows(DType dtype) : size_(byte_size(dtype)) {}

  void read(const std::byte* row, int64_t begin, int64_t end, std::byte* out) override {
    std::memcpy(out, row + begin * size_, static_cast<size_t>((end - begin) * size_));
  }

 private:
  int64_t size_;
};

// Rows of values or blocks become float32.
class FloatRows final : public RowReader {
 public:
  FloatRows(const io::GgufType& type, float factor)
      : stored_(plain_type(type)), block_(quant::find_block_type(type.name)), factor_(factor) {}

  void read(const std::byte* row, int64_t begin, int64_t end, std::byte* out) override {
    const int64_t count = end - begin;
    values_.resize(static_cast<size_t>(count));
    if (block_ != nullptr) {
      quant::decode_blocks(*block_, row, begin, count, values_.data());
    } else {
      convert({.data = row + begin * byte_size(*stored_), .dtype = *stored_, .shape = {1, count}},
              {.data = values_.data(), .dtype = DType::kF32, .shape = {1, count}});
    }
    if (factor_ != 1) {
      for (float& value : values_) value *= factor_;
    }
    std::memcpy(out, values_.data(), values_.size() * sizeof(float));
  }

 private:
  std::optional<DType> stored_;
  const quant::BlockType* block_;
  float factor_;
  std::vector<float> values_;
};

// Codes of blocks become less by this number, to be codes of a layer.
int8_t shift_of(const quant::BlockType& type, DType codes) {
  return lowers_codes(codes, type) ? 8 : 0;
}

// A layer's codes stand for the codes of blocks over this number, which makes their scales greater.
float unit_of(const quant::BlockType& type, DType codes) {
  return codes == type.element
             ? static_cast<float>(type.largest) / quant::format_of(codes).codes->largest
             : 1;
}

// Rows of blocks become codes.
class CodeRows final : public RowReader {
 public:
  CodeRows(const quant::BlockType& type, DType out) : type_(type), bits_(bit_size(out)) {
    const quant::CodeBook& book = *quant::format_of(out).codes;
    for (int code = type.least; code <= type.largest; ++code) {
      const float value = static_cast<float>(code - shift_of(type, out)) / unit_of(type, out);
      bits_of_[static_cast<uint8_t>(code)] = book.encode(value);
    }
  }

  void read(const std::byte* row, int64_t begin, int64_t end, std::byte* out) override {
    quant::BlockParts parts;
    for (int64_t col = begin; col < end;) {
      const int64_t block = col / type_.elements;
      const int64_t stop = std::min(end, (block + 1) * type_.elements);
      type_.take_apart(row + block * type_.bytes, parts);
      for (; col < stop; ++col) {
        const uint8_t bits = bits_of_[static_cast<uint8_t>(parts.codes[col % type_.elements])];
        if (bits_ < 8 && (col - begin) % 2 == 0) out[(col - begin) / 2] = std::byte{0};
        set_code(out, col - begin, bits_, bits);
      }
    }
  }

 private:
  const quant::BlockType& type_;
  int64_t bits_;
  std::array<uint8_t, 256> bits_of_ = {};  // by the code of a block, as an unsigned byte
};

// Rows of blocks become numbers, one for each `group` columns.
class GroupRows : public RowReader {
 public:
  GroupRows(const quant::BlockType& type, int64_t group, float factor)
      : type_(type), group_(group), factor_(factor) {}

  void read(const std::byte* row, int64_t begin, int64_t end, std::byte* out) override {
    quant::BlockParts parts;
    int64_t taken_apart = -1;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i * group_ / type_.elements;
      if (block != taken_apart) type_.take_apart(row + block * type_.bytes, parts);
      taken_apart = block;
      const float number = number_of(parts, i * group_ % type_.elements / type_.group) * factor_;
      std::memcpy(out + (i - begin) * 4, &number, sizeof(float));
    }
  }

 protected:
  virtual float number_of(const quant::BlockParts& parts, int64_t group) const = 0;

 private:
  const quant::BlockType& type_;
  int64_t group_;
  float factor_;
};

class ScaleRows final : public GroupRows {
 public:
  using GroupRows::GroupRows;

 protected:
  float number_of(const quant::BlockParts& parts, int64_t group) const override {
    return parts.scales[group];
  }
};

class OffsetRows final : public GroupRows {
 public:
  OffsetRows(const quant::BlockType& type, DType codes, int64_t group, float factor)
      : GroupRows(type, group, factor),
        has_offset_(type.has_offset),
        shift_(shift_of(type, codes)) {}

 protected:
  float number_of(const quant::BlockParts& parts, int64_t group) const override {
    if (!has_offset_) return 0;
    // Nothing times a scale may be NaN, or turn the sign of an offset of 0.
    if (shift_ == 0) return parts.offsets[group];
    return parts.offsets[group] - static_cast<float>(shift_) * parts.scales[group];
  }

 private:
  bool has_offset_;
  int8_t shift_;
};

}  // namespace

std::optional<DType> plain_type(const io::GgufType& type) {
  const auto* at = std::ranges::find(kPlain, type.name, &Plain::name);
  return at != kPlain.end() ? std::optional(at->dtype) : std::nullopt;
}

const io::GgufType* gguf_type_of(DType dtype) {
  const auto* at = std::ranges::find(kPlain, dtype, &Plain::dtype);
  return at != kPlain.end() ? io::find_gguf_type(at->name) : nullptr;
}

std::unique_ptr<RowReader> same_rows(DType dtype) { return std::make_unique<SameRows>(dtype); }

std::unique_ptr<RowReader> float_rows(const io::GgufType& type, float factor) {
  return std::make_unique<FloatRows>(type, factor);
}

bool fits_4_bits(const quant::BlockType& type) {
  const bool from_0 = type.has_offset && type.least >= 0 && type.largest <= 15;
  return from_0 || (type.least >= -8 && type.largest <= 7);
}

bool holds_codes(DType codes, const quant::BlockType& type) {
  const quant::CodeBook& book = *quant::known_format_of(codes).codes;
  return std::ranges::all_of(std::array{type.least, type.largest}, [&](int8_t code) {
    const auto value = static_cast<float>(code);
    return book.decode(book.encode(value)) == value;
  });
}

bool lowers_codes(DType codes, const quant::BlockType& type) {
  return codes != type.element && fits_4_bits(type) && !holds_codes(codes, type);
}

std::unique_ptr<RowReader> code_rows(const quant::BlockType& type, DType dtype) {
  return std::make_unique<CodeRows>(type, dtype);
}

std::unique_ptr<RowReader> scale_rows(const quant::BlockType& type, DType codes, int64_t group,
                                      float factor) {
  return std::make_unique<ScaleRows>(type, group, factor * unit_of(type, codes));
}

std::unique_ptr<RowReader> offset_rows(const quant::BlockType& type, DType codes, int64_t group,
                                       float factor) {
  return std::make_unique<OffsetRows>(type, codes, group, factor);
}

}  // namespace conclave::inline v0::checkpoint
