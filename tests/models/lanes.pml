/* Lanes: large calls in chunks, each announced by a counter. A lane has a ring of R slots for each
 * ordered pair of ranks and each stage (0: scattered chunks, 1: results). The counters only grow.
 * They start so that they wrap around.
 *
 * For each lane, stage and ordered pair, there is one word {sent, consumed}, which the first rank
 * stores at the second: the number of chunks that it has sent into its ring there, and the number
 * that it has consumed from the ring of the opposite direction. At its start, a call announces the
 * consumption of the previous calls. Results that are stored into outputs use no ring; a separate
 * word announces that all of them are complete.
 *
 * A block has three roles: one scatters, one reduces, one drains. Each role processes the block's
 * lanes in ascending order and each lane to its end. The number of blocks that serve the lanes
 * differs between ranks.
 *
 * WIDE: a mask of calls in which one block of each rank alternates between all lanes: its chunk i
 * is chunk i / LANES of lane i % LANES. Another role announces in these calls, so an announcement
 * does not wait for this rank's consumption, and consumption is also announced while the rank
 * sends. The first lane of a block announces that outputs are complete.
 *
 * A call has one of these kinds, the same on all ranks:
 *   1 two-shot; 2 one-shot; 4 broadcast from rank 0; 8 two-shot that stores results into the
 *   outputs of all ranks; 16 allgather that does so; 32 one-shot in which rank 0 sends more than
 *   the others; 64 broadcast from rank 0 to ranks that pass on to each other what they receive.
 *
 *   W, LANES, R, CALLS, CHUNKS (at most, of a call in each lane), KINDS (a mask), BLOCKS0, BLOCKS1
 *   (blocks of rank 0, and of the others)
 * FIRST, SECOND: the kinds of the first and of the second call, instead of any.
 * Mutants: NO_CREDIT (no wait for the peer's consumption), RELAXED (an announcement overtakes its
 * chunk), NO_CARRY (an announcement does not wait until it contains enough of the own consumption),
 * CARRY_ALL (it waits for more than the peer sends), NOT_TOLD (a rank that has sent everything does
 * not announce its consumption), DIRECT_IN_RING (chunks that are stored into outputs count as sent
 * into the ring), GEOMETRY (a call of one chunk uses half of each ring), NO_ENTRY (a peer's output
 * is written before the peer has entered the call), OTHER_ORDER (rank 1 serves its lanes in
 * descending order), WIDE_DIRECT_FIRST (outputs are announced when the first lane is complete),
 * WIDE_NOT_TOLD (a wide call does not announce its consumption while it sends).
 *
 * Checks: a chunk that is read is the one that was sent; an output is the result of the last call
 * until the user has read it; every call ends.
 */
#ifndef KINDS
#define KINDS 31
#endif
#ifndef FIRST
#define FIRST KINDS
#endif
#ifndef SECOND
#define SECOND KINDS
#endif
#ifndef BLOCKS0
#define BLOCKS0 1
#endif
#ifndef BLOCKS1
#define BLOCKS1 1
#endif
#ifndef LANES
#define LANES 1
#endif
#ifndef WIDE
#define WIDE 0
#endif
#define START 253

#define TWOSHOT 1
#define ONESHOT 2
#define BROADCAST 4
#define TWOSHOT_DIRECT 8
#define ALLGATHER_DIRECT 16
#define UNEQUAL 32
#define PASSED 64

/* The index of (stage, lane, first rank, second rank). */
#define PAIR(s, l, p, q) ((((s) * LANES + (l)) * W + (p)) * W + (q))
#define PAIRS (2 * LANES * W * W)

#define REACHED(seen, expected) (((seen) - (expected) + 512) % 256 < 128)
#ifdef GEOMETRY
#define PLACE(x) (chunks[call] == 1 -> (x) % (R / 2) : (x) % R)
#else
#define PLACE(x) ((x) % R)
#endif
#define SLOT(s, l, p, q, x) (PAIR(s, l, p, q) * R + PLACE(x))

byte slot[PAIRS * R];   /* by ring of p at q: the number of the chunk in the slot, plus 1 */
byte sent[PAIRS];       /* the words of p at q */
byte consumed[PAIRS];
byte has_sent[PAIRS];   /* the same numbers, as counted by p */
byte has_consumed[PAIRS];
byte used[PAIRS];       /* chunks from q that p has consumed in this call, in shared memory */
byte told[PAIRS];       /* chunks of this call that p has announced to q */
byte stored[LANES * W * W]; /* of p at q: the last call whose direct outputs p has all stored */
byte entry[W * W];      /* of p at q: the last call with direct outputs that p has entered */
byte output[W * LANES]; /* number of the call that wrote it */

