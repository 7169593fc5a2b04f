#include "fallback.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "../cpu/calls.h"
#include "bounded_gather.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAStream.h>

#include "../cuda/calls.h"
#endif

namespace collx {

namespace {

/// A contiguous tensor as one axis. view(-1) would not work, since an axis of one element may have
/// any stride.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

/// `gathered` holds one row of each rank, `pitch` bytes apart; the first begins at byte `start`.
void reduce_rows(int world, const at::Tensor& gathered, uint64_t start, uint64_t pitch,
                 at::Tensor& output, uint64_t numel, DType dtype, ReduceOp op) {
  std::array<const void*, kMaxRanks> rows{};
  for (int rank = 0; rank < world; ++rank) {
    rows[static_cast<size_t>(rank)] = static_cast<const char*>(gathered.const_data_ptr()) + start +
                                      static_cast<uint64_t>(rank) * pitch;
  }
  void* to = output.mutable_data_ptr();
  if (gathered.is_cpu()) {
    cpu::reduce(rows.data(), world, to, numel, dtype, op);
  } else {
#if COLLX_CUDA
    cuda::reduce(rows.data(), world, to, numel, dtype, op,
                 c10::cuda::getCurrentCUDAStream(gathered.device().index()).stream());
#endif
  }
}

}  // namespace

void fallback_allreduce(Communicator& communicator, const char* op, const AllreduceCall& call,
                        const at::Tensor& input, const at::Tensor& output) {
  BoundedGather gather(communicator, op, call.descriptor);
  const at::Tensor from = flat(input);
  const at::Tensor to = flat(output);
  const auto element = static_cast<uint64_t>(dtype_size(call.dtype));
  const auto step = static_cast<int64_t>(
      fallback_chunk_bytes(communicator.options().world_size, call.dtype) / element);
  for (int64_t start = 0; start < from.numel(); start += step) {
    const int64_t count = std::min(step, from.numel() - start);
    const at::Tensor gathered = gather(from.narrow(0, start, count).view(at::kByte));
    at::Tensor part = to.narrow(0, start, count);
    at::Tensor reduced = gathered.device() == part.device()
                             ? part
                             : at::empty({count}, part.options().device(gathered.device()));
    const uint64_t row = static_cast<uint64_t>(count) * element;
    reduce_rows(communicator.options().world_size, gathered, 0, row, reduced,
                static_cast<uint64_t>(count), call.dtype, call.reduce_op);
    if (!reduced.is_same(part)) part.copy_(reduced);
  }
}

namespace {

/// The counts that every rank sends to all ranks before an alltoallv.
class Told {
 public:
  /// One word for each rank, followed by rows and capacity.
  static constexpr int64_t words(int world) { return world + 2; }
  Told(const void* all, int world) : all_(static_cast<const uint64_t*>(all)), world_(world) {}

  uint64_t operator()(int rank, int to) const { return word(rank, to); }
  uint64_t rows(int rank) const { return word(rank, world_); }
  uint64_t capacity(int rank) const { return word(rank, world_ + 1); }

 private:
  uint64_t word(int rank, int index) const { return all_[rank * words(world_) + index]; }

  const uint64_t* all_;
  int world_;
};

/// A call in which every rank sends a flat tensor of bytes to each rank, in the memory in which
/// gathered bytes arrive.
class Messages {
 public:
  Messages(Communicator& communicator, const char* op, const ExchangeCall& call,
           const at::Tensor& input, const at::Tensor& output)
      : communicator_(communicator),
        op_(op),
        call_(call),
        gather_(communicator, op, call.descriptor),
        world_(communicator.options().world_size),
        rank_(communicator.options().rank),
        input_(input),
        output_(output),
        longest_(call.longest) {
    for (int r = 0; r < world_; ++r) {
      sent_[static_cast<size_t>(r)] = call.sent(rank_, r);
      received_[static_cast<size_t>(r)] = call.received(r, rank_);
    }
  }

  void run() {
    if (call_.collective == Collective::alltoallv) agree_on_splits();
    if (call_.cleared > 0) output_.zero_();
    const bool same = sends_the_same(call_.collective);
    const int sends = same ? 1 : world_;
    const uint64_t step = fallback_chunk_bytes(world_ * sends, DType::float64);
    std::vector<at::Tensor> to = received_messages();
    for (uint64_t start = 0; start < longest_; start += step) {
      const uint64_t count = std::min(step, longest_ - start);
      const at::Tensor gathered = gather_(packed(sends, start, count));
      take(gathered, static_cast<uint64_t>(sends), start, count, to);
    }
    place(to);
  }

