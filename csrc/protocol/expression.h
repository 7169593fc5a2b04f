// The expression of an epilogue: a textual form of an elementwise function of a reduced value.
//
//     value.bfloat16;cast.float32 0;extra.bfloat16 0;cast.float32 2;add.float32 1 3;cast.bfloat16 4
//
// Statements are separated by semicolons. Each has a name, the type of its result, and its
// operands: indices of earlier statements or, for a leaf, a number. The last statement is the
// result. The text is an argument of the operator, so it survives every graph representation.
// Kernels are generated from this text, never from what a user wrote.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "epilogue.h"

namespace collx {

/// The operation of a statement. `T` is the type that the statement names.
enum class Do : uint8_t {
  value,     // the reduced value, rounded to T, the dtype of the call
  extra,     // an element of extra tensor N, which has the same dtype
  index,     // coordinate N of the element in the output; in reducescatter, in the full tensor
  constant,  // T, given by its bits in hexadecimal
  number,    // number N of the call, as T
  cast,      // from any type: rounds to nearest even; from float to integer towards zero
  // Operands of T.
  add,
  sub,
  mul,
  div,  // floats only
  neg,
  abs,
  minimum,  // NaN if either is; -0 below +0
  maximum,
  // Like minimum and maximum, but with the derivatives of these functions.
  clamp_min,
  clamp_max,
  relu,
  floor_divide,  // integers only, by a positive constant
  remainder,
  where,  // operands: a bool and two of T
  // The result is bool; both operands have one type.
  lt,
  le,
  gt,
  ge,
  eq,
  ne,
  // Operands of bool.
  land,
  lor,
  lxor,
  lnot,
  // Operands of float32 or float64. The square root is correctly rounded and therefore equal
  // everywhere. The others have an error of at most 4 units in the last place.
  sqrt,
  rsqrt,
  exp,
  log,
  tanh,
  sigmoid,
  silu,
  erf,
  gelu,
  gelu_tanh,
  count
};

/// The operands of a statement and their types.
enum class Takes : uint8_t {
  leaf,
  anything,  // one operand of any type
  numbers,   // two of T, which is not bool
  number,    // one of T, which is not bool
  floats,    // two of T, float32 or float64
  real,      // one of T, float32 or float64
  divisor,   // two of T, an integer type, the second a positive constant
  choice,    // a bool and two of T
  compared,  // two of one type; T is bool
  bools,     // two bools; T is bool
  one_bool,
};

struct DoRow {
  Do what;
  const char* name;
  Takes takes;
};
inline constexpr DoRow kDo[] = {
    {Do::value, "value", Takes::leaf},
    {Do::extra, "extra", Takes::leaf},
    {Do::index, "index", Takes::leaf},
    {Do::constant, "constant", Takes::leaf},
    {Do::number, "number", Takes::leaf},
    {Do::cast, "cast", Takes::anything},
    {Do::add, "add", Takes::numbers},
    {Do::sub, "sub", Takes::numbers},
    {Do::mul, "mul", Takes::numbers},
    {Do::div, "div", Takes::floats},
    {Do::neg, "neg", Takes::number},
    {Do::abs, "abs", Takes::number},
    {Do::minimum, "minimum", Takes::numbers},
    {Do::maximum, "maximum", Takes::numbers},
    {Do::clamp_min, "clamp_min", Takes::numbers},
    {Do::clamp_max, "clamp_max", Takes::numbers},
    {Do::relu, "relu", Takes::number},
    {Do::floor_divide, "floor_divide", Takes::divisor},
    {Do::remainder, "remainder", Takes::divisor},
    {Do::where, "where", Takes::choice},
    {Do::lt, "lt", Takes::compared},
    {Do::le, "le", Takes::compared},
    {Do::gt, "gt", Takes::compared},
    {Do::ge, "ge", Takes::compared},
    {Do::eq, "eq", Takes::compared},
    {Do::ne, "ne", Takes::compared},
    {Do::land, "and", Takes::bools},
    {Do::lor, "or", Takes::bools},
    {Do::lxor, "xor", Takes::bools},
    {Do::lnot, "not", Takes::one_bool},
    {Do::sqrt, "sqrt", Takes::real},
    {Do::rsqrt, "rsqrt", Takes::real},
    {Do::exp, "exp", Takes::real},
    {Do::log, "log", Takes::real},
    {Do::tanh, "tanh", Takes::real},
    {Do::sigmoid, "sigmoid", Takes::real},
    {Do::silu, "silu", Takes::real},
    {Do::erf, "erf", Takes::real},
    {Do::gelu, "gelu", Takes::real},
    {Do::gelu_tanh, "gelu_tanh", Takes::real},
};
static_assert(stand_at_their_values(kDo, &DoRow::what));

/// Number of operands of a statement.
constexpr int operands_of(Do what) {
  switch (kDo[static_cast<int>(what)].takes) {
    case Takes::leaf: return 0;
    case Takes::anything:
    case Takes::number:
    case Takes::real:
    case Takes::one_bool: return 1;
    case Takes::choice: return 3;
    case Takes::numbers:
    case Takes::floats:
    case Takes::divisor:
    case Takes::compared:
    case Takes::bools: break;
  }
  return 2;
}

struct Statement {
  Do what;
  ValueType type;
  uint16_t operands[3] = {};
  uint64_t number = 0;  // the number of a leaf; the bits of a constant
};

struct Expression {
  std::vector<Statement> statements;
  int extras = 0;   // extra tensors, up to the last one used
  int numbers = 0;  // numbers of the call, up to the last one used
  int indices = 0;  // coordinates, up to the last one used
  ValueType result() const { return statements.back().type; }
};

inline constexpr size_t kMostStatements = 256;

namespace detail {

constexpr bool is_real(ValueType t) { return t == ValueType::float32 || t == ValueType::float64; }
constexpr bool is_whole(ValueType t) {
  return !is_real(t) && !is_narrow(t) && t != ValueType::boolean;
}

/// Parses a text, statement by statement. read() returns an error message, or nullopt on success.
class ExpressionReader {
 public:
  ExpressionReader(std::string_view text, ValueType value, Expression& to)
      : text_(text), value_(value), to_(to) {}

