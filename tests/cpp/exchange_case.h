// A call of any collective in a test: its arguments and its expected output. The output is computed
// from the definition of the collective, not from the spans that the backends use.
#pragma once

#include <numeric>
#include <string>

#include "cpu/calls.h"
#include "cpu_ranks.h"
#include "forms.h"
#include "protocol/names.h"
#include "scalar_reference.h"

namespace collx::cpu {

struct Case {
  Collective collective = Collective::allgather;
  Algorithm algorithm = Algorithm::staged;
  Geometry shape;  // the shape of the unsplit tensor, with `inner` in bytes
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  int root = -1;
  bool symmetric = false;
  bool in_place = false;
  uint64_t shift = 0;  // offset of the tensors in elements

  // Alltoallv: the rows from each rank to each rank, and the bytes of a row. `shape` is unused.
  std::vector<uint64_t> rows;
  uint64_t row_bytes = 1;
  bool device_splits = false;
  uint64_t spare_rows = 0;  // rows of the capacity that are not received

  uint64_t element() const { return static_cast<uint64_t>(dtype_size(dtype)); }
  uint64_t rows_between(int world, int from, int to) const {
    return rows[size_t(from * world + to)];
  }
};

inline std::string describe(const Case& c) {
  std::string text = std::string(name_of(c.collective)) + ' ' + std::string(name_of(c.algorithm)) +
                     " of " + std::string(name_of(c.dtype)) + " [" + std::to_string(c.shape.outer) +
                     ", " + std::to_string(c.shape.units) + ", " + std::to_string(c.shape.inner) +
                     " bytes] " + std::string(name_of(c.op)) + " shifted by " +
                     std::to_string(c.shift);
  if (c.root >= 0) text += ", root " + std::to_string(c.root);
  for (const uint64_t n : c.rows) text += ' ' + std::to_string(n);
  if (c.device_splits) text += ", device splits";
  if (c.symmetric) text += ", symmetric";
  return c.in_place ? text + ", in place" : text;
}

inline uint64_t rows_sent(const Case& c, int world, int rank) {
  uint64_t total = 0;
  for (int to = 0; to < world; ++to) total += c.rows_between(world, rank, to);
  return total;
}
inline uint64_t rows_received(const Case& c, int world, int rank) {
  uint64_t total = 0;
  for (int from = 0; from < world; ++from) total += c.rows_between(world, from, rank);
  return total;
}

inline uint64_t input_bytes(const Case& c, int world, int rank) {
  switch (c.collective) {
    case Collective::allgather:
    case Collective::gather: return c.shape.part_bytes(world, rank);
    case Collective::alltoallv: return rows_sent(c, world, rank) * c.row_bytes;
    case Collective::barrier: return 0;
    default: return c.shape.bytes();
  }
}
inline uint64_t output_bytes(const Case& c, int world, int rank) {
  switch (c.collective) {
    case Collective::reducescatter:
    case Collective::scatter: return c.shape.part_bytes(world, rank);
    case Collective::alltoallv: return (rows_received(c, world, rank) + c.spare_rows) * c.row_bytes;
    case Collective::barrier: return 0;
    default: return c.shape.bytes();
  }
}

/// Returns where the smaller of a rank's two tensors starts within the larger one in place.
inline uint64_t own_offset(const Case& c, int world, int rank) {
  const bool part =
      c.collective == Collective::allgather || c.collective == Collective::reducescatter;
  return part ? partition(c.shape.units, world, rank).start * c.shape.inner : 0;
}

namespace detail {

/// Sets what calls of all collectives have.
template <typename Made>
void fill_call(const Case& c, int world, const void* input, void* output, Made& call) {
  call.input = input;
  call.output = output;
  call.plan = plan_of({c.collective, c.algorithm, c.symmetric}, c.dtype, c.shape.bytes(), world,
                      c.in_place);
  call.dtype = c.dtype;
  call.reduce_op = c.op;
  CallDescriptor& d = call.descriptor;
  d.collective = c.collective;
  d.algorithm = c.algorithm;
  d.dtype = c.dtype;
  d.reduce_op = c.op;
  d.root = static_cast<int16_t>(c.root);
  if (c.collective != Collective::alltoallv) d.numel = c.shape.bytes() / c.element();
}

}  // namespace detail

inline AllreduceCall make_allreduce(const Case& c, int world, const void* input, void* output) {
  AllreduceCall call{};
  detail::fill_call(c, world, input, output, call);
  call.numel = call.descriptor.numel;
  call.descriptor.dims = 1;
  call.descriptor.sizes[0] = static_cast<int64_t>(call.numel);
  return call;
}

inline ExchangeCall make_exchange(const Case& c, int world, int rank, const void* input,
                                  void* output) {
  ExchangeCall call{};
  detail::fill_call(c, world, input, output, call);
  call.collective = c.collective;
  call.geometry = c.shape;
  call.world = world;
  call.root = c.root;
  call.element_bytes = static_cast<uint32_t>(c.element());
  if (c.collective == Collective::alltoallv) {
    for (int r = 0; r < world; ++r) {
      call.sends[r] = c.rows_between(world, rank, r) * c.row_bytes;
      call.expects[r] = c.rows_between(world, r, rank) * c.row_bytes;
      call.longest = std::max({call.longest, call.sends[r], call.expects[r]});
    }
    return call;
  }
  for (int from = 0; from < world; ++from) {
    for (int to = 0; to < world; ++to) {
      if (to != from) call.longest = std::max(call.longest, call.sent(from, to).bytes());
    }
  }
  if (c.collective == Collective::gather && rank != c.root) call.cleared = c.shape.bytes();
  return call;
}

/// The tensors of all ranks in a call.
struct Places {
  std::function<void*(int rank)> input;
  std::function<void*(int rank)> output;

