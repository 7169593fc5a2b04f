// Arguments of a kernel with an epilogue besides its call: the layout of extra tensors, the
// coordinates of elements, and the types of values.
#pragma once

#include "cuda_layout.h"
#include "types.h"

namespace collx {

/// Types of values. The first ones are those of DType, in the same order. A 16-bit float is held in
/// a float32 that has been rounded.
enum class ValueType : uint8_t {
  float32,
  float16,
  bfloat16,
  float64,
  int32,
  int64,
  int8,
  uint8,
  int16,
  boolean,
  count
};

struct ValueTypeRow {
  ValueType type;
  const char* name;
  int bytes;
};
inline constexpr ValueTypeRow kValueTypes[] = {
    {ValueType::float32, "float32", 4},   {ValueType::float16, "float16", 2},
    {ValueType::bfloat16, "bfloat16", 2}, {ValueType::float64, "float64", 8},
    {ValueType::int32, "int32", 4},       {ValueType::int64, "int64", 8},
    {ValueType::int8, "int8", 1},         {ValueType::uint8, "uint8", 1},
    {ValueType::int16, "int16", 2},       {ValueType::boolean, "bool", 1},
};
static_assert(stand_at_their_values(kValueTypes, &ValueTypeRow::type));

COLLX_HD constexpr bool is_narrow(ValueType t) {
  return t == ValueType::float16 || t == ValueType::bfloat16;
}

inline constexpr int kMostLeaves = 8;  // extra tensors; dimensions
inline constexpr int kExtraDims = 4;

/// How a vector of an extra tensor is read for a vector of the output.
enum class Lies : uint8_t {
  vectors,   // as one aligned vector, which is shorter at the end of the output
  same,      // as one element
  anywhere,  // element by element
};

/// An extra tensor, in the order of the output's elements.
struct ExtraTensor {
  const void* data = nullptr;
  uint64_t size[kExtraDims] = {};        // of the output's dimensions, innermost first
  uint64_t reciprocal[kExtraDims] = {};  // 2^64 / size, rounded up; 0 if the output is too large
  int64_t stride[kExtraDims] = {};       // in elements; 0 along broadcast dimensions
  int32_t dims = 0;
  Lies lies = Lies::anywhere;
};

/// The properties of an extra tensor for which a kernel is specialized. The default is none.
struct ExtraForm {
  Lies lies = Lies::anywhere;
  int32_t dims = 0;

  friend bool operator==(const ExtraForm&, const ExtraForm&) = default;
};

/// One and two dimensions share a kernel, since a bias has one dimension if there is a single row.
constexpr ExtraForm known_form(Lies lies, int32_t dims) { return {lies, dims < 2 ? 2 : dims}; }

/// Whether offsets in the extra tensor can be computed without divisions.
COLLX_HD inline bool has_reciprocals(const ExtraTensor& extra) {
  return extra.dims == 1 || extra.reciprocal[0] != 0;
}

/// The offset, in elements, of the extra's element for element i of the output. The extra must have
/// reciprocals: the upper half of the product of a reciprocal and a 32-bit number is the exact
/// quotient (Lemire, Kaser, Kurz, "Faster remainder by direct computation", 2019).
template <ExtraForm kForm = ExtraForm{}>
COLLX_HD inline int64_t offset_by_reciprocals(const ExtraTensor& extra, uint64_t i) {
  const int dims = kForm.dims > 0 ? kForm.dims : extra.dims;
  const int64_t innermost = kForm.dims == 0 ? extra.stride[0] : kForm.lies == Lies::vectors ? 1 : 0;
  if (dims == 1) return static_cast<int64_t>(i) * innermost;
  auto rest = static_cast<uint32_t>(i);
  int64_t offset = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll(kForm.dims > 0 ? kForm.dims : 1)
#endif
  for (int d = 0; d + 1 < dims; ++d) {
    // The upper half of reciprocal * rest.
    const uint64_t low = (extra.reciprocal[d] & 0xFFFFFFFFu) * rest;
    const uint64_t high = (extra.reciprocal[d] >> 32) * rest + (low >> 32);
    const auto outer = static_cast<uint32_t>(high >> 32);
    offset += static_cast<int64_t>(rest - outer * static_cast<uint32_t>(extra.size[d])) *
              (d == 0 ? innermost : extra.stride[d]);
    rest = outer;
  }
  return offset + static_cast<int64_t>(rest) * extra.stride[dims - 1];
}

/// The same for any extra tensor.
COLLX_HD inline int64_t offset_of(const ExtraTensor& extra, uint64_t i) {
  if (has_reciprocals(extra)) return offset_by_reciprocals(extra, i);
  int64_t offset = 0;
  for (int d = 0; d < extra.dims; ++d) {
    offset += static_cast<int64_t>(i % extra.size[d]) * extra.stride[d];
    i /= extra.size[d];
  }
  return offset;
}

/// The coordinate of element i is start + i / below % size.
struct Coordinate {
  uint64_t below = 1;  // elements of the inner dimensions
  uint64_t size = 1;
  int64_t start = 0;
};

struct EpilogueArguments {
  void* value = nullptr;  // also receives the reduced elements, for a gradient; may be null
  ExtraTensor extra[kMostLeaves];
  Coordinate coordinate[kMostLeaves];
  uint64_t number[kMostLeaves] = {};  // bits, in the order in which the expression uses them
};

/// The leading members of EpilogueArguments, for kernels without coordinates and numbers. A smaller
/// struct means that each launch copies less to the device.
template <int Extras>
struct ExtraArguments {
  void* value;
  ExtraTensor extra[Extras > 0 ? Extras : 1];
};

/// The properties of an epilogue for which a kernel is compiled. Calls that differ in them use
/// different kernels.
struct EpilogueForm {
  bool whole = false;  // the output is aligned vectors, and offsets of extras need no divisions
  bool keeps = false;  // the reduced elements are stored as well
  ExtraForm extra[kMostLeaves] = {};  // only set if `whole`

