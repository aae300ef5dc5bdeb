// The seam between files of quantised weights and everything that reads them: how a method states
// its codes in a configuration, which tensors it stores for a matrix, and how these become planes.
// docs/adding-a-method.md walks through one.
#pragma once

#include "io/json.h"

#include "conclave/dtype.h"
#include "conclave/methods.h"
#include "conclave/safetensors.h"
#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct StoredPlane;
struct ModuleSchemes;

// How codes lie in words, where a method has had two ways.
enum class WordLayout : uint8_t {
  kAcross,  // over the ends of words
  kWhole,   // as many as a word has room for
  kEither,  // both are possible, and give other codes
  kSame,    // both give the same codes
};

// A file says this about codes beside what they mean.
struct StoredCodes {
  int64_t bits = 0;             // that a stored code has
  bool zeros_less_one = false;  // zero points are stored less one
  int64_t flat_block = 0;  // codes that share a scale, counted over rows that follow each other
  WordLayout words = WordLayout::kEither;  // where shapes do not tell
};

// A key of the configuration that says how many columns a group has.
struct GroupKey {
  std::string file;
  std::string path;
};

// Says what quantised matrices are, and how files hold them.
struct QuantizedWeights {
  DType element = DType::kF32;  // that codes have
  QuantSpec spec = {};
  StoredCodes stored = {};
  // The method's own tensors; without any, codes and scales lie in tensors of the usual names.
  std::span<const StoredPlane> planes = {};
  // Set where the method has whole groups alone: columns of a matrix must be a multiple.
  std::optional<GroupKey> whole_groups = std::nullopt;
  // Completes what the tensors of a model tell; null: nothing is told.
  void (*settle)(std::span<const TensorInfo* const> tensors, StoredCodes& stored) = nullptr;
  // Completes what depends on the sizes of a layer; null: nothing does.
  void (*fit)(const StoredCodes& stored, const MoeSpec& layer, QuantSpec& spec) = nullptr;
  std::string_view note = {};  // for the user: how the layer differs from what the file asks for
  // Set where modules have schemes of their own; this is then one of the experts'.
  std::shared_ptr<const ModuleSchemes> by_module = nullptr;
  // All that is said of modules by their names, also where those with codes have one scheme.
  std::shared_ptr<const ModuleSchemes> modules = nullptr;
};

// One of the ways in which a method quantises modules.
struct ModuleScheme {
  std::optional<QuantizedWeights> weights;  // empty: not read
  std::string reason;                       // why not
};

// Says by their names which modules have a scheme.
struct ModuleRule {
  enum class Kind : uint8_t {
    kName,        // the module's name, or the end of it after a dot
    kExpression,  // an expression of Python's `re`, from the begin
    kPattern,     // with * and ? for any letters, [a-z] and [!x] for some
    kAny,
  };
  Kind kind = Kind::kAny;
  std::string text = {};
  size_t scheme = 0;
  bool leaves_out = false;  // such modules stay as they are
};

// The first rule that holds counts. Modules without any stay as they are.
struct ModuleSchemes {
  std::vector<ModuleScheme> schemes;
  // Modules by their names, or by the begins of these before a dot: the longest counts.
  std::map<std::string, size_t, std::less<>> by_name;
  // Names, or begins of names, of modules that stay as they are.
  std::set<std::string, std::less<>> left_out;
  std::vector<ModuleRule> rules;  // for all others
};

// A matrix, or gate and up above each other, whose planes are stored.
struct MatrixForm {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t scale_rows = 0;  // rows of its scales
  int64_t groups = 0;      // columns of its scales
  int64_t group_cols = 0;  // columns of the matrix that share a scale
  const QuantizedWeights* quant = nullptr;
  WordLayout words = WordLayout::kEither;  // as other tensors of the layer tell
};

// A stored tensor, or the part of a stack, from which a plane is computed.
struct PlaneInput {
  const TensorInfo* info = nullptr;  // null: an optional tensor that is absent
  std::string_view file = {};
  std::span<const std::byte> bytes = {};
};

using StoredShapes = std::vector<std::vector<int64_t>>;

