// The interpreter of expressions. Part of the templates that are compiled once for each level of
// vector instructions: see reduce_template.h.

#include "expression_values_template.h"

namespace collx::cpu::COLLX_SIMD_LEVEL {

/// Elements at a time: what a few statements make of them stays in the first cache, and they are
/// many beside what it takes to find out what a statement does.
constexpr int64_t kLanes = 512;

/// What a loop writes may be what it reads, element by element, but nothing else.
#define COLLX_APART _Pragma("GCC ivdep")

/// Room for the values of every statement, and where they are.
class Lanes {
 public:
  template <typename T>
  T* of(size_t statement) {
    return reinterpret_cast<T*>(memory_.get() + statement * kLanes);
  }
  const void*& place(size_t statement) { return places_[statement]; }
  void reserve(size_t statements) {
    if (statements <= held_) return;
    memory_ = std::make_unique<uint64_t[]>(statements * kLanes);
    places_ = std::make_unique<const void*[]>(statements);
    held_ = statements;
  }

 private:
  std::unique_ptr<uint64_t[]> memory_;
  std::unique_ptr<const void*[]> places_;
  size_t held_ = 0;
};

class Evaluation {
 public:
  Evaluation(const Expression& expression, const Line& line, Lanes& lanes)
      : expression_(expression),
        line_(line),
        lanes_(lanes),
        last_(expression.statements.size() - 1),
        computed_(expression.statements.size()),
        stored_(last_) {
    lanes.reserve(expression.statements.size());
    for (size_t k = 0; k <= last_; ++k) {
      const Statement& s = expression.statements[k];
      if (s.what == Do::constant) fill(k, s);
    }
    const Statement& s = expression.statements[last_];
    if (s.what == Do::cast && is_narrow(s.type) && is_float(type_of(s, 0))) {
      // It is rounded when it is stored.
      computed_ = last_;
      stored_ = s.operands[0];
    }
    const bool made = kDo[static_cast<int>(s.what)].takes != Takes::leaf && !is_kept(s);
    in_place_ = made && !is_narrow(s.type) && line.strides[0] == bytes_of(s.type);
  }

  void run() {
    for (at_ = 0; at_ < line_.count; at_ += kLanes) {
      n_ = std::min(kLanes, line_.count - at_);
      for (size_t k = 0; k < computed_; ++k) step(k);
      if (!in_place_) store();
    }
  }

 private:
  void fill(size_t k, const Statement& s) {
    with_type(s.type, [&](auto type) {
      using T = Lane<type.value>;
      T value;
      std::memcpy(&value, &s.number, sizeof(T));  // the low bytes, which stand first
      std::fill_n(made<T>(k), kLanes, value);
    });
  }

  void step(size_t k) {
    const Statement& s = expression_.statements[k];
    switch (s.what) {
      case Do::constant:
        return;
      case Do::value:
        return load(k, s.type, 1);
      case Do::extra:
        return load(k, s.type, 2 + s.number);
      case Do::index:
        return load(k, s.type, 2 + static_cast<uint64_t>(expression_.extras) + s.number);
      case Do::cast:
        if (is_kept(s)) {
          lanes_.place(k) = lanes_.place(s.operands[0]);
          return;
        }
        return cast(k, s);
      default:
        break;
    }
    switch (kDo[static_cast<int>(s.what)].takes) {
      case Takes::compared:
        return with_type(type_of(s, 0), [&](auto type) { compare<Lane<type.value>>(k, s); });
      case Takes::real:
        return s.type == ValueType::float32 ? real<float>(k, s) : real<double>(k, s);
      case Takes::bools:
      case Takes::one_bool:
        return logic(k, s);
      case Takes::choice:
        return with_type(s.type, [&](auto type) { choose<Lane<type.value>>(k, s); });
      default:
        return with_type(s.type, [&](auto type) {
          if constexpr (type.value != ValueType::boolean) arithmetic<Lane<type.value>>(k, s);
        });
    }
  }

  ValueType type_of(const Statement& s, int operand) const {
    return expression_.statements[s.operands[operand]].type;
  }
  static int64_t bytes_of(ValueType type) { return kValueTypes[static_cast<int>(type)].bytes; }
  static bool is_float(ValueType type) { return is_narrow(type) || type == ValueType::float32; }
  /// A cast that changes nothing of what is kept.
  bool is_kept(const Statement& s) const {
    if (s.what != Do::cast) return false;
    return type_of(s, 0) == s.type || (s.type == ValueType::float32 && is_narrow(type_of(s, 0)));
  }

  template <typename T>
  const T* operand(const Statement& s, int i) {
    return static_cast<const T*>(lanes_.place(s.operands[i]));
  }
  /// Where a statement's values are to be: the last one's, where the result is.
  template <typename T>
  T* made(size_t k) {
    T* to = lanes_.of<T>(k);
    if (k == last_ && in_place_) {
      to = reinterpret_cast<T*>(line_.data[0] + at_ * static_cast<int64_t>(sizeof(T)));
    }
    lanes_.place(k) = to;
    return to;
  }

