// Tests which rank the notes in an inbox blame, also if some notes are still missing.
#include <gtest/gtest.h>

#include <vector>

#include "protocol/blame.h"

namespace collx {
namespace {

/// An inbox with the notes of some ranks.
class Inbox {
 public:
  explicit Inbox(int world) : world_(world), notes_(kMaxRanks) {}

  Inbox& left(int rank, Failure failure, int peer) {
    StatusRecord& record = notes_[size_t(rank)].record;
    record.failure = failure;
    record.rank = rank;
    record.peer = peer;
    record.seen = 7;
    left_ |= 1u << rank;
    return *this;
  }
  Inbox& waited(int rank, int peer) { return left(rank, Failure::timeout, peer); }
  Inbox& also(int rank, int peer) {
    notes_[size_t(rank)].missed[peer] = 1;
    return *this;
  }

  Verdict judged(int first, uint32_t quiet = 0) const {
    return judge(notes_.data(), left_, quiet, first, world_);
  }

 private:
  int world_;
  uint32_t left_ = 0;
  std::vector<Note> notes_;
};

void expect(const Verdict& verdict, int rank, int peer, bool final) {
  EXPECT_EQ(verdict.record.failure, Failure::timeout);
  EXPECT_EQ(verdict.record.rank, rank);
  EXPECT_EQ(verdict.record.peer, peer);
  EXPECT_EQ(verdict.final, final);
}

TEST(Blame, ends_at_the_rank_that_has_left_no_note) {
  expect(Inbox(2).waited(0, 1).judged(0, 1u << 1), 0, 1, true);
  expect(Inbox(3).waited(0, 1).waited(1, 2).judged(0, 1u << 2), 1, 2, true);
  expect(Inbox(4).waited(0, 1).waited(1, 2).waited(2, 3).judged(0, 1u << 3), 2, 3, true);
  expect(Inbox(4).waited(3, 0).waited(0, 2).waited(2, 1).judged(3, 1u << 1), 2, 1, true);
}

TEST(Blame, is_open_while_a_note_may_come_that_changes_it) {
  // The note of rank 2 is missing too, and rank 1 may wait for rank 2.
  expect(Inbox(3).waited(0, 1).judged(0), 0, 1, false);
  expect(Inbox(3).waited(0, 1).judged(0, 1u << 2), 0, 1, false);
  expect(Inbox(3).waited(0, 1).judged(0, 1u << 1), 0, 1, true);
  // A note of the last rank would close a cycle, for which the verdict is the first rank's own
  // wait.
  expect(Inbox(2).waited(0, 1).judged(0), 0, 1, true);
  expect(Inbox(3).waited(0, 1).waited(2, 0).judged(0), 0, 1, true);
  expect(Inbox(3).waited(0, 1).waited(1, 2).judged(0), 1, 2, false);
  // The first rank waited for two ranks, and noted the one that is not missing.
  expect(Inbox(4).waited(1, 2).also(1, 3).waited(0, 3).waited(2, 3).judged(1), 1, 3, false);
}

TEST(Blame, follows_every_wait_of_a_rank) {
  const Inbox inbox = Inbox(3).waited(0, 1).waited(1, 0).also(1, 2);
  expect(inbox.judged(0, 1u << 2), 1, 2, true);
  EXPECT_EQ(inbox.judged(0).record.seen, 0u) << "of the wait for another rank";
  EXPECT_EQ(Inbox(3).waited(0, 1).waited(1, 2).judged(0).record.seen, 7u);
}

TEST(Blame, of_ranks_that_wait_for_each_other_falls_on_whom_the_first_waited_for) {
  const Inbox all = Inbox(3).waited(0, 1).waited(1, 2).waited(2, 1);
  for (int first = 0; first < 3; ++first)
    expect(all.judged(first), first, first == 1 ? 2 : 1, true);
  const Inbox some = Inbox(3).waited(0, 1).waited(1, 0);
  expect(some.judged(0), 0, 1, false);
  expect(some.judged(0, 1u << 2), 0, 1, true);
}

TEST(Blame, falls_on_what_failed_otherwise_and_kept_the_others_waiting) {
  const Inbox inbox = Inbox(3).waited(0, 1).left(1, Failure::mismatch, 2);
  const Verdict verdict = inbox.judged(0);
  EXPECT_EQ(verdict.record.failure, Failure::mismatch);
  EXPECT_EQ(verdict.record.rank, 1);
  EXPECT_TRUE(verdict.final);
  EXPECT_EQ(inbox.judged(1).record.failure, Failure::mismatch);
}

TEST(Blame, falls_on_a_rank_that_gave_up_but_waited_for_nobody) {
  expect(Inbox(3).waited(0, 1).left(1, Failure::none, -1).judged(0), 0, 1, true);
}

TEST(Blame, of_a_wait_for_the_process_group_stays_there) {
  expect(Inbox(3).waited(0, -1).judged(0), 0, -1, true);
  expect(Inbox(3).waited(0, 1).waited(1, -1).judged(0), 1, -1, true);
}

TEST(Blame, has_a_grace_within_what_an_error_may_be_late) {
  EXPECT_EQ(grace_ns(400), 100u);
  EXPECT_LT(grace_ns(~0ull), 1'000'000'000u);
}

}  // namespace
}  // namespace collx
