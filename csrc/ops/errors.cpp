#include "errors.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <charconv>
#include <sstream>

#include "../protocol/geometry.h"
#include "../protocol/names.h"
#include "../protocol/norm.h"
#include "call.h"
#include "symmetric.h"
#include "torch_version.h"

namespace collx {

namespace {

thread_local bool carries_errors = false;
std::atomic<Raise> raise_hook{nullptr};

constexpr std::array<std::string_view, static_cast<size_t>(Failure::count)> kFailureNames = {
    "none", "timeout", "mismatch", "overlap", "splits", "group", "aborted"};
constexpr std::array<std::string_view, static_cast<size_t>(Phase::count)> kPhaseNames = {
    "none",        "check",   "start_barrier", "arrival",  "stage_barrier", "gather",
    "end_barrier", "release", "counts",        "fallback", "allocation"};

template <typename E, size_t N>
std::string_view safe_name(const std::array<std::string_view, N>& names, E value) {
  const auto index = static_cast<size_t>(value);  // may come from a damaged region
  return index < N ? names[index] : std::string_view("unknown");
}

void write_sizes(std::ostream& out, const CallDescriptor& call) {
  constexpr int kKept = sizeof(call.sizes) / sizeof(call.sizes[0]);
  out << '[';
  for (int i = 0; i < call.dims && i < kKept; ++i) out << (i > 0 ? ", " : "") << call.sizes[i];
  if (call.dims > kKept) {
    out << ", ...], " << call.numel << " elements in " << static_cast<int>(call.dims)
        << " dimensions,";
  } else {
    out << ']';
  }
}

/// Writes the options of the collective in parentheses.
void write_options(std::ostream& out, const CallDescriptor& call) {
  const char* separator = "(";
  const auto write = [&](std::string_view name, const auto& value) {
    out << separator << name << value;
    separator = ", ";
  };
  if (is_reduction(call.collective)) write("", safe_name(kReduceOpNames, call.reduce_op));
  if (call.root >= 0) write("root ", call.root);
  if (call.axis >= 0) write("axis ", static_cast<int>(call.axis));
  if (separator[0] != '(') out << ')';
}

constexpr std::array<std::string_view, 4> kQuantizationNames = {"none", "e4m3fn", "e5m2", "int8"};
constexpr std::array<std::string_view, 4> kScaleTypeNames = {"float32", "float16", "bfloat16",
                                                             "float8_e8m0fnu"};

/// The shortest text that identifies the float.
std::string exact(float value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

void write_norm_options(std::ostream& out, const CallDescriptor& call) {
  const NormOptions& o = call.norm;
  out << "(rounding " << safe_name(kRoundingNames, o.rounding) << ", eps " << exact(o.eps)
      << ", weight_offset " << exact(o.weight_offset);
  if (o.weight_float32 && call.dtype != DType::float32) out << ", weight of float32";
  if (o.quantization != Quantization::none) {
    out << ", " << safe_name(kQuantizationNames, o.quantization) << ", scale_mode "
        << safe_name(kScaleModeNames, o.scale_mode) << ", scale_ub " << exact(o.scale_ub)
        << ", quant_group_size " << o.quant_group_size << ", ue8m0 " << o.ue8m0;
    if (o.scale_type != ScaleType::float32) {
      out << ", scale_dtype " << safe_name(kScaleTypeNames, o.scale_type);
    }
    if (o.column_major) out << ", scale_layout column";
    if (call.keeps_norm) out << ", keep_norm";
  }
  out << ')';
}

void write_place(std::ostream& out, std::string_view what, uint64_t place) {
  out << ", symmetric " << what << " (allocation " << (place >> kAllocationShift) << ", byte "
      << (place & ((1ull << kAllocationShift) - 1)) << ')';
}

void write_timeout(std::ostream& out, const StatusRecord& r, const FailureContext& context) {
  // The message omits how long the rank waited: it may have started to wait later than the rank
  // that timed out first.
  out << "rank " << r.rank << " timed out waiting for ";
  if (r.peer >= 0) {
    out << "rank " << r.peer;
  } else {
    out << "its peers";
  }
  out << " (timeout " << context.timeout_seconds << " s) in ";
  if (r.phase == Phase::allocation) {
    out << "phase allocation of allocate_tensor";
  } else if (r.own.collective == Collective::none) {  // a vote on the host, outside any operator
    out << "a vote of the ranks";
  } else {
    out << "phase " << name_of(r.phase);
    if (r.lane >= 0) out << ", lane " << r.lane << ',';
    out << " of " << describe(r.own);
  }
}

void write_mismatch(std::ostream& out, const StatusRecord& r) {
  if (r.phase == Phase::allocation) {
    out << "ranks " << r.rank << " and " << r.peer
        << " have allocated tensors of different sizes, or on different streams; accepted: the "
           "same allocations in the same order on all ranks";
    return;
  }
  out << "in phase " << name_of(r.phase) << ", rank " << r.rank << " called " << describe(r.own)
      << ", but rank " << r.peer << " called ";
  if (r.other.collective == Collective::none) {
    out << "another operation";
  } else {
    out << describe(r.other);
  }
}

void write_splits(std::ostream& out, const StatusRecord& r) {
  if (r.phase == Phase::arrival) {
    out << "rank " << r.rank << " was sent " << r.seen << " rows, but its capacity is "
        << r.expected << ", in " << describe(r.own);
  } else {
    out << "input_splits of rank " << r.rank << " are negative or exceed its input of "
        << r.expected << " rows, in " << describe(r.own);
  }
}

void write_group(std::ostream& out, const StatusRecord& r) {
  out << "the process group of rank " << r.rank << " raised an exception in phase "
      << name_of(r.phase) << " of " << describe(r.own);
}

void write_overlap(std::ostream& out, const StatusRecord& r) {
  out << "rank " << r.rank << " ran " << describe(r.own)
      << " while another call of the same communicator was still using its slots (phase "
      << name_of(r.phase)
      << "); order the calls of different streams, or use one communicator for each stream";
}

}  // namespace

std::string_view name_of(Failure failure) { return safe_name(kFailureNames, failure); }
std::string_view name_of(Phase phase) { return safe_name(kPhaseNames, phase); }

std::string dtype_of(const CallDescriptor& call) {
  const uint32_t code = call.scalar_type - 1;
  if (call.scalar_type == 0 || code >= static_cast<uint32_t>(at::ScalarType::NumOptions)) {
    return std::string(safe_name(kDTypeNames, call.dtype));
  }
  return dtype_name(static_cast<at::ScalarType>(code));
}

std::string describe(const CallDescriptor& call) {
  std::ostringstream out;
  out << safe_name(kCollectiveNames, call.collective);
  if (call.collective == Collective::barrier) return out.str();
  if (is_norm(call.collective)) {
    write_norm_options(out, call);
  } else {
    write_options(out, call);
  }
  out << " of " << dtype_of(call) << ' ';
  write_sizes(out, call);
  if (call.sends > 0 || call.expects > 0) {
    out << ", which sends " << call.sends << " bytes to the other rank and expects " << call.expects
        << ",";
  }
  out << " by " << safe_name(kAlgorithmNames, call.algorithm);
  if (call.runs != call.algorithm) out << ", executed by " << safe_name(kAlgorithmNames, call.runs);
  if (call.max_blocks > 0) out << ", max_blocks=" << call.max_blocks;
  if (const uint64_t epilogue = call.epilogue; epilogue != 0) {
    out << ", with epilogue " << std::hex << epilogue << std::dec;
  }
  if (call.symmetric & 1u) write_place(out, "input", call.input_offset);
  if (call.symmetric & 2u) write_place(out, "output", call.output_offset);
  return out.str();
}

std::string describe(const StatusRecord& record, const FailureContext& context) {
  std::ostringstream out;
  switch (record.failure) {
    case Failure::mismatch: write_mismatch(out, record); break;
    case Failure::overlap: write_overlap(out, record); break;
    case Failure::splits: write_splits(out, record); break;
    case Failure::group: write_group(out, record); break;
    case Failure::aborted: out << "rank " << record.rank << " has aborted its calls"; break;
    default: write_timeout(out, record, context);
  }
  out << " (communicator \"" << context.communicator << "\", sequence number " << record.sequence
      << ", expected " << record.expected << ", seen " << record.seen << ", this is rank "
      << context.rank << ')';
  return out.str();
}

ErrorKind kind_of(Failure failure) {
  switch (failure) {
    case Failure::mismatch:
    case Failure::splits: return ErrorKind::mismatch;
    case Failure::overlap: return ErrorKind::overlap;
    case Failure::group:
    case Failure::aborted: return ErrorKind::poisoned;
    default: return ErrorKind::timeout;
  }
}

void raise_by(Raise raise) { raise_hook.store(raise, std::memory_order_release); }

CarryErrors::CarryErrors() { carries_errors = true; }
CarryErrors::~CarryErrors() { carries_errors = false; }

void raise_carried(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CarriedError& carried) {
    raise_error(carried.error);
  }
}

void raise_error(const RaisedError& error) {
  if (carries_errors) throw CarriedError(error);
  if (const Raise raise = raise_hook.load(std::memory_order_acquire)) raise(error);
  TORCH_CHECK(false, error.message);
}

}  // namespace collx
