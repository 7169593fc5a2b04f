/* Two calls of one rank on one tile at once, which nobody has ordered: is it noticed?
 *
 * Each warp reads the tile's epoch and marks the tile, in either order: the one is a load, the other
 * an atomic whose answer has the epoch and the marks before it. When all warps of a call have come
 * so far, one 8-byte store advances the epoch and clears the marks.
 *
 * -DWARPS=n       of a tile
 * Mutants: NO_COMPARE   the epoch that was read is not compared with the one that was marked
 *          ONE_MARK     the first warp marks and compares for all
 */
#define BIT(w) (1 << (w))

byte epoch;
byte busy;
byte used[2 * WARPS]; /* epochs, by call and warp */
byte joined[2];
byte finished;
bool noticed;

#ifdef ONE_MARK
#define MARKS(w) ((w) == 0)
#else
#define MARKS(w) 1
#endif

inline look() { used[call * WARPS + w] = epoch }

inline mark() {
  atomic {
    if
    :: MARKS(w) ->
       before = epoch;
       found = (busy & BIT(w)) != 0;
       busy = busy | BIT(w)
    :: else
    fi
  }
}

proctype warp(byte call; byte w) {
  byte before;
  bool found;
  if
  :: look(); mark()
  :: mark(); look()
  fi;
  atomic {
#ifndef NO_COMPARE
    found = found || (MARKS(w) && before != used[call * WARPS + w]);
#endif
    noticed = noticed || found;
    joined[call]++;
    found = 0; before = 0
  };
  if
  :: w == 0 ->
     joined[call] == WARPS;
     atomic { epoch = used[call * WARPS] + 1; busy = 0; finished++ }
  :: else
  fi
}

init {
  byte i, j;
  atomic {
    i = 0;
    do
    :: i < WARPS -> run warp(0, i); run warp(1, i); i++
    :: else -> break
    od;
    i = 0
  }
  finished == 2;
  d_step {
    do
    :: i < WARPS ->
       j = 0;
       do
       :: j < WARPS -> assert(noticed || used[i] != used[WARPS + j]); j++
       :: else -> break
       od;
       i++
    :: else -> break
    od
  }
}
