// Tests the selection, a pure function of agreed values that returns the same plan on every rank.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "protocol/cuda_layout.h"
#include "protocol/names.h"
#include "protocol/selection.h"

namespace collx {
namespace {

constexpr uint64_t kSizes[] = {1,       16,      1000,    64 << 10, 128 << 10,  (128 << 10) + 1,
                               1 << 20, 3333333, 8 << 20, 64 << 20, 256u << 20, 1ull << 33};

bool equal(const Plan& a, const Plan& b) {
  return std::tie(a.algorithm, a.blocks, a.threads, a.width) ==
         std::tie(b.algorithm, b.blocks, b.threads, b.width);
}

/// Returns requests with all devices, dtypes, world sizes, sizes and bounds.
std::vector<Request> requests() {
  std::vector<Request> all;
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
    const int limit = device == DeviceKind::cpu ? kMaxCpuRanks : kMaxCudaRanks;
    for (int dtype = 0; dtype < static_cast<int>(DType::count); ++dtype) {
      for (int world = 1; world <= limit; ++world) {
        for (const uint64_t bytes : kSizes) {
          for (int symmetric = 0; symmetric < 4; ++symmetric) {
            Request request;
            request.device = device;
            request.dtype = static_cast<DType>(dtype);
            request.bytes = bytes;
            request.world = world;
            request.input_symmetric = symmetric & 1;
            request.output_symmetric = symmetric & 2;
            request.room = 66;
            all.push_back(request);
          }
        }
      }
    }
  }
  return all;
}

/// Returns a call on GPUs with room for many blocks. A message is as long as the tensor.
Request cuda_request(Collective collective, int world, uint64_t bytes = 0) {
  Request request;
  request.device = DeviceKind::cuda;
  request.collective = collective;
  request.world = world;
  request.bytes = request.message = bytes;
  request.room = 132;
  return request;
}

/// Values that differ between the ranks of one call and must not affect the plan.
struct Local {
  int rank;
  const void* address;
  uint64_t free_bytes;
};

using Selection = std::function<Plan(const Request&, const Local&)>;

/// Whether all ranks of a call get the same plan from `selection`, regardless of their local
/// values.
bool ranks_agree(const Selection& selection) {
  for (const Request& request : requests()) {
    const Plan first = selection(request, {0, nullptr, 0});
    for (int rank = 1; rank < request.world; ++rank) {
      const auto address = reinterpret_cast<const void*>(0x1001ull * static_cast<uint64_t>(rank));
      if (!equal(selection(request, {rank, address, 1ull << (20 + rank)}), first)) return false;
    }
  }
  return true;
}

TEST(Selection, gives_every_rank_the_same_plan) {
  EXPECT_TRUE(ranks_agree([](const Request& request, const Local&) { return select(request); }));
}

// Negative controls: the check above notices choices from rank-local values (hazard 5).
TEST(Selection, a_choice_from_rank_local_facts_is_noticed) {
  EXPECT_FALSE(ranks_agree([](const Request& request, const Local& local) {
    Plan plan = select(request);
    if (reinterpret_cast<uintptr_t>(local.address) % kVectorBytes != 0) plan.threads = 32;
    return plan;
  }));
  EXPECT_FALSE(ranks_agree([](const Request& request, const Local& local) {
    Request smaller = request;
    if (local.free_bytes < (2ull << 20)) smaller.max_blocks = 1;
    return select(smaller);
  }));
  EXPECT_FALSE(ranks_agree([](const Request& request, const Local& local) {
    Request other = request;
    other.capabilities.peer_access = local.rank != 1;
    return select(other);
  }));
}

TEST(Selection, is_known_at_compile_time_and_so_reads_nothing_else) {
  constexpr Plan plan = [] {
    Request request;
    request.device = DeviceKind::cuda;
    request.bytes = 1 << 10;
    request.world = 4;
    return select(request);
  }();
  static_assert(plan.algorithm == Algorithm::oneshot_push);
}

TEST(Selection, always_decides) {
  for (const Request& request : requests()) {
    const Plan plan = select(request);
    EXPECT_NE(plan.algorithm, Algorithm::automatic);
    EXPECT_LT(plan.algorithm, Algorithm::count);
    EXPECT_NE(plan.algorithm, Algorithm::fallback) << "peers can be reached";
  }
}

TEST(Selection, takes_only_algorithms_whose_needs_are_met) {
  for (const Request& request : requests()) {
    if (request.input_symmetric && request.output_symmetric) continue;
    EXPECT_FALSE(needs_symmetric(select(request).algorithm));
  }
}

TEST(Selection, falls_back_where_peers_cannot_be_reached) {
  for (Request request : requests()) {
    request.capabilities.peer_access = false;
    EXPECT_EQ(select(request).algorithm, Algorithm::fallback);
  }
}

TEST(Selection, obeys_a_forced_algorithm) {
  for (int i = 1; i < static_cast<int>(Algorithm::count); ++i) {
    for (Request request : requests()) {
      request.algorithm = static_cast<Algorithm>(i);
      const Plan plan = select(request);
      ASSERT_EQ(plan.named, request.algorithm);
      // Slots and lanes are two forms of one algorithm.
      const bool cpu = request.device == DeviceKind::cpu;
      if (plan.named == Algorithm::twoshot_lanes && cpu) {
        ASSERT_EQ(plan.algorithm, Algorithm::twoshot_push);
      } else if (plan.named == Algorithm::twoshot_push && !cpu && request.world == 2 &&
                 request.bytes >= 12 << 20) {
        ASSERT_EQ(plan.algorithm, Algorithm::twoshot_lanes);
      } else {
        ASSERT_EQ(plan.algorithm, request.algorithm);
      }
    }
  }
}

TEST(Selection, keeps_grids_within_what_can_be_resident) {
  for (Request request : requests()) {
    if (request.device == DeviceKind::cpu) continue;
    for (const int room : {1, 2, 66, 132, 4096}) {
      request.room = room;
      const Plan plan = select(request);
      ASSERT_GE(plan.blocks, 1);
      ASSERT_LE(plan.blocks, kMaxBlocks);
      ASSERT_LE(static_cast<int64_t>(plan.blocks) * plan.threads,
                static_cast<int64_t>(room) * kFullBlock);
      ASSERT_TRUE(plan.threads == 64 || plan.threads == 128 || plan.threads == 256 ||
                  plan.threads == kFullBlock || plan.threads == kLaneBlock ||
                  (plan.width > 0 && plan.threads == kLaneBound));
    }
  }
}

TEST(Selection, honors_max_blocks_down_to_one_in_every_algorithm) {
  for (int i = 0; i < static_cast<int>(Algorithm::count); ++i) {
    for (Request request : requests()) {
      request.algorithm = static_cast<Algorithm>(i);
      for (const int bound : {1, 2, 7, 64, 5000}) {
        request.max_blocks = bound;
        ASSERT_LE(select(request).blocks, bound);
      }
    }
  }
}

/// Whether the longest call that fits the row selects it, for at least one of its collectives and
/// requested algorithms.
bool is_reached(const SelectionRow& row) {
  for (const CollectiveRow& collective : kCollectives) {
    if ((row.collectives & only(collective.collective)) == 0) continue;
    Request request;
    request.collective = collective.collective;
    request.device = row.device;
    request.bytes = row.up_to;
    request.world = row.max_world;
    request.room = row.calls == For::few ? kFewBlocks : 132;
    request.input_symmetric = request.output_symmetric =
        row.calls != For::all && row.calls != For::few;
    request.input_multicast = request.output_multicast = row.calls == For::switched;
    request.deterministic = row.calls != For::switched;
    request.overlap = row.calls == For::overlap;
    request.capabilities.multicast = true;
    for (const AlgorithmRow& asked : kAlgorithms) {
      if ((row.asked & only(asked.algorithm)) == 0) continue;
      if (find_row(request, asked.algorithm) == &row - kSelection) return true;
    }
  }
  return false;
}

TEST(Selection, every_row_of_the_table_is_reached) {
  for (const SelectionRow& row : kSelection) {
    EXPECT_TRUE(is_reached(row)) << "row " << &row - kSelection
                                 << " of the table is hidden by one above it";
  }
}

TEST(Selection, a_row_that_names_what_a_device_or_a_collective_lacks_does_not_compile) {
  SelectionRow row = kSelection[0];
  EXPECT_TRUE(names_what_there_is(row));
  row.algorithm = Algorithm::pipelined;
  EXPECT_FALSE(names_what_there_is(row)) << "of a broadcast";
  row = {only(Algorithm::staged), only(Collective::reduce), DeviceKind::cpu, For::all, 2, 1,
         Algorithm::channels};
  EXPECT_FALSE(names_what_there_is(row)) << "between GPUs alone";
}

TEST(Selection, a_row_ends_after_its_last_byte) {
  Request request;
  request.device = DeviceKind::cuda;
  request.world = 4;
  for (const SelectionRow& row : kSelection) {
    if (row.collectives != only(request.collective) || row.device != request.device ||
        row.up_to == kAnySize || row.max_world != request.world) {
      continue;
    }
    request.bytes = row.up_to + 1;
    EXPECT_NE(select_algorithm(request), row.algorithm);
  }
}

TEST(Selection, takes_only_what_a_collective_has) {
  for (int c = 1; c < static_cast<int>(Collective::barrier); ++c) {
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
      for (const bool symmetric : {false, true}) {
        for (uint64_t bytes = 1; bytes < (1ull << 33); bytes *= 7) {
          Request request;
          request.collective = static_cast<Collective>(c);
          request.device = device;
          request.bytes = request.message = bytes;
          request.world = 4;
          request.input_symmetric = request.output_symmetric = symmetric;
          const Plan plan = select(request);
          EXPECT_TRUE(has_algorithm(request.collective, plan.named));
          EXPECT_NE(plan.algorithm, Algorithm::fallback);
          EXPECT_GE(plan.blocks, 1);
          EXPECT_TRUE(symmetric || plan.algorithm != Algorithm::direct);
        }
      }
    }
  }
}

