/* Lanes: large calls by chunks, each announced by a counter. A lane has a ring of R slots for each
 * ordered pair of ranks and each stage (0: what is scattered, 1: results). The counters only grow.
 * They start so that they wrap around.
 *
 * For each lane, stage and ordered pair there is one word {sent, consumed}, which the first rank
 * stores at the second: how many chunks it has sent into its ring there, and how many it has consumed
 * of the ring by which the other one sends to it. A call tells at its start what the calls before have
 * consumed. Results that go into outputs use no ring; a word of its own tells that all of them stand.
 *
 * A block has three roles, each of which goes through the block's lanes in ascending order and through
 * each lane to its end: one scatters, one reduces, one drains. How many blocks serve the lanes differs
 * between ranks.
 *
 * A call is of one of these kinds, the same on all ranks:
 *   1 two-shot; 2 one-shot; 4 broadcast from rank 0; 8 two-shot that stores results into the outputs
 *   of all ranks; 16 allgather that does so; 32 one-shot in which rank 0 sends more than the others.
 *
 *   W, LANES, R, CALLS, CHUNKS (of a call in each lane, at most), KINDS (a mask), BLOCKS0, BLOCKS1
 *   (blocks of rank 0, and of the others)
 * FIRST, SECOND: the kinds of the first and of the second call, instead of any.
 * Mutants: NO_CREDIT (no wait for what the peer has consumed), RELAXED (an announcement overtakes its
 * chunk), NO_CARRY (an announcement does not wait until the own consumption is worth telling),
 * CARRY_ALL (it waits for more than the peer sends), NOT_TOLD (a rank that has sent all does not tell
 * what it consumes), DIRECT_IN_RING (chunks that
 * go into outputs count as sent into the ring), GEOMETRY (a call of one chunk uses half of each ring),
 * NO_ENTRY (a peer's output is written before the peer has entered the call), OTHER_ORDER (rank 1
 * serves its lanes in descending order).
 *
 * Checked: a chunk that is read is the one that was sent; an output is what the last call made until
 * the user has read it; every call ends.
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
#define START 253

#define TWOSHOT 1
#define ONESHOT 2
#define BROADCAST 4
#define TWOSHOT_DIRECT 8
#define ALLGATHER_DIRECT 16
#define UNEQUAL 32

/* Of (stage, lane, first, second). */
#define PAIR(s, l, p, q) ((((s) * LANES + (l)) * W + (p)) * W + (q))
#define PAIRS (2 * LANES * W * W)

#define REACHED(seen, expected) (((seen) - (expected) + 512) % 256 < 128)
#ifdef GEOMETRY
#define PLACE(x) (chunks[call] == 1 -> (x) % (R / 2) : (x) % R)
#else
#define PLACE(x) ((x) % R)
#endif
#define SLOT(s, l, p, q, x) (PAIR(s, l, p, q) * R + PLACE(x))

byte slot[PAIRS * R];   /* by ring: of p at q; the number of the chunk that is in it, plus 1 */
byte sent[PAIRS];       /* words: of p at q */
byte consumed[PAIRS];
byte has_sent[PAIRS];   /* the same where p counts it */
byte has_consumed[PAIRS];
byte used[PAIRS];       /* chunks of this call that p has consumed of what q sent, in shared memory */
byte told[PAIRS];       /* chunks of this call that p has announced to q */
byte stored[LANES * W * W]; /* of p at q: the last call with direct outputs of which p has stored all */
byte entry[W * W];      /* of p at q: the last call with direct outputs that p has entered */
byte output[W * LANES]; /* number of the call that wrote it */

#ifdef RELAXED
short late[2 * W];
byte late_value[2 * W];
#endif

byte kind[CALLS + 1];
byte chunks[CALLS + 1];
byte fewer[CALLS + 1]; /* those of the ranks that send less */
byte launched[W];
byte ended[W]; /* roles, over all calls */
byte finished;

#define BLOCKS(rank) ((rank) == 0 -> BLOCKS0 : BLOCKS1)
#define ROLES(rank) (3 * BLOCKS(rank))

