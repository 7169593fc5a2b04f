/* The pull forms: every rank has the same number of blocks, and block b of a rank meets block b of
 * the others at flags that count up. The number of blocks of each call is chosen freely, and counts
 * start so that they wrap around (here they have three bits).
 *
 * Default: symmetric tensors. Between a start barrier and a closing barrier, every block reads the
 * inputs of all peers and stores into the outputs of all peers. The user overwrites the input as
 * soon as the call has ended, and reads the output.
 * STAGED: CHUNKS times in a call, each block copies its share into one of two alternating halves of
 * the region and reads the peers' shares after a barrier. One closing barrier ends the call.
 * PASSED: like STAGED, with a share for each rank, which stores its result to its place at all
 * ranks. After another barrier, every rank reads the results from its own half.
 * SENT: only the second half of PASSED: each rank stores its message into a half at all ranks,
 * which read it after a barrier. The call has no start barrier.
 *
 * MULTICAST: one addition updates the flag at all ranks, by the difference between the own flag and
 * the next epoch. A kernel reads its own flag once, when it starts. The addition to the own flag
 * may land late, even after the kernel has ended, so every barrier waits for it.
 *
 *   W, BLOCKS, CALLS, CHUNKS
 * Mutants: NO_CLOSING (no closing barrier), RELAXED (flags are not ordered after earlier stores),
 * EQUAL (a peer that is ahead does not pass), UNSIGNED (no signed difference), ONE_HALF (staging in
 * one buffer), OTHER_BLOCK (a block reads the data that another block has staged), NO_GATHER (no
 * barrier between writing and reading results), NOT_OWN (with multicast, no wait for the own flag).
 *
 * Checks: the data that is read is what its owner wrote for the same call and chunk; outputs are
 * final when the call has ended; every call ends.
 */
#ifndef CHUNKS
#define CHUNKS 1
#endif
#ifdef SENT
#define PASSED
#endif
#define FIRST_EPOCH 6
#define EPOCHS 8

#ifdef EQUAL
#define REACHED(seen, expected) ((seen) == (expected))
#else
#ifdef UNSIGNED
#define REACHED(seen, expected) ((seen) >= (expected))
#else
#define REACHED(seen, expected) (((seen) + EPOCHS - (expected)) % EPOCHS < EPOCHS / 2)
#endif
#endif

#ifdef RELAXED
#define RELEASE true
#else
#define RELEASE (flying[me * BLOCKS + block] == 0)
#endif

#ifdef ONE_HALF
#define HALVES 1
#else
#define HALVES 2
#endif

/* Data cells: outputs [owner][writer][block], or staged shares [owner][half][block]. */
#ifdef PASSED
#define CELLS (W * HALVES * BLOCKS * W)
#define PLACE(rank, half, block, owner) \
  ((((rank) * HALVES + (half) % HALVES) * BLOCKS + (block)) * W + (owner))
byte writer[CELLS]; /* the writer of the store in flight; a place has two writers in turn */
#define WRITER(c) writer[c]
#else
#ifdef STAGED
#define CELLS (W * HALVES * BLOCKS)
#define CELL(rank, half, block) (((rank) * HALVES + (half) % HALVES) * BLOCKS + (block))
#define WRITER(c) ((c) / BLOCKS / HALVES * BLOCKS + (c) % BLOCKS)
#else
#define CELLS (W * W * BLOCKS)
#define CELL(rank, writer, block) (((rank) * W + (writer)) * BLOCKS + (block))
#define WRITER(c) ((c) / BLOCKS % W * BLOCKS + (c) % BLOCKS)
#endif
#endif
byte cell[CELLS];
byte cell_flying[CELLS];

#define FLAG(owner, block, sender) (((owner) * BLOCKS + (block)) * W + (sender))
byte flag[W * BLOCKS * W]; /* lands at once: landing late is equivalent to a later read */

#ifdef MULTICAST
byte own_flying[W * BLOCKS]; /* additions to own flags that have not landed, one after the other */
#endif

#if defined(MULTICAST) && !defined(NOT_OWN)
#define AWAITED(p) true
#else
#define AWAITED(p) ((p) != me)
#endif

byte flying[W * BLOCKS]; /* stores of each block that have not landed */
byte input[W];           /* number of the call for which the user has written the input */
byte blocks[CALLS + 1];  /* blocks of call 1, 2, ... */
byte launched[W];
byte ended[W]; /* ended blocks of all calls */
byte finished;

/* Calls and chunks are counted from 1 over the whole run. */
#define CHUNK(call, chunk) (((call) - 1) * CHUNKS + (chunk) + 1)

inline store(c, value) {
  atomic {
    cell_flying[c] == 0 -> cell_flying[c] = value; flying[me * BLOCKS + block]++
#ifdef PASSED
    ; writer[c] = me * BLOCKS + block
#endif
  }
}