TEST(Selection, copy_engines_serve_large_copies_that_leave_multiprocessors_alone) {
  for (const CollectiveRow& row : kCollectives) {
    const Collective c = row.collective;
    if (!has_tensors(c)) continue;
    for (const bool overlap : {false, true}) {
      for (const bool symmetric : {false, true}) {
        for (const uint64_t bytes : {uint64_t{1} << 10, uint64_t{64} << 20}) {
          Request request;
          request.collective = c;
          request.device = DeviceKind::cuda;
          request.bytes = request.message = bytes;
          request.world = 2;
          request.input_symmetric = request.output_symmetric = symmetric;
          request.overlap = overlap;
          const bool wanted =
              overlap && symmetric && bytes > (1 << 20) && has_algorithm(c, Algorithm::copy_engine);
          EXPECT_EQ(select(request).algorithm == Algorithm::copy_engine, wanted) << row.name;
        }
      }
    }
  }
  EXPECT_TRUE(has_algorithm(Collective::allgather, Algorithm::copy_engine));
  EXPECT_FALSE(has_algorithm(Collective::reducescatter, Algorithm::copy_engine));
  EXPECT_FALSE(has_algorithm(Collective::alltoallv, Algorithm::copy_engine));
}

TEST(Selection, every_collective_has_its_own_algorithms) {
  EXPECT_FALSE(has_algorithm(Collective::allreduce, Algorithm::staged));
  EXPECT_FALSE(has_algorithm(Collective::allgather, Algorithm::oneshot_push));
  EXPECT_FALSE(has_algorithm(Collective::allgather, Algorithm::pipelined));
  EXPECT_FALSE(has_algorithm(Collective::broadcast, Algorithm::staged));
  EXPECT_FALSE(has_algorithm(Collective::alltoallv, Algorithm::onestage));
  EXPECT_TRUE(has_algorithm(Collective::reduce, Algorithm::direct));
  EXPECT_TRUE(has_algorithm(Collective::broadcast, Algorithm::twostage));
}

