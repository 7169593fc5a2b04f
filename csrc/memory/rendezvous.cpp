#include "rendezvous.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <type_traits>
#include <utility>

#include "boot_id.h"
#include "fd_all_gather.h"
#include "meeting.h"

namespace collx::memory {
namespace {

namespace symm_mem = c10d::symmetric_memory;

/// The message of a rank to the meeting. Its bytes are sent through the store.
struct SegmentOffer {
  Endpoint endpoint;
  std::array<char, 36> boot_id;
  int32_t world;
  uint64_t bytes;
  uint64_t offset;
  uint64_t pad_bytes;
};
static_assert(std::is_trivially_copyable_v<SegmentOffer>);

std::string encode(const SegmentOffer& offer) {
  return {reinterpret_cast<const char*>(&offer), sizeof(offer)};
}

SegmentOffer decode(const std::string& message, size_t rank) {
  SegmentOffer offer{};
  TORCH_CHECK(message.size() == sizeof(offer), "rank ", rank, " runs another version of collx");
  std::memcpy(&offer, message.data(), sizeof(offer));
  return offer;
}

/// Every rank checks the same offers, so either all ranks throw or none.
template <typename Value>
void check_equal(const std::vector<SegmentOffer>& offers, const char* what, Value&& value) {
  const auto differs = [&](const SegmentOffer& offer) { return value(offer) != value(offers[0]); };
  if (std::none_of(offers.begin(), offers.end(), differs)) return;
  std::ostringstream text;
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    text << (rank == 0 ? "" : ", ") << "rank " << rank << ": " << value(offers[rank]);
  }
  TORCH_CHECK(false, what, " differ between the ranks (", text.str(), ")");
}

void check_agreement(const std::vector<SegmentOffer>& offers) {
  check_equal(offers, "machines (boot ids)", [](const SegmentOffer& offer) {
    return std::string(offer.boot_id.data(), offer.boot_id.size());
  });
  check_equal(offers, "world sizes", [](const SegmentOffer& offer) { return offer.world; });
  check_equal(offers, "sizes in bytes", [](const SegmentOffer& offer) { return offer.bytes; });
  check_equal(offers, "offsets in bytes", [](const SegmentOffer& offer) { return offer.offset; });
  check_equal(offers, "signal pad sizes in bytes",
              [](const SegmentOffer& offer) { return offer.pad_bytes; });
}

/// A forked child shares its parent's connection to the store, and would corrupt it by sending.
void check_not_forked(const Group& group) {
  struct Use {
    c10::weak_intrusive_ptr<c10d::Store>
        store;  // distinguishes a group from a later one of the same name
    pid_t owner;
  };
  static std::mutex mutex;
  static std::map<std::string, Use> uses;
  const std::lock_guard lock(mutex);
  std::erase_if(uses, [](const auto& use) { return use.second.store.expired(); });
  const auto found = uses.find(group.name);
  if (found == uses.end() || found->second.store.lock() != group.store) {
    uses.insert_or_assign(group.name,
                          Use{c10::weak_intrusive_ptr<c10d::Store>(group.store), ::getpid()});
    return;
  }
  TORCH_CHECK(found->second.owner == ::getpid(), "the group belongs to process ",
              found->second.owner, " and cannot be used in its forked child ", ::getpid());
}

std::vector<SegmentOffer> gather_offers(Meeting& meeting, const Group& group,
                                        const Endpoint& endpoint, const RankMappings& mappings,
                                        size_t offset) {
  SegmentOffer own{endpoint, {}, group.world, mappings.buffer_bytes, offset, mappings.pad_bytes};
  const std::string id = boot_id();
  std::copy_n(id.begin(), std::min(id.size(), own.boot_id.size()), own.boot_id.begin());
  const std::vector<std::string> messages = meeting.all_gather(Step::offer, encode(own));
  std::vector<SegmentOffer> offers;
  for (const std::string& message : messages) offers.push_back(decode(message, offers.size()));
  return offers;
}

void map_segments(RankMappings& mappings, Segment own_pad, std::vector<FdSet> fds) {
  mappings.segments.reserve(2 * static_cast<size_t>(mappings.world));
  const auto keep = [&](Segment segment) -> void* {
    return mappings.segments.emplace_back(std::move(segment)).data();
  };
  for (size_t rank = 0; rank < fds.size(); ++rank) {
    if (static_cast<int>(rank) == mappings.rank) {
      mappings.buffers.push_back(mappings.own_buffer->data());
      mappings.pads.push_back(keep(std::move(own_pad)));
    } else {
      auto& [buffer, pad] = fds[rank];
      mappings.buffers.push_back(keep(Segment::map(std::move(buffer), mappings.buffer_bytes)));
      mappings.pads.push_back(
          keep(Segment::map(std::move(pad), pad_segment_bytes(mappings.pad_bytes))));
    }
  }
}

void meet(Meeting& meeting, const FdAllGather& descriptors, const Group& group,
          RankMappings& mappings, size_t offset) {
  Segment pad = Segment::create(pad_segment_bytes(mappings.pad_bytes), "collx signal pad");
  const std::vector<SegmentOffer> offers =
      gather_offers(meeting, group, descriptors.endpoint(), mappings, offset);
  check_agreement(offers);
  std::vector<Endpoint> endpoints;
  for (const SegmentOffer& offer : offers) endpoints.push_back(offer.endpoint);
  std::vector<FdSet> fds = descriptors.all_gather(
      group.rank, endpoints, {mappings.own_buffer->fd(), pad.fd()}, meeting.deadline());
  pad.close_fd();
  map_segments(mappings, std::move(pad), std::move(fds));
  // If a rank could not map a peer's segment, all ranks fail.
  meeting.all_gather(Step::verdict, "");
}

}  // namespace

std::shared_ptr<RankMappings> rendezvous(const std::string& group_name,
                                         std::shared_ptr<const Segment> segment, size_t bytes,
                                         size_t offset) {
  const Group group = find_group(group_name);
  const auto where = [&] {
    return "SymmetricMemory rendezvous on cpu, rank " + std::to_string(group.rank) + " of group '" +
           group.name + "': ";
  };
  auto mappings = std::make_shared<RankMappings>();
  mappings->group = group.name;
  mappings->rank = group.rank;
  mappings->world = group.world;
  mappings->owner = ::getpid();
  mappings->buffer_bytes = bytes;
  mappings->pad_bytes = symm_mem::get_signal_pad_size();
  mappings->own_buffer = std::move(segment);
  // Both outlive the attempt, so that a peer that loses this rank's socket finds the reported
  // reason.
  std::optional<Meeting> meeting;
  std::optional<FdAllGather> descriptors;
  const auto fail = [&](std::string reason) {
    if (meeting) {
      const std::string cause = meeting->reported();
      if (!cause.empty() && reason.find(cause) == std::string::npos) reason = cause;
      meeting->give_up(reason);
    }
    TORCH_CHECK(false, where(), reason);
  };
  try {
    check_not_forked(group);
    meeting.emplace(group);
    descriptors.emplace();
    meet(*meeting, *descriptors, group, *mappings, offset);
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  }
  meeting->clean_up();
  return mappings;
}

}  // namespace collx::memory
