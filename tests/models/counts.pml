/* The exchange of counts before an all-to-all-v whose splits are only known on the device. Block 0
 * of each rank stores the word {count, epoch} into a mailbox at every peer, and every block waits
 * for the words of all peers. The communicator has one epoch: each block reads it when it starts,
 * and the last block that reads it advances it. Each pair has two mailboxes, which alternate with
 * the parity of the epoch.
 *
 *   W, BLOCKS, CALLS
 * Every call is a kernel: a rank's next kernel starts when all blocks of the previous one have
 * ended. Words land at once: landing late is equivalent to a later read.
 * Mutants: ONE_MAILBOX, FIRST_ADVANCES (the first block that reads the epoch advances it),
 * TWO_WORDS (a separate count, which lands after the epoch), NOTHING_SENT (no word from rank W-1
 * to rank 0 in every second call, in which neither waits for the other).
 *
 * Checks: no word is overwritten before every block has read it; counts are those of this call;
 * every call ends.
 */
#define EPOCHS 8
#define FIRST_EPOCH 6
#ifdef ONE_MAILBOX
#define MAILBOXES 1
#else
#define MAILBOXES 2
#endif
#define MAILBOX(owner, sender, e) (((e) % MAILBOXES * W + (owner)) * W + (sender))

byte count[MAILBOXES * W * W];
byte stamp[MAILBOXES * W * W];
byte unread[MAILBOXES * W * W]; /* blocks that have not read the mailbox yet */

byte epoch[W];
byte readers[W];  /* blocks of this call that have read the epoch */
byte ended[W];    /* blocks of this call that have ended */
byte launched[W]; /* the call that the rank has reached */
byte finished;

#ifdef NOTHING_SENT
#define SENDS(from, to) ((from) != W - 1 || (to) != 0 || call % 2 == 1)
#else
#define SENDS(from, to) true
#endif

inline send() {
  do
  :: p < W && p != me && SENDS(me, p) ->
     atomic {
       assert(unread[MAILBOX(p, me, mine)] == 0);
       unread[MAILBOX(p, me, mine)] = BLOCKS;
       stamp[MAILBOX(p, me, mine)] = mine;
#ifdef TWO_WORDS
     };
     atomic {
#endif
       count[MAILBOX(p, me, mine)] = call;
       p++
     }
  :: p < W && !(p != me && SENDS(me, p)) -> p++
  :: p == W -> break
  od;
  p = 0
}

inline await() {
  do
  :: p < W && p != me && SENDS(p, me) ->
     atomic {
       stamp[MAILBOX(me, p, mine)] == mine;
       assert(count[MAILBOX(me, p, mine)] == call);
       unread[MAILBOX(me, p, mine)]--;
       p++
     }
  :: p < W && !(p != me && SENDS(p, me)) -> p++
  :: p == W -> break
  od;
  p = 0
}

proctype thread_block(byte me; byte block) {
  byte call, mine, p;
  call = 1;
  do
  :: call <= CALLS ->
     mine = (epoch[me] + 1) % EPOCHS;
     d_step {
       readers[me]++;
#ifdef FIRST_ADVANCES
       if :: readers[me] == 1 -> epoch[me] = mine :: else fi;
       if :: readers[me] == BLOCKS -> readers[me] = 0 :: else fi
#else
       if :: readers[me] == BLOCKS -> readers[me] = 0; epoch[me] = mine :: else fi
#endif
     };
     if
     :: block == 0 -> send()
     :: else
     fi;
     await();
     atomic {
       ended[me]++;
       mine = 0;
       if
       :: ended[me] == BLOCKS -> ended[me] = 0; launched[me] = call + 1
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
    do
    :: i < MAILBOXES * W * W -> stamp[i] = FIRST_EPOCH; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < W -> epoch[i] = FIRST_EPOCH; launched[i] = 1; i++
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