TEST(Selection, direct_messages_that_ranks_count_have_equal_grids) {
  Request request = cuda_request(Collective::alltoallv, 4);
  request.algorithm = Algorithm::direct;
  request.input_symmetric = request.output_symmetric = true;
  request.spare_room = 5;
  for (const uint64_t bytes : {0, 16, 1 << 20, 64 << 20}) {
    request.bytes = request.message = bytes;
    request.max_blocks = 0;
    EXPECT_EQ(select(request).blocks, 132);
    request.max_blocks = 7;
    EXPECT_EQ(select(request).blocks, 7);
    request.algorithm = Algorithm::automatic;
    EXPECT_NE(select(request).algorithm, Algorithm::direct) << "ranks need not have such outputs";
    request.algorithm = Algorithm::direct;
  }
}

TEST(Selection, a_large_reduce_between_four_ranks_leaves_blocks_unused) {
  const auto blocks = [](int world, uint64_t bytes, int max_blocks = 0, int room = 264) {
    Request request = cuda_request(Collective::reduce, world, bytes);
    request.max_blocks = max_blocks;
    request.room = room;
    EXPECT_EQ(select(request).algorithm, Algorithm::reduce_twostage);
    return select(request).blocks;
  };
  EXPECT_EQ(blocks(4, 64 << 20), 198);
  EXPECT_EQ(blocks(4, 16 << 20), 198);
  EXPECT_EQ(blocks(4, (16 << 20) - 16), 264);
  EXPECT_EQ(blocks(4, 64 << 20, 100), 100);
  EXPECT_EQ(blocks(4, 64 << 20, 220), 198);
  for (const int world : {3, 8}) EXPECT_EQ(blocks(world, 64 << 20), 264);
  EXPECT_EQ(blocks(4, 64 << 20, 0, 1), 1);
}

