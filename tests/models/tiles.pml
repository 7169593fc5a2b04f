/* The epoch that determines the parity of a tile. Calls have mixed sizes, one or more chunks, and
 * grids of mixed sizes: the block of a tile differs between calls, and some calls do not use a
 * tile. There are two tiles of one word each, and two-way exchanges between all ranks, as in
 * sentinel.pml. That model checks the memory order: here stores land at once.
 *
 *   W, BLOCKS, CALLS, CHUNKS   the number of blocks and chunks (up to 2) of each call, and whether
 *                              its last chunk reaches the second tile, are chosen freely before the
 *                              ranks start
 * Default: each tile has an epoch, which its uses advance. Mutants: EPOCH_PER_BLOCK, advanced by
 * the uses of the block; EPOCH_PER_CALL, one for the communicator, advanced by 1;
 * EPOCH_PER_COMMUNICATOR, one, advanced by the chunks of the call.
 */
#define TILES 2
#ifndef BLOCKS
#define BLOCKS 2
#endif
#define CELLS (W * W * TILES * 2)
#define ARMED 0
byte cell[CELLS]; /* ARMED, or the number of the use that filled it */

#define CELL(owner, source, tile, epoch) \
  ((((owner) * W + (source)) * TILES + (tile)) * 2 + (epoch) % 2)

/* The blocks of the grid and the uses of each tile in call 1, 2, ... */
byte grid[CALLS + 1];
byte uses[TILES * (CALLS + 1)];
#define USES(call, tile) uses[(tile) * (CALLS + 1) + (call)]

#ifdef EPOCH_PER_BLOCK
#define EPOCHS BLOCKS
#define EPOCH_OF(tile, block) (block)
#define ADVANCE(call, i) ((i) < grid[call] -> USES(call, i) : 0)
#else
#if defined(EPOCH_PER_CALL) || defined(EPOCH_PER_COMMUNICATOR)
#define EPOCHS 1
#define EPOCH_OF(tile, block) 0
#ifdef EPOCH_PER_CALL
#define ADVANCE(call, i) 1
#else
#define ADVANCE(call, i) USES(call, 0)
#endif
#else
#define EPOCHS TILES
#define EPOCH_OF(tile, block) (tile)
#define ADVANCE(call, i) USES(call, i)
#endif
#endif
byte epoch[W * EPOCHS];
/* Only for the check: how often each tile has been used on each rank. */
byte used[W * TILES];
byte joined[W];   /* blocks that have reached the end of a kernel, in total */
byte launched[W]; /* the call that the rank has reached */
byte finished;

#define SERVES(tile, use) ((tile) % blocks == block && (use) < ((tile) == 0 -> uses0 : uses1))
#define EPOCH(tile, use) (epoch[me * EPOCHS + EPOCH_OF(tile, block)] + (use))
#define NUMBER(tile, use) (used[me * TILES + (tile)] + (use) + 1)
#define PEER(d) ((me + (d)) % W)

inline push() {
  d_step {
    t = 0;
    do
    :: t < TILES && SERVES(t, use) ->
       d = 1;
       do
       :: d < W ->
          assert(cell[CELL(PEER(d), me, t, EPOCH(t, use))] == ARMED); /* else unread */
          cell[CELL(PEER(d), me, t, EPOCH(t, use))] = NUMBER(t, use);
          d++
       :: else -> break
       od;
       t++
    :: t < TILES && !SERVES(t, use) -> t++
    :: t == TILES -> break
    od;
    t = 0; d = 0
  }
}

inline take(tile) {
  if
  :: SERVES(tile, use) ->
     d = 1;
     do
     :: d < W ->
        atomic {
          cell[CELL(me, PEER(d), tile, EPOCH(tile, use))] != ARMED ->
          assert(cell[CELL(me, PEER(d), tile, EPOCH(tile, use))] == NUMBER(tile, use));
          cell[CELL(me, PEER(d), tile, EPOCH(tile, use))] = ARMED;
          d++
        }
     :: else -> break
     od;
     d = 0
  :: else
  fi
}

proctype thread_block(byte me; byte block) {
  byte call, use, last, t, d, blocks, uses0, uses1;
  call = 1;
  do
  :: call <= CALLS ->
     d_step {
       blocks = grid[call];
       uses0 = USES(call, 0);
       uses1 = USES(call, 1);
       last = (block >= blocks -> 0 : (block == 0 -> uses0 : uses1));
       use = 0
     };
     do
     :: use < last ->
        push();
        take(0);
        take(1);
        use++
     :: else -> break
     od;
     /* The last block of the rank that arrives here ends the kernel. */
     atomic {
       use = 0; last = 0; blocks = 1; uses0 = 0; uses1 = 0;
       joined[me]++;
       if
       :: joined[me] == call * BLOCKS ->
          t = 0;
          do
          :: t < EPOCHS -> epoch[me * EPOCHS + t] = epoch[me * EPOCHS + t] + ADVANCE(call, t); t++
          :: else -> break
          od;
          t = 0;
          do
          :: t < TILES -> used[me * TILES + t] = used[me * TILES + t] + USES(call, t); t++
          :: else -> break
          od;
          t = 0;
          launched[me] = call + 1
       :: else
       fi
     };
     atomic { launched[me] > call -> call++ }
  :: else -> break
  od;
  finished++
}

init {
  byte i;
  atomic {
    i = 1;
    do
    :: i <= CALLS ->
       if :: grid[i] = 1 :: grid[i] = BLOCKS fi;
       if :: USES(i, 0) = 1 :: CHUNKS > 1 -> USES(i, 0) = 2 fi;
       if
       :: USES(i, 1) = USES(i, 0)
       :: USES(i, 1) = USES(i, 0) - 1 /* the last chunk does not reach the second tile */
       fi;
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W -> launched[i] = 1; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W * BLOCKS -> run thread_block(i / BLOCKS, i % BLOCKS); i++
    :: else -> break
    od;
    i = 0
  }
  finished == W * BLOCKS
}