inline barrier() {
  RELEASE;
  d_step {
    epoch = (epoch + 1) % EPOCHS;
    p = 0;
    do
#ifdef MULTICAST
    :: p < W && p != me ->
       flag[FLAG(p, block, me)] = (flag[FLAG(p, block, me)] + EPOCHS + epoch - base) % EPOCHS; p++
    :: p == me ->
       own_flying[me * BLOCKS + block] = own_flying[me * BLOCKS + block] + EPOCHS + epoch - base; p++
#else
    :: p < W -> flag[FLAG(p, block, me)] = epoch; p++
#endif
    :: p == W -> break
    od;
#ifdef MULTICAST
    base = epoch;
#endif
    p = 0
  };
  do
  :: p < W && AWAITED(p) -> REACHED(flag[FLAG(me, block, p)], epoch) -> p++
  :: p < W && !AWAITED(p) -> p++
  :: p == W -> break
  od;
  p = 0
}

#ifdef OTHER_BLOCK
#define FOREIGN(block, call) (blocks[call] - 1 - (block))
#else
#define FOREIGN(block, call) (block)
#endif

proctype thread_block(byte me; byte block) {
  byte epoch, call, p, chunk;
#ifdef MULTICAST
  byte base; /* this block's value of its own flag */
#endif
  epoch = FIRST_EPOCH;
  call = 1;
end:
  do
  :: call <= CALLS && launched[me] >= call && block >= blocks[call] -> call++
  :: call <= CALLS && launched[me] == call && block < blocks[call] ->
#ifdef MULTICAST
     base = flag[FLAG(me, block, me)];
#endif
#ifdef PASSED
     chunk = 0;
     do
     :: chunk < CHUNKS ->
#ifndef SENT
        do
        :: p < W -> store(PLACE(me, chunk, block, p), 2 * CHUNK(call, chunk)); p++
        :: else -> break
        od;
        p = 0;
        barrier();
        do
        :: p < W -> assert(cell[PLACE(p, chunk, block, me)] == 2 * CHUNK(call, chunk)); p++
        :: else -> break
        od;
        p = 0;
#endif
        do
        :: p < W -> store(PLACE(p, chunk, block, me), 2 * CHUNK(call, chunk) + 1); p++
        :: else -> break
        od;
        p = 0;
#ifndef NO_GATHER
        barrier();
#endif
        do
        :: p < W -> assert(cell[PLACE(me, chunk, block, p)] == 2 * CHUNK(call, chunk) + 1); p++
        :: else -> break
        od;
        p = 0;
        chunk++
     :: else -> break
     od;
     chunk = 0;
#else
#ifdef STAGED
     chunk = 0;
     do
     :: chunk < CHUNKS ->
        store(CELL(me, chunk, block), CHUNK(call, chunk));
        barrier();
        do
        :: p < W ->
           assert(p == me ||
                  cell[CELL(p, chunk, FOREIGN(block, call))] == CHUNK(call, chunk));
           p++
        :: else -> break
        od;
        p = 0;
        chunk++
     :: else -> break
     od;
     chunk = 0;
#else
     barrier();
     do
     :: p < W ->
        assert(input[p] == call);
        if
        :: p != me -> store(CELL(p, me, block), call)
        :: else
        fi;
        p++
     :: else -> break
     od;
     p = 0;
#endif
#endif
#ifndef NO_CLOSING
     barrier();
#endif
     /* The end of the kernel. */
     flying[me * BLOCKS + block] == 0;
     atomic { ended[me]++; call++ }
  od
}

/* The stream: everything before, between and after the calls. */
proctype stream(byte me) {
  byte call, p, b, expected;
  call = 1;
  do
  :: call <= CALLS ->
     atomic { input[me] = call; launched[me] = call; expected = expected + blocks[call] };
     ended[me] == expected;
#if !defined(STAGED) && !defined(PASSED)
     d_step {
       p = 0;
       do
       :: p < W ->
          b = 0;
          do
          :: b < blocks[call] -> assert(p == me || cell[CELL(me, p, b)] == call); b++
          :: else -> break
          od;
          p++
       :: else -> break
       od;
       p = 0; b = 0
     };
#endif
     call++
  :: else -> break
  od;
  finished++
}

#ifdef MULTICAST
proctype own_wire(byte me; byte block) {
end:
  do
  :: atomic {
       own_flying[me * BLOCKS + block] != 0 ->
       flag[FLAG(me, block, me)] =
         (flag[FLAG(me, block, me)] + own_flying[me * BLOCKS + block]) % EPOCHS;
       own_flying[me * BLOCKS + block] = 0
     }
  od
}
#endif

proctype cell_wire(byte c) {
end:
  do
  :: atomic {
       cell_flying[c] != 0 ->
       cell[c] = cell_flying[c];
       cell_flying[c] = 0;
       flying[WRITER(c)]--
     }
  od
}

init {
  byte i;
  atomic {
    i = 1;
    do
    :: i <= CALLS -> if :: blocks[i] = 1 :: BLOCKS > 1 -> blocks[i] = BLOCKS fi; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W * BLOCKS * W -> flag[i] = FIRST_EPOCH; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < CELLS -> run cell_wire(i); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W * BLOCKS ->
#ifdef MULTICAST
       run own_wire(i / BLOCKS, i % BLOCKS);
#endif
       run thread_block(i / BLOCKS, i % BLOCKS); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W -> run stream(i); i++
    :: else -> break
    od;
    i = 0
  }
  finished == W
}
