// Stages of shared memory, through which a block with several lanes moves chunks by bulk copies.
//
// ORDER  A load into a stage begins after the stores out of the stage have read it. A store begins
// after the load has arrived: `full` counts its bytes. Stored data may be announced only after the
// store has arrived (wait_stored, not wait_read).
//
// FAILURE  Every wait for another role ends when a thread marks the block as failed. The thread
// still waits for bulk copies that were started: the next block uses the same shared memory.
#pragma once

#include "../ptx/bulk.cuh"

namespace collx::cuda {

/// Whether a thread of the block has marked it as failed.
__device__ __forceinline__ bool has_failed(const uint32_t* mark) {
  return *const_cast<const volatile uint32_t*>(mark) != 0;
}

/// Waits until is() is true. Returns false if the block has failed.
template <typename Is>
__device__ __forceinline__ bool await_unless(const uint32_t* failed, Is is) {
  while (!is()) {
    if (has_failed(failed)) return false;
  }
  return !has_failed(failed);
}

/// The stages of one role. The barriers have one element for each stage.
struct Stages {
  // Groups of stores that may be in flight when earlier ones are published.
  static constexpr int kPublished = 6;

  uint32_t memory;  // address of the first stage in shared memory
  uint32_t bytes;   // of each stage
  uint32_t count;
  ptx::TransactionBarrier* full;   // the load has arrived
  ptx::TransactionBarrier* added;  // the threads of the role have added up the values
  uint32_t* freed;                 // chunks of a reduction whose stages have been read
  const uint32_t* failed;

  __device__ __forceinline__ uint32_t of(uint32_t stage) const { return memory + stage * bytes; }

  /// The number of stores that may still read their stages when the next load begins. It reduces
  /// the number of stages that are loaded ahead.
  __device__ __forceinline__ uint32_t held() const { return count < 5 ? 1 : 2; }
  __device__ __forceinline__ bool are_free(uint32_t loaded, uint32_t done) const {
    return loaded - done + held() < count;
  }
  /// Waits until the stage that is loaded next has been read.
  __device__ __forceinline__ void wait_free() const {
    if (held() == 1) return ptx::wait_read<1>();
    ptx::wait_read<2>();
  }
  __device__ __forceinline__ void wait_loaded(uint32_t stage, uint32_t parity) const {
    while (!ptx::has_ended(&full[stage], parity)) {
    }
  }

  /// Moves `n` items through the stages, by one thread. `load(x, to, barrier)` starts the load of
  /// item x after can_load(x) has returned true. When the item has arrived, it calls `landed(x)`.
  /// After can_store(x) returns true, it calls `store(x, from)`. `stored(x)`: the stores of the
  /// first x items have arrived.
  template <bool Announces, typename CanLoad, typename Load, typename Landed, typename CanStore,
            typename Store, typename Stored>
  __device__ __forceinline__ void pump(uint32_t n, CanLoad can_load, Load load, Landed landed,
                                       CanStore can_store, Store store, Stored stored) const {
    uint32_t loaded = 0, done = 0, in = 0, out = 0, parity = 0;
    const auto next = [&] {
      ++done;
      if (++out == count) out = 0, parity ^= 1;
    };
    ptx::fence_proxy_async();
    while (done < n) {
      if (loaded < n && are_free(loaded, done) && can_load(loaded)) {
        wait_free();
        load(loaded, of(in), &full[in]);
        ++loaded;
        if (++in == count) in = 0;
        continue;
      }
      if (loaded == done) {
        if (has_failed(failed)) break;
        continue;
      }
      wait_loaded(out, parity);
      landed(done);
      if (!can_store(done)) {
        if (Announces) {
          ptx::wait_stored<0>();
          stored(done);
        }
        if (!await_unless(failed, [&] { return can_store(done); })) break;
      }
      if (has_failed(failed)) break;
      store(done, of(out));
      ptx::commit_stores();
      next();
      if (Announces && done > kPublished) {
        ptx::wait_stored<kPublished>();
        stored(done - kPublished);
      }
    }
    const bool all = done == n;
    while (done < loaded) {
      wait_loaded(out, parity);
      next();
    }
    ptx::wait_stored<0>();
    if (Announces && all) stored(n);
  }

  // A reduction of n chunks in stages has three parts, which wait for each other by barriers and
  // counts. One thread loads, the threads of a role add, and another thread stores the results.

  /// load(x, to, barrier) starts the loads of chunk x after can_load(x) has returned true.
  template <typename CanLoad, typename Load>
  __device__ __forceinline__ void load_all(uint32_t n, CanLoad can_load, Load load) const {
    uint32_t loaded = 0, in = 0, parity = 0;
    ptx::fence_proxy_async();
    for (; loaded < n; ++loaded) {
      const auto may = [&] {
        return loaded < ptx::ld_acquire_cta(freed) + count && can_load(loaded);
      };
      if (!await_unless(failed, may)) break;
      load(loaded, of(in), &full[in]);
      if (++in == count) in = 0, parity ^= 1;
    }
    // After a failure no other thread waits for the loads that were started.
    for (uint32_t left = min(loaded, count); left > 0; --left) {
      if (in == 0) in = count, parity ^= 1;
      wait_loaded(--in, parity);
    }
  }

  /// Each thread of the role calls add(stage, x) for its share of chunk x.
  template <typename Add>
  __device__ __forceinline__ void add_all(uint32_t n, Add add) const {
    uint32_t at = 0, parity = 0;
    for (uint32_t x = 0; x < n; ++x) {
      while (!ptx::has_ended(&full[at], parity)) {
        if (has_failed(failed)) return;
      }
      add(of(at), x);
      ptx::fence_proxy_async_shared();
      ptx::arrive(&added[at]);
      if (++at == count) at = 0, parity ^= 1;
    }
  }

  /// Stores the sums of the chunks, like pump().
  template <typename Landed, typename CanStore, typename Store, typename Stored>
  __device__ __forceinline__ void store_all(uint32_t n, Landed landed, CanStore can_store,
                                            Store store, Stored stored) const {
    uint32_t at = 0, parity = 0, x = 0;
    for (; x < n; ++x) {
      if (!await_unless(failed, [&] { return ptx::has_ended(&added[at], parity); })) break;
      landed(x);
      if (!can_store(x)) {
        ptx::wait_stored<0>();
        stored(x);
        if (!await_unless(failed, [&] { return can_store(x); })) break;
      }
      store(x, of(at));
      ptx::commit_stores();
      ptx::wait_read<1>();
      ptx::st_release_cta(freed, x);
      if (x >= kPublished) {
        ptx::wait_stored<kPublished>();
        stored(x + 1 - kPublished);
      }
      if (++at == count) at = 0, parity ^= 1;
    }
    ptx::wait_stored<0>();
    if (x == n) stored(n);
  }
};

}  // namespace collx::cuda