#ifdef RELAXED
short late[2 * W];
byte late_value[2 * W];
#endif

byte kind[CALLS + 1];
byte chunks[CALLS + 1];
byte fewer[CALLS + 1]; /* the chunks of ranks that send less */
byte launched[W];
byte ended[W]; /* ended roles of all calls */
byte finished;

#define IS_WIDE (((WIDE) >> (call - 1)) & 1)
#define PROCESSES(rank) ((rank) == 0 -> BLOCKS0 : BLOCKS1)
#define BLOCKS(rank) (IS_WIDE -> 1 : PROCESSES(rank))
#define ROLES(rank) (3 * BLOCKS(rank))

#ifdef OTHER_ORDER
#define LANE(k) (me == 1 -> LANES - 1 - (k) : (k))
#else
#define LANE(k) (k)
#endif

#define STAGES_RESULTS (kind[call] == TWOSHOT || kind[call] == PASSED)
#define DIRECT (kind[call] == TWOSHOT_DIRECT || kind[call] == ALLGATHER_DIRECT)
/* The number of chunks that a rank sends to another rank in a stage. */
#define SENDS(s, from, to) ((s) == 0 -> SCATTERED(from) : RESULTS(from, to))
#define SCATTERED(from) \
  (kind[call] == ALLGATHER_DIRECT -> 0 : ((from) != 0 && ONE_WAY -> fewer[call] : chunks[call]))
#define RESULTS(from, to) (kind[call] == PASSED && (from) * (to) == 0 -> 0 : chunks[call])
#define ONE_WAY (kind[call] == BROADCAST || kind[call] == UNEQUAL || kind[call] == PASSED)
#define SCATTERS (i < SENDS(0, me, p))
#define TAKES(s) (i < SENDS(s, p, me))
#define PASSES (i < SENDS(1, me, p))

/* The credit for the next chunk: the peer has consumed the chunk that was in its slot. */
#ifdef NO_CREDIT
#define CREDIT(s) true
#else
#define CREDIT(s) \
  REACHED(consumed[PAIR(s, l, p, me)] + R, has_sent[PAIR(s, l, me, p)] + 1)
#endif
/* The peer has entered the call, so that its output may be written. A chunk that the peer has
 * scattered in this call also proves this. */
#ifdef NO_ENTRY
#define ENTERED true
#else
#define ENTERED (kind[call] != ALLGATHER_DIRECT || entry[p * W + me] >= call)
#endif

/* The consumption in the announcement of chunk i suffices for the peer's chunk i + 1, or for its
 * first chunk of the next call. */
#ifdef NO_CARRY
#define CARRIES(s) true
#else
#ifdef CARRY_ALL
#define CARRIES(s) (used[PAIR(s, l, me, p)] + R >= i + 2)
#else
#define CARRIES(s) \
  (IS_WIDE || used[PAIR(s, l, me, p)] + R >= i + 2 || used[PAIR(s, l, me, p)] >= SENDS(s, p, me))
#endif
#endif
/* A rank that has sent everything announces its consumption separately. The next call announces the
 * last R/2 chunks. */
#ifdef WIDE_NOT_TOLD
#define TELLS_ALWAYS false
#else
#define TELLS_ALWAYS IS_WIDE
#endif
#define IS_TOLD(s) \
  ((TELLS_ALWAYS || told[PAIR(s, l, me, p)] >= SENDS(s, me, p)) && \
   used[PAIR(s, l, me, p)] - 1 + R / 2 < SENDS(s, p, me))

inline tell(s) {
  sent[PAIR(s, l, me, p)] = has_sent[PAIR(s, l, me, p)];
  consumed[PAIR(s, l, me, p)] = has_consumed[PAIR(s, l, me, p)]
}

/* The chunk is in the peer's slot before it is announced: the peer sees both or neither. */
inline push(s) {
  told[PAIR(s, l, me, p)]++;
#ifdef RELAXED
  has_sent[PAIR(s, l, me, p)]++;
  tell(s);
  late[me * 2 + s] = SLOT(s, l, me, p, has_sent[PAIR(s, l, me, p)] + 255) + 1;
  late_value[me * 2 + s] = has_sent[PAIR(s, l, me, p)]
#else
  slot[SLOT(s, l, me, p, has_sent[PAIR(s, l, me, p)])] = has_sent[PAIR(s, l, me, p)] + 1;
  has_sent[PAIR(s, l, me, p)]++;
  tell(s)
#endif
}

