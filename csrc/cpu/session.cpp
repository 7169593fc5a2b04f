#include "session.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "../protocol/epoch.h"
#include "failure.h"

namespace collx::cpu {
namespace {

/// Spinning helps only if every rank has a core. Otherwise it takes the core from the rank that
/// this rank waits for (hazard 23).
Spinning spinning(int world) {
  static const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return {world <= cores ? 1000 : 10, 50};
}

std::chrono::steady_clock::time_point deadline_after(std::chrono::steady_clock::time_point began,
                                                     uint64_t timeout_ns) {
  constexpr uint64_t kYear = 365ull * 24 * 3600 * 1'000'000'000;
  return began + std::chrono::nanoseconds(std::min(timeout_ns, kYear));
}

/// Other threads may read the sum at any time. Only this thread writes it.
void add_wait(const CpuView& view, int peer, std::chrono::nanoseconds waited) {
  uint64_t& sum = view.status->waited_ns[peer];
  __atomic_store_n(&sum, sum + static_cast<uint64_t>(waited.count()), __ATOMIC_RELAXED);
}

}  // namespace

bool Session::enter() {
  // Store `busy` first, then load the mark. A rank that marks this rank does it in the opposite
  // order, and all of these accesses are sequentially consistent. Therefore, if it finds no call in
  // progress, this rank refuses the next call.
  auto& busy = control(rank()).busy;
  const bool overlap = busy.exchange(1) != 0;
  if (std::atomic_ref(view_.header(rank())->poison).load() != 0) {
    if (!overlap) busy.store(0, std::memory_order_release);
    adopt(view_);
    return false;
  }
  if (overlap) {
    report(view_, record(Failure::overlap, Phase::none, rank()));
    return false;
  }
  entered_ = true;
  return true;
}

Session::~Session() {
  if (entered_) control(rank()).busy.store(0, std::memory_order_release);
}

bool Session::alive() const {
  if (!poisoned(view_)) return true;
  report(view_, record(Failure::none, Phase::none, -1));  // this rank was not waiting for any rank
  return false;
}

bool Session::complete() {
  if (shares_tensors()) {
    // A peer leaves its note before it raises an error, and changes its tensors afterwards. So if
    // there is no note after the last load from these tensors, they had not changed. x86-64 keeps
    // the order of loads, so only the compiler must keep it.
    std::atomic_signal_fence(std::memory_order_acquire);
    if (!alive()) return false;
  }
  std::atomic_ref(view_.header(rank())->sequence).fetch_add(1, std::memory_order_relaxed);
  return true;
}

Use Session::next_use(Area area) {
  if (mutant(Mutant::epoch_stands_still)) return {area, 1};
  const uint64_t shape = call_.descriptor.numel;
  if (mutant(Mutant::epoch_by_shape))
    return {area, ++control(rank()).epochs[(static_cast<size_t>(area) + shape) % kAreas]};
  return {area, ++control(rank()).epochs[static_cast<size_t>(area)]};
}

bool Session::claim(Use use) {
  if (mutant(Mutant::no_claim)) return true;
  const Use before{use.area, use.epoch - 1};
  if (control(rank()).settled[static_cast<size_t>(use.area)] == before.epoch) return true;
  if (!await(before, Word::reduced, Phase::release)) return false;
  settle(before);
  return true;
}

void Session::settle(Use use) {
  control(rank()).settled[static_cast<size_t>(use.area)] = use.epoch;
}

void Session::publish(Use use, Word word) {
  char* const own = view_.region[rank()];
  published(own, layout(), use.area, word).store(use.epoch, std::memory_order_release);
  ring(control(rank()).bell);
}

void Session::publish_all(Use use) {
  const int root = call_.descriptor.root;
  if (mutant(Mutant::only_root_publishes) && root >= 0 && root != rank()) return;
  char* const own = view_.region[rank()];
  published(own, layout(), use.area, Word::reduced).store(use.epoch, std::memory_order_release);
  publish(use, Word::arrived);
}

bool Session::await_from(int peer, Use use, Word word, Phase phase) {
  if (mutant(Mutant::no_closing_barrier) && phase == Phase::end_barrier) return true;
  const bool arrival = word == Word::arrived && use.area != Area::end_barrier;
  if (mutant(Mutant::arrival_not_awaited) && arrival) return true;
  const auto& flag = published(view_.region[peer], layout(), use.area, word);
  return wait(
      peer, [&] { return flag.load(std::memory_order_acquire); }, use.epoch, phase);
}

bool Session::await(Use use, Word word, Phase phase) {
  for (int step = 1; step < world(); ++step) {
    if (!await_from(neighbor(step), use, word, phase)) return false;
  }
  return true;
}

bool Session::barrier(Phase phase) {
  const Use use = next_use(Area::end_barrier);
  publish(use, Word::arrived);
  return await(use, Word::arrived, phase);
}

CallDescriptor Session::descriptor(int peer) const {
  CallDescriptor descriptor = call_.descriptor;
  if (sends_ == nullptr || peer < 0) return descriptor;  // without a peer there is no pair
  descriptor.sends = sends_[peer];
  descriptor.expects = expects_[peer];
  return descriptor;
}

uint32_t Session::fingerprint_for(int peer, uint32_t call) const {
  if (sends_ == nullptr) return call;
  return pair_fingerprint(call, rank(), peer, sends_[peer], expects_[peer]);
}

bool Session::meet(Phase phase) {
  const uint32_t epoch = ++view_.header(rank())->check_epoch;
  const uint32_t call = fingerprint(call_.descriptor);
  for (int peer = 0; peer < world(); ++peer) {
    if (peer != rank()) push_descriptor(peer, epoch, call);
  }
  ring(control(rank()).bell);
  for (int step = 1; step < world(); ++step) {
    if (!compare_with(neighbor(step), epoch, call, phase)) return false;
  }
  // A rank that has entered this call has completed the previous one.
  Control& own = control(rank());
  std::copy(std::begin(own.epochs), std::end(own.epochs), std::begin(own.settled));
  return true;
}

void Session::push_descriptor(int to, uint32_t epoch, uint32_t call) const {
  CheckSlot& slot = view_.header(to)->check[epoch & 1][rank()];
  slot.descriptor = descriptor(to);
  const uint64_t flag = static_cast<uint64_t>(epoch) << 32 | fingerprint_for(to, call);
  std::atomic_ref(slot.flag).store(flag, std::memory_order_release);
}

bool Session::compare_with(int peer, uint32_t epoch, uint32_t call, Phase phase) {
  const uint32_t own = fingerprint_for(peer, call);
  CheckSlot& slot = view_.header(rank())->check[epoch & 1][peer];
  const auto load = [&] { return std::atomic_ref(slot.flag).load(std::memory_order_acquire); };
  if (!wait(
          peer, [&] { return static_cast<uint32_t>(load() >> 32); }, epoch, phase))
    return false;
  const uint32_t other = static_cast<uint32_t>(load());
  if (other == own) return true;
  StatusRecord mismatch = record(Failure::mismatch, phase, peer);
  mismatch.expected = own;
  mismatch.seen = other;
  mismatch.other = slot.descriptor;
  report(view_, mismatch);
  return false;
}

template <typename Read>
bool Session::wait(int peer, Read read, uint32_t expected, Phase phase) {
  const auto reached = [&] { return epoch_reached(read(), expected); };
  const auto ready = [&] { return reached() || poisoned(view_); };
  Spinning left = spinning(world());
  // Read the clock only after the spins: most waits end within them.
  while (left.spins > 0 && !ready()) {
    detail::relax();
    --left.spins;
  }
  if (reached()) return true;
  left.spins = 0;
  const auto began = std::chrono::steady_clock::now();
  wait_until(control(peer).bell, ready, deadline_after(began, view_.timeout_ns), left);
  add_wait(view_, peer, std::chrono::steady_clock::now() - began);
  if (reached()) return true;
  // The wait failed: it timed out, or another rank has failed, possibly because this rank was
  // missing.
  StatusRecord vain = record(Failure::timeout, phase, peer);
  vain.expected = expected;
  vain.seen = read();
  report(view_, vain);
  return false;
}

StatusRecord Session::record(Failure failure, Phase phase, int peer) const {
  StatusRecord record;
  record.failure = failure;
  record.phase = phase;
  record.rank = rank();
  record.peer = peer;
  record.sequence = std::atomic_ref(view_.header(rank())->sequence).load(std::memory_order_relaxed);
  record.own = descriptor(peer);
  return record;
}

char* Session::oneshot_slot(int of, Use use, int source) const {
  return view_.region[of] + layout().oneshot.slot(world(), 0, use.parity(), source);
}

char* Session::twoshot_slot(int of, Use use, int stage, int source) const {
  return view_.region[of] + layout().twoshot.slot(world(), stage, use.parity(), source);
}

char* Session::staging(int of, Use use) const {
  const bool by_shape = mutant(Mutant::slots_by_shape);
  const uint64_t half = by_shape ? call_.descriptor.numel : layout().staging_bytes;
  return view_.region[of] + layout().staging + use.parity() * half;
}

char* Session::results(int of, Use use) const {
  return view_.region[of] + layout().results + use.parity() * layout().result_bytes;
}

Counts Session::counts(int of, Use use) const {
  return counts_of(view_.region[of], layout(), use.parity());
}

}  // namespace collx::cpu
