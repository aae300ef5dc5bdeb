#include "io/json.h"

#include "io/json_cursor.h"
#include "io/name_index.h"
#include "io/text.h"

#include <fmt/format.h>

#include <limits>
#include <vector>

namespace conclave::inline v0::io {
namespace {

constexpr uint32_t kNoNode = std::numeric_limits<uint32_t>::max();

struct Slice {
  uint32_t offset;
  uint32_t bytes;
};

struct Children {
  uint32_t first;  // kNoNode if there is none
  uint32_t count;
};

struct Node {
  JsonType type = JsonType::kNull;
  uint32_t parent = kNoNode;
  uint32_t next = kNoNode;  // sibling
  Slice key{};              // for a member of an object
  union {
    bool boolean;
    int64_t integer = 0;
    double number;
    Slice text;
    Children children;
  };
};

}  // namespace

// Strings are decoded in place: nodes point into `text`.
struct JsonValue::Data {
  std::string file;
  std::string text;
  std::vector<Node> nodes;
  NameIndex members;  // grouped by the object's node

  std::string_view view(Slice slice) const {
    return std::string_view(text).substr(slice.offset, slice.bytes);
  }
  std::string_view key(uint32_t node) const { return view(nodes[node].key); }
};

std::string_view to_string(JsonType type) noexcept {
  switch (type) {
    case JsonType::kNull:
      return "null";
    case JsonType::kBool:
      return "a boolean";
    case JsonType::kInteger:
      return "an integer";
    case JsonType::kFloat:
      return "a floating-point number";
    case JsonType::kString:
      return "a string";
    case JsonType::kArray:
      return "an array";
    case JsonType::kObject:
      return "an object";
  }
  return "unknown";
}

// Builds without recursion: depth costs a counter, not stack.
class JsonDocument::Builder {
 public:
  Builder(JsonValue::Data& data, const JsonLimits& limits)
      : data_(data), limits_(limits), cursor_(data.text, ErrorCode::kJsonSyntax, data.file) {}

  void build() {
    begin_value({});
    while (open_ != kNoNode) {
      if (data_.nodes[open_].type == JsonType::kObject) {
        continue_object();
      } else {
        continue_array();
      }
    }
    cursor_.expect_end();
    index_members();
  }

 private:
  void continue_object() {
    if (cursor_.try_consume('}')) return close();
    if (data_.nodes[open_].children.count > 0) {
      cursor_.expect(',', "between members of an object");
    }
    const Slice key = decode(cursor_.string("before a key"));
    cursor_.expect(':', "after a key");
    begin_value(key);
  }

  void continue_array() {
    if (cursor_.try_consume(']')) return close();
    if (data_.nodes[open_].children.count > 0) {
      cursor_.expect(',', "between items of an array");
    }
    begin_value({});
  }

  void begin_value(Slice key) {
    Node node;
    node.parent = open_;
    node.key = key;
    const std::optional<char> first = cursor_.peek();
    if (first == '{' || first == '[') {
      cursor_.try_consume(*first);
      node.type = first == '{' ? JsonType::kObject : JsonType::kArray;
      node.children = {kNoNode, 0};
      open(append(node));
      return;
    }
    if (first == '"') {
      node.type = JsonType::kString;
      node.text = decode(cursor_.string("before a string"));
    } else {
      read_literal(node);
    }
    append(node);
  }

  void read_literal(Node& node) {
    if (cursor_.try_literal("null")) return;
    if (cursor_.try_literal("true")) {
      node.type = JsonType::kBool;
      node.boolean = true;
    } else if (cursor_.try_literal("false")) {
      node.type = JsonType::kBool;
      node.boolean = false;
    } else if (const std::optional<double> special = read_non_finite()) {
      node.type = JsonType::kFloat;
      node.number = *special;
    } else {
      read_number(node);
    }
  }

  std::optional<double> read_non_finite() {
    if (limits_.non_finite == NonFinite::kReject) return std::nullopt;
    if (cursor_.try_literal("NaN")) return std::numeric_limits<double>::quiet_NaN();
    if (cursor_.try_literal("Infinity")) return std::numeric_limits<double>::infinity();
    if (cursor_.try_literal("-Infinity")) return -std::numeric_limits<double>::infinity();
    return std::nullopt;
  }

  void read_number(Node& node) {
    const JsonNumber number = cursor_.number();
    if (const std::optional<int64_t> integer = to_int64(number)) {
      node.type = JsonType::kInteger;
      node.integer = *integer;
      return;
    }
    const std::optional<double> value = to_double(number);
    if (!value) cursor_.fail("a number beyond the range of double precision ends");
    node.type = JsonType::kFloat;
    node.number = *value;
  }