#ifdef RELAXED
#define LANDED(s) (late[me * 2 + s] == 0)
#else
#define LANDED(s) true
#endif
#define COME(s) REACHED(sent[PAIR(s, l, p, me)], has_consumed[PAIR(s, l, me, p)] + 1)

/* Reads the next chunk of p. */
inline take(s) {
  b = has_consumed[PAIR(s, l, me, p)] + 1;
  assert(slot[SLOT(s, l, p, me, has_consumed[PAIR(s, l, me, p)])] == b);
  has_consumed[PAIR(s, l, me, p)] = b;
  used[PAIR(s, l, me, p)]++
}

#ifdef WIDE_DIRECT_FIRST
#define ANNOUNCES_WIDE (IS_WIDE && k == 0)
#else
#define ANNOUNCES_WIDE (IS_WIDE && k == LANES - 1)
#endif

#define FIRST_PEER (me == 0 -> 1 : 0)
#define NEXT_PEER (p + 1 == me -> p + 2 : p + 1)
#define ACTIVE (call <= CALLS && launched[me] == call)

/* Skips to the next call in which the rank has this block. */
inline leave_out() {
  do
  :: call <= CALLS && block >= BLOCKS(me) -> call++
  :: else -> break
  od
}
inline begin() {
  atomic { call = 1; leave_out(); k = block; l = LANE(k); p = FIRST_PEER }
}
inline next_call() {
  i = 0;
  k = block;
  ended[me]++;
  call++;
  leave_out()
}
/* Continues with the next lane, or with the next call. */
inline next_lane() {
  i = 0;
  k = k + BLOCKS(me);
  if
  :: k >= LANES -> next_call()
  :: else
  fi;
  l = LANE(k)
}
/* Continues with the next lane, then with the next chunk of all lanes. */
inline next_turn() {
  k++;
  if
  :: k == LANES ->
     k = block;
     i++;
     if
     :: i == chunks[call] -> next_call()
     :: else
     fi
  :: else
  fi;
  l = LANE(k)
}
inline next_chunk() {
  p = FIRST_PEER;
  if
  :: IS_WIDE -> next_turn()
  :: else ->
     i++;
     if
     :: i == chunks[call] -> next_lane()
     :: else
     fi
  fi
}
inline next_peer() {
  p = NEXT_PEER;
  if
  :: p >= W -> next_chunk()
  :: else
  fi
}

proctype scatter_role(byte me; byte block) {
  byte call, p, l, k, i;
  begin();
end:
  do
  :: atomic { ACTIVE && !SCATTERS -> next_chunk() }
  :: atomic {
       ACTIVE && SCATTERS && CREDIT(0) && LANDED(0) && CARRIES(0) ->
       push(0);
       next_peer()
     }
  od
}

/* A result of all peers' chunks is sent to all peers. */
inline next_taken() {
  p = NEXT_PEER;
  if
  :: p >= W -> p = FIRST_PEER; taken = true
  :: else
  fi
}
inline next_result() {
  taken = false;
  next_chunk()
}

proctype reduce_role(byte me; byte block) {
  byte call, p, l, k, i, b;
  bool taken;
  begin();
end:
  do
  :: atomic { ACTIVE && !taken && !TAKES(0) -> next_taken() }
  :: atomic {
       ACTIVE && !taken && TAKES(0) && COME(0) ->
       take(0);
       if
#ifndef NOT_TOLD
       :: IS_TOLD(0) -> tell(0)
#endif
       :: else
       fi;
       next_taken()
     }
  :: atomic { ACTIVE && taken && !STAGES_RESULTS && !DIRECT -> next_result() }
  :: atomic {
       ACTIVE && taken && STAGES_RESULTS &&
       (!PASSES || (CREDIT(1) && LANDED(1) && CARRIES(1))) ->
       if
       :: PASSES -> push(1)
       :: else
       fi;
       p = NEXT_PEER;
       if
       :: p >= W -> next_result()
       :: else
       fi
     }
  :: atomic {
       ACTIVE && taken && DIRECT && ENTERED ->
       output[p * LANES + l] = call;
#ifdef DIRECT_IN_RING
       has_sent[PAIR(1, l, me, p)]++;
       tell(1);
#endif
       if
       :: i + 1 == chunks[call] && !IS_WIDE -> stored[(l * W + me) * W + p] = call
       :: i + 1 == chunks[call] && ANNOUNCES_WIDE -> stored[(LANE(0) * W + me) * W + p] = call
       :: else
       fi;
       p = NEXT_PEER;
       if
       :: p >= W -> next_result()
       :: else
       fi
     }
  od
}