TEST(Selection, large_calls_of_two_ranks_take_lanes) {
  using enum Algorithm;
  struct {
    DeviceKind device;
    int world;
    uint64_t mib;
    Algorithm asked;
    Algorithm taken;
  } const rows[] = {
      {DeviceKind::cuda, 2, 64, automatic, twoshot_lanes},
      {DeviceKind::cuda, 2, 64, twoshot_push, twoshot_lanes},
      {DeviceKind::cuda, 1, 64, twoshot_push, twoshot_push},
      {DeviceKind::cuda, 1, 64, automatic, twoshot_push},
      {DeviceKind::cuda, 2, 10, twoshot_push, twoshot_push},
      {DeviceKind::cuda, 4, 64, twoshot_push, twoshot_push},
      {DeviceKind::cpu, 4, 64, twoshot_lanes, twoshot_push},
  };
  for (const auto& row : rows) {
    Request request = cuda_request(Collective::allreduce, row.world, row.mib << 20);
    request.device = row.device;
    request.algorithm = row.asked;
    EXPECT_EQ(select(request).algorithm, row.taken) << &row - rows;
    if (row.asked == automatic) continue;
    EXPECT_EQ(select(request).named, row.asked) << &row - rows;
  }
}

constexpr uint64_t kNever = ~0ull;

TEST(Selection, large_exchanges_take_lanes) {
  struct {
    Collective collective;
    Algorithm named;
    uint64_t from;          // MiB, the first of the sizes below that uses lanes between two ranks
    uint64_t from_of_four;  // the same between three or four ranks
  } const rows[] = {
      {Collective::reducescatter, Algorithm::staged, 24, kNever},
      {Collective::allgather, Algorithm::staged, 32, 32},
      {Collective::broadcast, Algorithm::onestage, 8, 8},
      {Collective::reduce, Algorithm::staged, 12, kNever},
      {Collective::gather, Algorithm::staged, 32, 8},
      {Collective::scatter, Algorithm::staged, 32, 8},
      {Collective::alltoall, Algorithm::staged, 32, 32},
      {Collective::alltoallv, Algorithm::staged, 8, kNever},
  };
  for (const auto& row : rows) {
    // Ranks other than the root pass on what it sends.
    const Algorithm passed =
        row.collective == Collective::broadcast ? Algorithm::broadcast_lanes : Algorithm::lanes;
    for (const uint64_t mib : {1, 4, 8, 12, 16, 24, 32, 64}) {
      if (row.from == 32 && mib == 24) continue;  // both are accepted
      Request request = cuda_request(row.collective, 1, mib << 20);
      const auto runs = [&](int world, Algorithm asked) {
        const auto ranks = static_cast<uint64_t>(world);
        request.message = sends_all(row.collective) ? request.bytes : request.bytes / ranks;
        request.world = world;
        request.algorithm = asked;
        return select(request).algorithm;
      };
      const auto what = [&] { return std::string(name_of(row.collective)) + std::to_string(mib); };
      for (const Algorithm asked : {Algorithm::automatic, row.named}) {
        EXPECT_EQ(runs(2, asked) == Algorithm::lanes, mib >= row.from) << what();
        EXPECT_NE(runs(1, asked), Algorithm::lanes) << "a rank by itself has none";
      }
      for (const int world : {3, 4}) {
        const bool slots = world == 3 && row.collective == Collective::broadcast;
        const Algorithm taken = runs(world, Algorithm::automatic);
        EXPECT_EQ(taken == passed, mib >= row.from_of_four && !slots) << what();
        EXPECT_EQ(row_of(taken).lanes, taken == passed) << what();
        EXPECT_FALSE(row_of(runs(world, row.named)).lanes) << what();
      }
      for (const Algorithm asked : {Algorithm::automatic, row.named}) {
        EXPECT_FALSE(row_of(runs(8, asked)).lanes) << "not measured";
      }
      for (const int world : {3, 4, 8}) EXPECT_EQ(runs(world, Algorithm::lanes), passed) << what();
      request.max_blocks = kFewBlocks;
      EXPECT_EQ(runs(8, Algorithm::lanes), Algorithm::lanes) << "blocks that serve several lanes";
      if (passed == Algorithm::broadcast_lanes) {
        EXPECT_FALSE(row_of(runs(4, Algorithm::automatic)).lanes) << "not measured";
      }
      request.max_blocks = 0;
    }
  }
}

