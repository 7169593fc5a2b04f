/* Two-way use of one tile of sentinel slots: every rank fills a slot at every peer, polls its own
 * slots until all words have arrived, re-arms them, and continues with the next use. Each word of
 * the tile has its own thread, which is the same on all ranks.
 *
 *   W, WORDS, USES   ranks; words of a slot, which are also the threads of a rank; uses of the tile
 *   SLOTS            alternating slots of a pair (2: the parities of the epoch)
 *   STAGES           1: one-shot. 2: two-shot; a rank's push in stage 1 needs all of stage 0
 *   AHEAD            uses whose first stage is pushed before the oldest one is polled
 *   LAG              steps by which draining the last stage lags (two-shot only)
 *   STAGE_FENCE      a fence between the stages, too; needed if AHEAD is 1 or more
 *   KERNEL           uses between two kernel boundaries: 1, or more for a call in chunks
 *   PARTIAL          a kernel's last use (KERNEL 1: every second one) only covers the first word
 * Mutants: NO_REARM, NO_FENCE, NO_BLOCK_BARRIER, NO_FILLER, and too few SLOTS for AHEAD and LAG.
 *
 * Checks: no word lands on a word that was not read and re-armed; a reader gets the words of its
 * own use and no others; every thread completes every use.
 */
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef STAGES
#define STAGES 1
#endif
#ifndef AHEAD
#define AHEAD 0
#endif
#ifndef LAG
#define LAG 0
#endif
#ifndef KERNEL
#define KERNEL 1
#endif
#ifndef WORDS
#define WORDS 1
#endif

#define THREADS (W * WORDS)
#define THREAD(rank, word) ((rank) * WORDS + (word))
#define CELLS (W * W * STAGES * SLOTS * WORDS)
#include "memory.inc"

/* Uses are numbered from 1, so that a use is its own epoch and never equals an armed word. */
#define CELL(owner, source, stage, use, word) \
  (((((owner) * W + (source)) * STAGES + (stage)) * SLOTS + (use) % SLOTS) * WORDS + (word))

#ifdef PARTIAL
#if KERNEL == 1
#define COVERS(use, word) ((word) == 0 || (use) % 2 == 1)
#else
#define COVERS(use, word) ((word) == 0 || (use) % KERNEL != 0)
#endif
#else
#define COVERS(use, word) true
#endif

#ifdef NO_FILLER
/* Rank W-1 does not participate in even uses, and no filler replaces its words. */
#define EXCHANGES(a, b, use) ((use) % 2 == 1 || ((a) != W - 1 && (b) != W - 1))
#else
#define EXCHANGES(a, b, use) true
#endif

#define ARRIVED(c) (LOAD(c) != ARMED)
#define TAKE(t, c, use)   \
  assert(LOAD(c) == use); \
  REARM(t, c)

byte joined[W]; /* arrivals of threads at barriers of their block, in total */
byte finished;

inline push(stage, use) {
  d_step {
    p = 0;
    do
    :: p < W && p != me && COVERS(use, word) && EXCHANGES(me, p, use) ->
       STORE(THREAD(me, word), CELL(p, me, stage, use, word), use);
       p++
    :: p < W && !(p != me && COVERS(use, word) && EXCHANGES(me, p, use)) -> p++
    :: p == W -> break
    od;
    p = 0
  }
}

/* A fixed order of polling suffices: a word that has arrived stays until it is re-armed. */
inline take(stage, use) {
  p = 0;
  do
  :: p < W && p != me && COVERS(use, word) && EXCHANGES(me, p, use) ->
     atomic {
       ARRIVED(CELL(me, p, stage, use, word)) ->
       TAKE(THREAD(me, word), CELL(me, p, stage, use, word), use);
       p++
     }
  :: p < W && !(p != me && COVERS(use, word) && EXCHANGES(me, p, use)) -> p++
  :: p == W -> break
  od;
  p = 0
}

inline block_barrier() {
  atomic { joined[me]++; barriers++ };
  joined[me] >= barriers * WORDS
}

/* Between a re-arm and the next store that lets a peer continue. In the kernel, the fence of one
 * thread covers the accesses of the others before the barrier. Here each thread waits for its own
 * stores. */
inline fence() {
#ifndef NO_FENCE
  DRAINED(THREAD(me, word));
#endif
#if WORDS > 1 && !defined(NO_BLOCK_BARRIER)
  block_barrier()
#else
  skip
#endif
}

inline boundary(use) {
  if
  :: (use) % KERNEL == 0 ->
     DRAINED(THREAD(me, word));
     block_barrier()
  :: else -> fence()
  fi
}

proctype thread(byte me; byte word) {
  byte use, p, barriers;
  use = 1;
  do
  :: use <= AHEAD -> push(0, use); use++
  :: else -> break
  od;
  use = 1;
  do
  :: use <= USES + LAG ->
     if
     :: use + AHEAD <= USES -> push(0, use + AHEAD)
     :: else
     fi;
     if
     :: use <= USES ->
        take(0, use);
#if STAGES == 2
#ifdef STAGE_FENCE
        fence();
#endif
        push(1, use)
#endif
     :: else
     fi;
#if STAGES == 2
     if
     :: use > LAG -> take(1, use - LAG)
     :: else
     fi;
#endif
     boundary(use);
     use++
  :: else -> break
  od;
  finished++
}

proctype wire(byte owner; byte source; byte c) {
end:
  do
  :: FILL_LANDS(c, source)
  :: REARM_LANDS(c, owner)
  od
}

#define OWNER(c) ((c) / (W * STAGES * SLOTS * WORDS))
#define SOURCE(c) ((c) / (STAGES * SLOTS * WORDS) % W)

init {
  byte i, j;
  atomic {
    do
    :: i < CELLS ->
       if
       :: OWNER(i) != SOURCE(i) ->
          run wire(THREAD(OWNER(i), i % WORDS), THREAD(SOURCE(i), i % WORDS), i)
       :: else
       fi;
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W * WORDS -> run thread(i / WORDS, i % WORDS); i++
    :: else -> break
    od;
    i = 0
  }
  finished == W * WORDS
}