  Slice decode(JsonString string) {
    char* begin = data_.text.data() + (string.raw.data() - data_.text.data());
    size_t bytes = string.raw.size();
    if (string.has_escapes) {
      const std::optional<size_t> decoded = decode_json_string(string.raw, begin);
      if (!decoded) cursor_.fail("half of a surrogate pair in the string that ends");
      bytes = *decoded;
    }
    return {static_cast<uint32_t>(begin - data_.text.data()), static_cast<uint32_t>(bytes)};
  }

  // Adds `node` as the last child of the open container and returns its number.
  uint32_t append(const Node& node) {
    if (data_.nodes.size() >= limits_.max_values) {
      throw Error(ErrorCode::kJsonTooLarge, {.what = "the document holds too many values",
                                             .file = data_.file,
                                             .limit = std::to_string(limits_.max_values)});
    }
    const auto number = static_cast<uint32_t>(data_.nodes.size());
    data_.nodes.push_back(node);
    if (open_ == kNoNode) return number;
    Node& parent = data_.nodes[open_];
    if (parent.children.count++ == 0) {
      parent.children.first = number;
    } else {
      data_.nodes[last_child_].next = number;
    }
    last_child_ = number;
    return number;
  }

  void open(uint32_t container) {
    if (++depth_ > limits_.max_depth) {
      throw Error(ErrorCode::kJsonTooDeep, {.what = "arrays and objects are nested too deeply",
                                            .file = data_.file,
                                            .limit = std::to_string(limits_.max_depth)});
    }
    open_ = container;
  }

  void close() {
    --depth_;
    last_child_ = open_;
    open_ = data_.nodes[open_].parent;
  }

  void index_members() {
    for (uint32_t i = 0; i < data_.nodes.size(); ++i) {
      const uint32_t parent = data_.nodes[i].parent;
      if (parent == kNoNode || data_.nodes[parent].type != JsonType::kObject) continue;
      data_.members.add(parent, data_.key(i), i);
    }
    const auto twins = data_.members.build([&](uint32_t node) { return data_.key(node); });
    if (twins) {
      JsonValue(&data_, twins->second)
          .reject(ErrorCode::kJsonDuplicateKey, "the key appears twice in one object",
                  "every key once");
    }
  }

  JsonValue::Data& data_;
  const JsonLimits& limits_;
  JsonCursor cursor_;
  uint32_t open_ = kNoNode;        // innermost container still being read
  uint32_t last_child_ = kNoNode;  // in the open container
  int depth_ = 0;
};

JsonDocument JsonDocument::parse(std::string text, std::string file, const JsonLimits& limits) {
  // Offsets are 32-bit, so no limit may go beyond them.
  const size_t max_bytes = std::min<size_t>(limits.max_bytes, kNoNode - 1);
  if (text.size() > max_bytes) {
    throw Error(ErrorCode::kJsonTooLarge, {.what = "the document is too large",
                                           .file = std::move(file),
                                           .found = fmt::format("{} bytes", text.size()),
                                           .limit = fmt::format("{} bytes", max_bytes)});
  }
  if (const std::optional<size_t> bad = find_invalid_utf8(text)) {
    throw Error(
        ErrorCode::kJsonSyntax,
        {.what = fmt::format("the text is not UTF-8 at byte {}", *bad), .file = std::move(file)});
  }
  auto data = std::make_unique<JsonValue::Data>();
  data->file = std::move(file);
  data->text = std::move(text);
  Builder(*data, limits).build();
  return JsonDocument(std::move(data));
}

JsonDocument JsonDocument::parse(std::span<const std::byte> text, std::string file,
                                 const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    throw Error(ErrorCode::kJsonTooLarge, {.what = "the document is too large",
                                           .file = std::move(file),
                                           .found = fmt::format("{} bytes", text.size()),
                                           .limit = fmt::format("{} bytes", limits.max_bytes)});
  }
  return parse(std::string(reinterpret_cast<const char*>(text.data()), text.size()),
               std::move(file), limits);
}

JsonDocument::JsonDocument(std::unique_ptr<JsonValue::Data> data) : data_(std::move(data)) {}
JsonDocument::JsonDocument(JsonDocument&&) noexcept = default;
JsonDocument& JsonDocument::operator=(JsonDocument&&) noexcept = default;
JsonDocument::~JsonDocument() = default;

JsonValue JsonDocument::root() const noexcept { return {data_.get(), 0}; }