TEST(Selection, large_symmetric_copies_of_four_ranks_are_direct_where_that_is_faster) {
  const auto runs = [](Collective collective, uint64_t mib) {
    Request request = cuda_request(collective, 4, mib << 20);
    request.input_symmetric = request.output_symmetric = true;
    request.message = request.bytes / 4;
    return select(request).algorithm;
  };
  for (const uint64_t mib : {8, 16, 32, 64}) {
    EXPECT_EQ(runs(Collective::allgather, mib), Algorithm::direct);
    EXPECT_EQ(runs(Collective::alltoall, mib), Algorithm::direct);
    EXPECT_EQ(runs(Collective::gather, mib), Algorithm::lanes);
    EXPECT_EQ(runs(Collective::scatter, mib), mib > 16 ? Algorithm::direct : Algorithm::lanes);
  }
}

TEST(Selection, lanes_of_messages_that_ranks_count_do_not_follow_from_their_length) {
  for (const uint64_t bytes : {0, 16, 1 << 20, 64 << 20}) {
    Request request = cuda_request(Collective::alltoallv, 4, bytes);
    request.algorithm = Algorithm::lanes;
    request.max_blocks = 7;
    EXPECT_EQ(select(request).blocks, 7);
  }
}

TEST(Selection, the_number_of_lanes_follows_from_what_ranks_agree_on) {
  const auto lanes = [](uint64_t bytes, int room, int lanes_there, int max_blocks) {
    Request request = cuda_request(Collective::allreduce, 2, bytes);
    request.algorithm = Algorithm::twoshot_lanes;
    request.room = room;
    request.lanes = lanes_there;
    request.max_blocks = max_blocks;
    const Plan plan = select(request);
    request.spare_room = 1000;
    EXPECT_EQ(select(request).blocks, plan.blocks) << "ranks may differ in their spare blocks";
    EXPECT_EQ(plan.threads, plan.width > 0 ? kLaneBound : kLaneBlock);
    return plan.blocks;
  };
  EXPECT_EQ(lanes(64 << 20, 132, 132, 0), 132);
  EXPECT_EQ(lanes(64 << 20, 40, 132, 0), 40);
  EXPECT_EQ(lanes(64 << 20, 132, 7, 0), 7);
  EXPECT_EQ(lanes(64 << 20, 132, 132, 3), 3);
  EXPECT_EQ(lanes(16, 132, 132, 0), 1);
  EXPECT_EQ(lanes(2 * 5 * kLeastLaneSlotBytes, 132, 132, 0), 5);
}