 private:
  /// A view of the bytes of a span, with one row for each run.
  static at::Tensor runs(const at::Tensor& bytes, const Span& span) {
    const auto rows = static_cast<int64_t>(span.rows), width = static_cast<int64_t>(span.width);
    return bytes.as_strided({rows, width}, {static_cast<int64_t>(span.pitch), 1},
                            bytes.storage_offset() + static_cast<int64_t>(span.offset));
  }

  at::TensorOptions where_gathered() const {
    const auto options = at::TensorOptions(at::kByte);
    return gather_.through_cpu() ? options : options.device(communicator_.options().device);
  }

  /// The messages to each rank, from byte `start` on. Shorter messages are padded.
  at::Tensor packed(int sends, uint64_t start, uint64_t count) {
    const at::Tensor bytes = flat(input_).view(at::kByte);
    at::Tensor pack = at::empty({sends, static_cast<int64_t>(count)}, where_gathered());
    pack.zero_();
    for (int i = 0; i < sends; ++i) {
      // A single message for all ranks is equal to the message for any of its receivers.
      const Span& span = sent_[static_cast<size_t>(sends == 1 ? any_receiver() : i)];
      if (span.bytes() <= start) continue;
      const auto n = static_cast<int64_t>(std::min(count, span.bytes() - start));
      const at::Tensor message = runs(bytes, span).reshape({-1});
      pack.select(0, i).narrow(0, 0, n).copy_(message.narrow(0, static_cast<int64_t>(start), n));
    }
    return pack.view(-1);
  }

  int any_receiver() const {
    for (int r = 0; r < world_; ++r) {
      if (sent_[static_cast<size_t>(r)].rows > 0) return r;
    }
    return rank_;
  }

  bool reduces_here() const {
    return is_reduction(call_.collective) && (call_.root < 0 || call_.root == rank_);
  }

  std::vector<at::Tensor> received_messages() const {
    std::vector<at::Tensor> messages;
    for (int r = 0; r < world_; ++r) {
      const auto bytes = static_cast<int64_t>(received_[static_cast<size_t>(r)].bytes());
      const bool none = reduces_here() && r != rank_;  // all messages are reduced into one
      messages.push_back(at::empty({none ? 0 : bytes}, where_gathered()));
    }
    return messages;
  }

  void take(const at::Tensor& gathered, uint64_t sends, uint64_t start, uint64_t count,
            std::vector<at::Tensor>& to) const {
    const uint64_t mine = sends == 1 ? 0 : static_cast<uint64_t>(rank_) * count;
    const uint64_t pitch = sends * count;
    if (reduces_here()) {
      at::Tensor& result = to[static_cast<size_t>(rank_)];
      const uint64_t bytes = static_cast<uint64_t>(result.numel());
      if (bytes <= start) return;
      const uint64_t n = std::min(count, bytes - start);
      at::Tensor part = result.narrow(0, static_cast<int64_t>(start), static_cast<int64_t>(n));
      reduce_rows(world_, gathered, mine, pitch, part, n / call_.element_bytes, call_.dtype,
                  call_.reduce_op);
      return;
    }
    for (int r = 0; r < world_; ++r) {
      const at::Tensor& message = to[static_cast<size_t>(r)];
      if (static_cast<uint64_t>(message.numel()) <= start) continue;
      const auto n =
          std::min(static_cast<int64_t>(count), message.numel() - static_cast<int64_t>(start));
      const auto from = static_cast<int64_t>(static_cast<uint64_t>(r) * pitch + mine);
      message.narrow(0, static_cast<int64_t>(start), n).copy_(gathered.narrow(0, from, n));
    }
  }

  void place(const std::vector<at::Tensor>& messages) {
    const at::Tensor bytes = flat(output_).view(at::kByte);
    for (int r = 0; r < world_; ++r) {
      const Span& span = received_[static_cast<size_t>(r)];
      if (span.bytes() == 0 || (reduces_here() && r != rank_)) continue;
      const at::Tensor to = runs(bytes, span);
      to.copy_(messages[static_cast<size_t>(r)].view(to.sizes()));
    }
  }

