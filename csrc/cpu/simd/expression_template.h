// The interpreter of expressions. Part of the templates that are compiled once for each level of
// vector instructions: see reduce_template.h.

#include "expression_plan_template.h"

namespace collx::cpu::COLLX_SIMD_LEVEL {

/// The output of a loop may be one of its inputs, element by element. There are no other overlaps.
#define COLLX_APART _Pragma("GCC ivdep")

class Evaluation : Plan {
 public:
  Evaluation(const Expression& expression, const Line& line, Lanes& lanes)
      : Plan(expression, line, lanes),
        operands_(static_cast<size_t>(2 + expression.extras + expression.indices)) {
    std::copy_n(line.data, operands_, data_);
  }

  void run() {
    // If all values stay in registers from load to store, no lanes are needed, and the length is
    // not limited.
    const auto& places = lanes_.places;
    const bool in_lanes = std::any_of(places.begin(), places.end(), [](auto* p) { return p; });
    const int64_t most = in_lanes ? kLanes : line_.count;
    for (int64_t row = 0;;) {
      read_uniform();
      for (at_ = 0; at_ < line_.count; at_ += most) {
        count_ = std::min(most, line_.count - at_);
        // If elements are in even/odd order, the elements of a partial tile are not its first
        // lanes.
        n_ = paired_ ? (count_ + kTile - 1) / kTile * kTile : count_;
        for (const Part& part : lanes_.parts) carry_out(part);
        if (stores_) store();
      }
      if (++row == line_.rows) return;
      for (size_t i = 0; i < operands_; ++i) data_[i] += line_.strides[operands_ + i];
    }
  }

 private:
  void read_uniform() {
    for (Step& step : lanes_.steps) {
      if (step.form != Form::uniform || !step.in_line()) continue;
      with_type(statement(step.statement).type, [&](auto type) {
        Stored<type.value> value;
        std::memcpy(&value, data_[step.line], sizeof(value));
        step.uniform = static_cast<float>(loaded<type.value>(value));
      });
    }
  }

  void carry_out(const Part& part) {
    if (part.statement != kNone) return compute(part.statement);
    Step* const first = lanes_.steps.data() + part.first_step;
    Step* const last = lanes_.steps.data() + part.last_step;
    for (Step* s = first; s != last; ++s) {
      if (s->in_line()) s->at = data_[s->line] + at_ * s->bytes();
    }
    const int64_t whole = count_ / kTile * kTile;
    run_tiles(first, last, 0, whole);
    if (whole < count_) run_rest(first, last, whole);
  }

  /// Processes fewer elements than a tile, through a full tile in the lanes.
  void run_rest(Step* first, Step* last, int64_t from) {
    const auto each_in_line = [&](auto copy) {
      for (Step* s = first; s != last; ++s) {
        if (!s->in_line() || s->form == Form::uniform) continue;
        const int64_t bytes = s->bytes();
        copy(*s, lanes_.rest_of(s->statement), data_[s->line] + (at_ + from) * bytes,
             static_cast<size_t>((count_ - from) * bytes));
        s->at = lanes_.rest_of(s->statement) - from * bytes;
      }
    };
    each_in_line([](const Step& s, char* room, const char* there, size_t bytes) {
      if (s.act != Act::put) std::memcpy(room, there, bytes);
    });
    run_tiles(first, last, from, from + kTile);
    each_in_line([](const Step& s, const char* room, char* there, size_t bytes) {
      if (s.act == Act::put) std::memcpy(there, room, bytes);
    });
  }

  void compute(size_t k) {
    const Statement& s = expression_.statements[k];
    switch (s.what) {
      case Do::value: return load(k, s.type, 1);
      case Do::extra: return load(k, s.type, 2 + s.number);
      case Do::index:
        return load(k, s.type, 2 + static_cast<uint64_t>(expression_.extras) + s.number);
      case Do::cast: return cast(k, s);
      default: break;
    }
    switch (kDo[static_cast<int>(s.what)].takes) {
      case Takes::compared:
        return with_type(type_of(s, 0), [&](auto type) { compare<Lane<type.value>>(k, s); });
      case Takes::real:
        return s.type == ValueType::float32 ? real<float>(k, s) : real<double>(k, s);
      case Takes::bools:
      case Takes::one_bool: return logic(k, s);
      case Takes::choice:
        return with_type(s.type, [&](auto type) { choose<Lane<type.value>>(k, s); });
      default:
        return with_type(s.type, [&](auto type) {
          if constexpr (type.value != ValueType::boolean) arithmetic<Lane<type.value>>(k, s);
        });
    }
  }

  template <typename T>
  const T* operand(const Statement& s, int i) {
    return static_cast<const T*>(lanes_.places[root(s, i)]);
  }
  /// The destination of a statement's values: for the last statement, the result.
  template <typename T>
  T* made(size_t k) {
    T* to = lanes_.of<T>(k);
    if (k == last_ && in_place_) {
      to = reinterpret_cast<T*>(data_[0] + at_ * static_cast<int64_t>(sizeof(T)));
    }
    lanes_.places[k] = to;
    return to;
  }

  void load(size_t k, ValueType type, uint64_t from) {
    with_type(type, [&](auto type) {
      using M = Stored<type.value>;
      const int64_t stride = line_.strides[from];
      const char* data = data_[from] + at_ * stride;
      if (std::is_same_v<M, Lane<type.value>> && stride == sizeof(M)) {
        lanes_.places[k] = data;
        return;
      }
      auto* to = made<Lane<type.value>>(k);
      const auto take = [&](int64_t step) {
        COLLX_APART
        for (int64_t i = 0; i < n_; ++i) {
          to[i] = loaded<type.value>(*reinterpret_cast<const M*>(data + i * step));
        }
      };
      stride == sizeof(M) ? take(sizeof(M)) : take(stride);
    });
  }