JsonType JsonValue::type() const noexcept { return data_->nodes[node_].type; }
const std::string& JsonValue::file() const noexcept { return data_->file; }
std::string_view JsonValue::key() const noexcept { return data_->key(node_); }

std::optional<JsonValue> JsonValue::next() const noexcept {
  const uint32_t sibling = data_->nodes[node_].next;
  if (sibling == kNoNode) return std::nullopt;
  return JsonValue(data_, sibling);
}

void JsonValue::require(JsonType wanted) const {
  if (type() != wanted) {
    reject(ErrorCode::kJsonType, "the value has the wrong type", std::string(to_string(wanted)));
  }
}

bool JsonValue::as_bool() const {
  require(JsonType::kBool);
  return data_->nodes[node_].boolean;
}

int64_t JsonValue::as_int64() const {
  require(JsonType::kInteger);
  return data_->nodes[node_].integer;
}

double JsonValue::as_double() const {
  if (is_integer()) return static_cast<double>(data_->nodes[node_].integer);
  require(JsonType::kFloat);
  return data_->nodes[node_].number;
}

std::string_view JsonValue::as_string() const {
  require(JsonType::kString);
  return data_->view(data_->nodes[node_].text);
}

size_t JsonValue::size() const {
  if (!is_object()) require(JsonType::kArray);
  return data_->nodes[node_].children.count;
}

std::optional<JsonValue> JsonValue::find(std::string_view key) const {
  require(JsonType::kObject);
  const auto member =
      data_->members.find(node_, key, [&](uint32_t node) { return data_->key(node); });
  if (!member) return std::nullopt;
  return JsonValue(data_, *member);
}

std::optional<JsonValue> JsonValue::find_set(std::string_view key) const {
  const std::optional<JsonValue> member = find(key);
  return member && !member->is_null() ? member : std::nullopt;
}

JsonValue JsonValue::at(std::string_view key) const {
  if (const std::optional<JsonValue> member = find(key)) return *member;
  const std::string parent = path();
  throw Error(ErrorCode::kConfigMissingKey,
              {.what = "the key is missing",
               .file = data_->file,
               .tensor = parent.empty() ? std::string(key) : parent + '.' + std::string(key)});
}

JsonRange<JsonValue> JsonValue::items() const {
  require(JsonType::kArray);
  const Children& children = data_->nodes[node_].children;
  if (children.count == 0) return JsonRange<JsonValue>(std::nullopt);
  return JsonRange<JsonValue>(JsonValue(data_, children.first));
}

JsonRange<JsonMember> JsonValue::members() const {
  require(JsonType::kObject);
  const Children& children = data_->nodes[node_].children;
  if (children.count == 0) return JsonRange<JsonMember>(std::nullopt);
  return JsonRange<JsonMember>(JsonValue(data_, children.first));
}

std::string JsonValue::path() const {
  std::vector<std::string> steps;
  for (uint32_t node = node_; data_->nodes[node].parent != kNoNode;) {
    const uint32_t parent = data_->nodes[node].parent;
    if (data_->nodes[parent].type == JsonType::kObject) {
      const std::string_view key = data_->key(node);
      const bool is_step = !key.empty() && key.find_first_of(".[]\"\\ ") == std::string_view::npos;
      steps.push_back(is_step ? show_name(key) : show_text(key));
    } else {
      size_t index = 0;
      for (uint32_t i = data_->nodes[parent].children.first; i != node; i = data_->nodes[i].next) {
        ++index;
      }
      steps.push_back(fmt::format("[{}]", index));
    }
    node = parent;
  }
  std::string path;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (!path.empty() && !step->starts_with('[')) path += '.';
    path += *step;
  }
  return path;
}

void JsonValue::reject(ErrorCode code, std::string what, std::string expected,
                       std::string hint) const {
  const Node& node = data_->nodes[node_];
  std::string found(to_string(node.type));
  switch (node.type) {
    case JsonType::kBool:
      found = node.boolean ? "true" : "false";
      break;
    case JsonType::kInteger:
      found = std::to_string(node.integer);
      break;
    case JsonType::kFloat:
      found = fmt::format("{}", node.number);
      break;
    case JsonType::kString:
      found = show_text(data_->view(node.text));
      break;
    default:
      break;
  }
  throw Error(code, {.what = std::move(what),
                     .file = data_->file,
                     .tensor = path(),
                     .expected = std::move(expected),
                     .found = std::move(found),
                     .hint = std::move(hint)});
}

}  // namespace conclave::inline v0::io