  /// Every rank sends to all ranks its counts, since a rank knows only its own: the bytes (with
  /// splits on the device: rows) that it sends to each rank, its rows, and its capacity for
  /// received rows.
  void agree_on_splits() {
    const bool on_device = call_.splits.sent != nullptr;
    at::Tensor words = at::empty({Told::words(world_)}, at::kLong);
    auto* own = static_cast<int64_t*>(words.mutable_data_ptr());
    own[world_] = static_cast<int64_t>(call_.splits.rows);
    own[world_ + 1] = static_cast<int64_t>(call_.splits.capacity);
    if (on_device) {
      words.narrow(0, 0, world_)
          .copy_(
              at::from_blob(const_cast<int64_t*>(call_.splits.sent), {world_},
                            at::TensorOptions(at::kLong).device(communicator_.options().device)));
    } else {
      for (int r = 0; r < world_; ++r) {
        own[r] = static_cast<int64_t>(sent_[static_cast<size_t>(r)].bytes());
      }
    }
    const at::Tensor all = gather_(words.view(at::kByte)).cpu();
    const Told told(all.const_data_ptr(), world_);
    if (on_device) return lay_out(told);
    longest_ = longest_of(told);
    for (int r = 0; r < world_; ++r) {
      const uint64_t sends = told(r, rank_);
      const uint64_t expects = received_[static_cast<size_t>(r)].bytes();
      if (sends == expects) continue;
      StatusRecord record = blank(Failure::mismatch, Phase::counts);
      record.peer = r;
      record.expected = expects;
      record.seen = sends;
      record.own.sends = sent_[static_cast<size_t>(r)].bytes();
      record.own.expects = expects;
      record.other = call_.descriptor;
      record.other.sends = sends;
      report(record);
    }
  }

  /// Computes the messages from splits on the device. All ranks reject splits that do not fit.
  void lay_out(const Told& told) {
    for (int r = 0; r < world_; ++r) check_sent(told, r);
    for (int r = 0; r < world_; ++r) check_received(told, r);
    const DeviceSplits& splits = call_.splits;
    uint64_t from = 0, to = 0;
    at::Tensor rows = at::empty({world_}, at::kLong);
    auto* arrived = static_cast<int64_t*>(rows.mutable_data_ptr());
    for (int r = 0; r < world_; ++r) {
      const uint64_t out = told(rank_, r) * splits.row_bytes;
      const uint64_t in = told(r, rank_) * splits.row_bytes;
      arrived[r] = static_cast<int64_t>(told(r, rank_));
      sent_[static_cast<size_t>(r)] = {from, out > 0 ? 1u : 0u, out, out};
      received_[static_cast<size_t>(r)] = {to, in > 0 ? 1u : 0u, in, in};
      from += out;
      to += in;
    }
    longest_ = longest_of(told) * splits.row_bytes;
    at::from_blob(splits.received, {world_},
                  at::TensorOptions(at::kLong).device(communicator_.options().device))
        .copy_(rows);
    const at::Tensor bytes = flat(output_).view(at::kByte);
    bytes.narrow(0, static_cast<int64_t>(to), bytes.numel() - static_cast<int64_t>(to)).zero_();
  }

  uint64_t longest_of(const Told& told) const {
    uint64_t longest = 0;
    for (int r = 0; r < world_; ++r) {
      for (int to = 0; to < world_; ++to) longest = std::max(longest, told(r, to));
    }
    return longest;
  }

  /// A negative count, as an unsigned number, exceeds the rows of any rank.
  void check_sent(const Told& told, int rank) {
    uint64_t left = told.rows(rank);
    for (int to = 0; to < world_; ++to) {
      const uint64_t sends = told(rank, to);
      if (sends > left) refuse_splits(rank, Phase::counts, told.rows(rank), sends);
      left -= sends;
    }
  }

  void check_received(const Told& told, int rank) {
    uint64_t received = 0;
    bool fits = true;
    for (int r = 0; r < world_; ++r) {
      fits = fits && told(r, rank) <= told.capacity(rank) - received;
      received += told(r, rank);
    }
    if (!fits) refuse_splits(rank, Phase::arrival, told.capacity(rank), received);
  }

  void refuse_splits(int rank, Phase phase, uint64_t expected, uint64_t seen) {
    StatusRecord record = blank(Failure::splits, phase);
    record.rank = record.peer = rank;
    record.expected = expected;
    record.seen = seen;
    report(record);
  }

  StatusRecord blank(Failure failure, Phase phase) const {
    StatusRecord record = communicator_.begin_record(failure, phase);
    record.own = call_.descriptor;
    return record;
  }

  void report(const StatusRecord& record) {
    communicator_.report(record);
    communicator_.check(op_);
  }

  Communicator& communicator_;
  const char* op_;
  const ExchangeCall& call_;
  BoundedGather gather_;
  const int world_, rank_;
  const at::Tensor input_, output_;
  uint64_t longest_;
  std::array<Span, kMaxRanks> sent_{}, received_{};
};

}  // namespace

void fallback_exchange(Communicator& communicator, const char* op, const ExchangeCall& call,
                       const at::Tensor& input, const at::Tensor& output) {
  Messages(communicator, op, call, input, output).run();
}

void fallback_barrier(Communicator& communicator, const char* op,
                      const CallDescriptor& descriptor) {
  BoundedGather gather(communicator, op, descriptor);
  gather(at::empty({1}, at::kByte).zero_());
}

}  // namespace collx