// The tensor "X<suffix>" holds a plane of the matrix "X<ending>", or serves to read one.
struct StoredPlane {
  using Use = MethodTensor::Use;

  std::string_view suffix;
  std::string_view ending = ".weight";
  Use use = Use::kPlane;
  WeightPlane plane = WeightPlane::kWeights;
  // Types and shapes in which the tensor may be stored; a stack has one more axis in front. Those
  // of inputs say what is written.
  std::span<const DType> types = {};
  StoredShapes (*shapes)(const MatrixForm& form) = nullptr;
  // The type of the plane's elements; without one, that of codes, or for other planes the stored.
  std::optional<DType> type = std::nullopt;
  // Tells by the shape which words it has; null: there is one way.
  WordLayout (*words)(const MatrixForm& form, std::span<const int64_t> shape) = nullptr;
  // Whether such a tensor has codes; null: its name says so.
  bool (*has_codes)(const TensorInfo& tensor) = nullptr;

  // A plane is either computed from whole tensors, or has their bytes: as they are, or each
  // converted by itself.
  void (*decode)(const MatrixForm& form, std::span<const PlaneInput> inputs,
                 std::span<std::byte> plane) = nullptr;
  bool (*lies_in_place)(const MatrixForm& form) = nullptr;  // then `decode` is not needed
  void (*convert)(std::span<std::byte> bytes) = nullptr;
  // Suffixes of the tensors that `decode` gets after the tensor itself, in this order.
  std::span<const std::string_view> inputs = {};
  std::span<const std::string_view> optional_inputs = {};

  // The way back, for methods that are written: the bytes of a tensor with the first of the shapes
  // and types. Without it only planes are written, those that lie in place.
  void (*encode)(const MatrixForm& form, const MatrixPlanes& planes,
                 std::span<std::byte> tensor) = nullptr;
  bool has_scale_type = false;  // written in the type of the scales

  // Counterparts of `shapes` and `decode` for matrices that layers have as values only, such as a
  // router: codes are decoded to float32. Null: such matrices have the form of experts'.
  StoredShapes (*value_shapes)(const MatrixForm& form) = nullptr;
  void (*decode_values)(const MatrixForm& form, std::span<const PlaneInput> inputs,
                        std::span<std::byte> values) = nullptr;
  std::span<const std::string_view> value_inputs = {};
};

// A method stores weights in a way that is not read: this is a verdict, not a fault of the file.
struct NotRead {
  std::string reason;
  // Set where codes lie in the order of a kernel that a tool has packed them for: what that is.
  std::string kernel_order = {};
};

// A row of the table of methods.
struct Method {
  std::string_view name;  // quant_method
  // Throws NotRead; Error(kJsonType, kConfigValue, kConfigMissingKey) for values that no such
  // method writes.
  QuantizedWeights (*read)(const io::JsonValue& config);
  std::string_view file = {};  // beside config.json, in exports that have it
  // The key expert_dtype of the model's configuration, if the row is for one of its values only.
  std::string_view experts = {};
  // Whether a configuration without quant_method is of this method; null: never.
  bool (*wrote)(const io::JsonValue& config) = nullptr;
  // The usual names of tensors of scales, and of steps of rows.
  std::string_view scale = "_scale";
  std::string_view step = "input_scale";
  // Keys of the modules that stay as they are: a list of them, or an object of rules for modules,
  // of which those that begin with "-:" count. They may stand below a key "quantization".
  std::span<const std::string_view> kept = {};
  // The way back: the text of a configuration that `read` understands as this form. Null: matrices
  // are not written so.
  std::string (*write)(const MethodForm& form, const std::vector<std::string>& kept) = nullptr;
  // Its own loader looks for the same under this key of config.json.
  std::string_view own_key = {};
};
std::span<const Method> known_methods();
// Its first row of this name; null if it is not read.
const Method* find_method(std::string_view name);

// Says what keeps another method from being read, by its quant_method; an unknown one has an empty
// reason.
NotRead unread_method(std::string_view name);

}  // namespace conclave::inline v0::checkpoint
