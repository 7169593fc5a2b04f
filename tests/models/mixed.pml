/* Sequences of two-way and one-way collectives on one communicator, over one tile.
 *
 * Two-way: as in sentinel.pml. An area has two stages. In each, a pair of ranks has two slots,
 * which alternate with the epoch of the tile. Every pair exchanges a word in each direction in
 * every use, in one stage or the other; nothing else is checked. A rank's push in stage 1 needs all
 * words that it receives in stage 0.
 *   ALLREDUCE   both stages between all
 *   ALLGATHER   stage 0 between all
 *   PIPELINED   a broadcast: stage 0 from the root; stage 1 from the others to all, a filler to the
 *               root
 *   REDUCE      stage 0 to all but the root; stage 1 to the root
 * One-way: every ordered pair of ranks has a channel: two slots at the receiver, which alternate
 * with the pair's epoch, and a done word at the sender. Each end counts the epoch for itself.
 * Iteration u of a call makes use u of every message that is long enough: send, receive, and the
 * done words of messages that have another use. The done word of the last use is deferred: the
 * first iteration of the next call in which the pair has a message stores it, after its sends.
 *   COPY        a message from every rank to every other, of any length or none: all-to-all-v, and,
 *               with suitable lengths, broadcast, reduce, gather and scatter
 *
 *   W, WORDS    ranks; words of the tile, which are also the threads of a rank
 *   CALLS       calls; kind, root and lengths of each are chosen freely
 *   KINDS       the kinds: the sum of 1, 2, 4, 8, 16 for those above. SECOND: of the second call
 *   LENGTH      words of the longest message. More than WORDS: several uses in a call
 *   GIVEN       the first GIVEN calls are not chosen but COPY, with messages of LENGTH words
 *   BROADCAST   COPY only has messages from rank 0
 * Every call is a kernel: its re-arms have landed before the next kernel begins.
 *
 * Memory: a fill lands at once, because landing late is equivalent to a later read by its only
 * reader. The owner sees a re-arm at once. It lands as late as possible, at a fence or at the
 * release that covers it. Landing earlier would only hide errors, since a re-arm only affects the
 * next fill, which must come after it has landed. A release is assumed to cover only the slots that
 * it hands back. A done word lands at once, like a fill. The sends or receives of a thread in an
 * iteration are one step if it need not wait: they only affect a rank that polls for them, and only
 * by being late.
 *
 * Mutants: SHARED (one slot area and epoch for all, no done words), NO_FILLER (in PIPELINED),
 * NO_DONE (no waits), NOT_TOLD (deferred words are not stored), TOLD_AHEAD (including the current
 * use), PUT_OFF_TWO (the last two uses of a call), ONE_KERNEL (nothing between calls), SLOTS=1,
 * DONE_EARLY (stored before the re-arm), DONE_RELAXED (not ordered after the re-arm),
 * NO_BLOCK_BARRIER (before the done word), ONE_END (the receiver counts calls, the sender uses),
 * EPOCH_PER_TILE (a rank counts its uses for all its channels together), RECEIVE_FIRST (before
 * sending), SEND_ALL_FIRST (a whole message before anything is received).
 *
 * Checks: no word lands on a word that was not read and re-armed; a reader gets the words of its
 * own call, use and sender, and no others; every thread completes every call.
 */
#define ALLREDUCE 0
#define ALLGATHER 1
#define PIPELINED 2
#define REDUCE 3
#define COPY 4
#define NONE 5

#ifndef WORDS
#define WORDS 1
#endif
#ifndef KINDS
#define KINDS 31
#endif
#ifndef SECOND
#define SECOND KINDS
#endif
#ifndef LENGTH
#define LENGTH 2
#endif
#ifndef GIVEN
#define GIVEN 0
#endif
#ifndef SLOTS
#define SLOTS 2
#endif

#define ALLOWED(k) (((call == 1 -> SECOND : KINDS) >> (k)) % 2 == 1)
#define USES(length) (((length) + WORDS - 1) / WORDS)
/* Whether iteration u of a call has a word of the message for this thread, or for any thread. */
#define COVERS(length) ((length) > u * WORDS + word)
#define REACHES(length) ((length) > u * WORDS)

/* Epochs of channels wrap around: here they have four bits. */
#define EPOCHS 16
#define FIRST_EPOCH 14
#define REACHED(seen, expected) (((seen) + 2 * EPOCHS - (expected)) % EPOCHS < EPOCHS / 2)