TEST(Selection, blocks_copy_in_bulk_only_if_those_of_two_communicators_are_resident) {
  Request request = cuda_request(Collective::allreduce, 2, 64 << 20);
  request.algorithm = Algorithm::twoshot_lanes;
  request.max_blocks = 16;
  for (const int resident : {0, 31, 32, 132}) {
    request.capabilities.bulk_blocks = resident;
    const Plan plan = select(request);
    ASSERT_EQ(plan.blocks, 16);
    ASSERT_GT(plan.width, 0);
    EXPECT_EQ(plan.bulk, resident >= 32) << resident;
  }
}

TEST(Selection, few_blocks_take_several_lanes_each) {
  Request request = cuda_request(Collective::allreduce, 1);
  const auto width = [&](Collective c, uint64_t bytes, int max_blocks, int lanes = 132) {
    request.collective = c;
    request.algorithm = c == Collective::allreduce ? Algorithm::twoshot_lanes : Algorithm::lanes;
    request.bytes = request.message = bytes;
    request.max_blocks = max_blocks;
    request.lanes = lanes;
    const Plan plan = select(request);
    EXPECT_LE(plan.blocks * std::max(plan.width, 1), lanes);
    request.spare_room = 1000;
    EXPECT_EQ(select(request).width, plan.width) << "ranks may differ in their spare blocks";
    request.spare_room = 0;
    return plan.width;
  };
  for (const int world : {2, 4, 8}) {
    request.world = world;
    for (const Collective c :
         {Collective::allreduce, Collective::allgather, Collective::alltoallv}) {
      EXPECT_EQ(width(c, 64 << 20, 0), 0) << "many blocks have a lane each";
      EXPECT_EQ(width(c, 64 << 20, 17), 0);
      EXPECT_EQ(width(c, 64 << 20, 16), 8);
      EXPECT_EQ(width(c, 64 << 20, 9), 8);
      EXPECT_EQ(width(c, 64 << 20, 8), 16);
      EXPECT_EQ(width(c, 64 << 20, 1), 16);
      EXPECT_EQ(width(c, 64 << 20, 8, 8), 1) << "a small region has few lanes";
      EXPECT_EQ(width(c, 64 << 20, 2, 8), 4);
    }
    EXPECT_EQ(width(Collective::allgather, 64 << 10, 8), 1) << "chunks are not made short";
  }
  request.world = 2;
  request.room = 12;
  EXPECT_EQ(width(Collective::allgather, 64 << 20, 0), 8) << "a communicator of few blocks";
  request.epilogue = true;
  EXPECT_EQ(width(Collective::allreduce, 64 << 20, 8), 0);
  request.epilogue = false;
  request.world = 1;
  EXPECT_EQ(width(Collective::allgather, 64 << 20, 8), 0);
}

TEST(Selection, few_blocks_take_lanes_at_smaller_sizes) {
  const auto takes_lanes = [](Collective c, uint64_t bytes, int max_blocks,
                              bool symmetric = false) {
    Request request = cuda_request(c, 2, bytes);
    request.message = sends_all(c) ? bytes : bytes / 2;
    request.max_blocks = max_blocks;
    request.input_symmetric = request.output_symmetric = symmetric;
    return row_of(select(request).algorithm).lanes;
  };
  for (const CollectiveRow& row : kCollectives) {
    const Collective c = row.collective;
    if (c != Collective::allreduce && (kExchanges & only(c)) == 0) continue;
    EXPECT_FALSE(takes_lanes(c, 2 << 20, 0)) << name_of(c);
    EXPECT_FALSE(takes_lanes(c, 2 << 20, 17)) << name_of(c);
    EXPECT_FALSE(takes_lanes(c, 512 << 10, 16)) << name_of(c);
    for (const int blocks : {1, 8, 16}) EXPECT_TRUE(takes_lanes(c, 2 << 20, blocks)) << name_of(c);
  }
  EXPECT_FALSE(takes_lanes(Collective::allgather, 64 << 20, 16, true)) << "direct is faster";
  EXPECT_TRUE(takes_lanes(Collective::reducescatter, 64 << 20, 16, true));
}

TEST(Selection, slots_are_those_that_the_algorithm_pushes_into) {
  constexpr CudaLayout layout = cuda_layout(4, 64 << 20);
  const auto of = [&](Algorithm a) { return slots_of(layout, row_of(a).slots); };
  EXPECT_EQ(of(Algorithm::oneshot_push), &layout.oneshot);
  EXPECT_EQ(of(Algorithm::twoshot_push), &layout.twoshot);
  EXPECT_EQ(of(Algorithm::channels), &layout.channels.slots);
  for (const AlgorithmRow& row : kAlgorithms) {
    EXPECT_EQ(of(row.algorithm) != nullptr, pushes_into_slots(row.algorithm)) << row.name;
  }
}