  friend bool operator==(const EpilogueForm&, const EpilogueForm&) = default;
};

/// `whole`: whether the output consists of whole aligned vectors.
inline EpilogueForm form_of(const EpilogueArguments& arguments, int extras, bool whole) {
  EpilogueForm form{whole, arguments.value != nullptr};
  for (int x = 0; x < extras; ++x) {
    const ExtraTensor& extra = arguments.extra[x];
    form.extra[x] = known_form(extra.lies, extra.dims);
    form.whole = form.whole && extra.lies != Lies::anywhere && extra.reciprocal[0] != 0;
  }
  return form.whole ? form : EpilogueForm{false, form.keeps};
}

/// Takes the sizes of the output and the strides of an extra tensor that was broadcast to it,
/// outermost first. Returns false if too many dimensions remain after adjacent ones are merged; the
/// caller can then use a contiguous copy, which has few.
inline bool lay_out_extra(const void* data, const int64_t* sizes, const int64_t* strides, int dims,
                          int element_bytes, ExtraTensor& to) {
  const int64_t count = static_cast<int64_t>(kVectorBytes) / element_bytes;
  to.data = data;
  to.dims = 0;
  for (int d = dims - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    const int last = to.dims - 1;
    if (last >= 0 && strides[d] == to.stride[last] * static_cast<int64_t>(to.size[last])) {
      to.size[last] *= static_cast<uint64_t>(sizes[d]);
      continue;
    }
    if (to.dims == kExtraDims) return false;
    to.size[to.dims] = static_cast<uint64_t>(sizes[d]);
    to.stride[to.dims++] = strides[d];
  }
  if (to.dims == 0) {
    to.size[0] = 1;
    to.dims = 1;
  }
  uint64_t numel = 1;
  for (int d = 0; d < to.dims; ++d) numel *= to.size[d];
  for (int d = 0; d < to.dims; ++d) {
    to.reciprocal[d] = numel >> 32 == 0 && to.size[d] > 1 ? ~0ull / to.size[d] + 1 : 0;
  }
  // Whether each vector lies within one run of the innermost dimension.
  const bool within = to.dims == 1 || to.size[0] % static_cast<uint64_t>(count) == 0;
  bool aligned = to.stride[0] == 1 && reinterpret_cast<uint64_t>(data) % kVectorBytes == 0;
  for (int d = 1; d < to.dims; ++d) aligned = aligned && to.stride[d] % count == 0;
  to.lies = !within             ? Lies::anywhere
            : to.stride[0] == 0 ? Lies::same
            : aligned           ? Lies::vectors
                                : Lies::anywhere;
  return true;
}

}  // namespace collx
