#include "meeting.h"

#include <algorithm>
#include <array>
#include <exception>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>

namespace collx::memory {
namespace {

using std::chrono::milliseconds;

// By default, the store of a process group waits for half an hour, which is too long within one
// machine. PyTorch's rendezvous on CUDA has this timeout.
constexpr milliseconds kLongestMeeting = c10d::Store::kDefaultTimeout;

// First byte of every message.
constexpr char kPresent = '+';
constexpr char kGaveUp = '-';

constexpr std::array kSteps = {Step::offer, Step::verdict};

const char* name_of(Step step) { return step == Step::offer ? "offer" : "verdict"; }

milliseconds meeting_timeout(const c10d::Store& store) {
  const milliseconds own = store.getTimeout();
  return own <= c10d::Store::kNoTimeout ? kLongestMeeting : std::min(own, kLongestMeeting);
}

std::vector<uint8_t> to_bytes(char kind, const std::string& text) {
  const std::string message = kind + text;
  return {message.begin(), message.end()};
}

}  // namespace

Group find_group(const std::string& name) {
  // PyTorch's own table gets an entry for a group on the first lookup, which may have happened only
  // on some ranks. The registry of process groups is the same on all ranks.
  try {
    const auto group = c10d::resolve_process_group(name);
    if (group->getStore()) {
      return {name, group->getRank(), group->getSize(), group->getStore()};
    }
  } catch (const c10::Error&) {
    // Not a process group. set_group_info() may have registered the name.
  }
  const auto& info = c10d::symmetric_memory::get_group_info(name);
  return {name, info.rank, info.world_size, info.store};
}

Meeting::Meeting(const Group& group)
    : group_(group),
      timeout_(meeting_timeout(*group.store)),
      deadline_(std::chrono::steady_clock::now() + timeout_),
      number_(group.store->add(
          "collx/symm_mem/" + group.name + "/meetings/" + std::to_string(group.rank), 1)) {}

std::string Meeting::key(int64_t meeting, Step step, int rank) const {
  return "collx/symm_mem/" + group_.name + "/" + std::to_string(meeting) + "/" + name_of(step) +
         "/" + std::to_string(rank);
}

std::string Meeting::collect(Step step, int rank) {
  const std::string from = key(number_, step, rank);
  const auto left = std::chrono::ceil<milliseconds>(deadline_ - std::chrono::steady_clock::now());
  std::vector<uint8_t> bytes;
  try {
    // At least 1 ms, since a timeout of zero would wait without limit.
    group_.store->wait({from}, std::max(left, milliseconds{1}));
    bytes = group_.store->get(from);
  } catch (const std::exception& error) {
    const bool late = std::chrono::steady_clock::now() >= deadline_;
    TORCH_CHECK(!late, "timed out after ", timeout_.count(), " ms waiting for rank ", rank,
                " (step '", name_of(step), "'); it has not arrived, or has ended");
    TORCH_CHECK(false, "the store failed while waiting for rank ", rank, " (step '", name_of(step),
                "'): ", error.what());
  }
  const std::string text(bytes.empty() ? bytes.end() : bytes.begin() + 1, bytes.end());
  TORCH_CHECK(!bytes.empty() && bytes[0] == static_cast<uint8_t>(kPresent), "rank ", rank,
              " gave up: ", text);
  return text;
}

std::vector<std::string> Meeting::all_gather(Step step, const std::string& message) {
  group_.store->set(key(number_, step, group_.rank), to_bytes(kPresent, message));
  std::vector<std::string> messages;
  for (int rank = 0; rank < group_.world; ++rank) {
    messages.push_back(rank == group_.rank ? message : collect(step, rank));
  }
  return messages;
}

std::string Meeting::reported() noexcept {
  // If the store fails, the caller keeps its own reason.
  try {
    for (int rank = 0; rank < group_.world; ++rank) {
      const std::string from = key(number_, Step::verdict, rank);
      if (rank == group_.rank || !group_.store->check({from})) continue;
      const std::vector<uint8_t> bytes = group_.store->get(from);
      if (bytes.empty() || bytes[0] != static_cast<uint8_t>(kGaveUp)) continue;
      return "rank " + std::to_string(rank) +
             " gave up: " + std::string(bytes.begin() + 1, bytes.end());
    }
  } catch (...) {
  }
  return "";
}

void Meeting::give_up(const std::string& reason) noexcept {
  // If the store fails, the peers wait until their own deadlines.
  try {
    for (const Step step : kSteps) {
      group_.store->set(key(number_, step, group_.rank), to_bytes(kGaveUp, reason));
    }
  } catch (...) {
  }
}

void Meeting::clean_up() noexcept {
  // A rank that has published its verdict has read all offers. A rank that has joined this meeting
  // has left the previous one. A store that cannot delete keeps the keys.
  try {
    group_.store->deleteKey(key(number_, Step::offer, group_.rank));
    if (number_ == 1) return;
    for (const Step step : kSteps) group_.store->deleteKey(key(number_ - 1, step, group_.rank));
  } catch (...) {
  }
}

}  // namespace collx::memory
