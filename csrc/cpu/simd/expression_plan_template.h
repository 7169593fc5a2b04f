// The plan for an expression: the order of execution, by runs of steps where possible, otherwise
// statement by statement. Part of the templates that are compiled once for each level of vector
// instructions: see reduce_template.h.

#include "expression_runs_template.h"

namespace collx::cpu::COLLX_SIMD_LEVEL {

/// The number of elements that are processed at a time. The values of a few statements for them fit
/// the L1 cache, and they amortize the dispatch of a statement.
constexpr int64_t kLanes = 512;
static_assert(kLanes % kTile == 0);

constexpr size_t kNone = SIZE_MAX;

/// The unit of execution: a statement or a run.
struct Part {
  size_t statement = kNone;
  size_t first_step = 0, last_step = 0;
};

/// Storage for the values of every statement and for the plan. It is kept for later calls.
struct Lanes {
  struct alignas(64) Values {
    char bytes[kLanes * sizeof(uint64_t)];
  };

  template <typename T>
  T* of(size_t statement) {
    return reinterpret_cast<T*>(memory[statement].bytes);
  }
  /// For elements that do not fill a tile. It is located after the floats.
  char* rest_of(size_t statement) { return of<char>(statement) + kLanes * sizeof(float); }
  void reserve(size_t statements) {
    if (statements > held) memory = std::make_unique<Values[]>(held = statements);
    places.assign(statements, nullptr);
    roots.assign(statements, 0);
    uses.assign(statements, 0);
    steps.clear();
    parts.clear();
  }

  std::unique_ptr<Values[]> memory;
  size_t held = 0;
  std::vector<const void*> places;  // of values; null if they are only in registers
  std::vector<size_t> roots;        // the statement whose values a cast keeps unchanged, or itself
  std::vector<int> uses;            // number of uses of its values
  std::vector<Step> steps;
  std::vector<Part> parts;
};

/// A run consists of float32 statements that each use the result of the previous one. It also reads
/// their operands and rounds the result. Values that other statements use, and operands that a run
/// cannot read directly, go through the lanes.
class Plan {
 protected:
  Plan(const Expression& expression, const Line& line, Lanes& lanes)
      : expression_(expression),
        line_(line),
        lanes_(lanes),
        last_(expression.statements.size() - 1) {
    lanes.reserve(expression.statements.size());
    const Statement& s = statement(last_);
    rounds_ = s.what == Do::cast && is_narrow(s.type) && is_float(type_of(s, 0));
    in_place_ = kDo[static_cast<int>(s.what)].takes != Takes::leaf && !is_kept(s) &&
                !is_narrow(s.type) && line.strides[0] == bytes_of(s.type);
    find_order();
    count_uses();
    plan();
  }

  const Statement& statement(size_t k) const { return expression_.statements[k]; }
  ValueType type_of(const Statement& s, int operand) const {
    return statement(s.operands[operand]).type;
  }
  size_t root(const Statement& s, int operand) const { return lanes_.roots[s.operands[operand]]; }
  static int64_t bytes_of(ValueType type) { return kValueTypes[static_cast<int>(type)].bytes; }
  static bool is_float(ValueType type) { return is_narrow(type) || type == ValueType::float32; }
  /// A cast that does not change the value in its lane type.
  bool is_kept(const Statement& s) const {
    if (s.what != Do::cast) return false;
    return type_of(s, 0) == s.type || (s.type == ValueType::float32 && is_narrow(type_of(s, 0)));
  }
  /// A float operand that needs no computation.
  static bool is_source(const Statement& s) {
    return is_float(s.type) && kDo[static_cast<int>(s.what)].takes == Takes::leaf;
  }
  /// Whether the statement is a step of a run.
  bool runs(const Statement& s) const {
    if (s.what == Do::cast) return is_narrow(s.type) && is_float(type_of(s, 0));
    const Takes takes = kDo[static_cast<int>(s.what)].takes;
    return s.type == ValueType::float32 &&
           (takes == Takes::numbers || takes == Takes::number || takes == Takes::floats);
  }
  static size_t operand_of_line(const Statement& s) {
    return s.what == Do::value ? 1 : 2 + static_cast<size_t>(s.number);
  }

 private:
  /// Some formats split a vector into its even and odd elements. If all operands are in that order,
  /// the vectors can be used as they are.
  void find_order() {
    const ValueType type = expression_.result();
    paired_ = is_narrow(type) && line_.strides[0] == bytes_of(type) && expression_.indices == 0;
    for (const Statement& s : expression_.statements) {
      if (s.what != Do::value && s.what != Do::extra) continue;
      const int64_t stride = line_.strides[operand_of_line(s)];
      paired_ = paired_ && s.type == type && (stride == 0 || stride == bytes_of(type));
    }
  }
  /// The form in which a run reads or writes vectors of the type, or Form::none.
  Form form_of(ValueType type, int64_t stride) const {
    if (stride != bytes_of(type)) return Form::none;
    if (type == ValueType::float32) return Form::wide;
    if (type == ValueType::bfloat16 && (paired_ || !BFloat16::kEvenOdd)) return Form::bfloat16;
    if (type == ValueType::float16 && (paired_ || !Float16::kEvenOdd)) return Form::float16;
    return Form::none;
  }