/* A cell contains ARMED or its value. RE_ARMED is added while a re-arm is in flight. */
#define ARMED 0
#define RE_ARMED 128
#define SEEN(c) (cell[c] < RE_ARMED -> cell[c] : ARMED)

#define AREA(stage, owner, source, epoch, place) \
  (((((stage) * 2 + (epoch) % 2) * W + (owner)) * W + (source)) * WORDS + (place))
#define AREA_CELLS (2 * 2 * W * W * WORDS)
#ifdef SHARED
#define CHANNEL(owner, source, epoch, place) AREA(0, owner, source, turn + u, place)
#define CELLS AREA_CELLS
#else
#define CHANNEL(owner, source, epoch, place) \
  (AREA_CELLS + (((epoch) % SLOTS * W + (owner)) * W + (source)) * WORDS + (place))
#define CELLS (AREA_CELLS + SLOTS * W * W * WORDS)
#endif
byte cell[CELLS];

#define DONE(sender, receiver) done_word[(sender) * W + (receiver)]
byte done_word[W * W]; /* at the sender, written by the receiver */

/* The calls. A rank only uses the parts in which it participates. They are reset when all threads
 * have left. */
byte kind[CALLS];
byte root[CALLS];
byte lengths[CALLS * W * W]; /* [call][from][to]; two-way calls use the first one for all */
byte left[CALLS];
#define LEN(from, to) lengths[(call * W + (from)) * W + (to)]
#define ROOT root[call]

/* The value of a word identifies its call, use and sender. */
#define DATUM(from) ((call * USES(LENGTH) + u) * W + (from) + 1)

byte joined[W]; /* threads that have reached the barrier of their block */
bit opened[W];  /* flips when all have arrived */
byte finished;

inline choose_length(length, least) {
  if
  :: least == 0 -> length = 0
  :: length = 1
  :: LENGTH > 1 -> length = 2
  :: LENGTH > 2 -> length = 3
  :: LENGTH > 3 -> length = 4
  :: LENGTH > 4 -> length = 5
  :: LENGTH > 5 -> length = 6
  fi
}

inline choose_messages() {
  do
  :: p < W * W ->
     if
     :: p % (W + 1) == 0 /* none to itself */
     :: p % (W + 1) != 0 && call < GIVEN -> lengths[call * W * W + p] = LENGTH
     :: p % (W + 1) != 0 && call >= GIVEN ->
#ifdef BROADCAST
        if
        :: p < W -> choose_length(lengths[call * W * W + p], 0)
        :: else
        fi
#else
        choose_length(lengths[call * W * W + p], 0)
#endif
     fi;
     p++
  :: p == W * W -> break
  od;
  p = 0
}

inline choose_root() {
  if
  :: ROOT = 0
  :: ROOT = 1
  :: W > 2 -> ROOT = 2
  :: W > 3 -> ROOT = 3
  fi
}

/* The first thread that enters a call chooses it. */
inline enter() {
  if
  :: kind[call] == NONE && call < GIVEN -> kind[call] = COPY; choose_messages()
  :: kind[call] == NONE && call >= GIVEN ->
     if
     :: ALLOWED(ALLREDUCE) -> kind[call] = ALLREDUCE; choose_length(LEN(0, 0), 1)
     :: ALLOWED(ALLGATHER) -> kind[call] = ALLGATHER; choose_length(LEN(0, 0), 1)
     :: ALLOWED(PIPELINED) -> kind[call] = PIPELINED; choose_length(LEN(0, 0), 1); choose_root()
     :: ALLOWED(REDUCE) -> kind[call] = REDUCE; choose_length(LEN(0, 0), 1); choose_root()
     :: ALLOWED(COPY) -> kind[call] = COPY; choose_messages()
     fi
  :: else
  fi;
  /* The number of iterations in which this rank participates. */
  d_step {
    if
    :: kind[call] != COPY -> uses = USES(LEN(0, 0))
    :: else ->
       do
       :: p < W ->
          uses = (USES(LEN(me, p)) > uses -> USES(LEN(me, p)) : uses);
          uses = (USES(LEN(p, me)) > uses -> USES(LEN(p, me)) : uses);
          p++
       :: else -> break
       od;
       p = 0
    fi
  }
}