TEST(Multicast, is_never_taken_by_itself) {
  for (Request request : requests()) {
    request.capabilities.multicast = true;
    request.input_multicast = request.input_symmetric;
    request.output_multicast = request.output_symmetric;
    EXPECT_FALSE(needs_multicast(select(request).algorithm));
  }
}

TEST(Multicast, adds_up_what_rounds_once) {
  int accepted = 0;
  for (const DTypeRow& row : kDTypes) {
    for (int op = 0; op < static_cast<int>(ReduceOp::count); ++op) {
      accepted += sums_by_multicast(static_cast<ReduceOp>(op), row.dtype) ? 1 : 0;
    }
    const bool sums = row.bytes > 1 && row.dtype != DType::float64;
    EXPECT_EQ(sums_by_multicast(ReduceOp::sum, row.dtype), sums) << row.name;
  }
  EXPECT_TRUE(sums_by_multicast(ReduceOp::avg, DType::float32));
  EXPECT_EQ(accepted, 6);
}

/// A call of 1 MiB between four ranks.
Request multicast_request(Algorithm algorithm, bool input, bool output) {
  Request request;
  request.device = DeviceKind::cuda;
  request.algorithm = algorithm;
  request.bytes = 1 << 20;
  request.world = 4;
  request.input_symmetric = request.input_multicast = input;
  request.output_symmetric = request.output_multicast = output;
  return request;
}

TEST(Multicast, reads_and_writes_in_place_what_has_such_an_address) {
  for (const bool input : {false, true}) {
    for (const bool output : {false, true}) {
      Request oneshot = multicast_request(Algorithm::multimem_oneshot, input, output);
      EXPECT_EQ(select(oneshot).staged, !input);
      EXPECT_FALSE(select(oneshot).into_outputs) << "each rank writes its own";
      oneshot.in_place = true;
      EXPECT_TRUE(select(oneshot).staged) << "all of it is read by all";
      Request twoshot = multicast_request(Algorithm::multimem_twoshot, input, output);
      EXPECT_EQ(select(twoshot).staged, !input);
      EXPECT_EQ(select(twoshot).into_outputs, output);
      twoshot.epilogue = true;
      EXPECT_FALSE(select(twoshot).into_outputs) << "each rank has still to finish its own";
    }
  }
  Request other = multicast_request(Algorithm::multimem_twoshot, true, true);
  other.input_multicast = other.output_multicast = false;
  EXPECT_TRUE(select(other).staged) << "peers can reach it, a switch cannot";
  EXPECT_FALSE(select(other).into_outputs);
  other.algorithm = Algorithm::multimem_gather;
  EXPECT_FALSE(select(other).staged) << "peers pull it";
}

TEST(Multicast, messages_that_all_get_go_into_outputs_and_others_are_read_from_inputs) {
  for (const bool input : {false, true}) {
    for (const bool output : {false, true}) {
      Request r = multicast_request(Algorithm::multimem, input, output);
      r.message = r.bytes / 4;
      const auto kept = [&] { return workspace_bytes(r, r.algorithm); };
      for (const Collective c : {Collective::reducescatter, Collective::reduce}) {
        r.collective = c;
        r.message = c == Collective::reduce ? r.bytes : r.bytes / 4;
        EXPECT_EQ(select(r).staged, !input);
        EXPECT_FALSE(select(r).into_outputs);
        EXPECT_EQ(kept(), input ? 0u : 2u << 20);
      }
      for (const Collective c : {Collective::allgather, Collective::broadcast}) {
        r.collective = c;
        r.message = c == Collective::broadcast ? r.bytes : r.bytes / 4;
        EXPECT_FALSE(select(r).staged);
        EXPECT_EQ(select(r).into_outputs, output);
        EXPECT_EQ(kept(), output ? 0u : 2u << 20);
      }
    }
  }
}

