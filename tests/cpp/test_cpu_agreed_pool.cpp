// Tests that ranks that free memory in different orders allocate at the same places, and never at a
// place that another rank still uses.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "cpu/agreed_pool.h"

namespace collx::cpu {
namespace {

using Place = AgreedPool::Place;

constexpr int kMostRanks = 3;
constexpr uint64_t kAllocations = 4000;

struct Pages {
  std::array<std::unique_ptr<PoolPage>, kMostRanks> own;

  explicit Pages(int world) {
    for (int rank = 0; rank < world; ++rank) own[size_t(rank)] = std::make_unique<PoolPage>();
  }
  std::vector<PoolPage*> all() const {
    std::vector<PoolPage*> pages;
    for (const auto& page : own) {
      if (page) pages.push_back(page.get());
    }
    return pages;
  }
};

std::optional<Place> place_or_grow(AgreedPool& pool) {
  auto place = pool.place();
  if (place) return place;
  const uint64_t bytes = pool.wanted_segment();
  if (bytes == 0) return std::nullopt;
  pool.add_segment(bytes);
  return pool.place();
}

std::optional<Place> allocate(AgreedPool& pool, int world, uint64_t bytes, uint32_t stream = 0) {
  pool.begin(bytes, stream);
  for (int peer = 0; peer < world; ++peer) {
    while (!pool.may_decide(peer)) std::this_thread::yield();
    EXPECT_TRUE(pool.agrees(peer));
  }
  return place_or_grow(pool);
}

struct Found {
  std::atomic<int> different_places{0};
  std::atomic<int> in_use{0};  // a peer still has an earlier allocation at the place
  std::atomic<int> reused{0};
};

/// The ranks make the same allocations and free them in different orders. `agreed`: the ranks agree
/// as in the product. Otherwise each rank only uses its own information.
void run(int world, bool agreed, uint64_t most_bytes, Found& found) {
  const Pages pages(world);
  constexpr uint64_t kNone = ~uint64_t{0};
  // places: {block, offset} of each allocation, from the first rank. users: the allocation that has
  // each block on each rank.
  static std::array<std::atomic<uint64_t>, kAllocations> places;
  static std::array<std::array<std::atomic<uint64_t>, kMostRanks>, kPoolBlocks> users;
  for (auto& place : places) place = kNone;
  for (auto& block : users) {
    for (auto& user : block) user = kNone;
  }
  const auto rank_main = [&](int rank) {
    auto all = pages.all();
    AgreedPool pool(agreed ? all : std::vector{all[size_t(rank)]}, agreed ? rank : 0, most_bytes);
    std::mt19937 shared(7), mine(uint32_t(100 + rank));
    std::vector<std::pair<uint64_t, uint32_t>> held;  // {allocation, block}
    for (uint64_t n = 0; n < kAllocations; ++n) {
      const uint64_t bytes = 1 + shared() % 5 * 3000;
      const uint32_t stream = shared() % 2;
      const auto place = allocate(pool, agreed ? world : 0, bytes, stream);
      const uint64_t code = place ? place->block * (uint64_t{1} << 32) + place->offset : kNone - 1;
      uint64_t first = kNone;
      if (!places[n].compare_exchange_strong(first, code) && first != code) {
        ++found.different_places;
      }
      if (place) {
        if (place->used_before) ++found.reused;
        for (int peer = 0; peer < world; ++peer) {
          const uint64_t user = users[place->block][size_t(peer)];
          if (user != kNone && user < n) ++found.in_use;
        }
        users[place->block][size_t(rank)] = n;
        held.emplace_back(n, place->block);
      }
      while (held.size() > 4 || (!held.empty() && mine() % 3 == 0)) {
        const auto which = held.begin() + mine() % held.size();
        users[which->second][size_t(rank)] = kNone;
        pool.give_back(which->second);
        held.erase(which);
      }
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) threads.emplace_back(rank_main, rank);
  for (auto& thread : threads) thread.join();
}

TEST(AgreedPool, places_are_equal_and_free_on_all_ranks_whatever_the_order_of_frees) {
  for (const int world : {1, 2, 3}) {
    for (const uint64_t most_bytes : {uint64_t{40} << 10, uint64_t{1} << 20}) {
      Found found;
      run(world, true, most_bytes, found);
      EXPECT_EQ(found.different_places, 0) << world;
      EXPECT_EQ(found.in_use, 0) << world;
      EXPECT_GT(found.reused, 100) << world;
    }
  }
}

TEST(AgreedPool, ranks_that_count_their_own_frees_alone_are_noticed) {
  Found found;
  run(2, false, uint64_t{1} << 20, found);
  EXPECT_GT(found.different_places, 0);
}

TEST(AgreedPool, a_block_is_free_for_the_allocation_after_the_next) {
  const Pages pages(1);
  AgreedPool pool(pages.all(), 0, 1 << 20);
  const Place first = *allocate(pool, 1, 100);
  EXPECT_FALSE(first.used_before);
  pool.give_back(first.block);
  const Place second = *allocate(pool, 1, 100);
  EXPECT_NE(second.block, first.block);
  const Place third = *allocate(pool, 1, 100);
  EXPECT_EQ(third.block, first.block);
  EXPECT_TRUE(third.used_before);
}

TEST(AgreedPool, blocks_stay_with_their_stream_and_are_not_much_too_large) {
  const Pages pages(1);
  AgreedPool pool(pages.all(), 0, 1 << 20);
  const uint32_t block = allocate(pool, 1, 64 << 10, 0)->block;
  pool.give_back(block);
  allocate(pool, 1, 1);
  EXPECT_NE(allocate(pool, 1, 64 << 10, 1)->block, block);
  EXPECT_NE(allocate(pool, 1, 16 << 10, 0)->block, block);
  EXPECT_EQ(allocate(pool, 1, 60 << 10, 0)->block, block);
}

TEST(AgreedPool, what_does_not_fit_has_no_place) {
  const Pages pages(1);
  AgreedPool pool(pages.all(), 0, 100 << 10);
  EXPECT_FALSE(allocate(pool, 1, 101 << 10));
  EXPECT_TRUE(allocate(pool, 1, 60 << 10));
  EXPECT_FALSE(allocate(pool, 1, 60 << 10));
  EXPECT_TRUE(allocate(pool, 1, 40 << 10));
  pool.stop_growing();
  EXPECT_FALSE(allocate(pool, 1, 1));
}

TEST(AgreedPool, other_requests_of_a_peer_are_noticed_at_the_next_allocation) {
  const Pages pages(2);
  AgreedPool one(pages.all(), 0, 1 << 20), other(pages.all(), 1, 1 << 20);
  one.begin(1000, 0);
  EXPECT_TRUE(one.may_decide(1));
  one.begin(1000, 0);
  EXPECT_FALSE(one.may_decide(1));
  other.begin(2000, 0);
  ASSERT_TRUE(one.may_decide(1));
  EXPECT_FALSE(one.agrees(1));
  EXPECT_TRUE(one.agrees(0));
}

}  // namespace
}  // namespace collx::cpu