inline leave() {
  d_step {
    if
    :: kind[call] != COPY -> turn = (turn + uses) % 2
    :: else ->
       do
       :: p < W ->
#ifdef EPOCH_PER_TILE
          sent[p] = (sent[p] + uses) % EPOCHS;
          received[p] = (received[p] + uses) % EPOCHS;
#else
          sent[p] = (sent[p] + USES(LEN(me, p))) % EPOCHS;
#ifdef ONE_END
          received[p] = (received[p] + (LEN(p, me) > 0 -> 1 : 0)) % EPOCHS;
#else
          received[p] = (received[p] + USES(LEN(p, me))) % EPOCHS;
#endif
#endif
          p++
       :: else -> break
       od;
       p = 0;
#ifdef SHARED
       turn = (turn + uses) % 2
#endif
    fi;
    left[call]++;
    if
    :: left[call] == W * WORDS ->
       kind[call] = NONE;
       ROOT = 0;
       left[call] = 0;
       do
       :: p < W * W -> lengths[call * W * W + p] = 0; p++
       :: else -> break
       od;
       p = 0
    :: else
    fi;
    u = 0;
    uses = 0;
    mutual = 0;
    call++
  }
}

#define FILL(c, value)                                           \
  assert(cell[c] == ARMED); /* else not read, or not re-armed */ \
  cell[c] = value
#define REARM(c) cell[c] = cell[c] + RE_ARMED
#define LAND(c)                             \
  if                                        \
  :: cell[c] >= RE_ARMED -> cell[c] = ARMED \
  :: else                                   \
  fi

inline join() {
  met = 1 - met;
  joined[me]++;
  if
  :: joined[me] == WORDS -> joined[me] = 0; opened[me] = met
  :: else
  fi
}

#if WORDS > 1
#define BLOCK_BARRIER d_step { join() }; opened[me] == met;
#else
#define BLOCK_BARRIER
#endif

/* All re-arms of the thread land. */
inline fence() {
  d_step {
    do
    :: p < CELLS ->
       if
       :: p / (W * WORDS) % W == me && p % WORDS == word -> LAND(p)
       :: else
       fi;
       p++
    :: else -> break
    od;
    p = 0
  }
}

/* Two-way. */

#ifdef NO_FILLER
#define FILLER 0
#else
#define FILLER 1
#endif
#define FORWARDS(stage, from, to) \
  ((stage == 0) == (from == ROOT) && (stage == 0 || FILLER || to != ROOT))
#define PUSHES(stage, from, to)                         \
  (from != to && COVERS(LEN(0, 0)) &&                   \
   ((kind[call] == ALLREDUCE) ||                        \
    (kind[call] == ALLGATHER && stage == 0) ||          \
    (kind[call] == PIPELINED && FORWARDS(stage, from, to)) || \
    (kind[call] == REDUCE && (stage == 1) == (to == ROOT))))

inline push(stage) {
  d_step {
    do
    :: p < W && PUSHES(stage, me, p) -> FILL(AREA(stage, p, me, turn + u, word), DATUM(me)); p++
    :: p < W && !PUSHES(stage, me, p) -> p++
    :: p == W -> break
    od;
    p = 0
  }
}

inline poll(stage) {
  atomic {
    do
    :: p < W && PUSHES(stage, p, me) ->
       SEEN(AREA(stage, me, p, turn + u, word)) != ARMED;
       assert(cell[AREA(stage, me, p, turn + u, word)] == DATUM(p));
       REARM(AREA(stage, me, p, turn + u, word));
       p++
    :: p < W && !PUSHES(stage, p, me) -> p++
    :: p == W -> break
    od;
    p = 0
  }
}

inline two_way() {
  do
  :: u < uses ->
     push(0);
     poll(0);
     push(1);
     poll(1);
     fence();
     BLOCK_BARRIER
     u++
  :: else -> break
  od
}

/* One-way. */

#if defined(NO_DONE) || defined(SHARED)
#define MAY_FILL(p) true
#else
#define MAY_FILL(p) REACHED(DONE(me, p), sent[p] + u + 1 - 2)
#endif

#define SENDS_TO(p) (p != me && COVERS(LEN(me, p)))
#define TAKES_FROM(p) (p != me && COVERS(LEN(p, me)))
#define OUT(p, place) CHANNEL(p, me, sent[p] + u + 1, place)
#define IN(p, place) CHANNEL(me, p, received[p] + u + 1, place)

