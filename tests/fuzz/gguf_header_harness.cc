#include "fuzz/harness.h"
#include "fuzz/promises.h"
#include "io/gguf/header.h"

#include "conclave/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

namespace conclave::testing {
namespace {

__extension__ using Uint128 = unsigned __int128;

bool is_plain(std::string_view text) {
  return !text.empty() && !io::find_invalid_utf8(text) && std::ranges::all_of(text, [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F;
  });
}

// Bytes of a tensor, in wider arithmetic than the reader's own, which accepts no dimension and no
// product above 2^63.
Uint128 wide_bytes(const io::GgufTensor& tensor) {
  Uint128 elements = 1;
  for (const int64_t dim : tensor.shape()) {
    promise(dim >= 1);
    elements *= static_cast<Uint128>(dim);
    promise(elements >> 63 == 0);
  }
  const int64_t row = tensor.rank > 0 ? tensor.shape().back() : 1;
  promise(row % tensor.type->block_elements == 0);
  return elements / tensor.type->block_elements * tensor.type->block_bytes;
}

void check_entries(const io::GgufHeader& header) {
  std::set<std::string_view> keys;
  for (const io::GgufEntry& entry : header.entries) {
    promise(is_plain(entry.key) && keys.insert(entry.key).second);
    promise(header.find_value(entry.key) == &entry.value);
    if (const auto* array = std::get_if<io::GgufArray>(&entry.value)) {
      promise(array->numbers.empty() || array->numbers.size() == array->count);
    }
  }
}

// Another walk over the entries and tensors of a file that was accepted: where the header ends, and
// where the tensors claim to be.
class Walk {
 public:
  explicit Walk(std::span<const std::byte> input) : input_(input) {
    at_ = 8;
    const uint64_t tensors = number(8);
    const uint64_t entries = number(8);
    for (uint64_t i = 0; i < entries; ++i) {
      at_ += number(8);
      skip_value(number(4));
    }
    for (uint64_t i = 0; i < tensors; ++i) {
      at_ += number(8);
      at_ += 8 * number(4);
      at_ += 4;
      offsets_.push_back(number(8));
    }
  }

  uint64_t header_end() const { return at_; }
  const std::vector<uint64_t>& offsets() const { return offsets_; }

 private:
  uint64_t number(size_t bytes) {
    promise(at_ <= input_.size() && bytes <= input_.size() - at_);
    uint64_t value = 0;
    std::memcpy(&value, input_.data() + at_, bytes);
    at_ += bytes;
    return value;
  }

  void skip_value(uint64_t type) {
    constexpr uint64_t kText = 8;
    constexpr uint64_t kArray = 9;
    constexpr uint64_t kBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    promise(type < std::size(kBytes));
    if (type == kText) {
      at_ += number(8);
    } else if (type == kArray) {
      const uint64_t element = number(4);
      promise(element != kArray);
      const uint64_t count = number(8);
      promise(count <= input_.size());
      for (uint64_t i = 0; i < count; ++i) skip_value(element);
    } else {
      at_ += kBytes[type];
    }
  }

  std::span<const std::byte> input_;
  uint64_t at_ = 0;
  std::vector<uint64_t> offsets_;
};

// Checks that the tensors cover the data by the rules and agree with their own shapes.
void check_tensors(std::span<const std::byte> input, uint64_t file_bytes,
                   const io::GgufHeader& header) {
  const auto aligned = [&](Uint128 offset) {
    return (offset + header.alignment - 1) / header.alignment * header.alignment;
  };
  promise(header.alignment >= 8 && header.alignment <= 65'536);
  std::set<std::string_view> names;
  const Walk walk(input);
  const Uint128 data_begin = aligned(walk.header_end());
  Uint128 end = walk.header_end();
  promise(walk.offsets().size() == header.tensors.size());
  for (size_t i = 0; i < header.tensors.size(); ++i) {
    const io::GgufTensor& tensor = header.tensors[i];
    promise(is_plain(tensor.name) && tensor.name.size() <= 64);
    promise(names.insert(tensor.name).second);
    promise(header.find_tensor(tensor.name) == &tensor);
    promise(tensor.rank <= io::GgufTensor::kMaxRank);
    promise(wide_bytes(tensor) == tensor.bytes);
    promise(tensor.file_offset == aligned(end));
    promise(tensor.file_offset == data_begin + walk.offsets()[i]);
    end = Uint128{tensor.file_offset} + tensor.bytes;
    promise(end <= file_bytes);
  }
  promise(file_bytes <= aligned(end));
}

}  // namespace

void fuzz_gguf_header(std::span<const std::byte> input) {
  // A file of so many bytes: the input, then zeros.
  const auto parse = [&](uint64_t file_bytes) {
    const io::ReadBytes read = [&](uint64_t offset, std::span<std::byte> destination) {
      promise(offset <= file_bytes && destination.size() <= file_bytes - offset);
      std::ranges::fill(destination, std::byte{0});
      if (offset >= input.size()) return;
      const auto part = input.subspan(offset);
      std::copy_n(part.begin(), std::min(part.size(), destination.size()), destination.begin());
    };
    return expect_value_or_error([&] {
      const io::GgufHeader header = io::parse_gguf_header(read, file_bytes, "fuzz.gguf");
      check_entries(header);
      check_tensors(input, file_bytes, header);
    });
  };
  const std::optional<ErrorCode> code = parse(input.size());
  // Bytes alone may have their data anywhere, so that whatever is a file is one of these, too.
  const std::optional<ErrorCode> alone =
      expect_value_or_error([&] { check_entries(io::parse_gguf_header(input, "fuzz.gguf")); });
  promise(code || !alone);
  expect_value_or_error([&] { CheckpointFeed::from_gguf(input).missing(); });
  // The header is sound but has too little data behind it: the last byte now decides how much more,
  // rarely as much as no memory holds.
  if (code == ErrorCode::kGgufTruncatedData) {
    const auto last = std::to_integer<uint64_t>(input.back());
    parse(input.size() + (last < 250 ? 8 * last : uint64_t{1} << (10 * (last - 249))));
  }
}

}  // namespace conclave::testing
