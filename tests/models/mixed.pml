/* Sequences of two-way and one-way collectives on one communicator, one use of one tile each.
 *
 * Two-way (all-reduce): as in sentinel.pml; slots of their own, two parities, nothing else checked.
 * One-way (broadcast, reduce, scatter): other slots, and a done word of each rank at each peer. At
 * the end of every use each rank sends its done word, after what it read is re-armed; a sender waits
 * until the peer is done with the use two before. All ranks count all uses, also those in which
 * they neither send nor receive.
 *
 * The sequence is chosen freely before the ranks start (or given as FIRST, SECOND,
 * THIRD), so a run covers all
 * mixed sequences of CALLS calls of the first OPS kinds. All calls run in one kernel: a fence stands
 * behind a two-way use, nothing behind a one-way use. Kernel boundaries only take behaviour away;
 * APART puts one behind every call, for mutants that fail even so.
 *
 * Mutants: SHARED (one slot area and epoch for all, no done words), NO_DONE (own slots, nothing
 * waits), DONE_EARLY (sent before the re-arm), DONE_RELAXED (not held behind the re-arm),
 * SKIP_EPOCH (ranks without a part in a one-way call do not count it).
 */
#define ALLREDUCE 0  /* all to all */
#define BROADCAST 1  /* rank 0 to all */
#define REDUCE 2     /* all to rank 0 */
#define SCATTER 3    /* rank W-1 to all but rank 0, whose part is empty */
#define BROADCAST1 4 /* rank 1 to all */
#ifndef OPS
#define OPS 5
#endif

#define SENDS(op, from, to)                          \
  ((from) != (to) &&                                 \
   (((op) == ALLREDUCE) ||                           \
    ((op) == BROADCAST && (from) == 0) ||            \
    ((op) == REDUCE && (to) == 0) ||                 \
    ((op) == SCATTER && (from) == W - 1 && (to) != 0) || \
    ((op) == BROADCAST1 && (from) == 1)))

#ifdef SHARED
#define AREAS 1
#define AREA(op) 0
#else
#define AREAS 2
#define AREA(op) ((op) == ALLREDUCE -> 0 : 1)
#endif

#define THREADS W
#define CELLS (AREAS * W * W * 2)
#include "memory.inc"

#define CELL(area, owner, source, use) \
  ((((area) * W + (owner)) * W + (source)) * 2 + (use) % 2)

byte sequence[CALLS];

/* finished_use[to * W + from]: the use that `from` has finished, as `to` sees it. A done word lands
 * at once: that it takes its time is the same as its reader looking later. */
byte finished_use[W * W];
byte finished;

inline push() {
  p = 0;
  do
  :: p < W && SENDS(op, me, p) ->
#if !defined(SHARED) && !defined(NO_DONE)
     (op == ALLREDUCE || finished_use[me * W + p] + 2 >= use);
#endif
     d_step { STORE(me, CELL(AREA(op), p, me, use), use); p++ }
  :: p < W && !SENDS(op, me, p) -> p++
  :: p == W -> break
  od;
  p = 0
}

inline take() {
  p = 0;
  do
  :: p < W && SENDS(op, p, me) ->
     atomic {
       LOAD(CELL(AREA(op), me, p, use)) != ARMED ->
       assert(LOAD(CELL(AREA(op), me, p, use)) == use);
#ifndef DONE_EARLY
       REARM(me, CELL(AREA(op), me, p, use));
#endif
       p++
     }
  :: p < W && !SENDS(op, p, me) -> p++
  :: p == W -> break
  od;
  p = 0
}

/* The mutant's re-arm, after the done word. */
inline rearm_late() {
#ifdef DONE_EARLY
  d_step {
    p = 0;
    do
    :: p < W && SENDS(op, p, me) -> REARM(me, CELL(AREA(op), me, p, use)); p++
    :: p < W && !SENDS(op, p, me) -> p++
    :: p == W -> break
    od;
    p = 0
  }
#else
  skip
#endif
}

/* A release: it lands after all that the block has stored. */
inline send_done() {
#if !defined(SHARED)
  if
  :: op != ALLREDUCE ->
#ifndef DONE_RELAXED
     DRAINED(me);
#endif
     d_step {
       p = 0;
       do
       :: p < W -> finished_use[p * W + me] = use; p++
       :: else -> break
       od;
       p = 0
     }
  :: else
  fi
#else
  skip
#endif
}

#ifdef SKIP_EPOCH
#define COUNTS(op) takes_part
#else
#define COUNTS(op) true
#endif

proctype rank(byte me) {
  byte call, op, use, p;
  byte uses[AREAS];
#ifdef SKIP_EPOCH
  bit takes_part;
#endif
  do
  :: call < CALLS ->
     op = sequence[call];
#ifdef SKIP_EPOCH
     d_step {
       p = 0; takes_part = 0;
       do
       :: p < W -> takes_part = takes_part || SENDS(op, me, p) || SENDS(op, p, me); p++
       :: else -> break
       od;
       p = 0
     };
#endif
     if
     :: COUNTS(op) ->
        d_step { uses[AREA(op)]++; use = uses[AREA(op)] };
        push();
        take();
        send_done();
        rearm_late()
     :: else
     fi;
#ifdef APART
     DRAINED(me);
#else
     if
     :: op == ALLREDUCE -> DRAINED(me)
     :: else
     fi;
#endif
     call++
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

#define OWNER(c) ((c) / (2 * W) % W)
#define SOURCE(c) ((c) / 2 % W)

init {
  byte i;
  atomic {
#ifdef FIRST
    sequence[0] = FIRST;
    sequence[1] = SECOND;
    sequence[2] = THIRD;
#else
    do
    :: i < CALLS ->
       if
       :: sequence[i] = ALLREDUCE
       :: sequence[i] = BROADCAST
       :: OPS > 2 -> sequence[i] = REDUCE
       :: OPS > 3 -> sequence[i] = SCATTER
       :: OPS > 4 -> sequence[i] = BROADCAST1
       fi;
       i++
    :: else -> break
    od;
#endif
    i = 0;
    do
    :: i < CELLS -> if :: OWNER(i) != SOURCE(i) -> run wire(OWNER(i), SOURCE(i), i) :: else fi; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W -> run rank(i); i++
    :: else -> break
    od;
    i = 0
  }
  finished == W
}