  std::optional<std::string> read() {
    for (bool more = true; more;) {
      more = text_.find(';') != std::string_view::npos;
      const std::string_view statement = until(text_, ';');
      if (to_.statements.size() == kMostStatements) {
        return std::to_string(kMostStatements) + " statements and more";
      }
      Statement s{};
      if (!read_statement(statement, s))
        return std::string(1, '"').append(statement).append(1, '"');
      to_.statements.push_back(s);
    }
    return std::nullopt;
  }

 private:
  /// Removes the text up to the separator, and the separator; returns the text before it.
  static std::string_view until(std::string_view& text, char separator) {
    const size_t at = text.find(separator);
    const std::string_view head = text.substr(0, at);
    text = at == std::string_view::npos ? std::string_view() : text.substr(at + 1);
    return head;
  }

  static std::optional<uint64_t> number(std::string_view text, unsigned base) {
    if (text.empty() || text.size() > 16) return std::nullopt;
    uint64_t value = 0;
    for (const char c : text) {
      const unsigned digit = c >= '0' && c <= '9'   ? static_cast<unsigned>(c - '0')
                             : c >= 'a' && c <= 'f' ? static_cast<unsigned>(c - 'a') + 10
                                                    : base;
      if (digit >= base) return std::nullopt;
      value = value * base + digit;
    }
    return value;
  }

  bool read_statement(std::string_view text, Statement& s) {
    std::string_view head = until(text, ' ');
    const std::string_view name = until(head, '.');
    const DoRow* row = nullptr;
    for (const DoRow& r : kDo) row = name == r.name ? &r : row;
    const ValueTypeRow* type = nullptr;
    for (const ValueTypeRow& r : kValueTypes) type = head == r.name ? &r : type;
    if (row == nullptr || type == nullptr) return false;
    s.what = row->what;
    s.type = type->type;
    if (row->takes == Takes::leaf) return read_leaf(text, s, type->bytes);
    int count = 0;
    while (!text.empty()) {
      const auto operand = number(until(text, ' '), 10);
      if (!operand || *operand >= to_.statements.size() || count == 3) return false;
      s.operands[count++] = static_cast<uint16_t>(*operand);
    }
    return fits(s, row->takes, count);
  }