inline send() {
  do
  :: p < W && SENDS_TO(p) -> MAY_FILL(p); FILL(OUT(p, word), DATUM(me)); p++
  :: p < W && !SENDS_TO(p) -> p++
  :: p == W -> break
  od;
  p = 0
}

#ifdef DONE_EARLY
#define REARM_TAKEN(c) skip
#else
#define REARM_TAKEN(c) REARM(c)
#endif

inline receive() {
  do
  :: p < W && TAKES_FROM(p) ->
     SEEN(IN(p, word)) != ARMED;
     assert(cell[IN(p, word)] == DATUM(p));
     REARM_TAKEN(IN(p, word));
     p++
  :: p < W && !TAKES_FROM(p) -> p++
  :: p == W -> break
  od;
  p = 0
}

/* One thread stores the done words of earlier calls, whose re-arms have landed since. */
#ifdef TOLD_AHEAD
#define TOLD(p) ((received[p] + 1) % EPOCHS)
#else
#define TOLD(p) received[p]
#endif
inline hand_back() {
  do
  :: p < W && p != me && REACHES(LEN(p, me)) -> DONE(p, me) = TOLD(p); p++
  :: p < W && !(p != me && REACHES(LEN(p, me))) -> p++
  :: p == W -> break
  od;
  p = 0
}

/* Whether the message has another use, so that the done word of this use is not deferred. */
#ifdef PUT_OFF_TWO
#define ANOTHER(length) ((length) > (u + 2) * WORDS)
#else
#define ANOTHER(length) ((length) > (u + 1) * WORDS)
#endif

/* One thread stores the done words of this use. They cover the re-arms of the whole block. */
inline release() {
  d_step {
    do
    :: p < W && p != me && ANOTHER(LEN(p, me)) ->
       do
       :: q < WORDS ->
#ifndef DONE_RELAXED
          LAND(IN(p, q));
#endif
          q++
       :: else -> break
       od;
       q = 0;
       DONE(p, me) = (received[p] + u + 1) % EPOCHS;
       p++
    :: p < W && !(p != me && ANOTHER(LEN(p, me))) -> p++
    :: p == W -> break
    od;
    p = 0
  }
}

/* The mutant's re-arms, after the done words. */
inline rearm_late() {
  do
  :: p < W && TAKES_FROM(p) -> cell[IN(p, word)] = ARMED; p++
  :: p < W && !TAKES_FROM(p) -> p++
  :: p == W -> break
  od;
  p = 0
}

inline one_way() {
#ifdef SEND_ALL_FIRST
  do
  :: u < uses -> atomic { send() }; u++
  :: else -> break
  od;
  u = 0;
#endif
  do
  :: u < uses ->
#ifdef RECEIVE_FIRST
     atomic { receive() };
     atomic { send() };
#else
#ifndef SEND_ALL_FIRST
     atomic { send() };
#endif
#ifndef NOT_TOLD
     atomic {
       if
       :: u == 0 && word == 0 -> hand_back()
       :: else
       fi
     };
#endif
     atomic { receive() };
#endif
#ifndef NO_BLOCK_BARRIER
     BLOCK_BARRIER
#endif
     atomic {
       if
       :: word == 0 -> release()
       :: else
       fi;
#ifdef DONE_EARLY
     };
     atomic {
       rearm_late();
#endif
       u++
     }
  :: else -> break
  od
}

proctype thread(byte me; byte word) {
  byte call, uses, u, p, q;
  bit turn, met, mutual;
  byte sent[W], received[W];
  d_step {
    do
    :: p < W -> sent[p] = FIRST_EPOCH; received[p] = FIRST_EPOCH; p++
    :: else -> break
    od;
    p = 0
  };
  do
  :: call < CALLS ->
     atomic {
       enter();
       mutual = kind[call] != COPY
     };
     if
     :: mutual -> two_way()
     :: else -> one_way()
     fi;
#ifndef ONE_KERNEL
     fence();
     BLOCK_BARRIER
#endif
     leave()
  :: else -> break
  od;
  finished++
}

init {
  byte i;
  atomic {
    do
    :: i < CALLS -> kind[i] = NONE; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W * W -> done_word[i] = FIRST_EPOCH; i++
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
