// Generates the CUDA source of a kernel whose epilogue is a given expression. The source is built
// from the parsed expression, so that it contains only names from the tables here and numbers, and
// no text of the user.
#pragma once

#include <cstdio>
#include <string>

#include "expression.h"
#include "norm.h"

namespace collx {

/// The kernel template NAME_kernel in cuda/collectives/NAME.cuh.
struct KernelTemplate {
  std::string_view name;
  bool simple = false;     // has a version for simple calls, see transports/session.cuh
  bool worlds = true;      // has a version for each world size
  bool rows = false;       // normalizes rows
  bool multicast = false;  // has a version for each policy of transports/multicast.cuh

  friend bool operator==(const KernelTemplate&, const KernelTemplate&) = default;
};

/// The additional arguments of the template. `world`: 2, 4 or 8, or 0 for any.
struct ProgramOptions {
  KernelTemplate kernel;
  int world = 0;
  bool simple = false;
  bool simulated = false;
  NormForm form = {};  // only for templates that normalize rows
  EpilogueForm epilogue = {};

  friend bool operator==(const ProgramOptions&, const ProgramOptions&) = default;
};

namespace detail {

inline std::string type_in_program(ValueType type) {
  return std::string("ValueType::") +
         (type == ValueType::boolean ? "boolean" : kValueTypes[static_cast<int>(type)].name);
}

inline const char* name_in_program(Do what) {
  switch (what) {  // "and" is a keyword of C++
    case Do::land: return "land";
    case Do::lor: return "lor";
    case Do::lxor: return "lxor";
    case Do::lnot: return "lnot";
    default: return kDo[static_cast<int>(what)].name;
  }
}

/// `numbers`: how many numbers of the call precede the statement.
inline std::string statement_in_program(const Statement& s, int& numbers) {
  const auto number = std::to_string(s.number);
  char bits[24];
  switch (s.what) {
    case Do::value: return "value";
    case Do::extra: return "extras[" + number + "]";
    case Do::index: return "coordinates[" + number + "]";
    case Do::constant:
      std::snprintf(bits, sizeof(bits), "0x%llxull", static_cast<unsigned long long>(s.number));
      return "values::constant<" + type_in_program(s.type) + ">(" + bits + ")";
    case Do::number:
      return "values::constant<" + type_in_program(s.type) + ">(arguments.number[" +
             std::to_string(numbers++) + "])";
    default: break;
  }
  std::string call =
      std::string("values::") + name_in_program(s.what) + "<" + type_in_program(s.type) + ">(";
  for (int i = 0; i < operands_of(s.what); ++i) {
    call += (i > 0 ? ", v" : "v") + std::to_string(s.operands[i]);
  }
  return call + ")";
}

/// Converts an element in the kernel's arithmetic type to a value of its dtype.
inline std::string leaf(const char* from, DType dtype) {
  return "static_cast<values::Kept<" + type_in_program(static_cast<ValueType>(dtype)) + ">>(" +
         from + ")";
}

inline const char* word(bool is) { return is ? "true" : "false"; }

inline std::string form_in_program(const EpilogueForm& form, int extras) {
  std::string text = std::string("{") + word(form.whole) + ", " + word(form.keeps) + ", {";
  for (int x = 0; form.whole && x < extras; ++x) {
    text += std::string("{Lies::") + (form.extra[x].lies == Lies::same ? "same" : "vectors") +
            ", " + std::to_string(form.extra[x].dims) + "}, ";
  }
  return text + "}}";
}

/// The argument type of the kernel: EpilogueArguments, or its leading members only.
inline std::string arguments_in_program(const Expression& expression) {
  if (expression.indices > 0 || expression.numbers > 0) return "collx::EpilogueArguments";
  return "collx::ExtraArguments<" + std::to_string(expression.extras) + ">";
}

/// Whether the last statement rounds a float32 to 16 bits, which can process several elements at
/// once.
inline bool rounds_last(const Expression& expression) {
  const Statement& last = expression.statements.back();
  return last.what == Do::cast && is_narrow(last.type) &&
         expression.statements[last.operands[0]].type == ValueType::float32;
}

}  // namespace detail

inline std::string epilogue_program(const Expression& expression, DType dtype,
                                    const ProgramOptions& options) {
  const std::string name(options.kernel.name);
  std::string p = "#include \"cuda/collectives/" + name + ".cuh\"\n#include \"cuda/stages/" +
                  (options.kernel.rows ? "map_rows" : "map") + ".cuh\"\n";
  p += "namespace collx::cuda {\nstruct Expression {\n";
  p += "  using Arguments = " + detail::arguments_in_program(expression) + ";\n";
  p += std::string("  static constexpr DType kDType = DType::") +
       kValueTypes[static_cast<int>(dtype)].name + ";\n";
  p += "  static constexpr ValueType kResult = " + detail::type_in_program(expression.result()) +
       ";\n";
  if (options.kernel.rows) {
    p += std::string("  static constexpr NormForm kForm = {") + detail::word(options.form.layer) +
         ", " + detail::word(options.form.groups) + ", " + detail::word(options.form.steps) +
         "};\n";
  }
  p += "  static constexpr EpilogueForm kEpilogueForm = " +
       detail::form_in_program(options.epilogue, expression.extras) + ";\n";
  p += "  static constexpr int kExtras = " + std::to_string(expression.extras) + ";\n";
  p += "  static constexpr int kCoordinates = " + std::to_string(expression.indices) + ";\n";
  p += "  template <typename Acc, typename Coordinates>\n"
       "  static __device__ __forceinline__ auto apply(Acc value, const Acc* extras,\n"
       "                                               const Coordinates& coordinates,\n"
       "                                               const Arguments& arguments) {\n";
  int numbers = 0;
  for (size_t k = 0; k < expression.statements.size(); ++k) {
    const Statement& s = expression.statements[k];
    const std::string made = detail::statement_in_program(s, numbers);
    const bool leaf = s.what == Do::value || s.what == Do::extra;
    p += "    const auto v" + std::to_string(k) + " = " +
         (leaf ? detail::leaf(made.c_str(), dtype) : made) + ";\n";
  }
  const bool rounds = !options.kernel.rows && detail::rounds_last(expression);
  const Statement& last = expression.statements.back();
  const size_t result = rounds ? last.operands[0] : expression.statements.size() - 1;
  p += "    return v" + std::to_string(result) + ";\n  }\n";
  p += std::string("  static constexpr bool kRounded = ") + detail::word(!rounds) + ";\n};\n}\n";
  return p;
}

/// The C++ name expression of the kernel in that program.
inline std::string kernel_in_program(const Expression& expression, const ProgramOptions& options) {
  std::string name = "collx::cuda::" + std::string(options.kernel.name) +
                     "_kernel<collx::cuda::" + (options.kernel.rows ? "MapRows" : "Map") +
                     "<collx::cuda::Expression>";
  if (options.kernel.worlds) name += ", " + std::to_string(options.world);
  if (options.kernel.multicast) {
    name += options.simulated ? ", collx::cuda::Simulated" : ", collx::cuda::Switch";
  }
  if (options.kernel.simple) name += options.simple ? ", true" : ", false";
  return name + ", " + detail::arguments_in_program(expression) + ">";
}

}  // namespace collx