#ifdef OTHER_ORDER
#define LANE(k) (me == 1 -> LANES - 1 - (k) : (k))
#else
#define LANE(k) (k)
#endif

#define STAGES_RESULTS (kind[call] == TWOSHOT)
#define DIRECT (kind[call] == TWOSHOT_DIRECT || kind[call] == ALLGATHER_DIRECT)
/* Chunks that a rank scatters to each other one. */
#define SENDS(rank) \
  (kind[call] == ALLGATHER_DIRECT -> 0 : ((rank) != 0 && ONE_WAY -> fewer[call] : chunks[call]))
#define ONE_WAY (kind[call] == BROADCAST || kind[call] == UNEQUAL)
#define SCATTERS (i < SENDS(me))
#define TAKES (i < SENDS(p))

/* The credit for the next chunk: the peer has consumed the chunk that was in its slot. */
#ifdef NO_CREDIT
#define CREDIT(s) true
#else
#define CREDIT(s) \
  REACHED(consumed[PAIR(s, l, p, me)] + R, has_sent[PAIR(s, l, me, p)] + 1)
#endif
/* The peer has entered the call, so that its output may be written. A chunk that it has scattered in
 * this call proves it, too. */
#ifdef NO_ENTRY
#define ENTERED true
#else
#define ENTERED (kind[call] != ALLGATHER_DIRECT || entry[p * W + me] >= call)
#endif

/* What the announcement of chunk i tells is enough for the peer's chunk i + 1, or for its first chunk
 * of the next call. */
#ifdef NO_CARRY
#define CARRIES(s) true
#else
#ifdef CARRY_ALL
#define CARRIES(s) (used[PAIR(s, l, me, p)] + R >= i + 2)
#else
#define CARRIES(s) (used[PAIR(s, l, me, p)] + R >= i + 2 || used[PAIR(s, l, me, p)] >= SENDS(p))
#endif
#endif
/* A rank that has sent all tells what it consumes by itself; of the last R/2 the next call tells. */
#define IS_TOLD(s) \
  (told[PAIR(s, l, me, p)] >= SENDS(me) && used[PAIR(s, l, me, p)] - 1 + R / 2 < SENDS(p))

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

#define FIRST_PEER (me == 0 -> 1 : 0)
#define NEXT_PEER (p + 1 == me -> p + 2 : p + 1)
#define ACTIVE (call <= CALLS && launched[me] == call)

inline begin() {
  atomic { call = 1; k = block; l = LANE(k); p = FIRST_PEER }
}
/* On to the next lane, or to the next call. */
inline next_lane() {
  i = 0;
  k = k + BLOCKS(me);
  if
  :: k >= LANES -> k = block; ended[me]++; call++
  :: else
  fi;
  l = LANE(k)
}
inline next_chunk() {
  p = FIRST_PEER;
  i++;
  if
  :: i == chunks[call] -> next_lane()
  :: else
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

/* What has been taken of all peers goes to all of them. */
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
  :: atomic { ACTIVE && !taken && !TAKES -> next_taken() }
  :: atomic {
       ACTIVE && !taken && TAKES && COME(0) ->
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
       ACTIVE && taken && STAGES_RESULTS && CREDIT(1) && LANDED(1) && CARRIES(1) ->
       push(1);
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
       :: i + 1 == chunks[call] -> stored[(l * W + me) * W + p] = call
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
  :: atomic { ACTIVE && STAGES_RESULTS && COME(1) -> take(1); next_peer() }
  :: atomic {
       ACTIVE && DIRECT && stored[(l * W + p) * W + me] == call ->
       p = NEXT_PEER;
       if
       :: p >= W -> p = FIRST_PEER; next_lane()
       :: else
       fi
     }
  od
}

#ifdef RELAXED
/* A chunk that lands behind its announcement. */
proctype wire(byte c) {
end:
  do
  :: atomic { late[c] != 0 -> slot[late[c] - 1] = late_value[c]; late[c] = 0 }
  od
}
#endif

/* The stream: what stands before and behind the calls. */
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
     d_step { /* the user reads the output, some time later */
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
       :: k < BLOCKS(i) ->
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