  bool read_leaf(std::string_view text, Statement& s, int bytes) {
    if (s.what == Do::value) return text.empty() && s.type == value_;
    const bool constant = s.what == Do::constant;
    const auto value = number(text, constant ? 16 : 10);
    if (!value) return false;
    s.number = *value;
    if (constant) {
      return !is_narrow(s.type) && text.size() == 2 * static_cast<size_t>(bytes) &&
             (s.type != ValueType::boolean || *value <= 1);
    }
    if (*value >= static_cast<uint64_t>(kMostLeaves)) return false;
    int& most = s.what == Do::extra ? to_.extras : s.what == Do::number ? to_.numbers : to_.indices;
    most = most > static_cast<int>(*value) ? most : static_cast<int>(*value) + 1;
    if (s.what == Do::number) return !is_narrow(s.type) && ++number_leaves_ <= kMostLeaves;
    return s.type == (s.what == Do::extra ? value_ : ValueType::int64);
  }

  bool fits(const Statement& s, Takes takes, int count) const {
    const auto type = [&](int i) { return to_.statements[s.operands[i]].type; };
    const auto are = [&](int from, int n, ValueType t) {
      bool all = count == from + n;
      for (int i = from; i < count; ++i) all = all && type(i) == t;
      return all;
    };
    const ValueType t = s.type;
    const bool number = !is_narrow(t) && t != ValueType::boolean;
    switch (takes) {
      case Takes::leaf: return false;
      case Takes::anything: return count == 1;
      case Takes::numbers: return number && are(0, 2, t);
      case Takes::number: return number && are(0, 1, t);
      case Takes::floats: return is_real(t) && are(0, 2, t);
      case Takes::real: return is_real(t) && are(0, 1, t);
      case Takes::divisor:
        return is_whole(t) && are(0, 2, t) && is_positive(to_.statements[s.operands[1]]);
      case Takes::choice:
        return !is_narrow(t) && count == 3 && type(0) == ValueType::boolean && are(1, 2, t);
      case Takes::compared:
        return t == ValueType::boolean && count == 2 && are(0, 2, type(0)) && !is_narrow(type(0));
      case Takes::bools: return t == ValueType::boolean && are(0, 2, t);
      case Takes::one_bool: return t == ValueType::boolean && are(0, 1, t);
    }
    return false;
  }

  static bool is_positive(const Statement& s) {
    const int bits = 8 * kValueTypes[static_cast<int>(s.type)].bytes;
    const bool negative = s.type != ValueType::uint8 && (s.number >> (bits - 1) & 1) != 0;
    return s.what == Do::constant && s.number != 0 && !negative;
  }

  std::string_view text_;
  const ValueType value_;
  Expression& to_;
  int number_leaves_ = 0;
};

}  // namespace detail

/// Parses the text of an expression for a value of `dtype`. Returns an error message, or nullopt on
/// success; then `to` is a well-typed expression.
inline std::optional<std::string> parse_expression(std::string_view text, DType dtype,
                                                   Expression& to) {
  to = {};
  return detail::ExpressionReader(text, static_cast<ValueType>(dtype), to).read();
}

/// The bits of a number converted to `type` as PyTorch converts it: integers wrap around. `type`
/// must not be narrow. Returns nullopt for a number outside the range of 64-bit integers.
inline std::optional<uint64_t> bits_of_number(double number, ValueType type) {
  if (type == ValueType::float64) return std::bit_cast<uint64_t>(number);
  if (type == ValueType::float32) return std::bit_cast<uint32_t>(static_cast<float>(number));
  if (type == ValueType::boolean) return number != 0 ? 1 : 0;
  if (!(number >= -0x1p63 && number < 0x1p63)) return std::nullopt;
  const int bits = 8 * kValueTypes[static_cast<int>(type)].bytes;
  return static_cast<uint64_t>(static_cast<int64_t>(number)) & (~0ull >> (64 - bits));
}

/// The FNV-1a hash of a text for descriptors, which is the same in every process.
constexpr uint64_t hash_of_text(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

}  // namespace collx