  void count_uses() {
    for (size_t k = 0; k <= last_; ++k) {
      const Statement& s = statement(k);
      lanes_.roots[k] = is_kept(s) ? root(s, 0) : k;
      const int operands = is_kept(s) ? 0 : operands_of(s.what);
      for (int i = 0; i < operands; ++i) ++lanes_.uses[root(s, i)];
    }
    stored_ = rounds_ ? root(statement(last_), 0) : lanes_.roots[last_];
    ++lanes_.uses[stored_];
  }

  void plan() {
    const size_t end = rounds_ ? last_ : last_ + 1;
    for (size_t k = 0; k < end; ++k) {
      const Statement& s = statement(k);
      if (is_kept(s) || is_source(s) || s.what == Do::constant) continue;
      if (runs(s)) {
        extend(k, s);
        continue;
      }
      close();
      for (int i = 0; i < operands_of(s.what); ++i) into_lanes(root(s, i));
      lanes_.parts.push_back({k});
      lanes_.places[k] = lanes_.of<char>(k);
    }
    finish();
  }

  void extend(size_t k, const Statement& s) {
    const bool two = operands_of(s.what) == 2;
    Step step{.act = Act::compute, .what = s.what};
    if (s.what == Do::cast) {
      step.act = Act::round;
      step.form = s.type == ValueType::bfloat16 ? Form::bfloat16 : Form::float16;
    }
    const size_t first = root(s, 0), second = two ? root(s, 1) : first;
    if (open_ != kNone && (open_ == first || open_ == second)) {
      if (lanes_.uses[open_] > 1) put_into_lanes();
      step.swapped = open_ != first;
    } else {
      close();
      open_ = first;
      take(first);
    }
    if (two) set_source(step, step.swapped ? first : second);
    lanes_.steps.push_back(step);
    open_ = k;
  }

  void take(size_t k) {
    Step step{.act = Act::take};
    set_source(step, k);
    lanes_.steps.push_back(step);
  }
  void put_into_lanes() {
    if (lanes_.places[open_] != nullptr) return;
    lanes_.places[open_] = lanes_.of<char>(open_);
    lanes_.steps.push_back({.act = Act::put, .form = Form::wide, .at = lanes_.of<char>(open_)});
  }
  void end_run() {
    lanes_.parts.push_back({kNone, first_step_, lanes_.steps.size()});
    first_step_ = lanes_.steps.size();
    open_ = kNone;
  }
  void close() {
    if (open_ == kNone) return;
    put_into_lanes();
    end_run();
  }

  /// Sets the location of a step's operand.
  void set_source(Step& step, size_t k) {
    const Statement& s = statement(k);
    step.statement = static_cast<uint16_t>(k);
    if (s.what == Do::constant) {
      step.form = Form::uniform;
      std::memcpy(&step.uniform, &s.number, sizeof(float));  // the low bytes, which come first
      return;
    }
    if (is_source(s) && (lanes_.places[k] == nullptr || s.type == ValueType::float32)) {
      const size_t operand = operand_of_line(s);
      const int64_t stride = line_.strides[operand];
      step.form = stride == 0 ? Form::uniform : form_of(s.type, stride);
      step.line = static_cast<int16_t>(operand);
      if (step.form != Form::none) return;
      step.line = -1;
      into_lanes(k);
    }
    step.form = Form::wide;
    step.at = lanes_.of<char>(k);
  }

  void fill(size_t k, const Statement& s) {
    with_type(s.type, [&](auto type) {
      using T = Lane<type.value>;
      T value;
      std::memcpy(&value, &s.number, sizeof(T));  // the low bytes, which come first
      std::fill_n(lanes_.of<T>(k), kLanes, value);
    });
    lanes_.places[k] = lanes_.of<char>(k);
  }

  /// Called between runs.
  void into_lanes(size_t k) {
    if (lanes_.places[k] != nullptr) return;
    const Statement& s = statement(k);
    if (s.what == Do::constant) {
      fill(k, s);
      return;
    }
    const int64_t stride = line_.strides[operand_of_line(s)];
    if (is_narrow(s.type) && (stride == 0 || form_of(s.type, stride) != Form::none)) {
      take(k);
      open_ = k;
      return close();
    }
    lanes_.parts.push_back({k});
    lanes_.places[k] = lanes_.of<char>(k);
  }

  /// Stores the values of the last statement to the result, unless they are already there.
  void finish() {
    const ValueType type = expression_.result();
    const Form form = is_float(type) ? form_of(type, line_.strides[0]) : Form::none;
    const bool made = in_place_ && !runs(statement(last_));
    if (form == Form::none || made) {
      close();
      into_lanes(stored_);
      stores_ = !made;
      return;
    }
    if (open_ != stored_) {
      close();
      take(stored_);
    }
    lanes_.steps.push_back(
        {.act = Act::put, .form = form, .line = 0, .statement = static_cast<uint16_t>(last_)});
    end_run();
  }

 protected:
  const Expression& expression_;
  const Line& line_;
  Lanes& lanes_;
  const size_t last_;    // the last statement
  size_t stored_ = 0;    // the statement whose values are the result
  bool rounds_ = false;  // the last statement is only the rounding of the result when it is stored
  bool in_place_ = false;  // the last statement writes directly to the result
  bool stores_ = false;    // a separate store is required
  bool paired_ = false;    // vectors of narrow types are used in their even/odd order

 private:
  size_t open_ = kNone;    // the last statement of the current run
  size_t first_step_ = 0;  // of the current run
};

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