  void load(size_t k, ValueType type, uint64_t from) {
    with_type(type, [&](auto type) {
      using M = Stored<type.value>;
      const int64_t stride = line_.strides[from];
      const char* data = line_.data[from] + at_ * stride;
      if (std::is_same_v<M, Lane<type.value>> && stride == sizeof(M)) {
        lanes_.place(k) = data;
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
      const auto* from = static_cast<const Lane<type.value>*>(lanes_.place(stored_));
      const int64_t stride = line_.strides[0];
      char* data = line_.data[0] + at_ * stride;
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
    auto* y = made<std::invoke_result_t<F, T, T>>(k);
    COLLX_APART
    for (int64_t i = 0; i < n_; ++i) y[i] = f(a[i], b[i]);
  }

  template <typename T>
  void arithmetic(size_t k, const Statement& s) {
    const auto wrap = [&](auto f) { each<T>(k, s, [f](T a, T b) { return wrapped(a, b, f); }); };
    switch (s.what) {
      case Do::add:
        return wrap([](auto a, auto b) { return a + b; });
      case Do::sub:
        return wrap([](auto a, auto b) { return a - b; });
      case Do::mul:
        return wrap([](auto a, auto b) { return a * b; });
      case Do::div:
        if constexpr (std::is_floating_point_v<T>)
          each<T>(k, s, [](T a, T b) -> T { return a / b; });
        return;
      case Do::neg:
        return each<T>(k, s, [](T a, T) {
          if constexpr (std::is_floating_point_v<T>) return -a;
          return wrapped(T{0}, a, [](auto zero, auto x) { return zero - x; });
        });
      case Do::abs:
        return each<T>(k, s, [](T a, T) {
          if constexpr (std::is_floating_point_v<T>) return std::abs(a);
          return a < T{0} ? wrapped(T{0}, a, [](auto zero, auto x) { return zero - x; }) : a;
        });
      case Do::minimum:
      case Do::clamp_max:
        return each<T>(k, s, least<T>);
      case Do::maximum:
      case Do::clamp_min:
        return each<T>(k, s, most<T>);
      case Do::relu:
        return each<T>(k, s, [](T a, T) { return most(a, T{0}); });
      case Do::floor_divide:
      case Do::remainder:
        if constexpr (std::is_integral_v<T>) divide<T>(k, s);
        return;
      default:
        return;
    }
  }

  /// By a positive number, towards minus infinity.
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
      case Do::lt:
        return each<T>(k, s, [](T a, T b) { return a < b; });
      case Do::le:
        return each<T>(k, s, [](T a, T b) { return a <= b; });
      case Do::gt:
        return each<T>(k, s, [](T a, T b) { return a > b; });
      case Do::ge:
        return each<T>(k, s, [](T a, T b) { return a >= b; });
      case Do::eq:
        return each<T>(k, s, [](T a, T b) { return a == b; });
      default:
        return each<T>(k, s, [](T a, T b) { return a != b; });
    }
  }

  void logic(size_t k, const Statement& s) {
    switch (s.what) {
      case Do::land:
        return each<bool>(k, s, [](bool a, bool b) { return a && b; });
      case Do::lor:
        return each<bool>(k, s, [](bool a, bool b) { return a || b; });
      case Do::lxor:
        return each<bool>(k, s, [](bool a, bool b) { return a != b; });
      default:
        return each<bool>(k, s, [](bool a, bool) { return !a; });
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
    if (what == Do::sqrt) return each([](T v) { return std::sqrt(v); });  // once rounded
    if (what == Do::rsqrt) return each([](double v) { return 1.0 / std::sqrt(v); });
    if (sizeof(T) == sizeof(double)) {
      return each([what](double v) { return real_function(what, v); });
    }
    switch (what) {
      case Do::exp:
        return each([](double v) { return exponential(v); });
      case Do::sigmoid:
        return each([](double v) { return logistic(v); });
      case Do::silu:
        return each([](double v) { return v * logistic(v); });
      case Do::tanh:
        return each([](double v) { return hyperbolic_tangent(v); });
      default:
        return each([what](double v) { return real_function(what, v); });
    }
  }

  const Expression& expression_;
  const Line& line_;
  Lanes& lanes_;
  const size_t last_;  // statement
  size_t computed_;    // statements that are taken one by one
  size_t stored_;      // the one whose values are stored
  bool in_place_;      // where the result is, the last one puts them itself
  int64_t at_ = 0;
  int64_t n_ = 0;
};

inline void evaluate(const Expression& expression, const Line& line) {
  static thread_local Lanes lanes;
  Evaluation(expression, line, lanes).run();
}

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