  void store() {
    with_type(expression_.result(), [&](auto type) {
      using M = Stored<type.value>;
      const auto* from = static_cast<const Lane<type.value>*>(lanes_.places[stored_]);
      const int64_t stride = line_.strides[0];
      char* data = data_[0] + at_ * stride;
      const auto put = [&](int64_t step) {
        COLLX_APART
        for (int64_t i = 0; i < n_; ++i) {
          *reinterpret_cast<M*>(data + i * step) = stored<type.value>(from[i]);
        }
      };
      stride == sizeof(M) ? put(sizeof(M)) : put(stride);
    });
  }

  void cast(size_t k, const Statement& s) {
    with_type(type_of(s, 0), [&](auto from) {
      with_type(s.type, [&](auto to) {
        using To = Lane<to.value>;
        const auto* x = operand<Lane<from.value>>(s, 0);
        To* y = made<To>(k);
        COLLX_APART
        for (int64_t i = 0; i < n_; ++i) y[i] = converted<To, to.value>(x[i]);
      });
    });
  }

  template <typename T, typename F>
  void each(size_t k, const Statement& s, F f) {
    const T* a = operand<T>(s, 0);
    const T* b = operand<T>(s, 1);
    if (b == nullptr) b = a;  // f ignores it
    auto* y = made<std::invoke_result_t<F, T, T>>(k);
    COLLX_APART
    for (int64_t i = 0; i < n_; ++i) y[i] = f(a[i], b[i]);
  }

  template <typename T>
  void arithmetic(size_t k, const Statement& s) {
    if (s.what == Do::floor_divide || s.what == Do::remainder) {
      if constexpr (std::is_integral_v<T>) divide<T>(k, s);
      return;
    }
    with_function(s.what, false, [&](auto f) { each<T>(k, s, f); });
  }

  /// Divides by a positive number and rounds toward minus infinity.
  template <typename T>
  void divide(size_t k, const Statement& s) {
    const bool quotient = s.what == Do::floor_divide;
    each<T>(k, s, [quotient](T a, T b) {
      const T rest = static_cast<T>(a % b), up = static_cast<T>(rest < 0 ? 1 : 0);
      return static_cast<T>(quotient ? a / b - up : rest + up * b);
    });
  }

  template <typename T>
  void compare(size_t k, const Statement& s) {
    switch (s.what) {
      case Do::lt: return each<T>(k, s, [](T a, T b) { return a < b; });
      case Do::le: return each<T>(k, s, [](T a, T b) { return a <= b; });
      case Do::gt: return each<T>(k, s, [](T a, T b) { return a > b; });
      case Do::ge: return each<T>(k, s, [](T a, T b) { return a >= b; });
      case Do::eq: return each<T>(k, s, [](T a, T b) { return a == b; });
      default: return each<T>(k, s, [](T a, T b) { return a != b; });
    }
  }

  void logic(size_t k, const Statement& s) {
    switch (s.what) {
      case Do::land: return each<bool>(k, s, [](bool a, bool b) { return a && b; });
      case Do::lor: return each<bool>(k, s, [](bool a, bool b) { return a || b; });
      case Do::lxor: return each<bool>(k, s, [](bool a, bool b) { return a != b; });
      default: return each<bool>(k, s, [](bool a, bool) { return !a; });
    }
  }

  template <typename T>
  void choose(size_t k, const Statement& s) {
    const bool* which = operand<bool>(s, 0);
    const T* a = operand<T>(s, 1);
    const T* b = operand<T>(s, 2);
    T* y = made<T>(k);
    COLLX_APART
    for (int64_t i = 0; i < n_; ++i) y[i] = which[i] ? a[i] : b[i];
  }

  template <typename T>
  void real(size_t k, const Statement& s) {
    const T* x = operand<T>(s, 0);
    T* y = made<T>(k);
    const auto each = [&](auto f) {
      COLLX_APART
      for (int64_t i = 0; i < n_; ++i) y[i] = static_cast<T>(f(x[i]));
    };
    const Do what = s.what;
    if (what == Do::sqrt) return each([](T v) { return std::sqrt(v); });  // rounded once
    if (what == Do::rsqrt) return each([](double v) { return 1.0 / std::sqrt(v); });
    if (sizeof(T) == sizeof(double)) {
      return each([what](double v) { return real_function(what, v); });
    }
    switch (what) {
      case Do::exp: return each([](double v) { return exponential(v); });
      case Do::sigmoid: return each([](double v) { return logistic(v); });
      case Do::silu: return each([](double v) { return v * logistic(v); });
      case Do::tanh: return each([](double v) { return hyperbolic_tangent(v); });
      default: return each([what](double v) { return real_function(what, v); });
    }
  }

  const size_t operands_;
  char* data_[2 + 2 * kMostLeaves];  // of the operands, in the current row
  int64_t at_ = 0;
  int64_t count_ = 0;  // elements from there on
  int64_t n_ = 0;      // lanes
};

// One source includes it at each level.  NOLINTNEXTLINE(misc-definitions-in-headers)
void evaluate(const Expression& expression, const Line& line) {
  static thread_local Lanes lanes;
  Evaluation(expression, line, lanes).run();
}

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