proctype drain_role(byte me; byte block) {
  byte call, p, l, k, i, b;
  begin();
end:
  do
  :: atomic { ACTIVE && !STAGES_RESULTS && !DIRECT -> next_chunk() }
  :: atomic { ACTIVE && STAGES_RESULTS && !TAKES(1) -> next_peer() }
  :: atomic {
       ACTIVE && STAGES_RESULTS && TAKES(1) && COME(1) ->
       take(1);
       if
       :: TELLS_ALWAYS && used[PAIR(1, l, me, p)] - 1 + R / 2 < chunks[call] -> tell(1)
       :: else
       fi;
       next_peer()
     }
  :: atomic {
       ACTIVE && DIRECT && stored[(l * W + p) * W + me] == call ->
       p = NEXT_PEER;
       if
       :: p >= W && IS_WIDE -> p = FIRST_PEER; next_call(); l = LANE(k)
       :: p >= W && !IS_WIDE -> p = FIRST_PEER; next_lane()
       :: else
       fi
     }
  od
}

#ifdef RELAXED
/* A chunk that lands after its announcement. */
proctype wire(byte c) {
end:
  do
  :: atomic { late[c] != 0 -> slot[late[c] - 1] = late_value[c]; late[c] = 0 }
  od
}
#endif

/* The stream: everything before and after the calls. */
proctype stream(byte me) {
  byte call, p, l, expected;
  call = 1;
  do
  :: call <= CALLS ->
     d_step {
       p = 0;
       do
       :: p < PAIRS ->
          if
          :: p / W % W == me -> used[p] = 0; told[p] = 0
          :: else
          fi;
          p++
       :: else -> break
       od;
       p = 0;
       do
       :: p < PAIRS && p / W % W == me && p % W != me && (p < PAIRS / 2 || !DIRECT) ->
          consumed[p] = has_consumed[p]; p++
       :: p < PAIRS && !(p / W % W == me && p % W != me && (p < PAIRS / 2 || !DIRECT)) -> p++
       :: p >= PAIRS -> break
       od;
       p = 0
     };
     if
     :: kind[call] == ALLGATHER_DIRECT ->
        d_step {
          do
          :: p < W -> entry[me * W + p] = call; p++
          :: else -> break
          od;
          p = 0
        }
     :: else
     fi;
     atomic { launched[me] = call; expected = expected + ROLES(me) };
     ended[me] == expected;
     if
     :: !DIRECT ->
        d_step {
          do
          :: l < LANES -> output[me * LANES + l] = call; l++
          :: else -> break
          od;
          l = 0
        }
     :: else
     fi;
     d_step { /* the user reads the output some time later */
       do
       :: l < LANES -> assert(output[me * LANES + l] == call); l++
       :: else -> break
       od;
       l = 0
     };
     call++
  :: else -> break
  od;
  finished++
}

#define CHOOSE(mask) \
  if \
  :: (mask) & TWOSHOT -> kind[i] = TWOSHOT \
  :: (mask) & ONESHOT -> kind[i] = ONESHOT \
  :: (mask) & BROADCAST -> kind[i] = BROADCAST \
  :: (mask) & TWOSHOT_DIRECT -> kind[i] = TWOSHOT_DIRECT \
  :: (mask) & ALLGATHER_DIRECT -> kind[i] = ALLGATHER_DIRECT \
  :: (mask) & UNEQUAL -> kind[i] = UNEQUAL \
  :: (mask) & PASSED -> kind[i] = PASSED \
  fi

init {
  byte i, k;
  atomic {
    i = 1;
    do
    :: i <= CALLS ->
       if
       :: i == 1 -> CHOOSE(FIRST)
       :: i == 2 -> CHOOSE(SECOND)
       :: i > 2 -> CHOOSE(KINDS)
       fi;
       k = 1;
       do
       :: k < CHUNKS -> k++
       :: true -> break
       od;
       chunks[i] = k;
       if
       :: kind[i] == UNEQUAL ->
          k--;
          do
          :: k > 0 -> k--
          :: true -> break
          od;
          fewer[i] = k
       :: else
       fi;
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < PAIRS ->
       sent[i] = START; consumed[i] = START; has_sent[i] = START; has_consumed[i] = START; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W ->
       k = 0;
       do
       :: k < PROCESSES(i) ->
          run scatter_role(i, k); run reduce_role(i, k); run drain_role(i, k); k++
       :: else -> break
       od;
       run stream(i); i++
    :: else -> break
    od;
#ifdef RELAXED
    i = 0;
    do
    :: i < 2 * W -> run wire(i); i++
    :: else -> break
    od;
#endif
    i = 0; k = 0
  }
  finished == W
}