  void map_peers(const Case& c, int world, Call& call) const {
    for (int r = 0; c.symmetric && r < world; ++r) {
      call.peer_input[r] = input(r);
      call.peer_output[r] = output(r);
    }
  }
};

/// Makes the call on one rank. `adjust` changes it first.
inline bool carry_out(const CpuView& view, const Case& c, const Places& places,
                      const std::function<void(Call&)>& adjust = {}) {
  if (c.collective == Collective::barrier) {
    CallDescriptor descriptor;
    descriptor.collective = Collective::barrier;
    return barrier(view, descriptor);
  }
  void *const input = places.input(view.rank), *const output = places.output(view.rank);
  if (c.collective == Collective::allreduce) {
    AllreduceCall call = make_allreduce(c, view.world, input, output);
    places.map_peers(c, view.world, call);
    if (adjust) adjust(call);
    return allreduce(view, call);
  }
  ExchangeCall call = make_exchange(c, view.world, view.rank, input, output);
  places.map_peers(c, view.world, call);
  if (adjust) adjust(call);
  return exchange(view, call);
}

namespace detail {

inline void append(Bytes& to, const char* from, uint64_t bytes) {
  to.insert(to.end(), from, from + bytes);
}

inline Bytes reduced_part(const Case& c, int world, int rank, const std::vector<const char*>& in) {
  const Part part = partition(c.shape.units, world, rank);
  std::vector<Bytes> parts(static_cast<size_t>(world));
  std::vector<const void*> sources;
  for (size_t r = 0; r < parts.size(); ++r) {
    for (uint64_t o = 0; o < c.shape.outer; ++o) {
      append(parts[r], in[r] + (o * c.shape.units + part.start) * c.shape.inner,
             part.count * c.shape.inner);
    }
    sources.push_back(parts[r].data());
  }
  Bytes result(parts[0].size());
  reference_reduce(sources, result.data(), result.size() / c.element(), c.dtype, c.op);
  return result;
}

inline Bytes concatenated(const Case& c, int world, const std::vector<const char*>& in) {
  Bytes result;
  for (uint64_t o = 0; o < c.shape.outer; ++o) {
    for (int s = 0; s < world; ++s) {
      const uint64_t run = partition(c.shape.units, world, s).count * c.shape.inner;
      append(result, in[size_t(s)] + o * run, run);
    }
  }
  return result;
}

inline Bytes transposed(const Case& c, int world, int rank, const std::vector<const char*>& in) {
  Bytes result;
  const uint64_t chunk = c.shape.bytes() / static_cast<uint64_t>(world);
  for (int s = 0; s < world; ++s) append(result, in[size_t(s)] + uint64_t(rank) * chunk, chunk);
  return result;
}

inline Bytes sorted_by_sender(const Case& c, int world, int rank,
                              const std::vector<const char*>& in) {
  Bytes result;
  for (int s = 0; s < world; ++s) {
    uint64_t start = 0;
    for (int to = 0; to < rank; ++to) start += c.rows_between(world, s, to);
    append(result, in[size_t(s)] + start * c.row_bytes,
           c.rows_between(world, s, rank) * c.row_bytes);
  }
  result.resize(output_bytes(c, world, rank), 0);
  return result;
}

}  // namespace detail

/// Returns the output of rank `rank` from the inputs of all ranks.
inline Bytes expected_output(const Case& c, int world, int rank,
                             const std::vector<const char*>& in) {
  const auto all_of = [&](const char* input) { return Bytes(input, input + c.shape.bytes()); };
  switch (c.collective) {
    case Collective::allgather: return detail::concatenated(c, world, in);
    case Collective::gather:
      return rank == c.root ? detail::concatenated(c, world, in) : Bytes(c.shape.bytes(), 0);
    case Collective::broadcast: return all_of(in[size_t(c.root)]);
    case Collective::scatter: {
      const Part part = partition(c.shape.units, world, rank);
      const char* const start = in[size_t(c.root)] + part.start * c.shape.inner;
      return Bytes(start, start + part.count * c.shape.inner);
    }
    case Collective::alltoall: return detail::transposed(c, world, rank, in);
    case Collective::alltoallv: return detail::sorted_by_sender(c, world, rank, in);
    case Collective::reducescatter: return detail::reduced_part(c, world, rank, in);
    case Collective::reduce:
      if (rank != c.root) return all_of(in[size_t(rank)]);
      [[fallthrough]];
#if defined(COLLX_EXTRA_MEANS_ALLREDUCE)
      COLLX_EXTRA_MEANS_ALLREDUCE
#endif
    case Collective::allreduce: {
      Bytes result(c.shape.bytes());
      reference_reduce({in.begin(), in.end()}, result.data(), result.size() / c.element(), c.dtype,
                       c.op);
      return result;
    }
    default: return {};
  }
}

/// Whether the output contains reduced values, in which all NaNs are equal.
inline bool is_reduced(const Case& c, int rank) {
  return is_reduction(c.collective) && (c.root < 0 || c.root == rank);
}

}  // namespace collx::cpu