TEST(Multicast, is_selected_where_any_order_will_do_and_it_can_add_up) {
  Request r = multicast_request(Algorithm::automatic, true, true);
  r.bytes = 64 << 20;
  r.capabilities.multicast = true;
  EXPECT_FALSE(needs_multicast(select(r).algorithm));
  r.deterministic = false;
  EXPECT_EQ(select(r).algorithm, Algorithm::multimem_twoshot);
  const auto refused = [&](auto change) {
    Request other = r;
    change(other);
    EXPECT_FALSE(needs_multicast(select(other).algorithm));
  };
  refused([](Request& o) { o.world = 2; });
  refused([](Request& o) { o.bytes = 1 << 20; });
  refused([](Request& o) { o.reduce_op = ReduceOp::max; });
  refused([](Request& o) { o.dtype = DType::float64; });
  refused([](Request& o) { o.exact_sums = true; });
  refused([](Request& o) { o.input_multicast = false; });
  refused([](Request& o) { o.output_multicast = false; });
  refused([](Request& o) { o.capabilities.multicast = false; });
  refused([](Request& o) { o.capabilities.peer_access = false; });
  r.collective = Collective::reduce;
  r.message = r.bytes;
  r.output_multicast = false;  // only the root has an output
  EXPECT_EQ(select(r).algorithm, Algorithm::multimem);
}

TEST(Multicast, keeps_staging_memory_for_what_has_no_such_address) {
  const auto of = [](Algorithm algorithm, bool input, bool output) {
    return workspace_bytes(multicast_request(algorithm, input, output), algorithm);
  };
  EXPECT_EQ(of(Algorithm::multimem_oneshot, false, false), 2u << 20);
  EXPECT_EQ(of(Algorithm::multimem_oneshot, true, false), 0u);
  EXPECT_EQ(of(Algorithm::multimem_twoshot, false, false), 2u << 20);
  EXPECT_EQ(of(Algorithm::multimem_twoshot, false, true), 2u << 20);
  EXPECT_EQ(of(Algorithm::multimem_twoshot, true, false), 2u << 20);
  EXPECT_EQ(of(Algorithm::multimem_twoshot, true, true), 0u);
}

TEST(Workspace, is_what_the_formulas_of_the_algorithms_say) {
  const uint64_t bytes = 4 << 20;
  const auto of = [&](Algorithm algorithm, DType dtype, bool symmetric) {
    Request request;
    request.dtype = dtype;
    request.bytes = bytes;
    request.world = 4;
    request.input_symmetric = request.output_symmetric = symmetric;
    return workspace_bytes(request, algorithm);
  };
  const auto masked = [](uint64_t data) {  // in whole tiles
    const uint64_t wire = wire_vectors(true, data / kVectorBytes) * kVectorBytes;
    return round_up<uint64_t>(wire, kTileBytes);
  };
  EXPECT_EQ(of(Algorithm::oneshot_push, DType::float32, false), 2 * 4 * bytes);
  EXPECT_EQ(of(Algorithm::oneshot_push, DType::int32, false), 2 * 4 * masked(bytes));
  EXPECT_EQ(of(Algorithm::twoshot_push, DType::float32, false), 4 * bytes);
  EXPECT_EQ(of(Algorithm::twoshot_push, DType::int32, false), 4 * 4 * masked(bytes / 4));
  EXPECT_EQ(of(Algorithm::oneshot_pull, DType::float32, true), 0u);
  EXPECT_EQ(of(Algorithm::oneshot_pull, DType::float32, false), 2 * bytes);
  EXPECT_LE(of(Algorithm::twoshot_pull, DType::float32, true), 2 * bytes);
  EXPECT_EQ(of(Algorithm::pull_push, DType::float32, true), 0u);
  EXPECT_EQ(of(Algorithm::twoshot_lanes, DType::int32, false), 2 * 3 * bytes / 4);
  EXPECT_EQ(of(Algorithm::fallback, DType::float32, false), 0u);
}

TEST(Workspace, of_nothing_is_nothing) {
  for (int i = 1; i < static_cast<int>(Algorithm::count); ++i) {
    Request request;
    request.dtype = DType::int32;
    request.world = 4;
    EXPECT_EQ(workspace_bytes(request, static_cast<Algorithm>(i)), 0u);
  }
}

}  // namespace
}  // namespace collx
